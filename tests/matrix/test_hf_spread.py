"""Families of transformers that nobody prepared: tiny ones, made as `nox -s hf_sweep` makes all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwalk.parallelizer_core.testing import RankError, RankTimeoutError, rank_pool
from tests.hf_sweep.checks import CHECKS, RANKS, Result, check_parity, outcome_of, refusal
from tests.hf_sweep.recipes import Recipe, architecture, find_recipe
from tests.hf_sweep.table import load_results, save_results, table

FSDP2, TP2, CHECKPOINTING = CHECKS
FAMILIES = {
    "GPT2LMHeadModel": "weights transposed, tables tied, positions learned",
    "Phi3ForCausalLM": "projections fused",
    "OlmoeForCausalLM": "experts",
    "Glm4vMoeForConditionalGeneration": "packed images, experts, pins that the tower inherits",
    "JambaForCausalLM": "attention, state space and experts by turns",
    "BailingHybridForCausalLM": "a pinned convolution that its parent reads",
    "MambaForCausalLM": "no attention at all",
    "T5ForConditionalGeneration": "an encoder, and positions that the first block keeps for all",
    "Qwen2_5_VLForConditionalGeneration": "packed images",
    "LlavaForConditionalGeneration": "a tower read before its last block",
    "MllamaForConditionalGeneration": "images by cross-attention behind gates",
    "WhisperForConditionalGeneration": "sound into an encoder",
}
SPLIT = ["Phi3ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "LlavaForConditionalGeneration"]
BESIDE_TEXT = ("Mllama", "Llava", "Qwen2_5_VL", "Glm4vMoe", "Whisper")


def recipe_of(class_name: str) -> Recipe:
    found = find_recipe(architecture(class_name))
    assert found.recipe is not None, found.reason
    return found.recipe


@pytest.mark.parametrize("name", FAMILIES)
def test_fsdp2_has_the_numbers_of_one_process(name: str) -> None:
    recipe = recipe_of(name)
    assert bool(recipe.beside_text) == name.startswith(BESIDE_TEXT)
    check_parity(recipe, FSDP2)


@pytest.mark.parametrize("name", ["JambaForCausalLM", "MllamaForConditionalGeneration"])
def test_so_has_full_checkpointing(name: str) -> None:
    check_parity(recipe_of(name), CHECKPOINTING)


@pytest.mark.parametrize("name", SPLIT)
def test_so_has_tensor_parallelism(name: str) -> None:
    check_parity(recipe_of(name), TP2)


@pytest.mark.parametrize("name", ["OlmoeForCausalLM", "MambaForCausalLM"])
def test_tensor_parallelism_is_refused_where_no_plan_is_safe(name: str) -> None:
    said = rank_pool(RANKS).run(refusal, recipe_of(name), TP2.sizes, dict(TP2.setup))
    assert len(set(said)) == 1
    assert "does not fit the default tensor-parallel plan" in said[0]


def test_what_went_wrong_is_one_line_of_the_table(tmp_path: Path) -> None:
    trace = 'rank 1 of 2: KeyError: 3\n  File "/x/model.py", line 7, in forward\n'
    outcomes = {
        "fsdp2": outcome_of(RankError(trace, 1, {})),
        "tp2": "refused: no plan | none",
        "checkpointing": outcome_of(RankTimeoutError("ranks [0] did not finish", 0, {})),
    }
    assert outcomes["fsdp2"] == "error: KeyError: 3 (model.py:7 in forward)"
    built = Result(model_type="b", class_name="B", kind="causal", outcomes=outcomes)
    missing = Result(model_type="a", class_name="A", kind="causal", reason="ImportError: x")
    save_results({"b/B": built, "a/A": missing}, tmp_path / "results.json")
    results = load_results(tmp_path / "results.json")
    assert list(json.loads((tmp_path / "results.json").read_text())["results"]) == ["a/A", "b/B"]
    page = table(results)
    assert "1 are built, 1 are not" in page
    assert "| TP2 | 0 | 1 | 0 |" in page
    assert (
        "| b | B |  | error | refused | hangs | FSDP2: KeyError: 3 (model.py:7 in forward);" in page
    )
    assert "no plan \\| none" in page
    assert page.endswith("| a | A | ImportError: x |\n")
