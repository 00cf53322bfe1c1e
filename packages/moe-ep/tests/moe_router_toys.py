"""A small model whose blocks route through a `Gate`, and one way to train it anywhere."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwalk.mesh import DDPConfig, DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.moe_ep.balance_loss import normalize_balance_loss
from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.load_balance import expert_load_report
from shardwalk.moe_ep.router import Gate, find_gates
from shardwalk.moe_ep.router_biases import attach_router_bias_update
from shardwalk.parallelizer_core import parallelize_model, sync_gradients_on_last
from shardwalk.parallelizer_core.testing import cached

WIDTH, EXPERTS, ROWS, LENGTH = 12, 8, 8, 6


def moe_config(**changes: Any) -> MoEConfig:
    return MoEConfig(**{
        "hidden_size": WIDTH,
        "intermediate_size": 4,
        "num_experts": EXPERTS,
        "top_k": 2,
        **changes,
    })


AUX_FREE = {
    "score_function": "sigmoid",
    "num_groups": 4,
    "top_k_groups": 2,
    "correction_bias": True,
    "bias_update_speed": 0.01,
}


class Experts(nn.Module):
    """Every expert a matrix, every token through all of them: nothing to dispatch."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.hidden_size, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, x, experts, weights):
        dense = x.new_zeros(len(x), len(self.weight))
        dense = dense.scatter_add(1, experts.clamp(min=0), weights.to(x.dtype))
        return torch.einsum("te,th,ehd->td", dense, x, self.weight)


class RoutedBlock(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.gate = Gate(config)
        self.experts = Experts(config)

    def forward(self, x):
        h = self.norm(x)
        routing = self.gate(h)
        flat = h.reshape(-1, h.shape[-1])
        return x + self.experts(flat, routing.experts, routing.weights).view_as(x)


class RoutedModel(nn.Module):
    def __init__(self, config: MoEConfig, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, config.hidden_size)
        self.layers = nn.ModuleList([RoutedBlock(config) for _ in range(blocks)])
        self.head = nn.Linear(config.hidden_size, 5)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def routed_model(**changes: Any) -> RoutedModel:
    torch.manual_seed(3)
    return RoutedModel(moe_config(**changes))


def context(
    strategy: str = "fsdp2", checkpointing: bool | str = False, **sizes: Any
) -> MeshContext:
    """A context over all ranks, in fp32; its mesh is made once per process."""

    def make() -> MeshContext:
        return DistributedSetup.build(
            strategy, parallelism_sizes=ParallelismSizes(**sizes)
        ).mesh_context

    made = cached(("moe_router_toys", strategy, *sorted(sizes.items())), make)
    config = DDPConfig() if strategy == "ddp" else FSDP2Config(mp_policy={"param_dtype": None})
    return MeshContext.from_meshes(
        made.device_mesh, strategy_config=config, activation_checkpointing=checkpointing
    )


def rows_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator)


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def train(
    config: dict[str, Any],
    *,
    mesh_context: MeshContext | None = None,
    micro_batches: int = 1,
    steps: int = 3,
    only_balance: bool = False,
) -> dict[str, Any]:
    """Train on every rank's share of the rows; what the gates saw and became, in full.

    Rows are cut into micro-batches first, so that each holds rows of all ranks.
    """
    model = routed_model(**config)
    here = mesh_context or MeshContext()
    model = parallelize_model(model, here)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh_context else (0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config.get("bias_update_speed"):
        attach_router_bias_update(model, optimizer)
    seen: dict[str, Any] = {"loads": [], "local loads": []}
    for step in range(steps):
        parts = [part.tensor_split(ranks)[rank] for part in rows_of(step).chunk(micro_batches)]
        normalize_balance_loss(model, here, [len(part) for part in parts])
        for part in sync_gradients_on_last(model, parts):
            loss = model(part).square().mean() / micro_batches
            (loss * 0 if only_balance else loss).backward()
        report = expert_load_report(model)
        seen["loads"].append(torch.stack([layer.load for layer in report.layers.values()]))
        seen["local loads"].append(torch.stack([gate.load for gate in find_gates(model)]))
        if step == 0:
            seen["gradients"] = {
                name.removeprefix("module."): full(parameter.grad)
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    seen["biases"] = [
        full(gate.e_score_correction_bias)
        for gate in find_gates(model)
        if gate.e_score_correction_bias is not None
    ]
    return seen


def train_on_mesh(config: dict[str, Any], layout: dict[str, Any], **options: Any) -> dict[str, Any]:
    return train(config, mesh_context=context(**layout), **options)
