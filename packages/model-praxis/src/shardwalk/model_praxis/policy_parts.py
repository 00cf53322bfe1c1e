"""Where a policy keeps its blocks and experts, and what of a moe mesh is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwalk.mesh import get_submesh
from shardwalk.model_praxis.action_expert import ActionExpert
from shardwalk.model_praxis.backbone import Backbone
from shardwalk.moe_ep import MoE
from shardwalk.parallelizer_core.model_tensors import unwrapped

if TYPE_CHECKING:  # the policy's class carries the sidecar
    from shardwalk.model_praxis.model import PraxisPolicy


def policy_in(model: nn.Module, asker: str = "PraxisModelParallelizer") -> PraxisPolicy:
    """The policy in `model`: itself, or the one that a wrapper holds.

    Raises:
        TypeError: there is none, or several; names who asked.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{asker} takes a PraxisPolicy, or a module that holds one, not {model!r}")
    found = [module for module in model.modules() if _is_policy(module)]
    if len(found) != 1:
        raise TypeError(
            f"{type(model).__name__} holds {len(found)} Praxis policies; {asker} takes a "
            f"PraxisPolicy, or a module that holds one"
        )
    return cast("PraxisPolicy", found[0])


def _is_policy(module: nn.Module) -> bool:
    return isinstance(getattr(module, "backbone", None), Backbone) and isinstance(
        getattr(module, "action_expert", None), ActionExpert
    )


def block_lists(policy: PraxisPolicy) -> tuple[nn.ModuleList, ...]:
    """The stacks of blocks: encoder tower, decoder tower, action expert."""
    return (
        policy.backbone.encoder.blocks,
        policy.backbone.decoder.blocks,
        policy.action_expert.layers,
    )


def refuse_shared_blocks(policy: PraxisPolicy) -> None:
    """Refuse a block in two places, and a weight of a block that something outside of it has too.

    A unit takes the weights of its block, and another place would be left with what they were.

    Raises:
        ValueError: names both places.
    """
    blocks = {block for stack in block_lists(policy) for block in stack}
    places = {name for name, module in policy.named_modules(remove_duplicate=False)
              if module in blocks}  # fmt: skip
    first: dict[nn.Parameter, tuple[str, str | None]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        block = next((place for place in places if name.startswith(f"{place}.")), None)
        other, other_block = first.setdefault(parameter, (name, block))
        if other_block != block:
            raise ValueError(
                f"{other} and {name} are one parameter, and every block of a Praxis policy is a "
                f"unit with weights of its own; give each its own copy"
            )


def moe_of(block: nn.Module) -> MoE | None:
    """The experts' layer of a block of a tower; None for dense ones and the action expert's."""
    ffn = getattr(unwrapped(block), "ffn", None)
    return ffn if isinstance(ffn, MoE) else None


def expert_meshes(moe_mesh: DeviceMesh | None) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The ep axis, and the axes that experts are sharded (before that replicated) over.

    None for what is not there or has one rank.
    """
    if moe_mesh is None:
        return None, None
    return _used(moe_mesh, "ep"), _used(moe_mesh, "ep_replicate", "ep_shard")


def _used(mesh: DeviceMesh, *axes: str) -> DeviceMesh | None:
    names = tuple(axis for axis in axes if axis in (mesh.mesh_dim_names or ()))
    found = get_submesh(mesh, names) if names else None
    return None if found is None or found.size() == 1 else found
