"""Toy experts, routings and counters for the tests of dispatchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwalk.parallelizer_core.testing.collectives import CountCollectives

HIDDEN = 24


def scales(experts: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight of each expert, by which a toy expert multiplies elementwise."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(experts, hidden, generator=generator).to(dtype).requires_grad_()


def toy_experts(rows: Tensor, counts: Sequence[int], scale: Tensor) -> Tensor:
    """Each expert: sin of the row times its scale."""
    pieces = rows.split(list(counts))
    return torch.cat([(piece * each).sin() for piece, each in zip(pieces, scale, strict=True)])


def by_formula(x: Tensor, experts: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """The sum over slots, one after the other, in the dtype of x."""
    result = x * 0
    for slot in range(experts.shape[1]):
        chosen = experts[:, slot]
        output = (x * scale[chosen.clamp(min=0)]).sin() * weights[:, slot, None].to(x.dtype)
        result = result + output.where((chosen >= 0)[:, None], 0.0)
    return result


def inputs(
    tokens: int,
    top_k: int,
    num_experts: int,
    *,
    dropped: float = 0.0,
    dtype: torch.dtype = torch.float32,
    hidden: int = HIDDEN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, different experts for each and weights, from torch's generator."""
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    experts = torch.rand(tokens, num_experts).argsort(1)[:, :top_k]
    experts = experts.masked_fill(torch.rand(tokens, top_k) < dropped, -1)
    weights = torch.rand(tokens, top_k).requires_grad_()
    return x, experts, weights


def through(dispatcher: Any, x: Tensor, experts: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """Dispatch, toy experts, combine."""
    rows, metadata = dispatcher.dispatch(x, experts, weights)
    assert rows.shape[0] == sum(metadata.counts)
    output: Tensor = dispatcher.combine(toy_experts(rows, metadata.counts, scale), metadata)
    assert output.dtype == x.dtype
    return output


def loss_of(output: Tensor) -> Tensor:
    """A loss whose gradient differs from place to place."""
    return (output.float() * (output.detach().float() + 1)).sum()


def run(forward: Callable[..., Tensor], *leaves: Any) -> list[Tensor]:
    """The output, and the gradients of all leaves that need one."""
    output = forward(*leaves)
    loss_of(output).backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def block(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's block of experts, as a leaf."""
    part = tensor.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return part.clone().requires_grad_()


class Exchanges(CountCollectives):
    """Also keeps each exchange.

    Attributes:
        sent: of each all-to-all, in order: dtype, dimensions and bytes of what this rank gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[torch.dtype, int, int]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note an exchange, count the call and carry it out."""
        if func.__name__.startswith("alltoall_base_"):
            given = args[1]
            self.sent.append((given.dtype, given.dim(), given.numel() * given.element_size()))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def bytes_of(self, kind: str) -> int:
        """Bytes of all exchanges of a kind."""
        return sum(size for dtype, dim, size in self.sent if kind_of(dtype, dim) == kind)

    def kinds(self) -> list[str]:
        """What each exchange carried, in order."""
        return [kind_of(dtype, dim) for dtype, dim, _ in self.sent]


def kind_of(dtype: torch.dtype, dim: int) -> str:
    """The kind of an exchange by what it carries."""
    if dtype == torch.int64:
        return "counts"
    if dtype == torch.int32:
        return "slots"
    return "rows" if dim == 2 else "weights"


class HostCopies(TorchFunctionMode):
    """Counts what makes a host wait for its device; on a CPU the same calls.

    Attributes:
        names: of the calls, in order.
    """

    WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "unique", "masked_select", "bincount")
    CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call if the host waits in it, and carry it out."""
        name = func.__name__
        if name in self.WAITS or name in self.CONVERSIONS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
