"""What selective checkpointing keeps, what it runs again, and that both follow one path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwalk.parallelizer_core import (
    apply_activation_checkpointing,
    not_kept,
    record_or_replay,
    replay_contexts,
)
from shardwalk.parallelizer_core.selective_checkpointing import always, selective_contexts
from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives

aten = torch.ops.aten


class Executed(TorchDispatchMode):
    """Counts what is really carried out, below the modes of checkpointing."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def executions(
    function: Callable[[], Any], rules: tuple[Mapping[Any, Any], ...] = ()
) -> Counter[Any]:
    """How often each operator ran in a forward and its recompute."""
    forward, recompute = selective_contexts(rules)
    with Executed() as executed:
        with forward:
            function()
        with recompute:
            function()
    return executed.calls


X, W = torch.randn(6, 4), torch.randn(4, 4)


def test_every_other_matrix_product_is_kept_beginning_with_the_first() -> None:
    def seven() -> None:
        for _ in range(3):
            torch.mm(X, W)
        torch.addmm(X, X, W)
        for _ in range(3):
            torch.mm(X, W)

    found = executions(seven)
    assert found[aten.mm.default] == 6 + 2  # of the products 0 to 6, 1 and 5 run again
    assert found[aten.addmm.default] == 2  # and 3
    assert executions(lambda: torch.mm(X, W))[aten.mm.default] == 1


def test_batched_products_and_everything_else_run_again() -> None:
    def work() -> None:
        torch.bmm(X[None], W[None]).softmax(-1).sin()

    found = executions(work)
    assert {found[op.default] for op in (aten.bmm, aten._softmax, aten.sin)} == {2}


def attention(name: str, device: str, **options: Any) -> Callable[[], Any]:
    shapes = {"q": (1, 2, 8, 16), "kv": (1, 2, 8, 16)}
    q, k, v = (torch.randn(shapes[s], device=device) for s in ("q", "kv", "kv"))
    op = getattr(aten, name).default
    extra = () if "flash" in name else (None, False)
    return lambda: op(q, k, v, *extra, **options)


ATTENTION = [
    ("_scaled_dot_product_flash_attention_for_cpu", "cpu"),
    ("_scaled_dot_product_flash_attention", "meta"),
    ("_scaled_dot_product_efficient_attention", "meta"),
    ("_scaled_dot_product_cudnn_attention", "meta"),
]


@pytest.mark.parametrize(("name", "device"), ATTENTION)
def test_attention_is_kept(name: str, device: str) -> None:
    assert executions(attention(name, device))[getattr(aten, name).default] == 1


@pytest.mark.parametrize(("name", "device"), ATTENTION[1:])
def test_attention_with_dropout_runs_again(name: str, device: str) -> None:
    """Kept, it would leave the random state behind, and later dropout would draw other numbers."""
    op = getattr(aten, name).default
    assert executions(attention(name, device, dropout_p=0.1))[op] == 2
    rules = {op: always}
    assert executions(attention(name, device, dropout_p=0.1), (rules,))[op] == 2


def test_the_attention_of_a_model_is_kept() -> None:
    q = torch.randn(1, 2, 8, 16)
    found = executions(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert found[aten._scaled_dot_product_flash_attention_for_cpu.default] == 1


def test_flex_attention_is_kept() -> None:
    """The operator itself: its public function compiles, which takes long."""
    q = torch.randn(1, 2, 16, 16)
    mask = create_block_mask(lambda b, h, row, column: row >= column, 1, 1, 16, 16, "cpu")
    flex = torch.ops.higher_order.flex_attention

    def call() -> None:
        options = {"PRESCALE_QK": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
        flex(q, q, q, lambda score, *_: score, mask.as_tuple(), 0.25, options)

    assert executions(call)[flex] == 1


def test_top_k_is_kept() -> None:
    assert executions(lambda: X.topk(2))[aten.topk.default] == 1


# Collectives


class SumOverRanks(torch.autograd.Function):
    """A functional all-reduce whose backward is one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.all_reduce(grad, "sum", dist.group.WORLD)


class Communicating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        summed = SumOverRanks.apply(self.up(x).sin())
        sizes = [len(x) // 2] * 2
        sent = funcol.all_to_all_single_autograd(summed.cos(), sizes, sizes, dist.group.WORLD)
        return x + self.down(sent.sin())


def collectives_of(mode: str | bool) -> tuple[Counter[str], list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(Communicating(), Communicating())
    apply_activation_checkpointing(model, mode)
    with CountCollectives() as counted:
        model(torch.full((4, 4), dist.get_rank() + 0.5)).sum().backward()
    return counted.calls, [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def collectives_of_all() -> list[Counter[str]]:
    counts, grads = zip(*map(collectives_of, (False, "selective", "full")), strict=True)
    for others in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], others, strict=True))
    return list(counts)


def test_collectives_of_a_block_run_once() -> None:
    """Two blocks, each with an all-reduce and an all-to-all forward and backward."""
    for off, selective, full in run_on_ranks(2, collectives_of_all):
        assert off["all_reduce"] == selective["all_reduce"] == 4
        assert full["all_reduce"] == 6
        assert off["all_to_all_single"] == selective["all_to_all_single"] == 4
        assert full["all_to_all_single"] == 6


# One path


class Turns(nn.Module):
    """Takes another path in its recompute; `paths` are functions of (module, x)."""

    def __init__(self, *paths: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.wide = nn.Linear(4, 9)
        self.paths = list(paths)

    def forward(self, x: Tensor) -> Tensor:
        return self.paths.pop(0)(self, x)


def taken(*paths: Callable[[Any, Tensor], Tensor]) -> Turns:
    torch.manual_seed(5)
    turns = Turns(*paths)
    apply_activation_checkpointing(nn.ModuleList([turns]), "selective")
    x = torch.randn(3, 4, requires_grad=True)
    turns(x).sum().backward()
    return turns


def straight(turns: Turns, x: Tensor) -> Tensor:
    return turns.second(turns.first(x.repeat(1, 1)).sin()).sin()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (
            lambda t, x: t.second(t.first(x.repeat(2, 1)).sin()).sin(),
            r"\[6, 4\].*forward ran.*\[3, 4\].*call 0",
        ),
        (lambda t, x: t.wide(t.first(x).sin()).sin(), r"addmm.*forward ran aten.mm.*call 1"),
    ],
)
def test_another_path_in_the_recompute_is_an_error(other: Any, named: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){named}"):
        taken(straight, other)
    taken(straight, straight)


def test_a_product_too_many_is_an_error() -> None:
    forward, recompute = selective_contexts()
    with forward:
        torch.mm(X, W)
    with recompute:
        torch.mm(X, W).sin().cos()  # what nothing decides about may differ
        with pytest.raises(RuntimeError, match="aten.mm.default.*after the 1 operators"):
            torch.mm(X, W)


def test_a_recompute_starts_from_the_first_decision_each_time() -> None:
    """After one that failed, too."""
    forward, recompute = selective_contexts()
    with forward:
        first = torch.mm(X, W)
        torch.mm(X, X.T)
    with suppress(KeyError), recompute:
        raise KeyError
    with recompute:
        kept = torch.mm(X, W)
    assert kept.data_ptr() == first.data_ptr()
    with recompute, pytest.raises(RuntimeError, match="call 0"):
        torch.mm(X, X.T)


def test_decisions_belong_to_one_call() -> None:
    """A call with an odd number of products shifts nothing for the next one."""
    counts = []
    for _ in range(2):
        x = X.clone().requires_grad_()
        with Executed() as executed:
            y = checkpoint(
                lambda x: torch.mm(x, W).sin(),
                x,
                use_reentrant=False,
                context_fn=selective_contexts,
            )
            y.sum().backward()
        counts.append(executed.calls[aten.mm.default])
    assert counts == [2, 2]  # the forward, the gradient of x; the product is kept


# What a module wants kept beyond that


class Router(nn.Module):
    """Its projection is kept whatever its place among the products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)

    def ops_to_save(self) -> Mapping[Any, Any]:
        return {aten.mm.default: lambda x, weight: weight.shape[-1] == 3, aten.exp.default: always}

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).exp()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router = nn.Linear(4, 4, bias=False), Router()

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.up(x).sin() @ self.up.weight.sin()) * self.router(x).sum(-1, keepdim=True)


def test_a_module_may_have_more_kept() -> None:
    torch.manual_seed(1)
    expected = None
    for mode in (False, "selective", "full"):
        model = nn.ModuleList([Routed()])
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        apply_activation_checkpointing(model, mode)
        x = X.clone().requires_grad_()
        with Executed() as executed:
            model[0](x).sum().backward()
        # Three products forward, six backward; only the second runs again where the gate is kept
        again = {False: 0, "selective": 1, "full": 3}[mode]
        assert executed.calls[aten.mm.default] == 3 + 6 + again, mode
        assert executed.calls[aten.exp.default] == 1 + (mode == "full")
        expected = x.grad if expected is None else expected
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    ("op", "error", "named"),
    [
        (aten.add_.Tensor, ValueError, "add_.Tensor writes to its arguments"),
        (aten.bernoulli.default, ValueError, "bernoulli.default draws random numbers"),
        (aten.mm, TypeError, "must map overloads such as"),
        ("mm", TypeError, "must map overloads such as"),
    ],
)
def test_what_cannot_be_kept_is_refused(op: Any, error: type[Exception], named: str) -> None:
    model = nn.ModuleList([Routed()])
    model[0].router.ops_to_save = lambda: {op: always}
    with pytest.raises(error, match=f"ops_to_save of Router.*{named}"):
        apply_activation_checkpointing(model, "selective")


class Chooses(nn.Module):
    """Records a choice made by an operator that is kept, between others of its kind."""

    checkpoint_context = staticmethod(replay_contexts)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = self.up(x).topk(2).values.sin()
        chosen = record_or_replay("choice", lambda: (x.detach() @ W).topk(1).indices)
        after = (self.up(x).sin() @ self.up.weight).sin().topk(3).values
        return after.sin().sum() + before.sum() + x.gather(1, chosen).sin().sum()


def test_what_a_forward_records_is_no_operator_of_its_recompute() -> None:
    """And what comes before and after it is kept as if it were not there."""
    gradients = []
    for mode in (False, "selective"):
        torch.manual_seed(1)
        model = nn.ModuleList([Chooses()])
        apply_activation_checkpointing(model, mode)
        x = X.clone().requires_grad_()
        with Executed() as executed:
            model[0](x).backward()
        assert executed.calls[aten.topk.default] == 3
        # Four products forward, six backward; of the three of the block the second runs again.
        assert executed.calls[aten.mm.default] == 4 + 6 + (mode == "selective")
        gradients.append([x.grad, model[0].up.weight.grad])
    for plain, selective in zip(*gradients, strict=True):
        assert torch.equal(plain, selective)


class ChangesWhatIsKept(nn.Module):
    """Divides the values of a top-k in place, as routers do."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with self.context():
            values, indices = h.softmax(-1).topk(2)
            values /= values.sum(-1, keepdim=True)
        return (values * h.gather(1, indices)).sum()


def test_what_is_kept_is_as_it_was_before_the_block_wrote_to_it() -> None:
    gradients = []
    contexts = (nullcontext, nullcontext, not_kept)
    for mode, context in zip((False, "selective", "selective"), contexts, strict=True):
        torch.manual_seed(1)
        model = nn.ModuleList([ChangesWhatIsKept(context)])
        apply_activation_checkpointing(model, mode)
        x = X.clone().requires_grad_()
        model[0](x).backward()
        gradients.append([x.grad, model[0].up.weight.grad])
    for plain, *others in zip(*gradients, strict=True):
        assert all(torch.equal(plain, other) for other in others)


class Writes(nn.Module):
    """A block that writes to the product of a linear layer."""

    def __init__(self, bias: bool, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.up, self.write = nn.Linear(4, 4, bias=bias), write

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.write(h)
        return x + h.sin()


WRITES = {
    "a sum": lambda h: h.add_(h.detach().tanh()),
    "a factor": lambda h: h.mul_(0.3),
    "bounds": lambda h: h.clamp_(-0.1, 0.1),
    "a mask": lambda h: h.masked_fill_(h > 0.2, 0.0),
    "a view": lambda h: h.flatten()[:5].mul_(2),
    "twice": lambda h: h.add_(1).mul_(2),
}


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["rows", "sequences"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_kept_product_change_no_gradient(
    write: str, bias: bool, shape: tuple[int, ...]
) -> None:
    """The view of a product without a bias has a version of its own, so torch sees no write."""
    gradients = []
    for mode in (False, "selective"):
        torch.manual_seed(1)
        model = nn.ModuleList([Writes(bias, WRITES[write])])
        apply_activation_checkpointing(model, mode)
        x = torch.randn(shape, requires_grad=True)
        model[0](x).pow(2).sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, selective in zip(*gradients, strict=True):
        assert torch.equal(plain, selective)
