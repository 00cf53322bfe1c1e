"""The cross-entropy of logits that are split over the vocabulary: that of one process."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tp_toys as toys
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import keep_logits_split, parallel_cross_entropy, parallelize_model
from shardwalk.parallelizer_core.testing import TinyDecoder, cached, run_on_ranks

ROWS, LENGTH = 3, 5


def mesh() -> Any:
    size = dist.get_world_size()
    return cached("tp mesh", lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))


def data(vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, LENGTH, vocabulary, generator=generator) * 8 + 30
    labels = torch.randint(vocabulary, (ROWS, LENGTH), generator=generator)
    labels[0, 1:3] = -100
    return logits.to(dtype), labels


def split(logits: Tensor) -> DTensor:
    made = distribute_tensor(logits, mesh(), [Shard(2)], src_data_rank=None).detach()
    assert isinstance(made, DTensor)
    made.requires_grad_()
    return made


def weighed(losses: Tensor) -> Tensor:
    """A number whose gradient differs from token to token."""
    if losses.ndim == 0:
        return losses
    return (losses * torch.arange(1, losses.numel() + 1).view_as(losses)).sum()


def compared(vocabulary: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits, labels = data(vocabulary, dtype)
    labels = labels.masked_fill(labels == -100, options.get("ignore_index", -100))
    expected = logits.clone().requires_grad_()
    wide = expected if dtype == torch.float64 else expected.float()
    reference = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), **options)
    reference = reference.view_as(labels) if reference.ndim else reference
    weighed(reference).backward()
    assert expected.grad is not None
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for found in (split(logits), logits.clone().requires_grad_()):
        losses = parallel_cross_entropy(found, labels, **options)
        assert type(losses) is Tensor
        assert losses.dtype == reference.dtype
        torch.testing.assert_close(losses, reference, rtol=1e-5, atol=1e-5)
        weighed(losses).backward()
        gradient = found.grad
        assert gradient is not None
        assert gradient.dtype == dtype
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, expected.grad, rtol=tolerance, atol=tolerance * 0.1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none", "ignore_index": 7},
    {"label_smoothing": 0.3},
    {"reduction": "none", "label_smoothing": 1.0},
]


def all_compared() -> None:
    for vocabulary in (24, 25, 10):  # over four ranks 10 is cut into 3, 3, 3 and 1
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for options in OPTIONS:
                compared(vocabulary, dtype, options)
    logits, labels = data(25)
    none = torch.full_like(labels, -100)
    assert parallel_cross_entropy(split(logits), none).isnan()
    assert parallel_cross_entropy(split(logits), none, reduction="sum") == 0


def test_loss_and_gradients_are_those_of_whole_logits() -> None:
    run_on_ranks(4, all_compared)


class Shapes(TorchDispatchMode):
    """The largest tensor that any operator makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                local = each.to_local() if isinstance(each, DTensor) else each
                self.largest = max(self.largest, local.numel())
        return made


def largest_tensor() -> None:
    vocabulary = 64
    logits, labels = data(vocabulary)
    own = split(logits)
    with Shapes() as shapes:
        parallel_cross_entropy(own, labels, label_smoothing=0.1).backward()
    assert shapes.largest == ROWS * LENGTH * vocabulary // dist.get_world_size()


def test_no_rank_holds_a_tensor_of_tokens_times_vocabulary() -> None:
    run_on_ranks(4, largest_tensor)


def refused() -> None:
    logits, labels = data(25)
    whole = DTensor.from_local(logits, mesh(), [Replicate()], run_check=False)
    with pytest.raises(ValueError, match=r"placed as \(Replicate.*must be \(Shard\(dim=2"):
        parallel_cross_entropy(whole, labels)
    labels[1, 1] = 25
    with pytest.raises(ValueError, match="label 25 lies outside the vocabulary of 25"):
        parallel_cross_entropy(split(logits), labels)
    with pytest.raises(ValueError, match="shape of logits"):
        parallel_cross_entropy(split(logits), labels[:, 1:])
    with pytest.raises(ValueError, match="reduction='avg'"):
        parallel_cross_entropy(split(logits), labels, reduction="avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5"):
        parallel_cross_entropy(split(logits), labels, label_smoothing=1.5)
    for logits_given in (split(logits), logits):
        for dtype in (torch.float32, torch.int32):
            with pytest.raises(TypeError, match=f"labels are {dtype} and must be torch.int64"):
                parallel_cross_entropy(logits_given, labels.to(dtype))
    with pytest.raises(ValueError, match="that parallelize_model returned"):
        keep_logits_split(TinyDecoder())


def test_other_layouts_labels_and_options_are_refused() -> None:
    run_on_ranks(2, refused)


def under_torch() -> None:
    logits, labels = data(24)
    ours, theirs = split(logits), split(logits)
    loss = parallel_cross_entropy(ours, labels)
    loss.backward()
    with loss_parallel():
        other = F.cross_entropy(theirs.flatten(0, 1), labels.flatten())
        other.backward()
    torch.testing.assert_close(other.full_tensor(), loss)
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(theirs.grad.to_local(), ours.grad.to_local())


def test_torch_takes_the_same_logits() -> None:
    run_on_ranks(2, under_torch)


class WithLoss(toys.Decoder):
    """A model that makes its loss of labels, and of its logits new tokens."""

    split_loss = False

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids)
        if labels is None:
            return logits
        if self.split_loss:
            return parallel_cross_entropy(logits, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def generate(self, input_ids: Tensor) -> Tensor:
        return torch.cat([input_ids, self(input_ids)[:, -1:].argmax(-1)], -1)


def calls_of_a_model() -> None:
    config = FSDP2Config(mp_policy={"param_dtype": None, "reduce_dtype": None})
    setup = DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(tp_size=2))
    model: Any = parallelize_model(WithLoss(), setup.mesh_context)
    ids = torch.arange(12).view(2, 6)
    whole, new = model(ids, labels=ids), model.generate(ids)
    signature = inspect.signature(model.forward)
    keep_logits_split(model)
    keep_logits_split(model)
    for labels in ({"labels": ids}, ids):
        args, kwargs = ((ids,), labels) if isinstance(labels, dict) else ((ids, labels), {})
        with pytest.raises(ValueError, match=r"labels out and call parallel_cross.*enabled=False"):
            model(*args, **kwargs)
    with pytest.raises(ValueError, match=r"generate needs whole .*split\(model, enabled=False\)"):
        model.generate(ids)
    with pytest.raises(RuntimeError, match="scalar types"):  # not of labels: as it was
        model(ids.float())
    assert inspect.signature(model.forward) == signature
    torch.testing.assert_close(parallel_cross_entropy(model(ids), ids), whole)
    with loss_parallel():
        torch.testing.assert_close(model(ids, labels=ids).full_tensor(), whole)
    model.split_loss = True
    torch.testing.assert_close(model(ids, labels=ids), whole)
    model.split_loss = False
    keep_logits_split(model, enabled=False)
    assert not {"forward", "generate"} & vars(model).keys()
    torch.testing.assert_close(model(ids, labels=ids), whole)
    assert torch.equal(model.generate(ids), new)


def test_labels_for_a_loss_of_whole_logits_are_refused_by_name() -> None:
    """The loss failed deep inside, over whole and split tensors."""
    run_on_ranks(2, calls_of_a_model)
