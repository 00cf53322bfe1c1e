"""The router: which experts each token goes to, and how much each of them counts.

Scores are float32 whatever surrounds them, weights always come from the scores without the
correction bias, and under activation checkpointing the recompute takes the forward's choice, while
the weights, through which gradients flow, are computed anew from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from shardwalk.mesh import DDPConfig, MeshContext, get_flat_mesh
from shardwalk.moe_ep._torch_compat import KeepsFloat32, in_backward
from shardwalk.moe_ep.balance_loss import BalanceLoss, Models, SequencesOfTokens, count_slots
from shardwalk.moe_ep.config import MoEConfig
from shardwalk.moe_ep.gate_groups import GateGroups
from shardwalk.moe_ep.load_watch import load_counted, load_used
from shardwalk.parallelizer_core import is_recomputing, record_or_replay, replay_contexts

_groups: WeakKeyDictionary[Gate, GateGroups] = WeakKeyDictionary()


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: int64 [T, k]; -1 in every slot of a masked token.
        weights: fp32 [T, k], with a gradient; 0 in the slots of a masked token.
    """

    experts: Tensor
    weights: Tensor


class Gate(KeepsFloat32):
    """Chooses the experts of each token and weighs them.

    Parameters `weight` [E, H] and, with `router_bias`, `bias` [E]; with `correction_bias` the
    buffer `e_score_correction_bias` [E]. All are float32 and stay so under `.to(torch.bfloat16)`
    and under any precision policy.

    Attributes:
        config: what it was made from.
        balance_loss: its `BalanceLoss`, or None where the coefficient is 0.
        tokens_split_over_tp: whether the ranks of the tp axis route different tokens; set it before
            `finalize_parallelization`.
        replay_routing: whether a recompute takes the choice of its forward.
        override: None, or a function that is given one which chooses, and returns the experts to
            use, int64 [T, k]; a recompute does not call it again.
    """

    checkpoint_context = staticmethod(replay_contexts)

    e_score_correction_bias: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=torch.float32))
        bias = torch.empty(experts, dtype=torch.float32) if config.router_bias else None
        self.bias = nn.Parameter(bias) if bias is not None else None
        correction = torch.zeros(experts, dtype=torch.float32) if config.correction_bias else None
        self.register_buffer("e_score_correction_bias", correction)
        self.balance_loss = (
            BalanceLoss(config.balance_loss_coefficient, config.balance_loss_scope)
            if config.balance_loss_coefficient > 0
            else None
        )
        self.tokens_split_over_tp = False
        self.replay_routing = True
        self.override: Callable[[Callable[[], Tensor]], Tensor] | None = None
        self._load: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Linear` does; biases become 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for bias in (self.bias, self.e_score_correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @property
    def _keep_in_fp32_modules_strict(self) -> list[str]:
        return [name for name, _ in (*self.named_parameters(), *self.named_buffers())]

    @property
    def load(self) -> Tensor:
        """Tokens that this rank sent to each expert since the last update, int64 [E]."""
        if self._load is None:
            experts, device = self.config.num_experts, self.weight.device
            return torch.zeros(experts, dtype=torch.int64, device=device)
        return self._load

    @property
    def last_balance_loss(self) -> Tensor | None:
        """What the last training forward added to this rank's loss, detached."""
        return None if self.balance_loss is None else self.balance_loss.last

    @property
    def groups(self) -> GateGroups | None:
        """The ranks that it shares tokens with; None before `finalize_parallelization`."""
        return _groups.get(self)

    @property
    def counts_over(self) -> GateGroups:
        """Those of `groups`, else those of the mesh that its bias is replicated over, else none."""
        bias = self.e_score_correction_bias
        if self.groups is None and isinstance(bias, DTensor):
            return GateGroups.of_data_mesh(bias.device_mesh)
        return self.groups or GateGroups()

    def reset_load(self) -> None:
        """Begin to count anew."""
        self._load = None
        load_used(self)

    def finalize_parallelization(self, mesh_context: MeshContext) -> None:
        """Learn which ranks to count with, and make the correction bias one over all of them.

        Under DDP it stays a plain buffer, which its update keeps equal.
        """
        split = self.tokens_split_over_tp
        _groups[self] = GateGroups.of(mesh_context, tokens_split_over_tp=split)
        is_ddp = isinstance(mesh_context.strategy_config, DDPConfig)
        if mesh_context.device_mesh is not None and not is_ddp:
            self.replicate_bias(get_flat_mesh(mesh_context.device_mesh, "dp_cp"))

    def replicate_bias(self, mesh: DeviceMesh) -> None:
        """Make the correction bias, where there is one, a DTensor replicated over `mesh`.

        Every rank keeps its own values, so nothing is communicated; again, it does nothing.
        """
        bias = self.e_score_correction_bias
        if bias is None or (isinstance(bias, DTensor) and bias.device_mesh == mesh):
            return
        whole = [Replicate()] * mesh.ndim
        self.e_score_correction_bias = DTensor.from_local(
            local_value(bias), mesh, whole, run_check=False
        )

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        sequences: int | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Routing:
        """Route tokens.

        Args:
            x: floating point [..., H]; its leading dimensions are flattened to T tokens.
            token_mask: bool, T elements; False is a token that goes nowhere and counts nowhere.
            sequences: how many sequences the tokens are, for the balance loss. None is the first
                dimension of x [B, S, H], and 1 of any other x.
            sequence_ids: int64 with T elements below `sequences`; None means that the sequences
                follow each other and are equally long.

        Raises:
            ValueError: for a mask or ids of another size, or sequences that cannot be equally long.
        """
        sequences = _count_sequences(x, sequences)
        tokens = x.reshape(-1, self.config.hidden_size)
        mask, ids = _flat("token_mask", token_mask, tokens), _flat("ids", sequence_ids, tokens)
        _check_lengths(len(tokens), sequences, ids)
        if mask is not None:
            tokens = tokens.masked_fill(~mask[:, None], 0)  # padding may hold anything, even NaN
        with _without_autocast(x.device):
            logits = self._project(tokens)
            scores = self._score(logits)
            experts = self._choose(scores.detach(), mask)
            weights = self._weigh(scores, experts)
            if self.training and torch.is_grad_enabled():
                counts = count_slots(experts, self.config.num_experts, sequences, ids)
                self._count(counts)
                found = SequencesOfTokens(
                    sequences=sequences, ids=ids, counts=counts, top_k=self.config.top_k
                )
                weights = self._balance(weights, logits, mask, found)
        return Routing(experts, weights)

    def _project(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.linear(tokens.to(wide), self.weight.to(wide), bias)

    def _score(self, logits: Tensor) -> Tensor:
        """What experts are chosen by: probabilities, or logits where the softmax comes after."""
        if self.config.score_function == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1) if self.config.softmax_before_top_k else logits

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        def choose() -> Tensor:
            bias = self.e_score_correction_bias
            bias = None if bias is None else local_value(bias)
            return top_k_experts(scores, bias, self.config)

        def chosen() -> Tensor:
            experts = choose() if self.override is None else self.override(choose)
            return experts if mask is None else experts.masked_fill(~mask[:, None], -1)

        return record_or_replay("routing", chosen) if self.replay_routing else chosen()

    def _weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        config = self.config
        weights = scores.gather(1, experts.clamp(min=0))
        if config.score_function == "softmax" and not config.softmax_before_top_k:
            weights = weights.softmax(-1)
        if config.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + config.normalize_epsilon)
        return (weights * config.scaling_factor).masked_fill(experts < 0, 0)

    def _count(self, counts: Tensor) -> None:
        if is_recomputing() or in_backward():
            return
        load = counts.sum(0)
        self._load = load if self._load is None else self._load.to(load.device) + load
        if self.config.bias_update_speed > 0:
            load_counted(self)

    def _balance(
        self, weights: Tensor, logits: Tensor, mask: Tensor | None, tokens: SequencesOfTokens
    ) -> Tensor:
        if self.balance_loss is None:
            return weights
        if self.config.score_function == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + self.config.normalize_epsilon)
        else:
            probabilities = logits.softmax(-1)
        if mask is not None:
            probabilities = probabilities.masked_fill(~mask[:, None], 0)
        return self.balance_loss.attach(weights, probabilities, tokens, self.counts_over)


def top_k_experts(scores: Tensor, bias: Tensor | None, config: MoEConfig) -> Tensor:
    """The `top_k` best experts of each token among its best groups, int64 [T, k].

    Args:
        scores: [T, E].
        bias: [E], added to the scores for the choice alone.
        config: the number of groups, how many a token may choose from, and `top_k`.
    """
    if bias is not None:
        scores = scores + bias
    if config.top_k_groups < config.num_groups:
        groups = scores.unflatten(1, (config.num_groups, config.group_size))
        best = groups.topk(2, dim=-1).values.sum(-1) if bias is not None else groups.amax(-1)
        kept = best.topk(config.top_k_groups, dim=-1).indices
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        scores = groups.masked_fill(dropped[:, :, None], -math.inf).flatten(1)
    return scores.topk(config.top_k, dim=-1).indices


def find_gates(model_or_models: Models) -> Iterator[Gate]:
    """Every gate of a model, or of the pipeline stages of this rank."""
    models: Sequence[nn.Module]
    models = [model_or_models] if isinstance(model_or_models, nn.Module) else model_or_models
    for model in models:
        for module in model.modules():
            if isinstance(module, Gate):
                yield module


def local_value(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing to it writes to the tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _count_sequences(x: Tensor, sequences: int | None) -> int:
    if sequences is not None:
        return sequences
    return x.shape[0] if x.ndim == 3 else 1


def _flat(name: str, given: Tensor | None, tokens: Tensor) -> Tensor | None:
    if given is None:
        return None
    if given.numel() != len(tokens):
        raise ValueError(f"{name} has {given.numel()} elements for {len(tokens)} tokens")
    return given.reshape(-1)


def _check_lengths(tokens: int, sequences: int, ids: Tensor | None) -> None:
    if sequences < 0 or (ids is None and tokens and (not sequences or tokens % sequences)):
        raise ValueError(
            f"sequences={sequences} does not divide the {tokens} tokens; pass the sequence of each "
            f"as sequence_ids"
        )
