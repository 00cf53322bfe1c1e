"""Which units the walk makes, and with which options."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from walk_toys import BF16, FULL, Block, Decoder, context, full_gradients, ids, sharded, unit_names

from shardwalk.parallelizer_core import ModelParallelizer, describe_units, parallelize_model
from shardwalk.parallelizer_core.fsdp2.walk import reshards_after_forward
from shardwalk.parallelizer_core.testing import run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives


def names_of(make=Decoder, **kwargs):
    return unit_names(sharded(make, **kwargs))


def test_untied_tables_are_units_and_tied_ones_stay_in_the_root():
    blocks = ["layers.0", "layers.1", "layers.2"]
    assert run_on_ranks(2, names_of)[0] == ["", "embed", *blocks, "head"]
    assert run_on_ranks(2, names_of, tied=True)[0] == ["", *blocks]


class Frozen(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


def test_a_frozen_table_stays_in_the_root():
    assert "embed" not in run_on_ranks(2, names_of, Frozen)[0]


class SharedBlocks(Decoder):
    """The weights of two blocks are tied, one block stands twice."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.layers[1].up.weight = self.layers[0].up.weight
        self.layers.append(self.layers[2])


def test_tied_blocks_stay_in_the_root_and_a_repeated_block_is_one_unit():
    assert run_on_ranks(2, names_of, SharedBlocks)[0] == [
        "",
        "embed",
        "layers.2",
        "layers.3",
        "head",
    ]


class SharedModules(Decoder):
    """Two blocks hold one norm, and the model names a third block and a part of a fourth."""

    def __init__(self) -> None:
        super().__init__(blocks=5)
        self.layers[1].norm = self.layers[0].norm
        self.middle = self.layers[2]
        self.first_product = self.layers[3].up


def test_blocks_that_hold_a_module_of_others_stay_in_the_root():
    """A block that has two names is still one unit; a part that could be called without it is not
    in it."""
    units = run_on_ranks(2, names_of, SharedModules)[0]
    assert units == ["", "embed", "layers.2", "layers.4", "head"]


def gradients(make, **kwargs):
    model = sharded(make, **kwargs)
    model(ids()).square().mean().backward()
    return full_gradients(model)


@pytest.mark.parametrize("make", [SharedBlocks, SharedModules, Decoder, Frozen])
def test_gradients_of_the_odd_shapes_are_those_of_one_process(make):
    torch.manual_seed(7)
    reference = make()
    reference(ids()).square().mean().backward()
    for rank in run_on_ranks(2, gradients, make):
        for name, parameter in reference.named_parameters():
            if parameter.grad is None:
                assert rank[name] is None
            else:
                torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("override", "expected"),
    [(None, [True, True, False]), (True, [True] * 3), (False, [False] * 3)],
)
def test_the_reshard_rule(override, expected):
    assert [reshards_after_forward(index, 3, override) for index in range(3)] == expected


def stays_gathered(**options):
    """The units whose weights are plain tensors between forward and backward."""
    model = sharded(options=options)
    model(ids()).sum()
    units = {"embed": model.embed, **{f"layers.{i}": b.up for i, b in enumerate(model.layers)}}
    units["head"] = model.head
    return [name for name, module in units.items() if not isinstance(module.weight, DTensor)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["layers.2", "head"]),
        ({"reshard_after_forward": True}, ["head"]),
        ({"reshard_after_forward": False}, ["embed", "layers.0", "layers.1", "layers.2", "head"]),
    ],
)
def test_what_stays_gathered_until_the_backward(options, expected):
    assert run_on_ranks(2, stays_gathered, **options) == [expected] * 2


class Staged(nn.Module):
    """Layers kept in a ModuleDict, as a pipeline stage keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block() for index in (2, 3, 4, 5)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def gathers_of_four_micro_batches(reshard):
    model = sharded(Staged, options={"reshard_after_forward": reshard})
    with CountCollectives() as counted:
        for _ in range(4):
            model(torch.ones(2, 6, requires_grad=True))
    return counted.calls["_allgather_base_"]


def test_layers_that_stay_gathered_are_gathered_once_for_all_micro_batches():
    assert run_on_ranks(2, gathers_of_four_micro_batches, False)[0] == 4
    assert run_on_ranks(2, gathers_of_four_micro_batches, None)[0] == 4 + 3 * 3
    assert run_on_ranks(2, gathers_of_four_micro_batches, True)[0] == 4 * 4


class PipelineRule(ModelParallelizer):
    """Records what the dense path hands to the sharding hook."""

    def __init__(self) -> None:
        self.reshard: list[bool | None] = []

    def _apply_fsdp_sharding(self, module, mesh, mp_policy, *args, **kwargs):
        self.reshard.append(kwargs["reshard_after_forward"])


def reshard_of_a_pipeline_stage(override):
    from torch.distributed.device_mesh import init_device_mesh

    from shardwalk.parallelizer_core.testing import cached

    mesh = cached("pp", lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard")))
    sidecar = PipelineRule()
    sidecar._apply(Decoder(), mesh, reshard_after_forward=override)
    return sidecar.reshard[0]


def test_the_rule_of_pipeline_stages_reads_the_device_mesh():
    """P10: the data-parallel mesh has no pp axis, so a rule that looks there never applies."""
    assert run_on_ranks(2, reshard_of_a_pipeline_stage, None)[0] is False
    assert run_on_ranks(2, reshard_of_a_pipeline_stage, True)[0] is True


def prefetch_lists(**options):
    model = sharded(options=options, blocks=4)
    states = {layer._get_fsdp_state(): index for index, layer in enumerate(model.layers)}
    return [
        (
            [states[s] for s in layer._get_fsdp_state()._states_to_forward_prefetch],
            [states[s] for s in layer._get_fsdp_state()._states_to_backward_prefetch],
        )
        for layer in model.layers
    ]


def test_prefetch_chains_have_the_two_depths():
    options = {"fsdp2_forward_prefetch_depth": 1, "fsdp2_backward_prefetch_depth": 2}
    assert run_on_ranks(2, prefetch_lists, **options)[0] == [([], [])] * 4
    assert run_on_ranks(2, prefetch_lists, enable_fsdp2_prefetch=True, **options)[0] == [
        ([1], []),
        ([2], [0]),
        ([3], [1, 0]),
        ([], [2, 1]),
    ]


class Mixed(Block):
    """An fp32 norm and scalar among bf16 weights: storage dtypes as declared."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.norm.float()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        hidden = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        return x + self.down(torch.relu(self.up(hidden))) * self.scale.to(x.dtype)


class MixedModel(Decoder):
    def __init__(self) -> None:
        super().__init__(block=Mixed, blocks=2)
        self.embed.to(torch.bfloat16)
        self.head.to(torch.bfloat16)
        self.norm.to(torch.bfloat16)


def dtypes_and_gradients(policy):
    model = sharded(MixedModel, options={"mp_policy": policy})
    units = {unit.name: unit.dtypes for unit in describe_units(model)}
    stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model(ids()).float().square().mean().backward()
    return units, stored, full_gradients(model)


@pytest.mark.parametrize("policy", [{"param_dtype": None}, BF16])
def test_a_block_of_mixed_storage_keeps_its_dtypes_and_trains(policy):
    """B63: fp32 norm, bf16 linear and an fp32 scalar in one block: one more gather for the norm."""
    torch.manual_seed(7)
    reference = MixedModel()
    reference(ids()).float().square().mean().backward()
    for units, stored, grads in run_on_ranks(2, dtypes_and_gradients, policy):
        assert units["layers.0"] == (
            "bfloat16",
            "float32",
        )  # the scalar is replicated beside the unit
        assert units["layers.0.norm"] == ("float32",)
        for name, parameter in reference.named_parameters():
            assert stored[name] == parameter.dtype
            assert grads[name].dtype == parameter.dtype
            torch.testing.assert_close(
                grads[name].float(), parameter.grad.float(), rtol=0.1, atol=2e-3
            )


class Adapted(Block):
    """A frozen bf16 linear with a trainable fp32 pair beside it, each computing in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16).requires_grad_(False)
        self.first = nn.Linear(6, 2, bias=False)
        self.second = nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return super().forward(x.bfloat16()).float() + self.second(self.first(x))


class AdaptedModel(Decoder):
    def __init__(self) -> None:
        super().__init__(block=Adapted, blocks=2)


def adapted_units(policy):
    model = sharded(AdaptedModel, options={"mp_policy": policy})
    units = {unit.name: unit.dtypes for unit in describe_units(model)}
    stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model(ids()).square().mean().backward()
    return units, stored, full_gradients(model)


def test_frozen_parameters_of_another_dtype_need_no_unit_of_their_own_where_nothing_is_cast():
    """One gather for the block instead of three, with the numbers of one process."""
    torch.manual_seed(7)
    reference = AdaptedModel()
    reference(ids()).square().mean().backward()
    for units, stored, grads in run_on_ranks(2, adapted_units, FULL):
        assert units["layers.0"] == ("bfloat16", "float32")
        assert not [name for name in units if name.startswith("layers.0.")]
        for name, parameter in reference.named_parameters():
            assert stored[name] == parameter.dtype
            if parameter.grad is None:
                assert grads[name] is None
            else:
                torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


class Gated(Block):
    """A router in fp32 that computes in it, and a bare fp32 parameter beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.A_log = nn.Parameter(torch.linspace(-1.0, 1.0, 6))
        self.bias = nn.Parameter(torch.zeros(6))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x):
        self.seen = {
            "gate": self.gate.weight.dtype,
            "A_log": self.A_log.dtype,
            "up": self.up.weight.dtype,
        }
        scores = self.gate(x.float()).sigmoid() * self.A_log.exp()
        return super().forward(x + self.bias) * scores.to(x.dtype)


class GatedModel(Decoder):
    _keep_in_fp32_modules_strict = ("gate", "A_log")

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__(block=Gated, blocks=2)
        if frozen:
            for layer in self.layers:
                layer.gate.requires_grad_(False)
                layer.A_log.requires_grad_(False)


class Seen(GatedModel):
    """The dtypes the first block's parameters have inside its forward."""


def islands(frozen):
    model = sharded(GatedModel, options={"mp_policy": BF16}, frozen=frozen)
    stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    inside = {}
    gate = model.layers[0].gate
    gate.register_forward_pre_hook(lambda module, args: inside.update(gate=module.weight.dtype))
    model(ids()).float().square().mean().backward()
    inside |= {"A_log": model.layers[0].seen["A_log"], "up": model.layers[0].seen["up"]}
    values = model.layers[0].gate.weight.full_tensor()
    return unit_names(model), stored, inside, values, full_gradients(model)


@pytest.mark.parametrize("frozen", [False, True])
def test_pinned_parameters_are_stored_computed_and_reduced_in_fp32(frozen):
    """B09: also when they are frozen, where torch would compute them in bf16 without a word."""
    torch.manual_seed(7)
    reference = GatedModel(frozen=frozen)
    (first, *others) = run_on_ranks(2, islands, frozen)
    names, stored, inside, values, grads = first
    assert "layers.0.gate" in names
    assert inside == {"gate": torch.float32, "A_log": torch.float32, "up": torch.bfloat16}
    assert set(stored.values()) == {torch.float32}
    assert torch.equal(values, reference.layers[0].gate.weight)
    for name in ("layers.0.gate.weight", "layers.1.A_log"):
        if frozen:
            assert grads[name] is None
        else:
            assert grads[name].dtype == torch.float32
            assert all(torch.equal(other[4][name], grads[name]) for other in others)


class Holder(nn.Module):
    """A pinned router beside a layer that a sidecar makes a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 60)
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        self.seen = x.dtype
        return self.inner(x) * self.gate(x.float()).sigmoid()[..., :6].to(x.dtype)


class HeavyRouter(nn.Module):
    """A block whose router has most of its parameters, or all that no unit holds yet."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()
        self.mlp = Holder()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class HeavyRouters(Decoder):
    _keep_in_fp32_modules_strict = ("gate",)

    def __init__(self, *, norm: bool) -> None:
        super().__init__(block=lambda: HeavyRouter(norm=norm), blocks=2)


class InnerFirst(ModelParallelizer):
    def _apply_fsdp_sharding(self, module, mesh, mp_policy, *args, **kwargs):
        for block in module.layers:
            self._fully_shard_module(block.mlp.inner, mesh=mesh, mp_policy=mp_policy)
        super()._apply_fsdp_sharding(module, mesh, mp_policy, *args, **kwargs)


def heavy_routers(norm):
    HeavyRouters.parallelizer = InnerFirst()
    model = sharded(HeavyRouters, options={"mp_policy": BF16}, norm=norm)
    model(ids()).float().square().mean().backward()
    trained = all(gradient is not None for gradient in full_gradients(model).values())
    return unit_names(model), [block.mlp.seen for block in model.layers], trained


@pytest.mark.parametrize("norm", [True, False], ids=["a norm is left", "nothing else is left"])
def test_a_pinned_router_is_a_unit_alone_however_large_it_is(norm):
    """As the rest of a block, or of what holds another unit, it would make all inputs fp32."""
    names, seen, trained = run_on_ranks(2, heavy_routers, norm)[0]
    assert {"layers.0.mlp.gate", "layers.0.mlp.inner"} <= set(names)
    assert "layers.0.mlp" not in names
    assert "layers.0.norm" not in names
    assert seen == [torch.bfloat16] * 2
    assert trained


class DifferentData(GatedModel):
    pass


def bare_gradient_on_different_data(micro_batches):
    import torch.distributed as dist

    model = sharded(GatedModel)
    model.set_requires_gradient_sync(micro_batches == 1)
    for index in range(micro_batches):
        if index == micro_batches - 1:
            model.set_requires_gradient_sync(True)
        rows = (
            ids(8, 5)[dist.get_rank() * 4 + index * 2 :][:2]
            if micro_batches > 1
            else ids(8, 5)[dist.get_rank() * 4 :][:4]
        )
        (model(rows).square().sum() / 8).backward()
    return model.layers[1].A_log.grad.to_local()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_of_a_bare_pinned_parameter_is_the_mean_over_ranks(micro_batches):
    torch.manual_seed(7)
    reference = GatedModel()
    (reference(ids(8, 5)).square().sum() / 16).backward()
    for grad in run_on_ranks(2, bare_gradient_on_different_data, micro_batches):
        torch.testing.assert_close(grad, reference.layers[1].A_log.grad, rtol=1e-5, atol=1e-7)


class Convolved(Block):
    """Its parent reads a pinned convolution's weight and calls another, which it asks for a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, groups=6, padding=1)
        self.called = nn.Conv1d(6, 6, 1)

    def forward(self, x):
        mixed = self.called(x.transpose(1, 2).to(self.called.weight.dtype))
        mixed = nn.functional.conv1d(mixed, self.conv.weight, self.conv.bias, padding=1, groups=6)
        return super().forward(x + mixed.transpose(1, 2))


class ConvolvedModel(Decoder):
    _keep_in_fp32_modules_strict = ("conv", "called")

    def __init__(self) -> None:
        super().__init__(block=Convolved, blocks=2)


def convolved():
    model = sharded(ConvolvedModel)
    for _ in range(2):
        model(ids()).square().mean().backward()
    return unit_names(model), full_gradients(model)


def test_a_pinned_submodule_that_its_parent_reads_stays_whole():
    torch.manual_seed(7)
    reference = ConvolvedModel()
    (2 * reference(ids()).square().mean()).backward()
    for names, grads in run_on_ranks(2, convolved):
        assert "layers.0.called" in names
        assert "layers.0.conv" not in names
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


class PaddedDecoder(Decoder):
    """Reads a row of its table beside calling it."""

    def forward(self, ids):
        x = self.embed(ids) + self.padding()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def padding(self):
        return self.embed.weight[0]


def padded():
    model = sharded(PaddedDecoder)
    for _ in range(2):
        model(ids()).square().mean().backward()
    return unit_names(model), full_gradients(model)


def test_a_table_whose_weight_is_read_stays_in_the_root_unit():
    torch.manual_seed(7)
    reference = PaddedDecoder()
    (2 * reference(ids()).square().mean()).backward()
    for names, grads in run_on_ranks(2, padded):
        assert "head" in names
        assert "embed" not in names
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


class SeveralTables(Decoder):
    """Names lists of tables and of heads, which nobody calls as such."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList([nn.Embedding(13, 6) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(6, 13) for _ in range(2)])
        del self.head

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.heads

    def forward(self, ids):
        x = sum(table(ids) for table in self.embed)
        for layer in self.layers:
            x = layer(x)
        return torch.stack([head(self.norm(x)) for head in self.heads])


def several_tables():
    model = sharded(SeveralTables)
    model(ids()).square().mean().backward()
    return unit_names(model), full_gradients(model)


def test_lists_of_tables_are_units_one_by_one():
    torch.manual_seed(7)
    reference = SeveralTables()
    reference(ids()).square().mean().backward()
    for names, grads in run_on_ranks(2, several_tables):
        assert {"embed.0", "embed.1", "heads.0", "heads.1"} <= set(names)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


class Listed(Block):
    """Bare parameters in a list that is never called, one of them used twice, one a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(()), torch.full((6,), 0.5)])
        self.again = self.scales[1]

    def forward(self, x):
        return super().forward(x) * self.scales[0] * self.scales[1] + self.again


class ListedModel(Decoder):
    _keep_in_fp32_modules_strict = ("scales",)

    def __init__(self) -> None:
        super().__init__(block=Listed, blocks=2)


def steps_with(optimizer, options):
    model = sharded(ListedModel, options={"mp_policy": {**FULL}})
    step = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(ids()).square().mean().backward()
        step.step()
        step.zero_grad()
    tied = model.layers[0].again is model.layers[0].scales[1]
    return tied, {name: p.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {"foreach": True}), ("AdamW", {"fused": True}), ("SGD", {"foreach": True})],
)
def test_optimizers_step_sharded_and_replicated_parameters_together(optimizer, options):
    """B51: a fused step takes no mixture of plain tensors and DTensors."""
    torch.manual_seed(7)
    reference = ListedModel()
    step = getattr(torch.optim, optimizer)(reference.parameters(), lr=0.1)
    for _ in range(2):
        reference(ids()).square().mean().backward()
        step.step()
        step.zero_grad()
    for tied, weights in run_on_ranks(2, steps_with, optimizer, options):
        assert tied
        assert list(weights) == [name for name, _ in reference.named_parameters()]
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(weights[name], parameter.data, rtol=1e-4, atol=1e-4)


class Temperature(Decoder):
    """A scalar that the loss reads outside the forward, used in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.turn = nn.Parameter(torch.tensor(0.3 + 0.4j))

    def forward(self, ids):
        hidden = super().forward(ids)
        return hidden * (self.turn * (1 + 2j)).real


def contrastive(model, rows, with_temperature):
    loss = model(rows).square().mean()
    return loss * model.temperature.exp() if with_temperature else loss


USES = {"all": [[1, 1], [1, 1]], "first only": [[1, 0], [1, 0]], "one rank": [[0, 0], [1, 0]]}


def scalar_gradients(uses):
    rank = torch.distributed.get_rank()
    model = sharded(Temperature)
    rows = ids(8, 5)
    for index, used in enumerate(USES[uses][rank]):
        model.set_requires_gradient_sync(index == 1)
        part = rows[rank * 4 + index * 2 :][:2]
        contrastive(model, part, used).backward()
    return full_gradients(model)


@pytest.mark.parametrize("uses", USES)
def test_scalars_have_the_mean_gradient_wherever_and_whenever_they_are_used(uses):
    torch.manual_seed(7)
    reference = Temperature()
    for rank in range(2):
        for index, used in enumerate(USES[uses][rank]):
            part = ids(8, 5)[rank * 4 + index * 2 :][:2]
            (contrastive(reference, part, used) / 2).backward()
    for grads in run_on_ranks(2, scalar_gradients, uses):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


def twice_before_a_backward():
    model = sharded(Temperature)
    (contrastive(model, ids(), True) + contrastive(model, ids(3), True)).backward()
    return full_gradients(model)


def test_two_forwards_before_one_backward_with_scalars():
    torch.manual_seed(7)
    reference = Temperature()
    (contrastive(reference, ids(), True) + contrastive(reference, ids(3), True)).backward()
    for grads in run_on_ranks(2, twice_before_a_backward):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)


def recomputed_inside_a_block():
    from torch.utils.checkpoint import checkpoint

    class Inner(Gated):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    class InnerModel(GatedModel):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.__class__ = Inner

    return gradients(InnerModel), gradients(GatedModel)


def test_a_block_may_recompute_what_uses_a_bare_parameter():
    for inner, plain in run_on_ranks(2, recomputed_inside_a_block):
        for name, grad in plain.items():
            torch.testing.assert_close(inner[name], grad)


class Door(ModelParallelizer):
    """Counts the units by the class of their module, and refuses lists."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def _fully_shard_module(self, module, **kwargs):
        assert isinstance(module, nn.Module)
        self.made.append(type(module).__name__)
        return super()._fully_shard_module(module, **kwargs)


class WithDoor(GatedModel):
    parallelizer = Door()


def units_through_the_door():
    WithDoor.parallelizer.made.clear()
    torch.manual_seed(7)
    model = parallelize_model(WithDoor(), context(mp_policy=BF16))
    return WithDoor.parallelizer.made, unit_names(model)


def test_every_unit_goes_through_the_sidecars_door_blocks_once_before_they_are_split():
    made, names = run_on_ranks(2, units_through_the_door)[0]
    block = ["Gated", "Linear", "Gated"]  # the block, its router, then its rest
    assert made == [*block, *block, "Embedding", "Linear", "WithDoor"]
    assert len(names) == 2 * 2 + 2 + 1


class Towered(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.Module()
        self.vision_tower.layers = nn.ModuleList([Block(), Block()])
        self.vision_tower.requires_grad_(False)


def test_a_frozen_tower_stays_in_the_root():
    names = run_on_ranks(2, names_of, Towered)[0]
    assert not [name for name in names if name.startswith("vision")]


def output_dtypes(output_dtype):
    policy = {**BF16, "output_dtype": output_dtype}
    model = sharded(options={"mp_policy": policy})
    inner = []
    model.norm.register_forward_hook(lambda module, args, output: inner.append(output.dtype))
    return inner, model(ids()).dtype, inner


def test_the_output_dtype_is_the_roots_alone():
    inner, outer, _ = run_on_ranks(2, output_dtypes, "float32")[0]
    assert (inner, outer) == ([torch.bfloat16], torch.float32)
