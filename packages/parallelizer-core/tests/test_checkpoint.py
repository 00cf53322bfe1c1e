"""Training checkpoints: saved on one mesh, continued on any other, bit for bit (B54, B56)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from shardwalk.mesh import DistributedSetup, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core.checkpoint import (
    LoadedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from shardwalk.parallelizer_core.dcp_source import stored_tensors
from shardwalk.parallelizer_core.materialize import materialize
from shardwalk.parallelizer_core.optimizer_state import optimizer_state_dict
from shardwalk.parallelizer_core.parallel_state import record_mesh_context
from shardwalk.parallelizer_core.state_dicts import model_state_dict
from shardwalk.parallelizer_core.state_mismatch import StateMismatchError
from shardwalk.parallelizer_core.testing import cached, run_on_ranks


class Odd(toys.ToyLM):
    """Dimensions 6, 5 and 9, one frozen norm, tied."""

    def __init__(self) -> None:
        super().__init__(layers=1, tied=True)
        self.blocks[0].up = nn.Linear(6, 5)
        self.blocks[0].down = nn.Linear(5, 6, bias=False)
        self.blocks.append(toys.Block(6, 9))
        self.norm.requires_grad_(False)


class EvenTP(Odd):
    """Hidden sizes that two ranks of tp can share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = toys.Block(6, 8)
        self.blocks[1] = toys.Block(6, 10)


Run = tuple[nn.Module, torch.optim.Optimizer, LRScheduler]


def start(sharding: str, even: bool, seed: int) -> Run:
    torch.manual_seed(seed)
    model = toys.SHARDINGS[sharding]((EvenTP if even else Odd)())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "lr": 3e-2}], lr=1e-2)
    return model, optimizer, MultiStepLR(optimizer, [2, 5])


def train(run: Run, sharding: str, steps: int) -> float:
    """The loss of the global batch at the last step."""
    model, optimizer, scheduler = run
    mean = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = toys.mean_loss(model, *toys.my_rows(sharding, *toys.batch()))
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach() / (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_reduce(mean)
    return mean.item()


def whole(run: Run) -> dict[str, Any]:
    model, optimizer, scheduler = run
    return {
        "model": model_state_dict(model, full=True),
        "optimizer": optimizer_state_dict(model, optimizer, full=True),
        "scheduler": scheduler.state_dict(),
    }


def save(sharding: str, even: bool, folder: Path) -> tuple[dict[str, Any], float]:
    run = start(sharding, even, seed=0)
    train(run, sharding, 3)
    model, optimizer, scheduler = run
    save_checkpoint(
        folder, model, optimizer, scheduler=scheduler, step=3, extra={"epoch": (1, {2: 0.5})}
    )
    return whole(run), train(run, sharding, 1)


def load(sharding: str, even: bool, folder: Path) -> tuple[LoadedCheckpoint, dict[str, Any], float]:
    run = start(sharding, even, seed=1)
    train(run, sharding, 1)
    model, optimizer, scheduler = run
    head = model.get_parameter("module.head.weight" if sharding == "ddp" else "head.weight")
    loaded = load_checkpoint(folder, model, optimizer, scheduler=scheduler)
    assert any(parameter is head for parameter in model.parameters())
    state = whole(run)
    return loaded, state, train(run, sharding, 1)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["scheduler"] == expected["scheduler"]
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    states, wanted = found["optimizer"]["state"], expected["optimizer"]["state"]
    assert states.keys() == wanted.keys()
    for name, entry in wanted.items():
        assert states[name].keys() == entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(states[name][key], value) for key, value in entry.items()), name


MESHES = {1: ["single"], 2: ["fsdp", "ddp"], 4: ["fsdp", "hsdp"]}
TP_MESHES = {1: ["single"], 2: ["tp", "fsdp"], 4: ["fsdp_tp", "hsdp"]}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("sharding", "world", "even"),
    [("fsdp", 2, False), ("ddp", 2, False), ("hsdp", 4, False), ("tp", 2, True)],
)
def test_a_run_continues_on_any_mesh(
    sharding: str, world: int, even: bool, ranks: int, tmp_path: Path
) -> None:
    """B56: parameters and moments bit-equal on 1, 2 and 4 ranks, and so is the next loss."""
    expected, loss = run_on_ranks(world, save, sharding, even, tmp_path)[0]
    for other in (TP_MESHES if even else MESHES)[ranks]:
        for loaded, state, next_loss in run_on_ranks(ranks, load, other, even, tmp_path):
            assert loaded.step == 3
            assert loaded.extra == {"epoch": (1, {2: 0.5})}
            assert loaded.random_state_restored == (ranks == world)
            assert_same(state, expected)
            assert next_loss == pytest.approx(loss, rel=1e-6)


def test_without_process_groups(tmp_path: Path) -> None:
    """A single process without any group saves and loads, and materializes from the folder."""
    expected, loss = save("single", False, tmp_path)
    loaded, state, next_loss = load("single", False, tmp_path)
    assert loaded.random_state_restored
    assert_same(state, expected)
    assert next_loss == loss
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(ValueError, match="the model is on meta; call materialize"):
        load_checkpoint(tmp_path, model)
    materialize(model, checkpoint=tmp_path)
    assert model.head.weight is model.embed.weight
    for name, tensor in expected["model"].items():
        assert torch.equal(model.state_dict()[name], tensor), name


def save_wrapped(folder: Path) -> None:
    model = toys.toy()
    for block in model.blocks:
        block.up = checkpoint_wrapper(block.up)  # type: ignore[assignment]
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # type: ignore[assignment]
    sharded = toys.fsdp(model)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for parameter in sharded.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(folder, sharded, optimizer)


def test_names_in_the_folder_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """B54: wrappers leave no trace in the files, so a plain model loads them."""
    run_on_ranks(2, save_wrapped, tmp_path)
    model = toys.toy()
    names = list(model.state_dict())
    expected = {f"model.{name}" for name in names}
    expected |= {f"optimizer.state.{name}.momentum_buffer" for name in names}
    assert stored_tensors(tmp_path).keys() == expected
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.9)
    loaded = load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (loaded.step, loaded.extra, loaded.random_state_restored) == (None, {}, False)


def load_errors(folder: Path) -> list[str]:
    messages = []
    for change in ("model", "optimizer", "groups"):
        model: Any = toys.toy()
        if change == "model":
            model.extra = nn.Linear(2, 2)
        toys.fsdp(model)
        trained = dict(model.named_parameters())
        if change == "optimizer":
            del trained["head.weight"]
        groups: Any = list(trained.values())
        if change == "groups":
            groups = [{"params": [parameter]} for parameter in groups]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        before = model_state_dict(model, full=True)
        try:
            load_checkpoint(folder, model, optimizer)
        except StateMismatchError as error:
            messages.append(str(error))
        after = model_state_dict(model, full=True)
        assert all(torch.equal(before[name], after[name]) for name in before)
    return messages


def test_errors_name_what_differs_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(2, save_wrapped, tmp_path)
    first, second = run_on_ranks(2, load_errors, tmp_path)
    assert first == second
    model, optimizer, groups = first
    assert "missing (2): extra.bias, extra.weight" in model
    assert "head.weight (group 0), head.weight (its momentum_buffer)" in optimizer
    assert "parameter groups (optimizer 14, saved 1)" in groups


def test_untied_values_do_not_load_into_a_tied_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, toys.toy())
    with pytest.raises(StateMismatchError, match="embed.weight and head.weight .one tied tensor"):
        load_checkpoint(tmp_path, toys.toy(tied=True))
    save_checkpoint(tmp_path, toys.toy(tied=True))
    untied = toys.toy()
    load_checkpoint(tmp_path, untied)
    assert torch.equal(untied.head.weight, untied.embed.weight)


def test_what_is_no_plain_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.raises(TypeError, match="extra of a checkpoint must be plain data"):
        save_checkpoint(folder, toys.toy(), extra={"path": Path("x")})
    assert not folder.exists()


def test_incomplete_and_partial_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        load_checkpoint(tmp_path, toys.toy())
    model = toys.toy()
    save_checkpoint(tmp_path, model, step=1)
    save_checkpoint(tmp_path, model, step=2)
    assert load_checkpoint(tmp_path, model).step == 2
    with pytest.raises(ValueError, match="was saved without optimizer=; leave it out"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0))
    (tmp_path / "trainer_state.pt").unlink()
    with pytest.raises(FileNotFoundError, match="no trainer_state.pt in it"):
        load_checkpoint(tmp_path, model)


def save_on_one_bad_disk(folder: Path) -> str:
    try:
        save_checkpoint(folder if dist.get_rank() else folder / "file" / "x", toys.fsdp(toys.toy()))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_cannot_write_stops_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for message in run_on_ranks(2, save_on_one_bad_disk, tmp_path):
        assert message.startswith("saving failed on rank 0: NotADirectoryError")


def context(**sizes: int) -> MeshContext:
    def make() -> MeshContext:
        built = DistributedSetup.build(parallelism_sizes=ParallelismSizes(**sizes))
        return built.mesh_context

    return cached(("checkpoint", tuple(sizes.items())), make)


def numbers() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def random_after_save(folder: Path) -> tuple[float, float]:
    model = toys.toy()
    record_mesh_context(model, context(dp_replicate_size=2))
    torch.manual_seed(10 + dist.get_rank())
    random.seed(dist.get_rank())
    numbers()
    save_checkpoint(folder, model, step=4)
    return numbers()


def random_after_load(folder: Path, sizes: dict[str, int]) -> tuple[bool, tuple[float, float]]:
    model = toys.toy()
    record_mesh_context(model, context(**sizes))
    loaded = load_checkpoint(folder, model)
    return loaded.random_state_restored, numbers()


def test_random_numbers_continue_or_are_seeded_anew(tmp_path: Path) -> None:
    """The same layout continues each rank's stream; another one is seeded from the saved seed."""
    expected = run_on_ranks(2, random_after_save, tmp_path)
    same = run_on_ranks(2, random_after_load, tmp_path, {"dp_replicate_size": 2})
    assert same == [(True, pair) for pair in expected]
    data = run_on_ranks(2, random_after_load, tmp_path, {})
    assert data == run_on_ranks(2, random_after_load, tmp_path, {})
    assert [restored for restored, _ in data] == [False, False]
    assert data[0][1] != data[1][1]
    tensor = run_on_ranks(2, random_after_load, tmp_path, {"tp_size": 2})
    assert tensor[0] == tensor[1]
    assert tensor[0][0] is False


def test_loading_leaves_unsaved_ranks_reseeded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, toys.toy())
    (tmp_path / "random_state_0.pt").unlink()
    assert not load_checkpoint(tmp_path, toys.toy()).random_state_restored
    shutil.rmtree(tmp_path)


def load_adafactor(folder: Path) -> str:
    model = toys.fsdp(toys.toy())
    optimizer = torch.optim.Adafactor(model.parameters())
    try:
        load_checkpoint(folder, model, optimizer)
    except StateMismatchError as error:
        return str(error)
    return "nothing"


def test_factored_state_beside_sharded_parameters_is_refused(tmp_path: Path) -> None:
    model = toys.toy()
    optimizer = torch.optim.Adafactor(model.parameters())
    toys.mean_loss(model, *toys.batch()).backward()
    optimizer.step()
    before = [value.clone() for value in optimizer.state[model.head.weight].values()]
    save_checkpoint(tmp_path, model, optimizer)
    fresh = torch.optim.Adafactor(model.parameters())
    load_checkpoint(tmp_path, model, fresh)
    after: list[Tensor] = list(fresh.state[model.head.weight].values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for message in run_on_ranks(2, load_adafactor, tmp_path):
        assert "head.weight.row_var (shape [33, 1] beside a sharded [33, 6])" in message


def caught(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def save_to_own_disk(folder: Path) -> str:
    own = folder / str(dist.get_rank())
    return caught(lambda: save_checkpoint(own, toys.fsdp(toys.toy())))


def test_a_folder_that_only_one_rank_sees(tmp_path: Path) -> None:
    for message in run_on_ranks(2, save_to_own_disk, tmp_path):
        assert message.startswith("RuntimeError: saving failed on rank 1: RuntimeError(")


class OddScheduler:
    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x")} if dist.get_rank() == 1 else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def save_odd_on_rank_1(folder: Path) -> list[str]:
    model = toys.fsdp(toys.toy())
    extra = {"path": Path("x") if dist.get_rank() == 1 else "x"}
    return [
        caught(lambda: save_checkpoint(folder, model, extra=extra)),
        caught(lambda: save_checkpoint(folder, model, scheduler=OddScheduler())),
    ]


def test_what_is_no_plain_data_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    others, own = run_on_ranks(2, save_odd_on_rank_1, tmp_path)
    for other, mine, name in zip(others, own, ["extra", "scheduler"], strict=True):
        assert mine.startswith(f"TypeError: {name} of a checkpoint must be plain data")
        assert other.startswith("RuntimeError: saving failed on rank 1: TypeError(")


def load_damaged(folder: Path) -> tuple[str, bool]:
    model = toys.fsdp(toys.toy(seed=1))
    before = model_state_dict(model, full=True)
    message = caught(lambda: load_checkpoint(folder, model))
    after = model_state_dict(model, full=True)
    return message, all(torch.equal(before[name], after[name]) for name in before)


def test_missing_and_short_files_are_named_on_every_rank(tmp_path: Path) -> None:
    """Nothing is written then, and an ``except Exception`` sees it."""
    run_on_ranks(2, save_wrapped, tmp_path)
    *_, last = sorted(tmp_path.glob("*.distcp"))
    last.write_bytes(last.read_bytes()[:-300])
    for damage in ("too short", "missing"):
        for message, untouched in run_on_ranks(2, load_damaged, tmp_path):
            assert (
                message == f"RuntimeError: checkpoint {tmp_path} is damaged: {last.name} ({damage})"
            )
            assert untouched
        last.unlink(missing_ok=True)


def test_bytes_that_cannot_be_read_name_the_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, toys.toy())
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(RuntimeError, match=f"checkpoint {tmp_path} cannot be read"):
        load_checkpoint(tmp_path, toys.toy())
    (tmp_path / "trainer_state.pt").write_bytes(b"xx")
    with pytest.raises(RuntimeError, match=f"{tmp_path}/trainer_state.pt cannot be read"):
        load_checkpoint(tmp_path, toys.toy())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1),
}


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize(("saved", "given"), [("AdamW", "SGD"), ("SGD", "AdamW")])
def test_an_optimizer_of_another_kind_is_refused(
    saved: str, given: str, stepped: bool, tmp_path: Path
) -> None:
    """Moments of Adam tell SGD nothing; the step would fail or quietly start anew."""
    model = toys.toy()
    optimizer = OPTIMIZERS[saved](model)
    if stepped:
        toys.mean_loss(model, *toys.batch()).backward()
        optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    other = toys.toy(seed=1)
    message = rf"optimizer {saved} \(state: .*\), which {given} cannot go on from"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, other, OPTIMIZERS[given](other))
    assert torch.equal(other.head.weight, toys.toy(seed=1).head.weight)
    load_checkpoint(tmp_path, other, OPTIMIZERS[saved](other))


@pytest.mark.parametrize(("saved", "given"), [("AdamW", "Adam"), ("Adam", "AdamW")])
def test_adam_and_adamw_are_one_kind(saved: str, given: str, tmp_path: Path) -> None:
    """Each keeps its own weight decay."""
    model = toys.toy()
    optimizer = OPTIMIZERS[saved](model)
    toys.mean_loss(model, *toys.batch()).backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    loaded = OPTIMIZERS[given](model)
    load_checkpoint(tmp_path, model, loaded)
    assert loaded.param_groups[0]["decoupled_weight_decay"] == (given == "AdamW")
    assert len(loaded.state) == len(optimizer.state)
