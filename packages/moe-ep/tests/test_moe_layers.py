"""The layer: the numbers of a token-by-token loop, alone, sharded and recomputed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from moe_layer_toys import VOCABULARY, WIDTH, MoEDecoder, moe_config, token_ids
from torch import Tensor, nn

from shardwalk.mesh import ParallelismSizes
from shardwalk.moe_ep.dispatcher import LocalDispatcher
from shardwalk.moe_ep.layers import MoE
from shardwalk.parallelizer_core import (
    apply_activation_checkpointing,
    is_recomputing,
)
from shardwalk.parallelizer_core.testing import ParityCase, TokenBatches, assert_parity


def plain(layer: MoE, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """The layer's formula, one token and one expert at a time."""
    routing = layer.gate(x, token_mask=token_mask, sequences=1)
    tokens = x.reshape(-1, x.shape[-1])
    out = []
    for token, chosen, weights in zip(tokens, routing.experts, routing.weights, strict=True):
        sent = token if layer.latent_in is None else layer.latent_in.weight @ token
        total = torch.zeros_like(sent)
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            if expert >= 0:
                total = total + weight * one_expert(layer.experts, expert, sent)
        total = total if layer.latent_out is None else layer.latent_out.weight @ total
        if layer.shared_experts is not None:
            shared = one_network(layer.shared_experts, token)
            if layer.shared_gate is not None:
                shared = shared * torch.sigmoid(layer.shared_gate.weight @ token)
            total = total + shared
        out.append(total)
    return torch.stack(out).view(x.shape)


def one_expert(experts: nn.Module, index: int, token: Tensor) -> Tensor:
    names = ("gate_up_proj", "down_proj")
    first, second = (getattr(experts, name)[index] for name in names)
    biases = [getattr(experts, f"{name}_bias") for name in names]
    b1, b2 = (0 if bias is None else bias[index] for bias in biases)
    gate, up = (first @ token + b1).chunk(2)
    return second @ (nn.functional.silu(gate) * up) + b2


def one_network(shared: nn.Module, token: Tensor) -> Tensor:
    gate, up = shared.gate_proj.weight @ token, shared.up_proj.weight @ token
    return shared.down_proj.weight @ (nn.functional.silu(gate) * up)


def run(layer: MoE, forward, x: Tensor, **kwargs):
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out = forward(x, **kwargs)
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return out.detach(), {"x": x.grad, **grads}


LAYERS = {
    "plain": {},
    "top 1": {"top_k": 1, "normalize_weights": False},
    "all experts": {"top_k": 4},
    "biases": {"expert_bias": True, "router_bias": True},
    "shared": {"num_shared_experts": 2},
    "shared of a width of its own": {"num_shared_experts": 1, "shared_intermediate_size": 5},
    "gated shared": {"num_shared_experts": 1, "shared_gate": True},
    "latent": {"latent_size": 4, "num_shared_experts": 1},
    "sigmoid groups": {
        "score_function": "sigmoid",
        "num_groups": 2,
        "top_k_groups": 1,
        "correction_bias": True,
        "scaling_factor": 2.5,
    },
}
MASK = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_forward_and_backward_have_the_numbers_of_a_loop(options, masked) -> None:
    torch.manual_seed(1)
    layer, x = MoE(moe_config(**options)), torch.randn(3, 5, WIDTH)
    kwargs = {"token_mask": MASK} if masked else {}
    out, grads = run(layer, layer, x, **kwargs)
    expected, plain_grads = run(layer, partial(plain, layer), x, **kwargs)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert set(grads) == {"x", *(name for name, _ in layer.named_parameters())}
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain_grads[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "shape", [(WIDTH,), (1, WIDTH), (1, 1, WIDTH), (7, WIDTH), (2, 3, 4, WIDTH)]
)
def test_any_leading_shape(shape) -> None:
    layer = MoE(moe_config(num_shared_experts=1))
    x = torch.randn(shape)
    out = layer(x)
    assert out.shape == x.shape
    torch.testing.assert_close(out.view(-1, WIDTH), layer(x.view(-1, WIDTH)))


@pytest.mark.parametrize("shape", [(0, WIDTH), (2, 0, WIDTH), (0, 3, WIDTH)])
def test_no_tokens(shape) -> None:
    """Every parameter has a gradient of zeros, as the ranks that had tokens expect."""
    options = {"num_shared_experts": 1, "shared_gate": True, "latent_size": 4, "expert_bias": True}
    layer = MoE(moe_config(**options, balance_loss_coefficient=0.1))
    out = layer(torch.randn(shape, requires_grad=True))
    assert out.shape == shape
    out.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_every_token_masked() -> None:
    layer = MoE(moe_config())
    x = torch.full((2, 3, WIDTH), float("nan"))
    out = layer(x, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_one_bad_token_stays_one() -> None:
    layer = MoE(moe_config(num_shared_experts=1))
    x = torch.randn(6, WIDTH)
    clean = layer(x)
    x[2, 3] = float("nan")
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(layer(x)[others], clean[others])


def test_bf16_keeps_the_routers_weights_in_fp32() -> None:
    torch.manual_seed(0)
    layer = MoE(moe_config(num_shared_experts=1)).bfloat16()
    x = torch.randn(4, 5, WIDTH).bfloat16()
    seen = []
    layer.gate.register_forward_hook(lambda *args: seen.append(args[-1]))
    out, grads = run(layer, layer, x)
    assert out.dtype == torch.bfloat16
    assert seen[0].weights.dtype == torch.float32
    assert grads["gate.weight"].dtype == torch.float32
    exact, _ = run(layer.float(), layer, x.float())
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.02)


def test_a_mask_of_another_kind_is_refused() -> None:
    layer, x = MoE(moe_config()), torch.randn(2, 3, WIDTH)
    for mask in (torch.ones(2, 3), torch.ones(6, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"token_mask must be bool of shape \[2, 3\]"):
            layer(x, mask)


def test_its_dispatcher_is_no_state() -> None:
    layer = MoE(moe_config(num_shared_experts=1, shared_gate=True, latent_size=4))
    assert sorted(layer.state_dict()) == [
        "experts.down_proj",
        "experts.gate_up_proj",
        "gate.weight",
        "latent_in.weight",
        "latent_out.weight",
        "shared_experts.down_proj.weight",
        "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight",
        "shared_gate.weight",
    ]


class Counting(LocalDispatcher):
    calls = 0

    def dispatch(self, *args):
        self.calls += 1
        return super().dispatch(*args)


def test_tokens_take_the_way_that_is_set() -> None:
    layer = MoE(moe_config())
    layer.set_dispatcher(Counting(4))
    layer(torch.randn(3, WIDTH))
    assert layer.dispatcher.calls == 1


def losses_and_gradients(model: nn.Module) -> list[Tensor]:
    """Of two micro-batches whose backwards come after both forwards, the second one's first."""
    losses = [model(token_ids(seed=seed)).logsumexp(-1).square().mean() for seed in (1, 2)]
    for loss in reversed(losses):
        loss.backward()
    return [*losses, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputes_take_the_routes_of_the_forward(mode) -> None:
    """Not the router's own of that moment, and count no load."""
    options = {"num_shared_experts": 1, "correction_bias": True}
    torch.manual_seed(0)
    reference = MoEDecoder(**options)
    expected = losses_and_gradients(reference)
    torch.manual_seed(0)
    model = MoEDecoder(**options)
    apply_activation_checkpointing(model, mode)
    asked = []

    def other_choice(choose):
        asked.append(is_recomputing())
        return choose() if not is_recomputing() else choose().flip(0)

    for block in model.layers:
        block.mlp.gate.override = other_choice
    for ours, theirs in zip(losses_and_gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert asked == [False] * 4
    for block, other in zip(model.layers, reference.layers, strict=True):
        assert torch.equal(block.mlp.gate.load, other.mlp.gate.load)


def test_a_part_may_be_checkpointed_by_itself() -> None:
    torch.manual_seed(0)
    expected = losses_and_gradients(MoEDecoder())
    torch.manual_seed(0)
    model = MoEDecoder()
    apply_activation_checkpointing(model, "full", whole_layers=False)
    for ours, theirs in zip(losses_and_gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# Sharded without expert parallelism


def build(**options) -> nn.Module:
    return MoEDecoder(**options)


def case(init=None, micro_batches: int = 1, **options) -> ParityCase:
    batches = TokenBatches(vocabulary=VOCABULARY, micro_batches=micro_batches, length=7)
    return ParityCase(model=partial(build, **options), batches=batches, init=init)


RICH = {
    "num_shared_experts": 1,
    "shared_gate": True,
    "latent_size": 4,
    "expert_bias": True,
    "score_function": "sigmoid",
}
MESHES = {
    "fsdp 2": (2, ParallelismSizes()),
    "fsdp 4": (4, ParallelismSizes()),
    "hsdp 2x2": (4, ParallelismSizes(dp_replicate_size=2)),
}


@pytest.mark.parametrize("options", [{}, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("mesh", MESHES)
def test_parity_under_the_dense_walk(mesh, options) -> None:
    world_size, sizes = MESHES[mesh]
    assert_parity(case(**options), world_size=world_size, parallelism_sizes=sizes)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_parity_of_two_micro_batches_recomputed(mode) -> None:
    assert_parity(
        case(micro_batches=2, **RICH),
        world_size=2,
        setup={"activation_checkpointing": mode},
        optimizers=("sgd",),
    )


def test_parity_from_reset_parameters_on_meta() -> None:
    """Every rank draws its own part, with the values of one process."""
    assert_parity(
        case(init="reset_parameters", **RICH), world_size=4, meta_start="init", optimizers=("sgd",)
    )
