"""The dense FSDP2 walk: which modules become units, in which order, with which policy."""
