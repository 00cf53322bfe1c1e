"""Losses of logits that stay split over the vocabulary: training as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import (
    keep_logits_split,
    parallel_cross_entropy,
    parallelize_model,
)
from shardwalk.parallelizer_core.parallel_state import mesh_context_of
from shardwalk.parallelizer_core.tensor_parallel import ColumnParallel, RowParallel
from shardwalk.parallelizer_core.testing import (
    ParityCase,
    TokenBatches,
    assert_parity,
    cached,
    run_on_ranks,
)
from tests.matrix.case_models import FULL, tokens
from tests.matrix.lora_models import lora
from tests.matrix.tiny_transformers import MODELS, normal_weights


def split_token_losses(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    is_parallel = mesh_context_of(model) is not None
    if is_parallel:
        keep_logits_split(model)
    logits = model(rows["input_ids"]).logits
    assert isinstance(logits, DTensor) == is_parallel
    return parallel_cross_entropy(logits, rows["labels"], reduction="none")


FORMS: dict[str, Any] = {
    "tied": (partial(MODELS["qwen3"], True), True),
    "capped": (partial(MODELS["gemma3"], False), False),
    "adapted head": (partial(lora, layers=2, target_modules=["v_proj", "lm_head"]), True),
    "trained head": (
        partial(lora, layers=2, target_modules=["v_proj"], modules_to_save=["lm_head"]),
        False,
    ),
}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("tied"),
        pytest.param("capped", marks=pytest.mark.widest),
        pytest.param("adapted head"),
        pytest.param("trained head", marks=pytest.mark.widest),
    ],
)
def test_training_has_the_numbers_of_one_process(form: str) -> None:
    model, sequence_parallel = FORMS[form]
    parity_case = ParityCase(
        model=model,
        batches=TokenBatches(vocabulary=61, micro_batches=2),
        token_losses=split_token_losses,
        init=normal_weights,
    )
    config = FSDP2Config(sequence_parallel=sequence_parallel, mp_policy=FULL)
    sizes = ParallelismSizes(tp_size=2)
    options = {"strategy": config, "clip": 0.5, "optimizers": ("adamw",)}
    assert_parity(parity_case, world_size=4, parallelism_sizes=sizes, **options)


class Largest(TorchDispatchMode):
    """The sizes of all tensors that operators make on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and not each.is_meta:
                self.shapes.add(each.to_local().shape if isinstance(each, DTensor) else each.shape)
        return made


def split_context() -> Any:
    def make() -> Any:
        config = FSDP2Config(mp_policy=FULL)
        return DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(tp_size=2))

    return cached("tp 2, split logits", make).mesh_context


def a_step() -> None:
    model: Any = MODELS["llama"](False, vocab_size=203)
    model = parallelize_model(model, split_context())
    keep_logits_split(model)
    ids = tokens(rows=2, length=9)
    with Largest() as found:
        logits = model(ids[:, :-1]).logits
        parallel_cross_entropy(logits, ids[:, 1:]).backward()
    assert logits.shape == (2, 8, 203)
    assert logits.placements == (Shard(2),)
    assert not [s for s in found.shapes if s.numel() >= 16 * 203 and s[-1] == 203]
    for given in ({"labels": ids}, {"labels": ids, "attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match=r"call parallel_cross_entropy\(model\(ids\)\.logits"):
            model(ids, **given)
    with pytest.raises(ValueError, match="generate needs whole logits"):
        model.generate(ids, max_new_tokens=2)
    keep_logits_split(model, enabled=False)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 11)
    assert model(ids, labels=ids).loss.isfinite()
    gathered = model(ids[:, :-1]).logits
    assert not isinstance(gathered, DTensor)
    torch.testing.assert_close(gathered, logits.full_tensor())


def test_no_rank_makes_a_tensor_of_tokens_times_vocabulary() -> None:
    run_on_ranks(2, a_step)


def a_whole_head() -> None:
    mesh = split_context().device_mesh
    cuts = {"gate": ColumnParallel(), "up": ColumnParallel(), "down": RowParallel()}
    plan = {f"model.layers.*.mlp.{name}_proj": style for name, style in cuts.items()}
    config = FSDP2Config(mp_policy=FULL, tp_plan=plan)
    context = MeshContext.from_meshes(mesh, strategy_config=config)
    model: Any = parallelize_model(MODELS["llama"](False), context)
    with pytest.raises(ValueError, match="cuts no output head .*gather_output=True"):
        keep_logits_split(model)


def test_a_model_whose_head_is_whole_is_refused() -> None:
    run_on_ranks(2, a_whole_head)
