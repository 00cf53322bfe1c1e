"""The shared packages name no model of transformers: structure and declared attributes decide."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
SHARED = ("mesh", "parallelizer-core", "moe-ep")

# Models of transformers whose names are ordinary words, and what these mean in the source.
ORDINARY_WORDS = {
    "align": "to give two things one dtype or shape",
    "auto": "a mode that chooses for itself",
    "bit": "of a number, and equality to the last of them",
    "clip": "to bound the norm of gradients",
    "ctrl": "a key",
}


def folders() -> set[str]:
    """The names under which transformers keeps its models."""
    models = Path(transformers.__file__).parent / "models"
    return {path.name for path in models.iterdir() if path.is_dir() and path.name[0] != "_"}


def classes() -> set[str]:
    """The names of transformers' public models and configurations."""
    return {
        name for name in dir(transformers) if re.fullmatch(r"\w*(Model|Config|For[A-Z]\w*)", name)
    }


def words(source: str) -> Iterator[tuple[int, str]]:
    """(line, word) of code, strings and comments: whole names, and runs of the words in them."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            continue
        for name in re.findall(r"\w+", token.string):
            parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
            ends = range(1, len(parts) + 1)
            yield token.start[0], name
            yield from (
                (token.start[0], "_".join(parts[first:last]))
                for last in ends
                for first in range(last)
            )


@cache
def forbidden() -> frozenset[str]:
    """Names of models and their classes, and the attribute by which a model would be told apart."""
    return frozenset(folders() - ORDINARY_WORDS.keys() | classes() | {"model_type"})


def named_models(source: str) -> list[str]:
    """Every place of a source file that names a model or asks for its kind."""
    return sorted(
        f"line {line}: {word}"
        for line, word in set(words(source))
        if word in forbidden() or re.fullmatch(r"[A-Z]\w*For[A-Z]\w*", word)
    )


@pytest.mark.parametrize("package", SHARED)
def test_no_source_names_a_model(package: str) -> None:
    files = sorted((ROOT / "packages" / package / "src").rglob("*.py"))
    assert files
    found = {path.name: named_models(path.read_text()) for path in files}
    assert {name: places for name, places in found.items() if places} == {}


def test_every_exception_is_a_model_and_is_used() -> None:
    used = {
        word
        for package in SHARED
        for path in (ROOT / "packages" / package / "src").rglob("*.py")
        for _, word in words(path.read_text())
    }
    assert set(ORDINARY_WORDS) <= folders() & used


@pytest.mark.parametrize(
    "line",
    [
        'if config.model_type == "x": pass',
        "from transformers import LlamaForCausalLM",
        'PLANS = {"SomethingNewForCausalLM": None}',
        "def shard_qwen3_moe(): pass",
        "x = 1  # as in mixtral",
        "class BertBlocks: pass",
    ],
)
def test_a_name_is_found_wherever_it_stands(line: str) -> None:
    assert named_models(line + "\n")
