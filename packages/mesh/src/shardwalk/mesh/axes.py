"""Names of the axes that a device mesh or a moe mesh may have."""

from enum import StrEnum

__all__ = ["MeshAxisName"]


class MeshAxisName(StrEnum):
    """Every axis name that shardwalk gives a meaning.

    ``dp``, ``dp_shard_cp`` and ``dp_cp`` are flattened views over several axes of one device mesh.
    The ``ep`` names belong to the moe mesh.
    """

    PP = "pp"
    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    DP_SHARD_CP = "dp_shard_cp"
    DP_CP = "dp_cp"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EP_SHARD = "ep_shard"
    EP_REPLICATE = "ep_replicate"
