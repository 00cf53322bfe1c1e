"""Which experts tokens go to, how much each counts, and in which precision that is decided."""

import math
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_router_toys import (
    AUX_FREE,
    EXPERTS,
    WIDTH,
    context,
    full,
    moe_config,
    routed_model,
    rows_of,
    train,
    train_on_mesh,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from shardwalk.mesh import FSDP2Config, MeshContext
from shardwalk.moe_ep.router import Gate, find_gates, top_k_experts
from shardwalk.parallelizer_core import (
    apply_activation_checkpointing,
    describe_units,
    parallelize_model,
)
from shardwalk.parallelizer_core.testing import run_on_ranks

GROUPED = {"score_function": "sigmoid", "num_groups": 4, "top_k_groups": 2, "correction_bias": True}


def make_gate(**changes):
    torch.manual_seed(0)
    gate = Gate(moe_config(**changes))
    with torch.no_grad():
        nn.init.normal_(gate.weight)
        if gate.bias is not None:
            nn.init.normal_(gate.bias)
        if gate.e_score_correction_bias is not None:
            nn.init.normal_(gate.e_score_correction_bias, std=0.3)
    return gate


def ordered(experts, weights):
    order = experts.argsort(-1)
    return experts.gather(1, order), weights.gather(1, order)


def transformers_router(name, **config):
    transformers = pytest.importorskip("transformers")
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

        made = transformers.MixtralConfig(
            hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2
        )
        return MixtralTopKRouter(made)
    if name == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

        made = transformers.Qwen3MoeConfig(
            hidden_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=2, **config
        )
        return Qwen3MoeTopKRouter(made)
    if name == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

        made = transformers.GptOssConfig(
            hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2
        )
        return GptOssTopKRouter(made)
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    made = transformers.DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        **config,
    )
    return DeepseekV3TopkRouter(made)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("mixtral", {}, {}),
        ("qwen3_moe", {"norm_topk_prob": True}, {}),
        ("qwen3_moe", {"norm_topk_prob": False}, {"normalize_weights": False}),
        ("gpt_oss", {}, {"softmax_before_top_k": False, "router_bias": True}),
        ("deepseek_v3", {"norm_topk_prob": True}, {**GROUPED, "scaling_factor": 2.5}),
        (
            "deepseek_v3",
            {"norm_topk_prob": False},
            {**GROUPED, "scaling_factor": 2.5, "normalize_weights": False},
        ),
    ],
)
def test_routing_is_that_of_transformers(name, theirs, ours):
    router, gate = transformers_router(name, **theirs), make_gate(**ours)
    router.load_state_dict(gate.state_dict())
    x = torch.randn(500, WIDTH)
    _, weights, experts = router(x)
    routing = gate(x)
    experts, weights = ordered(experts, weights)
    mine, my_weights = ordered(*routing)
    assert torch.equal(mine, experts)
    torch.testing.assert_close(my_weights, weights, rtol=0, atol=1e-6)


def test_p4_groups_that_are_not_chosen_lose_even_to_very_low_scores():
    """A mask of 0 would let experts of other groups in where biases make scores negative."""
    config = moe_config(**{**GROUPED, "top_k": 4})
    scores = torch.rand(64, EXPERTS)
    bias = torch.full((EXPERTS,), -2.0)
    experts = top_k_experts(scores, bias, config)
    groups = (scores + bias).view(64, 4, 2).sum(-1).topk(2).indices
    for token in range(64):
        assert set((experts[token] // 2).tolist()) == set(groups[token].tolist())


def test_without_a_correction_bias_a_group_is_as_good_as_its_best_expert():
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.6, 0.1, 0.1, 0.2, 0.2]])
    config = moe_config(num_groups=4, top_k=1)
    assert top_k_experts(scores, None, config).tolist() == [[0]]
    assert top_k_experts(scores, torch.zeros(EXPERTS), config).tolist() == [[2]]


def best_by_hand(scores, bias, config):
    """Expert by expert, in plain Python."""
    biased = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = config.group_size
    groups = [biased[start : start + size] for start in range(0, len(biased), size)]
    best = 2 if bias is not None else 1
    value = [sum(sorted(group, reverse=True)[:best]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda group: -value[group])[: config.top_k_groups]
    allowed = [e for e in range(len(biased)) if e // size in kept]
    return set(sorted(allowed, key=lambda e: -biased[e])[: config.top_k])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([1, 2, 4]),
    kept=st.integers(1, 4),
    top_k=st.integers(1, 4),
    biased=st.booleans(),
)
def test_the_choice_is_that_of_plain_python(seed, groups, kept, top_k, biased):
    kept = min(kept, groups)
    top_k = min(top_k, kept * EXPERTS // groups)
    config = moe_config(top_k=top_k, num_groups=groups, top_k_groups=kept, correction_bias=biased)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator) if biased else None
    found = top_k_experts(scores, bias, config)
    for row, experts in zip(scores.tolist(), found.tolist(), strict=True):
        assert set(experts) == best_by_hand(row, bias.tolist() if biased else None, config)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_correction_bias_moves_the_choice_and_never_the_weights(scores):
    gate = make_gate(score_function=scores, correction_bias=True, normalize_weights=False)
    x = torch.randn(20, WIDTH)
    gate.e_score_correction_bias.zero_()
    gate.e_score_correction_bias[5] = 50.0
    experts, weights = gate(x)
    assert (experts == 5).any(-1).all()
    logits = x @ gate.weight.T
    expected = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    torch.testing.assert_close(weights, expected.gather(1, experts))


def test_the_epsilon_keeps_weights_finite():
    gate = make_gate(score_function="sigmoid", normalize_epsilon=1e-3)
    with torch.no_grad():
        gate.weight.fill_(-100.0)
    _, weights = gate(torch.ones(3, WIDTH))
    assert torch.equal(weights, torch.zeros(3, 2))


@pytest.mark.parametrize("config", [{}, GROUPED, {"softmax_before_top_k": False}])
def test_one_bad_token_stays_one_bad_token(config):
    gate, x = make_gate(**config), torch.randn(9, WIDTH)
    expected = gate(x)
    for bad in (math.nan, math.inf):
        x[4] = bad
        found = gate(x)
        others = torch.arange(9) != 4
        for actual, wanted in zip(found, expected, strict=True):
            assert torch.equal(actual[others], wanted[others])
        assert ((found.experts >= 0) & (found.experts < EXPERTS)).all()
        assert found.experts[4].unique().numel() == 2


def test_masked_tokens_go_nowhere_and_count_nowhere():
    gate = make_gate(**GROUPED, balance_loss_coefficient=1.0)
    x = torch.randn(2, 4, WIDTH)
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    x[~mask] = math.nan
    x.requires_grad_()
    experts, weights = gate(x, token_mask=mask)
    masked = ~mask.flatten()
    assert (experts[masked] == -1).all()
    assert (weights[masked] == 0).all()
    assert (experts[~masked] >= 0).all()
    assert int(gate.load.sum()) == 6 * 2
    weights.square().sum().backward()
    assert gate.weight.grad.isfinite().all()
    assert torch.equal(x.grad[~mask], torch.zeros(2, WIDTH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_whatever_surrounds_them(dtype):
    gate = make_gate(**GROUPED)
    x = torch.randn(300, WIDTH).to(dtype)
    expected = gate(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gate(x)
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.weights, expected.weights)


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_b09_a_cast_of_the_model_leaves_the_gates_bits(cast):
    gate = make_gate(**GROUPED, router_bias=True)
    before = {name: tensor.clone() for name, tensor in gate.state_dict().items()}
    model = nn.ModuleDict({"gate": gate, "other": nn.Linear(2, 2)})
    getattr(model, cast)()
    assert model["other"].weight.dtype != torch.float32
    for name, tensor in gate.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert model.double()["gate"].weight.dtype == torch.float64
    assert model.to("meta")["gate"].weight.is_meta


def mixed_precision(strategy_options):
    mesh_context = MeshContext.from_meshes(
        context().device_mesh, strategy_config=FSDP2Config(**strategy_options)
    )
    model = routed_model(**GROUPED, router_bias=True)
    for gate in find_gates(model):
        nn.init.normal_(gate.e_score_correction_bias, std=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = parallelize_model(model, mesh_context)
    seen = []
    for gate in find_gates(model):
        gate.register_forward_hook(
            lambda gate, args, routing: seen.append((gate.weight.dtype, args[0].detach(), routing))
        )
    model(rows_of(0)).float().square().mean().backward()
    for name, tensor in model.state_dict().items():
        if ".gate." in name:
            assert torch.equal(full(tensor), before[name]), name
    for index, (dtype, x, routing) in enumerate(seen):
        assert dtype == torch.float32
        reference = Gate(moe_config(**GROUPED, router_bias=True))
        reference.load_state_dict({
            n.split(".gate.")[1]: t for n, t in before.items() if f"layers.{index}.gate" in n
        })
        expected = reference(x.float())
        assert torch.equal(routing.experts, expected.experts)
        assert routing.weights.dtype == torch.float32
    for gate in find_gates(model):
        assert gate.weight.grad.dtype == gate.bias.grad.dtype == torch.float32
    return [unit.name for unit in describe_units(model)]


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, None, True)},
    ],
)
def test_b09_under_bf16_units_gates_are_units_of_float32(policy):
    policy = policy or {
        "mp_policy": {
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "cast_forward_inputs": True,
        }
    }
    for names in run_on_ranks(2, mixed_precision, policy):
        assert "layers.0.gate" in names


def counted(gate, x, **kwargs):
    gate.reset_load()
    gate(x, **kwargs)
    return gate.load


def test_loads_count_real_training_forwards_only():
    gate, x = make_gate(), torch.randn(7, WIDTH)
    load = counted(gate, x)
    assert load.dtype == torch.int64
    assert torch.equal(load, torch.bincount(gate(x).experts.flatten(), minlength=EXPERTS))
    assert int(gate.load.sum()) == 2 * 7 * 2
    with torch.no_grad():
        gate(x)
    gate.eval()(x)
    assert int(gate.load.sum()) == 2 * 7 * 2


@pytest.mark.parametrize("mode", [False, "full", "selective"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_b20_loads_count_once_under_every_checkpointing(mode, micro_batches):
    model = routed_model(balance_loss_coefficient=0.1)
    apply_activation_checkpointing(model, mode)
    plain = routed_model()
    for part in rows_of(0).chunk(micro_batches):
        model(part).sum().backward()
        plain(part)
    model.eval()(rows_of(1))
    for gate, expected in zip(find_gates(model), find_gates(plain), strict=True):
        assert torch.equal(gate.load, expected.load)
        assert int(gate.load.sum()) == rows_of(0)[..., 0].numel() * 2


def test_b20_loads_count_once_under_a_checkpointing_of_torch():
    gate, x = make_gate(), torch.randn(7, WIDTH, requires_grad=True)
    for reentrant in (False, True):
        gate.reset_load()
        checkpoint(lambda x: gate(x).weights, x, use_reentrant=reentrant).sum().backward()
        # Reentrant, the forward runs without gradients and does not count, nor does the recompute.
        assert int(gate.load.sum()) == (0 if reentrant else 14)


def gradients_of(model, x, disturb=False, thread=False):
    """The gradients; disturbed, a recompute that chooses anew comes to other experts."""
    loss = model(x).square().mean()
    if disturb:
        for gate in find_gates(model):
            gate.override = lambda choose: (choose() + 1) % EXPERTS
    if thread:
        worker = Thread(target=loss.backward)
        worker.start()
        worker.join()
    else:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize(
    "config", [GROUPED, {"softmax_before_top_k": False, "correction_bias": True}]
)
def test_a_recompute_takes_the_choice_of_its_forward(mode, thread, config):
    expected = gradients_of(routed_model(**config), rows_of(0))
    model = routed_model(**config)
    apply_activation_checkpointing(model, mode)
    found = gradients_of(model, rows_of(0), disturb=True, thread=thread)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_without_replay_a_recompute_chooses_anew():
    expected = gradients_of(routed_model(**GROUPED), rows_of(0))
    model = routed_model(**GROUPED)
    apply_activation_checkpointing(model, "full")
    for gate in find_gates(model):
        gate.replay_routing = False
    found = gradients_of(model, rows_of(0))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    model.zero_grad()
    found = gradients_of(model, rows_of(0), disturb=True)
    assert any(not torch.allclose(found[name], expected[name]) for name in expected)


def test_two_forwards_before_one_backward_keep_their_own_choices():
    model, plain = routed_model(**GROUPED), routed_model(**GROUPED)
    apply_activation_checkpointing(model, "full")
    for each in (model, plain):
        first, second = each(rows_of(0)), each(rows_of(1))
        (first.square().mean() + second.mean()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_override_chooses_once_for_forward_and_recompute():
    calls = []

    def override(choose):
        calls.append(choose())
        return (calls[-1] + 1) % EXPERTS

    model = routed_model(**GROUPED)
    apply_activation_checkpointing(model, "full")
    gate = next(iter(find_gates(model)))
    gate.override = override
    gradients_of(model, rows_of(0))
    assert len(calls) == 1
    expected = torch.bincount(((calls[0] + 1) % EXPERTS).flatten(), minlength=EXPERTS)
    assert torch.equal(gate.load, expected)


def test_p21_devices_and_float64_come_from_the_inputs():
    with torch.device("meta"):
        gate = Gate(moe_config(**GROUPED, balance_loss_coefficient=1.0))
    experts, weights = gate(torch.empty(2, 3, WIDTH, device="meta"))
    assert experts.is_meta
    assert weights.is_meta
    wide = make_gate(balance_loss_coefficient=1.0).double()
    assert wide(torch.randn(3, WIDTH, dtype=torch.float64)).weights.dtype == torch.float64


def test_gradients_are_those_of_finite_differences():
    gate = make_gate(**GROUPED, router_bias=True).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, *_: gate(x).weights, (x, gate.weight, gate.bias))


def test_no_tokens_route_nowhere():
    gate = make_gate(**GROUPED, balance_loss_coefficient=1.0)
    experts, weights = gate(torch.zeros(0, WIDTH))
    assert experts.shape == weights.shape == (0, 2)
    weights.sum().backward()
    assert not gate.weight.grad.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_mask": torch.ones(5, dtype=torch.bool)}, "token_mask has 5 elements for 6 tokens"),
        ({"sequence_ids": torch.zeros(5, dtype=torch.int64)}, "has 5 elements for 6 tokens"),
        ({"sequences": 4}, "sequences=4 does not divide the 6 tokens"),
        ({"sequences": -1}, "sequences=-1"),
    ],
)
def test_masks_and_sequences_of_another_size_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_gate()(torch.randn(6, WIDTH), **options)


@pytest.mark.parametrize("config", [{}, AUX_FREE], ids=["softmax", "grouped"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {}),
        (4, {}),
        (4, {"dp_replicate_size": 2, "checkpointing": "full"}),
        (2, {"checkpointing": "selective"}),
        (2, {"strategy": "ddp", "checkpointing": "full"}),
    ],
)
def test_gradients_on_a_mesh_are_those_of_one_process(ranks, layout, config):
    expected = train(config, steps=1)["gradients"]
    for seen in run_on_ranks(ranks, train_on_mesh, config, layout, steps=1):
        for name, gradient in expected.items():
            torch.testing.assert_close(
                seen["gradients"][name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max())
            )
