"""The parity checker on bare FSDP2: right subjects pass, each broken one is named."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import bare_fsdp2
import pytest
import torch
from torch import Tensor, nn

from shardwalk.parallelizer_core.testing import (
    Bf16,
    ParityCase,
    ParityError,
    RankError,
    Subject,
    TinyDecoder,
    TokenBatches,
    assert_parity,
    clip_grad_norm_torch,
    rank_pool,
    sync_always,
    tiny_decoder_case,
)
from shardwalk.parallelizer_core.testing.parity_subject import clip_grad_norm_default

CASE = tiny_decoder_case()
ISLAND = dataclasses.replace(CASE, model=bare_fsdp2.decoder_with_fp32_head)


def check(case: ParityCase, shape: tuple[int, ...], **options: Any) -> list[Any]:
    """`assert_parity` of bare FSDP2 on a mesh of that shape; options go to where they belong."""
    parallelize = options.pop("parallelize", bare_fsdp2.shard)
    if policy := options.pop("policy", None):
        parallelize = functools.partial(parallelize, policy=policy)
    hooks: dict[str, Any] = {"clip_grad_norm": clip_grad_norm_torch, "sync_on_last": sync_always}
    names = [field.name for field in dataclasses.fields(Subject) if field.name in options]
    hooks |= {name: options.pop(name) for name in names}
    subject = Subject(parallelize=functools.partial(parallelize, shape=shape), **hooks)
    world_size = int(torch.Size(shape).numel())
    return assert_parity(case, world_size=world_size, strategy=None, subject=subject, **options)


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_bare_fsdp2_has_the_numbers_of_one_process(shape: tuple[int, ...], tied: bool) -> None:
    findings = check(tiny_decoder_case(tied=tied), shape)
    assert findings[0].ratio < 0.2
    values = {finding.value for finding in findings}
    assert "sgd: gradient layers.1.up.weight" in values
    assert {"adamw: parameter head.weight", "sgd: buffer rotary.frequencies"} <= values
    assert {"sgd: loss of step 1", "adamw: gradient norm of step 0"} <= values


def test_accumulation_and_clipping() -> None:
    check(tiny_decoder_case(micro_batches=3), (2,), clip=0.1)


def test_ranks_without_rows() -> None:
    check(tiny_decoder_case(rows=1), (2,), optimizers=("sgd",))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16_follows_the_policy(shape: tuple[int, ...], tied: bool) -> None:
    case = tiny_decoder_case(tied=tied, micro_batches=2)
    findings = check(case, shape, bf16=Bf16(), policy=bare_fsdp2.BF16)
    assert findings[0].ratio < 0.2


def test_bf16_with_an_fp32_island() -> None:
    parallelize = bare_fsdp2.shard_with_island
    check(ISLAND, (2,), bf16=Bf16(islands=("head.*",)), parallelize=parallelize)


def test_a_reference_runs_once_per_case_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    case = ParityCase(model=talking_decoder, batches=TokenBatches(vocabulary=61))
    for shape in ((2,), (1,), (2,)):
        check(case, shape, optimizers=("sgd",), steps=1)
    printed = capsys.readouterr().out
    assert printed.count("built") == 1 + 2 + 1 + 2


def talking_decoder() -> TinyDecoder:
    print("built")
    return TinyDecoder()


TWICE = {"parallelize": bare_fsdp2.shard_dividing_twice}
LONELY = {
    "parallelize": bare_fsdp2.shard_with_a_lonely_unit,
    "clip_grad_norm": clip_grad_norm_default,
}
REPLICAS = {"parallelize": bare_fsdp2.shard_unequal_replicas}
UNTIED = {"parallelize": bare_fsdp2.shard_untied}
FROZEN = {"parallelize": bare_fsdp2.shard_frozen}
BUFFER = {"parallelize": bare_fsdp2.shard_wrong_buffer}
START = {"parallelize": bare_fsdp2.shard_wrong_start}
EXTRA = {"parallelize": bare_fsdp2.shard_extra_parameter}
LOCAL_MEAN = {"normalizer": bare_fsdp2.mean_per_rank}
LOST_STEP = {"clip_grad_norm": bare_fsdp2.lose_second_step}
NO_CLIP = {"clip_grad_norm": bare_fsdp2.never_clip, "clip": 0.1}
SHARD_NORM = {"clip_grad_norm": bare_fsdp2.norm_of_the_shard}
TIED = tiny_decoder_case(tied=True)
NUMBERS = r"( +\d\.\d+e[+-]\d+){4}"


@pytest.mark.parametrize(
    ("case", "shape", "options", "expected"),
    [
        pytest.param(CASE, (2,), TWICE, f"sgd: gradient layers.1.up.weight{NUMBERS}", id="divide"),
        pytest.param(CASE, (2,), LONELY, "gradient layers.1.qkv.weight differs", id="unsynced"),
        pytest.param(
            CASE, (2, 2), REPLICAS, r"initial parameter layers.2.gate.weight .*\[2, 3\]", id="hsdp"
        ),
        pytest.param(TIED, (2,), UNTIED, r"parameter head.weight is shared by \['head", id="tie"),
        pytest.param(TIED, (2,), UNTIED, f"sgd: gradient head.weight{NUMBERS}", id="tied-gradient"),
        pytest.param(CASE, (2,), FROZEN, "norm.weight changed its requires_grad", id="frozen"),
        pytest.param(CASE, (2,), BUFFER, f"sgd: buffer rotary.frequencies{NUMBERS}", id="buffer"),
        pytest.param(CASE, (2,), START, "initial parameter layers.0.out.bias .*inf", id="start"),
        pytest.param(
            CASE, (2,), EXTRA, "one process has no initial parameter norm.bias", id="extra"
        ),
        pytest.param(CASE, (2,), LOCAL_MEAN, f"sgd: gradient head.weight{NUMBERS}", id="mean"),
        pytest.param(
            CASE, (2,), LOST_STEP, f"adamw: parameter layers.0.down.weight{NUMBERS}", id="step"
        ),
        pytest.param(CASE, (2,), NO_CLIP, f"sgd: parameter head.weight{NUMBERS}", id="clip"),
        pytest.param(
            CASE, (2,), SHARD_NORM, "gradient norm of step 0 differs in its bits", id="norm"
        ),
        pytest.param(
            tiny_decoder_case(micro_batches=3),
            (2,),
            {"sync_on_last": bare_fsdp2.skip_last},
            f"sgd: gradient head.weight{NUMBERS}",
            id="micro-batch",
        ),
        pytest.param(
            CASE,
            (2,),
            {"policy": bare_fsdp2.BF16_REDUCE, "bf16": Bf16()},
            f"sgd: gradient layers.*{NUMBERS}",
            id="bf16-reduce",
        ),
        pytest.param(
            ISLAND,
            (2,),
            {"policy": bare_fsdp2.BF16, "bf16": Bf16(islands=("head.*",))},
            f"sgd: gradient embed.weight{NUMBERS}",
            id="island",
        ),
    ],
)
def test_a_broken_subject_is_named(
    case: ParityCase, shape: tuple[int, ...], options: dict[str, Any], expected: str
) -> None:
    optimizers = ("adamw",) if "adamw" in expected else ("sgd",)
    with pytest.raises(ParityError, match=expected):
        check(case, shape, optimizers=optimizers, **options)


def test_the_message_is_a_table_of_the_worst() -> None:
    with pytest.raises(ParityError) as caught:
        check(CASE, (2,), **TWICE, optimizers=("sgd",))
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 ranks differ from one process:"
    assert re.fullmatch(r"  \d+ of \d+ values are off, the worst first:", lines[1])
    assert lines[2].split() == ["value", "difference", "tolerance", "ratio", "magnitude"]
    assert lines[3].startswith("  sgd: gradient layers.1.up.weight ")


def test_extra_values_are_compared() -> None:
    case = dataclasses.replace(CASE, extras=last_bias)
    values = [finding.value for finding in check(case, (2,), optimizers=("sgd",))]
    assert "sgd: extra last bias" in values


def last_bias(model: nn.Module) -> dict[str, Tensor]:
    assert isinstance(model, TinyDecoder)
    bias = model.get_parameter("layers.2.out.bias")
    return {"last bias": bias.detach()}


def nothing_valid(rows: Any) -> int:
    return 1


def no_losses(model: nn.Module, rows: Any) -> Tensor:
    zero: Tensor = model(rows["input_ids"]).sum() * 0
    return zero


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_default_subject_is_parallelize_model(strategy: str) -> None:
    case = tiny_decoder_case(micro_batches=2)
    assert_parity(case, world_size=2, strategy=strategy, clip=0.1)


@pytest.mark.parametrize("start", ["checkpoint", "init"])
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_start_on_meta(strategy: str, start: Any) -> None:
    case = tiny_decoder_case(tied=True)
    assert_parity(case, world_size=2, strategy=strategy, meta_start=start, optimizers=("sgd",))


def test_a_reference_that_proves_nothing_is_refused() -> None:
    case = dataclasses.replace(CASE, token_losses=no_losses, valid_tokens=nothing_valid)
    with pytest.raises(RankError, match="all gradients of the reference run are zero"):
        check(case, (1,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizers": ("lion",)}, "optimizers="),
        ({"optimizers": ()}, "optimizers="),
        ({"steps": 0}, "steps=0"),
        ({"meta_start": "disk"}, "meta_start='disk'"),
        ({"pool": rank_pool(2)}, "the pool has 2 ranks"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(CASE, (4,), **options)


def test_an_init_start_needs_an_init_function() -> None:
    with pytest.raises(ValueError, match="needs a case with an init"):
        check(dataclasses.replace(CASE, init=None), (2,), meta_start="init")
