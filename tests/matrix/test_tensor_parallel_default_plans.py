"""The default plan on models of transformers: which fit, which are refused, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    RowParallel,
    SequenceBoundary,
    SharedInput,
    SplitInput,
    VocabularyParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.apply import apply_plan
from shardwalk.parallelizer_core.tensor_parallel.coverage import check_uncovered
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.tensor_parallel.validation import (
    validate_tp_sizes,
)
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from tests.matrix.tiny_transformers import MODELS, SIZES

NO_DROPOUT = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def build(name: str, **sizes: Any) -> nn.Module:
    if name == "Bart":
        counts = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in (
            ("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))}  # fmt: skip
        config = transformers.BartConfig(
            vocab_size=61, d_model=24, dropout=0.0, attn_implementation="eager", **counts
        )
        return transformers.BartForConditionalGeneration(config)
    if name == "Llava":
        text = transformers.LlamaConfig(**SIZES, **NO_DROPOUT)
        vision = transformers.CLIPVisionConfig(**VISION)
        config = transformers.LlavaConfig(
            text_config=text, vision_config=vision, image_token_index=60
        )
        return transformers.LlavaForConditionalGeneration(config)
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**{**SIZES, **NO_DROPOUT, "rope_parameters": None, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config)


def plan_of(model: nn.Module, sequence_parallel: bool = False) -> dict[str, Any]:
    plan = structural_plan(model, 2, sequence_parallel)
    validate_tp_sizes(model, 2, plan)
    assert check_uncovered(model, plan) == {}
    return plan


def on_meta(name: str, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](True) if name in MODELS else build(name, **sizes)


COLUMN, SHARED, ROW = ColumnParallel(shared_input=True), (SharedInput(),), RowParallel()
LINEARS = {
    **{f"self_attn.{name}_proj": (COLUMN,) for name in "qkv"},
    "self_attn": SHARED,
    "self_attn.o_proj": (ROW,),
    "mlp": SHARED,
    "mlp.gate_proj": (COLUMN,),
    "mlp.up_proj": (COLUMN,),
    "mlp.down_proj": (ROW,),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@pytest.mark.parametrize(
    ("name", "norms", "head_norms"),
    [
        ("llama", NORMS, ()),
        ("Qwen2", NORMS, ()),
        ("Mistral", NORMS, ()),
        ("qwen3", NORMS, HEAD_NORMS),
        ("gemma3", GEMMA_NORMS, HEAD_NORMS),
        ("Gemma2", GEMMA_NORMS, ()),
    ],
)
def test_the_default_plan_of_common_decoders(
    name: str, norms: tuple[str, ...], head_norms: tuple[str, ...]
) -> None:
    plan = plan_of(on_meta(name))
    block = {p.removeprefix("model.layers.1."): s for p, s in plan.items() if ".layers.1." in p}
    whole, split = dict.fromkeys(norms, (WholeInput(),)), dict.fromkeys(head_norms, (SplitInput(),))
    assert block == LINEARS | whole | split
    outside = {path: styles for path, styles in plan.items() if ".layers." not in path}
    assert outside == {
        "model.embed_tokens": (VocabularyParallel(),),
        "model.norm": (WholeInput(),),
        "lm_head": (ColumnParallel(gather_output=True),),
    }


def test_the_default_plan_over_the_sequence() -> None:
    plan = plan_of(on_meta("qwen3"), sequence_parallel=True)
    assert plan["model.layers.0"] == (SequenceBoundary(enter=True),)
    assert plan["model.layers.2"] == (SequenceBoundary(leave=True),)
    for name in (*NORMS, *HEAD_NORMS):
        assert plan[f"model.layers.1.{name}"] == (SplitInput(),)
    assert plan["model.layers.1.mlp.down_proj"] == (RowParallel(sequence_parallel=True),)
    assert plan["model.norm"] == (WholeInput(),)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CodeGen", "transformer.h.0.attn does not fit .*out_proj, qkv_proj"),
        ("Olmo2", "model.layers.0.self_attn.q_norm does not fit .*a norm over several heads"),
        ("GptOss", "model.layers.0.self_attn.sinks does not fit .*stands bare"),
        ("Mixtral", "model.layers.0.mlp.gate.weight does not fit .*stands bare"),
        ("DeepseekV3", "model.layers.0.self_attn does not fit .*q_a_proj"),
    ],
)
def test_what_is_fused_or_mixes_heads_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(on_meta(name))


def test_heads_of_a_nested_text_config_are_checked() -> None:
    """B57: the language model of a vision model has a number of heads that tp does not divide."""
    with torch.device("meta"):
        model = build("Llava")
    plan = structural_plan(model, 4, False)
    match = "tp_size=4 does not divide num_key_value_heads=2 of model.language_model.layers.0"
    with pytest.raises(ValueError, match=match):
        validate_tp_sizes(model, 4, plan)
    explicit = {path: s for path, s in plan.items() if "language_model" in path}
    with pytest.raises(ValueError, match=match):
        validate_tp_sizes(model, 4, explicit)


def test_a_trainable_tower_beside_a_language_model_keeps_whole_sequences() -> None:
    """What reads the layers of a tower one by one must not find parts of a sequence."""
    with torch.device("meta"):
        model = build("Llava")
    plan = plan_of(model, sequence_parallel=True)
    tower = {path: styles for path, styles in plan.items() if "vision_tower" in path}
    language = {path: styles for path, styles in plan.items() if "language_model" in path}
    for styles, is_split in ((tower, False), (language, True)):
        rows = [s for given in styles.values() for s in given if isinstance(s, RowParallel)]
        assert {row.sequence_parallel for row in rows} == {is_split}
    ends = [path for path, given in plan.items() for s in given if isinstance(s, SequenceBoundary)]
    assert ends == ["model.language_model.layers.0", "model.language_model.layers.2"]
    alone = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
    assert any(isinstance(s, SequenceBoundary) for g in plan_of(alone, True).values() for s in g)


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 59, (2, 7))
    if name != "Llava":
        return {"input_ids": ids, "labels": ids}
    ids[:, 1:5] = 60
    return {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(2, 3, 28, 28)}


def step_on_two_ranks(name: str, sequence_parallel: bool) -> None:
    mesh = cached(("default plans", 2), lambda: init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    model = build(name).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    batch, results = inputs_of(name), []
    for parallel in (False, True):
        if parallel:
            apply_plan(model, mesh, plan_of(model, sequence_parallel))
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        grads = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in grads}
        results.append(({"loss": loss.detach()}, whole))
    (loss, gradients), (parallel_loss, parallel_gradients) = results
    torch.testing.assert_close(parallel_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(parallel_gradients, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        ("Qwen2", True),
        ("Mistral", False),
        ("Gemma2", True),
        ("Cohere", True),
        ("StableLm", False),
        ("Exaone4", True),
        ("Nemotron", False),
        ("Arcee", True),
        ("Bart", False),
        ("Bart", True),
        ("Llava", False),
        ("Llava", True),
    ],
)
def test_models_that_fit_get_the_numbers_of_one_process(name: str, sequence_parallel: bool) -> None:
    run_on_ranks(2, step_on_two_ranks, name, sequence_parallel)
