"""Adapters and frozen parameters that do not resume, or do not load elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwalk.parallelizer_core import load_checkpoint
from shardwalk.parallelizer_core.checkpoint import save_checkpoint
from shardwalk.parallelizer_core.optimizer_state import optimizer_state_dict
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.state_dicts import load_model_state_dict, model_state_dict
from shardwalk.parallelizer_core.state_mismatch import StateMismatchError
from shardwalk.parallelizer_core.testing import run_on_ranks
from tests.matrix.case_models import (
    logits_of,
    mean_loss,
    mine,
    parallel,
    seeded,
    tokens,
    whole,
)
from tests.matrix.lora_models import (
    Unused,
    adapter_names,
    ignored_warnings,
    lora,
    with_adapters,
)
from tests.matrix.test_case_checkpoints import on
from tests.matrix.tiny_transformers import MODELS

KINDS = pytest.mark.parametrize(
    ("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)]
)


class LoraRun:
    """Adapters with their optimizer and scheduler, on the mesh or in one process."""

    def __init__(self, kind: str, form: str, seed: int = 3) -> None:
        self.form = form
        self.model: Any = seeded(Unused if form == "never stepped" else lora, seed=seed)
        if kind != "none":
            options = {"find_unused_parameters": True} if kind == "ddp" else {}
            self.model = parallel(self.model, kind, **options)
        parameters = self.model.parameters()
        if form == "adapters only":
            parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)

    def freeze(self) -> None:
        """Stop training the first block, as a schedule of the user does after its first step."""
        for name, parameter in unwrap_model(self.model).named_parameters():
            if self.form == "frozen later" and ".layers.0." in name:
                parameter.requires_grad_(False)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = mean_loss(self.model, mine(tokens(rows=8, seed=number)))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        total = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total.item()

    def moments(self) -> dict[str, Any]:
        state = optimizer_state_dict(self.model, self.optimizer, full=True)["state"]
        return {name: (entry["exp_avg"], entry["step"].item()) for name, entry in state.items()}


FORMS = ["adapters only", "all", "frozen later", "never stepped"]


def uninterrupted(kind: str, form: str, folder: Path) -> tuple[float, dict[str, Any]]:
    run = LoraRun(kind, form)
    run.step(0)
    run.freeze()
    run.step(1)
    save_checkpoint(folder, run.model, run.optimizer, scheduler=run.scheduler, step=2)
    return run.step(2), run.moments()


def gone_on(kind: str, form: str, folder: Path) -> tuple[float, dict[str, Any]]:
    run = LoraRun(kind, form, seed=9)
    loaded = load_checkpoint(folder, run.model, run.optimizer, scheduler=run.scheduler)
    assert loaded.step == 2
    run.freeze()
    return run.step(2), run.moments()


@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_frozen_parameters_goes_on_as_if_nothing_had_happened(
    form: str, tmp_path: Path
) -> None:
    """B13: saved on 2 ranks, on 1, 2 and 4 (replicated) ranks, under DDP and on none after that."""
    loss, moments = run_on_ranks(2, uninterrupted, "fsdp", form, tmp_path)[0]
    steps = {count for _, count in moments.values()}
    assert steps == ({3.0, 1.0} if form == "frozen later" else {3.0})
    assert len(moments) == len(adapter_names(lora()))
    for kind, world in [("fsdp", 2), ("hsdp", 4), ("ddp", 2), ("fsdp", 1), ("none", 0)]:
        for found_loss, found in on(world, gone_on, kind, form, tmp_path):
            assert abs(found_loss - loss) < 1e-6
            assert found.keys() == moments.keys()
            for name, (average, count) in moments.items():
                assert found[name][1] == count, name
                assert (found[name][0] - average).abs().max() < 1e-6, name


def wrong_names(folder: Path) -> list[str]:
    run = LoraRun("fsdp", "all")
    run.step(0)
    save_checkpoint(folder, run.model, run.optimizer)
    messages = []
    renamed = parallel(seeded(second_adapter))
    for model, optimizer in [
        (renamed, None),
        (run.model, torch.optim.AdamW([p for p in run.model.parameters() if p.requires_grad][1:])),
    ]:
        before = [whole(parameter) for parameter in model.parameters()]
        with pytest.raises(StateMismatchError) as error:
            load_checkpoint(folder, model, optimizer)
        assert all(map(torch.equal, before, map(whole, model.parameters())))
        messages.append(str(error.value))
    return messages


def second_adapter() -> Any:
    """The same base, whose adapters have another name."""
    base = MODELS["llama"](False, num_hidden_layers=4)
    return with_adapters(base, adapter_name="second")


def test_a_checkpoint_of_other_adapters_is_refused_by_their_names(tmp_path: Path) -> None:
    """B13: names of parameters, not their order, decide what is loaded where."""
    for model, optimizer in run_on_ranks(2, wrong_names, tmp_path):
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A"
        missing, unexpected = model.split("unexpected", 1)
        assert f"{name}.second.weight" in missing
        assert f"{name}.default.weight" in unexpected
        assert "unexpected (" in optimizer
        assert f"{name}.default.weight (group 0)" in optimizer


def exported(kind: str, mode: Any, folder: Path) -> dict[str, Any]:
    model = parallel(seeded(lora), kind, activation_checkpointing=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mean_loss(model, mine(tokens(rows=8))).backward()
    optimizer.step()
    inner = unwrap_model(model)
    state = model_state_dict(model, full=True)
    adapters = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model_state_dict(model).items()
        if ".lora_" in name
    }
    with ignored_warnings():
        inner.save_pretrained(folder, state_dict=adapters, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    with torch.no_grad():
        logits = logits_of(model, tokens())
    return {
        "names": list(model_state_dict(model)),
        "from whole": get_peft_model_state_dict(inner, state_dict=state),
        "from adapters": get_peft_model_state_dict(inner, state_dict=adapters),
        "own names": list(get_peft_model_state_dict(inner)),
        "logits": logits,
    }


@pytest.mark.parametrize("mode", [False, "full", "selective"])
@KINDS
def test_adapters_load_into_a_plain_model(kind: str, world: int, mode: Any, tmp_path: Path) -> None:
    """B54: names and values of the adapters are those of one process, in memory and in files."""
    plain = seeded(lora)
    names = list(get_peft_model_state_dict(plain))
    for found in run_on_ranks(world, exported, kind, mode, tmp_path):
        assert found["names"] == list(plain.state_dict())
        assert list(found["from whole"]) == list(found["from adapters"]) == names
        assert found["own names"] == names
        assert all(map(torch.equal, found["from whole"].values(), found["from adapters"].values()))
        loaded = seeded(lora)
        result = set_peft_model_state_dict(loaded, found["from whole"])
        assert not result.unexpected_keys
        with ignored_warnings():
            # The first draws of the seed make the base model, adapters or not.
            from_file = PeftModel.from_pretrained(
                seeded(lambda: MODELS["llama"](False, num_hidden_layers=4)), tmp_path
            )
        with torch.no_grad():
            for model in (loaded, from_file):
                torch.testing.assert_close(
                    logits_of(model, tokens()), found["logits"], rtol=1e-5, atol=1e-6
                )


def plain_to_sharded(kind: str) -> Tensor:
    model = parallel(seeded(lora, seed=9), kind)
    load_model_state_dict(model, seeded(lora).state_dict())
    with torch.no_grad():
        return logits_of(model, tokens())


@KINDS
def test_a_plain_state_loads_into_a_parallel_model_with_adapters(kind: str, world: int) -> None:
    """B54: the other direction, strictly."""
    with torch.no_grad():
        expected = logits_of(seeded(lora), tokens())
    for logits in run_on_ranks(world, plain_to_sharded, kind):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
