"""What a parity check runs: the model, its batches, its loss, and how it is trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rows = dict[str, Tensor]
Init = Callable[[str, Tensor, torch.Generator], object] | Literal["reset_parameters"]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Start = Literal["checkpoint", "init"]

IGNORED_LABEL = -100


def causal_token_losses(model: nn.Module, rows: Rows) -> Tensor:
    """The cross-entropy of every token, fp32 of shape [rows, length], 0 where it is masked.

    The model takes ``input_ids`` and returns logits of shape [rows, length, vocabulary], or an
    object that has them as ``logits``; ``labels`` are shifted already.
    """
    output = model(rows["input_ids"])
    logits = getattr(output, "logits", output)
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(),
        rows["labels"].flatten(),
        reduction="none",
        ignore_index=IGNORED_LABEL,
    )
    return losses.view_as(rows["labels"])


def count_labels(rows: Rows) -> int:
    """The number of labels that are not masked."""
    return int((rows["labels"] != IGNORED_LABEL).sum())


def no_extras(model: nn.Module) -> Mapping[str, Tensor]:
    """No values beside parameters and buffers."""
    return {}


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Random token batches, whose rows have unequal numbers of valid tokens.

    Attributes:
        vocabulary: token ids are below it.
        rows: rows of a micro-batch over all ranks.
        length: tokens of a row.
        micro_batches: micro-batches of a step.
    """

    vocabulary: int
    rows: int = 8
    length: int = 11
    micro_batches: int = 1

    def __call__(self, step: int) -> list[Rows]:
        """The micro-batches of a step, each with `input_ids` and `labels` [rows, length]."""
        generator = torch.Generator().manual_seed(1000 + step)
        return [self._micro_batch(generator, index) for index in range(self.micro_batches)]

    def _micro_batch(self, generator: torch.Generator, index: int) -> Rows:
        shape = (self.rows, self.length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        labels = tokens[:, 1:].clone()
        for row in range(self.rows):
            valid = self.length * (row + index + 1) // (self.rows + self.micro_batches)
            labels[row, valid:] = IGNORED_LABEL
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A model and how to feed it.

    Ranks get every callable by pickle: it stands at the top level of a module, or is a
    `functools.partial` or an instance of something that does.

    Attributes:
        model: builds the model; called after `seed` was set, so that all processes agree.
        batches: gives the global micro-batches of a step. Each is a dict of tensors whose
            dimension 0 is rows; a data-parallel rank gets an even share of the rows.
        token_losses: (model, rows) -> the unreduced losses, 0 where a token is masked.
        valid_tokens: rows -> the number of tokens that count.
        init: what `materialize` fills parameters with on a meta start: a function of (name,
            tensor, generator) or ``reset_parameters``.
        extras: model -> more values to compare after the last step, such as expert loads.
        seed: torch's seed when the model is built and before the first step.

    Example:
        ::

            CASE = ParityCase(model=build_my_model, batches=TokenBatches(vocabulary=100))

            @pytest.mark.parametrize("world_size", [2, 4])
            def test_my_sidecar(world_size: int) -> None:
                assert_parity(CASE, world_size=world_size)
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int], Sequence[Rows]]
    token_losses: Callable[[nn.Module, Rows], Tensor] = causal_token_losses
    valid_tokens: Callable[[Rows], int] = count_labels
    init: Init | None = None
    extras: Callable[[nn.Module], Mapping[str, Tensor]] = no_extras
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """Mixed precision as FSDP2 does it: bf16 parameters and compute, fp32 gradient means.

    Attributes:
        islands: patterns (as of `fnmatch`) of the parameters that stay in fp32.
        prepare: changes the one-process bf16 model where the subject's units cast their inputs.
    """

    islands: tuple[str, ...] = ()
    prepare: Callable[[nn.Module], None] | None = None

    def keeps(self, name: str) -> bool:
        """Whether the parameter of this name stays in fp32."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.islands)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How both sides train; together with the case, all that a reference run depends on.

    Attributes:
        optimizers: each is one run from the start: ``sgd``, ``adamw`` or a factory.
        steps: optimizer steps of a run.
        clip: the largest gradient norm, None for no clipping.
        start: None builds real weights; else the subject starts on meta, from a checkpoint of the
            reference's weights or from the case's `init`.
        bf16: mixed precision; None is fp32.
        slices: the data-parallel ranks whose bf16 gradients are averaged.
    """

    optimizers: tuple[str | OptimizerFactory, ...]
    steps: int
    clip: float | None
    start: Start | None
    bf16: Bf16 | None
    slices: int


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; its large eps keeps noise in gradients that are zero in exact arithmetic small."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.1)


OPTIMIZERS: dict[str, OptimizerFactory] = {"sgd": sgd, "adamw": adamw}


def make_optimizer(choice: str | OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a run over the model's trainable parameters."""
    factory = OPTIMIZERS[choice] if isinstance(choice, str) else choice
    return factory(parameter for parameter in model.parameters() if parameter.requires_grad)


def share_of_rows(rows: Rows, part: int, parts: int, device: torch.device) -> Rows:
    """The rows of one of `parts` data-parallel ranks, on its device; may be none."""
    return {name: all_.tensor_split(parts)[part].to(device) for name, all_ in rows.items()}


def name_of_optimizer(choice: Any) -> str:
    """How messages call an optimizer."""
    return choice if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))
