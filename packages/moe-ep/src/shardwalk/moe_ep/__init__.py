"""Mixture-of-experts layers and the expert-parallel walk."""
