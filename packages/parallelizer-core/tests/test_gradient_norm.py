"""The global gradient norm and clipping: mixed meshes, dtypes, orders, offload (B51, B55, P1)."""

from __future__ import annotations

import math

import pytest
import state_toys as toys
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardwalk.parallelizer_core.gradients import clip_grad_norm_, get_total_norm
from shardwalk.parallelizer_core.testing import run_on_ranks

ORDERS = [1.0, 2.0, 3.5, math.inf]


def reference(tied: bool = False) -> nn.Module:
    model = toys.toy(tied=tied)
    toys.mean_loss(model, *toys.batch()).backward()
    return model


def reference_norm(model: nn.Module, order: float) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(
        torch.cat([g.flatten().double() for g in gradients]), order
    ).item()


def norms_and_clipped(sharding: str, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = toys.SHARDINGS[sharding](toys.toy(tied=tied))
    toys.mean_loss(model, *toys.my_rows(sharding, *toys.batch())).backward()
    norms = []
    for order in ORDERS:
        norm = get_total_norm(model, order)
        assert type(norm) is Tensor
        assert norm.shape == ()
        assert norm.dtype == torch.float32
        norms.append(norm.item())
    before = clip_grad_norm_(model, 0.05)
    assert before.item() == norms[1]
    return norms, toys.whole_gradients(model)


@pytest.mark.parametrize(
    ("sharding", "world", "tied"),
    [
        ("fsdp", 2, True),
        ("fsdp", 4, False),
        ("hsdp", 4, False),
        ("tp", 2, False),
        ("fsdp_tp", 4, False),
        ("ddp", 2, True),
    ],
)
def test_norm_and_clipping_equal_one_process(sharding: str, world: int, tied: bool) -> None:
    """B51: any mixture of meshes and plain tensors; tied parameters count once."""
    expected = reference(tied)
    expected_norms = [reference_norm(expected, order) for order in ORDERS]
    nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
    results = run_on_ranks(world, norms_and_clipped, sharding, tied)
    assert len({tuple(norms) for norms, _ in results}) == 1
    norms, gradients = results[0]
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


class Mixed(nn.Module):
    """Parameters on two meshes with an axis in common with none, and plain ones."""

    def __init__(self) -> None:
        super().__init__()
        experts = toys.mesh_of(2, 2, names=("ep_shard", "ep"))
        flat = toys.mesh_of(4, names=("dp",))
        torch.manual_seed(3)
        self.whole = {name: torch.randn(8, 5, 3) for name in ("experts", "dense", "plain", "sum")}
        self.experts = nn.Parameter(self._split("experts", experts, [Shard(1), Shard(0)]))
        self.dense = nn.Parameter(self._split("dense", flat, [Shard(0)]))
        self.plain = nn.Parameter(self.whole["plain"].clone())
        self.sum = nn.Parameter(self._split("sum", flat, [Replicate()]))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))

    def _split(self, name: str, mesh: object, placements: list[object]) -> DTensor:
        return distribute_tensor(self.whole[name], mesh, placements, src_data_rank=None)  # type: ignore[arg-type]

    def fill_gradients(self) -> None:
        for name in ("experts", "dense", "plain"):
            getattr(self, name).grad = getattr(self, name).detach().clone()
        mesh = self.sum.device_mesh  # type: ignore[attr-defined]
        part = self.whole["sum"] * (dist.get_rank() + 1) / 10
        self.sum.grad = DTensor.from_local(part, mesh, [Partial()])
        self.empty.grad = torch.empty(0)


def mixed_meshes(order: float) -> tuple[float, float, float]:
    model = Mixed()
    model.fill_gradients()
    expected = torch.linalg.vector_norm(torch.stack(list(model.whole.values())).double(), order)
    measured = clip_grad_norm_(model, 0.5, order)
    after = get_total_norm([model, model], order)
    torch.optim.AdamW(model.parameters()).step()
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    for options in ({"foreach": True}, {"fused": True}):
        torch.optim.AdamW(sharded, **options).step()
    return measured.item(), expected.item(), after.item()


@pytest.mark.parametrize("order", ORDERS)
def test_norm_over_two_meshes_plain_and_partial_gradients(order: float) -> None:
    """B51: two meshes, partial sums, an unused, a frozen and an empty parameter; AdamW steps."""
    for measured, expected, after in run_on_ranks(4, mixed_meshes, order):
        assert measured == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.5, rel=1e-4)


def clip_bf16() -> tuple[float, float, torch.dtype]:
    model = toys.toy().to(torch.bfloat16)
    toys.fsdp(model, mp_policy=toys.BF16)
    toys.mean_loss(model, *toys.my_rows("fsdp", *toys.batch())).backward()
    before = clip_grad_norm_(model, 0.01).item()
    return before, get_total_norm(model).item(), next(model.parameters()).grad.dtype  # type: ignore[union-attr]


def test_clipping_changes_stored_bf16_gradients() -> None:
    """P1: what is scaled is the stored gradient, not a cast copy."""
    for before, after, dtype in run_on_ranks(2, clip_bf16):
        assert dtype == torch.bfloat16
        assert before > 0.1
        assert after == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_millions_of_elements_is_exact(dtype: torch.dtype) -> None:
    """Accumulated in fp32 and joined in fp64: a sequential fp32 sum is 1e-3 off at this size."""
    model = nn.Linear(3000, 3001, bias=False, dtype=dtype)
    model.weight.grad = torch.randn(model.weight.shape).to(dtype)
    for order in ORDERS:
        expected = reference_norm(model, order)
        assert get_total_norm(model, order).item() == pytest.approx(expected, rel=1e-6)


def clip_offloaded() -> float:
    model = toys.fsdp(toys.toy(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    toys.mean_loss(model, *toys.my_rows("fsdp", *toys.batch())).backward()
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())
    return clip_grad_norm_(model, 0.05).item()


def test_offloaded_gradients_have_the_same_norm() -> None:
    """B55: gradients on the CPU; collectives run on the device of the mesh."""
    expected = reference_norm(reference(), 2.0)
    assert run_on_ranks(2, clip_offloaded) == pytest.approx([expected] * 2, rel=1e-5)


def clip_while_unsharded() -> float:
    model = toys.fsdp(toys.toy())
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    toys.mean_loss(model, *toys.my_rows("fsdp", *toys.batch())).backward()
    return clip_grad_norm_(model, math.inf).item()


def test_units_that_stay_unsharded_after_backward_count() -> None:
    expected = reference_norm(reference(), 2.0)
    assert run_on_ranks(2, clip_while_unsharded) == pytest.approx([expected] * 2, rel=1e-5)


def missing_on_one_rank() -> float:
    mesh = toys.mesh_of(2, names=("shard",))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    if dist.get_rank() == 0:
        model.weight.grad = torch.ones_like(model.weight)
    return get_total_norm(model).item()


def test_a_gradient_missing_on_one_rank_hangs_nothing() -> None:
    assert run_on_ranks(2, missing_on_one_rank) == pytest.approx([math.sqrt(8)] * 2)


def test_no_gradients_at_all() -> None:
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_infinite_max_norm_only_measures() -> None:
    model = reference()
    before = toys.whole_gradients(model)
    assert clip_grad_norm_(model, math.inf).item() > 0
    for name, gradient in toys.whole_gradients(model).items():
        assert torch.equal(gradient, before[name])


def test_large_gradients_do_not_overflow() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e18)
    assert get_total_norm(model).item() == pytest.approx(math.sqrt(2) * 1e18, rel=1e-5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    assert get_total_norm(model, 1.0).item() == math.inf


def test_nonfinite_raises_before_a_gradient_changes() -> None:
    model = reference()
    model.head.weight.grad[0, 0] = math.nan  # type: ignore[union-attr,index,operator]
    before = toys.whole_gradients(model)["embed.weight"]
    with pytest.raises(RuntimeError, match="gradient norm of order 2.0 is nan"):
        clip_grad_norm_(model, 0.01, error_if_nonfinite=True)
    assert torch.equal(toys.whole_gradients(model)["embed.weight"], before)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "2", None, True])
def test_bad_numbers_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="max_norm must be a number above 0"):
        clip_grad_norm_(nn.Linear(2, 2), value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm_type must be a number above 0"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0, value)  # type: ignore[arg-type]


def test_error_if_nonfinite_must_be_a_bool() -> None:
    for measure in (get_total_norm, clip_grad_norm_):
        with pytest.raises(TypeError, match="error_if_nonfinite must be True or False, got 'no'"):
            measure(nn.Linear(2, 2), 1.0, error_if_nonfinite="no")  # type: ignore[operator]


def test_parameters_instead_of_a_model_are_refused() -> None:
    with pytest.raises(TypeError, match="not its parameters"):
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Parameter among them"):
        clip_grad_norm_(list(nn.Linear(2, 2).parameters()), 1.0)  # type: ignore[arg-type]


def test_fp64_gradients_are_clipped() -> None:
    model = nn.Linear(3, 3, dtype=torch.float64)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    expected = torch.nn.utils.get_total_norm([
        p.grad for p in model.parameters() if p.grad is not None
    ])
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected.float())
    torch.testing.assert_close(get_total_norm(model), torch.tensor(0.1), rtol=1e-5, atol=0)
