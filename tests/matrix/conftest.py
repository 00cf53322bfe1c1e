"""Ranks fork from a server that has imported the models already."""

from shardwalk.parallelizer_core.testing import preload

preload("tests.matrix.tiny_transformers", "tests.matrix.lora_models", "tests.matrix.plain_moe")
