"""Low-rank adapters on the action expert: the backbone stays as it is, and so do its files.

An adapted linear layer keeps its weight under its name and adds ``lora_a`` [rank, in] and
``lora_b`` [out, rank]: y = W x + b + alpha / rank * B A x, with B = 0 at the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.model_praxis.model import PraxisPolicy
from shardwalk.parallelizer_core import StateDictAdapter
from shardwalk.parallelizer_core.model_sequences import reshard
from shardwalk.parallelizer_core.parallel_state import fsdp_units
from shardwalk.parallelizer_core.state_dict_adapter import Index, ReadSlice

_A, _B = "lora_a", "lora_b"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What the adapters are like.

    Attributes:
        rank: their inner width.
        alpha: their strength; what an adapter adds is multiplied by alpha / rank.
        targets: patterns (``fnmatch``) of the names of linear layers inside the action expert, such
            as "layers.*.attn.*".

    Raises:
        TypeError: for a value of another type.
        ValueError: for a rank below 1, an alpha that is not above 0, or no target.
    """

    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise TypeError(f"rank={self.rank!r} must be an integer")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise TypeError(f"alpha={self.alpha!r} must be a number")
        if isinstance(self.targets, str):
            raise TypeError(f"targets must be a tuple of patterns, got the string {self.targets!r}")
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be 1 or more")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha={self.alpha} must be above 0, and finite")
        if not self.targets:
            raise ValueError('targets is empty; name a pattern, such as "*" for every linear layer')


class LoraLinear(nn.Linear):
    """A frozen linear layer with a trained low-rank adapter beside it.

    Args:
        base: the layer whose weight and bias it takes over, the very parameters.
        rank: rows of `lora_a`, columns of `lora_b`.
        alpha: strength.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        has_bias = base.bias is not None
        super().__init__(base.in_features, base.out_features, bias=has_bias, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha = rank, alpha
        self.lora_a = nn.Parameter(base.weight.new_zeros(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self._reset_base = type(base).reset_parameters

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def reset_parameters(self) -> None:
        """Draw the layer as without an adapter, and the adapter so that it adds nothing."""
        if not hasattr(self, _A):  # the constructor of nn.Linear
            return
        self._reset_base(self)
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        low_rank = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.scaling * low_rank

    @torch.no_grad()
    def fold(self) -> None:
        """Add the adapter to the weight, in float32 and in place, and empty it."""
        product = self.lora_b.float() @ self.lora_a.float()
        self.weight.copy_(self.weight.float() + self.scaling * product)
        self.lora_b.zero_()

    def plain(self) -> nn.Linear:
        """The layer alone, of the very weight and bias."""
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, bias=has_bias, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear


class LoraStateDictAdapter:
    """The files of the model without adapters: adapters are not in them, and start anew.

    Args:
        inner: how the files hold everything else.
        seed: what a fresh `lora_a` depends on, beside its name.
    """

    def __init__(self, inner: StateDictAdapter, seed: int = 0) -> None:
        self.inner, self.seed = inner, seed

    def file_shapes(self, name: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """Nothing for an adapter."""
        return {} if is_lora_name(name) else self.inner.file_shapes(name, shape)

    def read(self, name: str, shape: Sequence[int], index: Index, read: ReadSlice) -> Tensor:
        """An adapter's start, which is the same on every mesh; everything else from the files."""
        if not is_lora_name(name):
            return self.inner.read(name, shape, index, read)
        if name.endswith(_B):
            return torch.zeros(*shape)[index]
        return first_lora_a(name, shape, self.seed)[index]

    def to_file(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """Nothing for an adapter that adds nothing.

        Raises:
            ValueError: for one that does, since its training would be lost.
        """
        if not is_lora_name(name):
            return self.inner.to_file(name, tensor)
        if name.endswith(_B) and bool(tensor.any()):
            raise ValueError(f"{name} is not part of the weights yet; call merge_lora(model) first")
        return {}


def first_lora_a(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Where an adapter starts, float32 on the CPU: uniform as the weight of an `nn.Linear`."""
    bound = 1 / math.sqrt(shape[-1])
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def apply_lora(policy: PraxisPolicy, settings: LoraSettings, *, seed: int = 0) -> PraxisPolicy:
    """Put adapters on the action expert's linear layers; nothing else is trained any more.

    Call it before `parallelize_model`; the policy may be on the meta device, with or without a
    checkpoint to load: adapters that no file holds start at random from `seed` and their names.

    Returns:
        The policy itself, changed in place.

    Raises:
        ValueError: when no linear layer matches, when there are adapters already, or when the
            policy is sharded.
    """
    expert = policy.action_expert
    _check_plain(policy)
    names = [name for name, module in expert.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in names if any(fnmatchcase(name, p) for p in settings.targets)]
    if not chosen:
        raise ValueError(
            f"targets={settings.targets!r} match no linear layer of the action expert; it has "
            f"{', '.join(names)}"
        )
    policy.requires_grad_(False)
    for name in chosen:
        linear = expert.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        adapted = LoraLinear(linear, settings.rank, settings.alpha)
        if not adapted.lora_a.is_meta:
            start = first_lora_a(f"action_expert.{name}.{_A}", adapted.lora_a.shape, seed)
            adapted.lora_a.data.copy_(start)
        expert.set_submodule(name, adapted)
    policy.state_dict_adapter = LoraStateDictAdapter(policy.state_dict_adapter, seed)
    return policy


def _check_plain(policy: PraxisPolicy) -> None:
    if next(lora_layers(policy), None) is not None:
        raise ValueError("the policy has adapters already; merge_lora(policy) takes them into it")
    if next(fsdp_units(policy), None) is not None:
        raise ValueError("the policy is sharded already; call apply_lora before parallelize_model")


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted layers, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def is_lora_name(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in {_A, _B}


@torch.no_grad()
def merge_lora(policy: PraxisPolicy) -> PraxisPolicy:
    """Take the adapters into the weights: W += alpha / rank * B A, computed in float32.

    A policy of plain tensors has no adapters any more afterwards, and its parameters stay frozen. A
    sharded one keeps them, at 0, since its units hold them; all ranks call this together. Either
    way `export_safetensors` then writes the merged weights in the layout of the policy's files.

    Returns:
        The policy itself, changed in place.

    Raises:
        ValueError: when there are no adapters, or they have no values yet.
    """
    layers = list(lora_layers(policy))
    if not layers:
        raise ValueError("the policy has no adapters to merge; apply_lora(policy, ...) adds them")
    if any(layer.weight.is_meta for _, layer in layers):
        raise ValueError("the policy has no values yet; call materialize(policy, ...) first")
    sharded = next(fsdp_units(policy), None) is not None
    reshard([policy])  # units may hold gathered copies from a forward
    for name, layer in layers:
        layer.fold()
        if not sharded:
            policy.set_submodule(name, layer.plain())
    if not sharded and isinstance(policy.state_dict_adapter, LoraStateDictAdapter):
        policy.state_dict_adapter = policy.state_dict_adapter.inner
    return policy
