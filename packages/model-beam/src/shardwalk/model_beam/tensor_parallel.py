"""How the layers of Beam are cut over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.model_beam.layers import BeamAttention, BeamMLP, Block, RMSNorm
from shardwalk.moe_ep import SplitTokens
from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    RowParallel,
    SequenceBoundary,
    SharedInput,
    SplitInput,
    VocabularyParallel,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.local_parameters import (
    Forward,
    distribute_parameter,
    local_values,
    shown,
)

Styles = dict[str, tuple[ParallelStyle, ...]]

_BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm")  # fmt: skip


def beam_tp_plan(model: nn.Module, sequence_parallel: bool) -> Styles:
    """The styles of every part of Beam by module path.

    Attention is cut by heads, dense feed-forward layers by their inner features, the embedding and
    the head by rows of the vocabulary. Layers of experts stay whole and take a part of the tokens
    on each rank.

    Args:
        model: a `BeamForCausalLM`, or what holds one.
        sequence_parallel: whether hidden states between the layers of a block are split over their
            length.
    """
    modules = dict(model.named_modules())
    blocks = {path: module for path, module in modules.items() if isinstance(module, Block)}
    plan: Styles = {}
    for path, block in blocks.items():
        plan |= _block_styles(path, block, sequence_parallel)
    if sequence_parallel and blocks:
        first, *_ = blocks
        *_, last = blocks
        plan[first] = (SequenceBoundary(enter=True, leave=first == last),)
        if last != first:
            plan[last] = (SequenceBoundary(leave=True),)
    return plan | dict(_outer_styles(modules, tuple(f"{path}." for path in blocks)))


def refuse_uneven_heads(model: nn.Module, tp_size: int) -> None:
    """Refuse an axis that does not divide the heads.

    Raises:
        ValueError: names the counts and the sizes that fit.
    """
    for path, module in model.named_modules():
        if not isinstance(module, BeamAttention):
            continue
        counts = {
            "num_attention_heads": module.q_proj.out_features // module.head_dim,
            "num_key_value_heads": module.k_proj.out_features // module.head_dim,
        }
        uneven = [f"{name}={count}" for name, count in counts.items() if count % tp_size]
        if uneven:
            fits = [n for n in range(1, 1 + min(counts.values())) if not _uneven(counts, n)]
            raise ValueError(
                f"tp_size={tp_size} does not divide {' and '.join(uneven)} of {path}; use one of "
                f"{fits}"
            )


@dataclass(kw_only=True)
class HeadParameter(ParallelStyle):
    """A module with a bare parameter that has an element for each head.

    Attributes:
        name: of the parameter, of which each rank gets the elements of its heads.
    """

    name: str

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameter(module, self.name, device_mesh, Shard(0))
        module.forward = _HeadParameterForward(self, module, module.forward)
        return module


@dataclass
class _HeadParameterForward:
    style: HeadParameter
    module: nn.Module
    inner: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with shown(self.module, **local_values(self.module, {self.style.name: Shard(0)})):
            return self.inner(*args, **kwargs)


def _block_styles(path: str, block: Block, sequence_parallel: bool) -> Styles:
    attention, mlp = f"{path}.self_attn", f"{path}.mlp"
    row = RowParallel(sequence_parallel=sequence_parallel)
    column = ColumnParallel(shared_input=True)
    styles: Styles = {
        attention: (HeadParameter(name="gate_bias"), SharedInput()),
        f"{attention}.q_norm": (SplitInput(),),
        f"{attention}.k_norm": (SplitInput(),),
        f"{attention}.o_proj": (row,),
    }
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj"):
        styles[f"{attention}.{name}"] = (column,)
    if isinstance(block.mlp, BeamMLP):
        styles[mlp] = (SharedInput(),)
        styles[f"{mlp}.gate_proj"] = styles[f"{mlp}.up_proj"] = (column,)
        styles[f"{mlp}.down_proj"] = (row,)
    else:
        styles[mlp] = (SplitTokens(),)
    norm = SplitInput() if sequence_parallel else WholeInput()
    return styles | {f"{path}.{name}": (norm,) for name in _BLOCK_NORMS}


def _outer_styles(
    modules: dict[str, nn.Module], blocks: tuple[str, ...]
) -> Iterator[tuple[str, tuple[ParallelStyle, ...]]]:
    for path, module in modules.items():
        if path.startswith(blocks):
            continue
        if isinstance(module, nn.Embedding):
            yield path, (VocabularyParallel(),)
        elif isinstance(module, nn.Linear):
            yield path, (ColumnParallel(gather_output=True),)
        elif isinstance(module, RMSNorm):
            yield path, (WholeInput(),)


def _uneven(counts: dict[str, int], size: int) -> bool:
    return any(count % size for count in counts.values())
