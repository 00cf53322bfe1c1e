"""From the name of a dispatcher to the dispatcher."""

from __future__ import annotations

from typing import get_args

from torch.distributed.device_mesh import DeviceMesh

from shardwalk.moe_ep.config import DispatcherName
from shardwalk.moe_ep.dispatcher.all_to_all import AllToAllDispatcher
from shardwalk.moe_ep.dispatcher.deepep import DeepEPDispatcher
from shardwalk.moe_ep.dispatcher.local import LocalDispatcher
from shardwalk.moe_ep.dispatcher.protocol import TokenDispatcher


def make_dispatcher(
    name: DispatcherName, num_experts: int, ep_mesh: DeviceMesh | None
) -> TokenDispatcher:
    """Make the dispatcher of one layer.

    Args:
        name: "auto" takes "local" where all experts are on one rank, else "all_to_all".
        num_experts: of the layer, on all ranks.
        ep_mesh: the expert-parallel axis, or None where there is none.

    Raises:
        ValueError: another name; "local" where experts are on several ranks; the others without a
            mesh; experts that don't divide evenly over the ranks.
        ImportError: "deepep", which is not installed.
    """
    if name not in get_args(DispatcherName):
        raise ValueError(f"dispatcher={name!r} must be one of {list(get_args(DispatcherName))}")
    ranks = 1 if ep_mesh is None else ep_mesh.size()
    if name == "auto":
        name = "local" if ranks == 1 else "all_to_all"
    if name == "local":
        if ranks > 1:
            raise ValueError(
                f"dispatcher='local' needs all experts on one rank, and ep_size={ranks}; use "
                f"'auto' or 'all_to_all'"
            )
        return LocalDispatcher(num_experts)
    if ep_mesh is None:
        raise ValueError(
            f"dispatcher={name!r} exchanges tokens over a mesh and there is none; use 'auto' or "
            f"'local'"
        )
    if name == "deepep":
        return DeepEPDispatcher(num_experts, ep_mesh)
    return AllToAllDispatcher(num_experts, ep_mesh)
