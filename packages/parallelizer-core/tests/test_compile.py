"""Per-layer compile: graphs for every kind of block, with the numbers of the blocks as they are."""

import warnings

import pytest
import torch
import tp_toys
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from walk_toys import BF16, Block, Decoder, Wrapper, context, full_gradients, ids

from shardwalk.mesh import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
)
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    compile_parallelized_model,
    describe_compiled,
    parallelize_model,
    record_or_replay,
    replay_contexts,
)
from shardwalk.parallelizer_core import (
    _torch_compat as compat,
)
from shardwalk.parallelizer_core.testing import TinyDecoder, run_on_ranks

MODES = [False, "full", "selective"]


def on_ranks(world_size, function, *args):
    """With the time that a busy machine takes to compile."""
    return run_on_ranks(world_size, function, *args, timeout=85.0)


def parallel(model, backend="aot_eager", **options):
    """Parallelized, and compiled unless there is no backend."""
    mesh_context = context(enable_compile=backend is not None, **options)
    model = parallelize_model(model, mesh_context)
    if backend is not None:
        compile_parallelized_model(model, mesh_context, backend=backend)
    return model


def tiny(**options):
    torch.manual_seed(3)
    return TinyDecoder(layers=2, **options)


def steps(model, lengths=(5, 8)):
    """The gradients of each step, and the bytes that its forward kept for the backward."""
    # The tracer asks tensors in the graph for their gradients, and hides what torch says of it.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found = []
    for step, length in enumerate(lengths):
        kept = 0

        def keep(tensor):
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        torch.manual_seed(step)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(ids(2, length) + torch.distributed.get_rank()).logsumexp(-1).mean()
        loss.backward()
        found.append((full_gradients(model), kept))
        model.zero_grad()
    return found


def difference(one, other):
    """The largest difference of any gradient, relative to the largest value of its tensor."""
    return max(
        ((found[name] - value).abs().max() / value.abs().max()).item()
        for (found, _), (expected, _) in zip(one, other, strict=True)
        for name, value in expected.items()
        if value is not None and value.abs().max() > 0
    )


def dense(mode):
    keys = list(tiny().state_dict())
    expected = steps(parallel(tiny(), None, activation_checkpointing=mode))
    model = parallel(tiny(), activation_checkpointing=mode)
    again = vars(model.layers[0])["forward"]
    compile_parallelized_model(model, context(enable_compile=True))
    assert vars(model.layers[0])["forward"] is again
    found = steps(model)
    assert list(model.state_dict()) == keys
    return difference(found, expected), found[-1][1], describe_compiled(model)


def test_compiled_blocks_have_the_gradients_of_plain_ones_in_every_mode():
    """B60: recompute metadata, silent eager runs and recompilations."""
    kept = {}
    for mode in MODES:
        for error, bytes_kept, (blocks,) in on_ranks(2, dense, mode):
            assert error < 1e-5
            kept[mode] = bytes_kept
            assert (blocks.name, blocks.class_name, blocks.blocks) == ("layers.0", "Block", 2)
            assert blocks.whole
            assert blocks.runs == 2 * 2
            assert 1 <= blocks.graphs <= 2  # one for the first length, one for all others
    assert kept["full"] < kept["selective"] < kept[False]


class Noise(nn.Module):
    """What it adds is drawn in the forward, and written down for the recompute."""

    checkpoint_context = staticmethod(replay_contexts)

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(6, 6)

    def forward(self, x):
        return self.scale(x) * record_or_replay("noise", lambda: torch.rand(x.shape))


class Attention(nn.Module):
    """A composite part that a graph can hold."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        return self.mix(x.softmax(1))


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attention = Attention()
        self.mlp = Noise()

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(torch.tanh(x)) * 2


def noisy():
    torch.manual_seed(3)
    return Decoder(blocks=2, block=NoisyBlock)


def decisions(mode):
    expected = steps(parallel(noisy(), None, activation_checkpointing=mode))
    model = parallel(noisy(), activation_checkpointing=mode)
    found = steps(model)
    return difference(found, expected), describe_compiled(model)


@pytest.mark.parametrize("mode", MODES)
def test_what_records_decisions_runs_between_the_pieces_of_its_block(mode):
    error, kinds = on_ranks(1, decisions, mode)[0]
    assert error < 1e-5
    blocks = next(kind for kind in kinds if kind.name == "layers.0")
    assert not blocks.whole
    assert dict(blocks.breaks)["mlp"].startswith("records decisions")
    assert all(kind.runs > 0 for kind in kinds)
    # Under checkpointing the part that a graph can hold is one, and recomputed in it.
    assert [k.name for k in kinds if k.whole] == (["layers.0.attention"] if mode else [])
    assert blocks.graphs <= 3 * 3


class Pinned(NoisyBlock):
    """Two fp32 parts in bf16 blocks: units of their own."""

    _keep_in_fp32_modules_strict = ("norm", "attention")

    def __init__(self):
        super().__init__()
        self.mlp = Attention()

    def forward(self, x):
        x = x + self.attention(self.norm(x)).to(x.dtype)
        return x + self.mlp(torch.tanh(x))


def pinned_units():
    torch.manual_seed(3)
    make = lambda: Decoder(blocks=2, block=Pinned)  # noqa: E731
    expected = steps(parallel(make(), None, mp_policy=BF16))
    torch.manual_seed(3)
    model = parallel(make(), mp_policy=BF16)
    found = steps(model)
    return difference(found, expected), describe_compiled(model)


def test_units_inside_a_block_run_between_its_pieces_and_large_ones_are_compiled():
    error, kinds = on_ranks(1, pinned_units)[0]
    assert error < 1e-2  # bf16
    names = {kind.name: kind for kind in kinds}
    assert dict(names["layers.0"].breaks).keys() == {"norm", "attention"}
    assert names["layers.0.attention"].whole
    assert all(kind.runs > 0 for kind in kinds)


class Branching(Block):
    """Asks for a value in its forward, which no graph can."""

    def forward(self, x):
        x = super().forward(x)
        return x * 2 if x.sum().item() > 0 else x * 3


def branching(mode):
    make = lambda: Decoder(blocks=2, block=Branching)  # noqa: E731
    torch.manual_seed(3)
    expected = steps(parallel(make(), None, activation_checkpointing=mode))
    torch.manual_seed(3)
    model = parallel(make(), activation_checkpointing=mode)
    with pytest.warns(UserWarning, match="layers.0") as caught:
        found = steps(model)
    texts = [str(each.message) for each in caught if "layers.0" in str(each.message)]
    return difference(found, expected), texts, describe_compiled(model)


@pytest.mark.parametrize(
    ("mode", "told"), [(False, "is compiled in pieces"), ("full", "runs uncompiled")]
)
def test_a_block_that_is_no_graph_is_told_once_with_torchs_reason(mode, told):
    error, texts, (blocks,) = on_ranks(1, branching, mode)[0]
    assert error < 1e-5
    assert len(texts) == 1
    assert f"layers.0 (Branching and 1 more like it) {told}" in texts[0]
    assert "item()" in texts[0]
    assert not blocks.whole
    assert (blocks.runs > 0) == (mode is False)


class Dropping(Block):
    """Dropout and running statistics: what a second run of the same code would do otherwise."""

    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(6)

    def forward(self, x):
        x = torch.dropout(super().forward(x), 0.5, True)
        return self.statistics(x.flatten(0, 1)).view_as(x)


def states(mode):
    make = lambda: Decoder(blocks=2, block=Dropping)  # noqa: E731
    torch.manual_seed(3)
    plain = parallel(make(), None, activation_checkpointing=mode)
    expected = steps(plain, (5, 5))
    torch.manual_seed(3)
    model = parallel(make(), activation_checkpointing=mode)
    found = steps(model, (5, 5))
    buffers = dict(model.named_buffers())
    same = all(torch.allclose(buffers[n], b) for n, b in plain.named_buffers())
    return difference(found, expected), same, describe_compiled(model)


def test_dropout_and_running_statistics_of_a_recomputed_block():
    error, same_buffers, (blocks,) = on_ranks(1, states, "full")[0]
    assert error < 1e-5
    assert same_buffers
    assert blocks.whole


def refused():
    with pytest.raises(ValueError, match="enable_compile=True changes blocks, and Linear"):
        parallelize_model(nn.Linear(2, 2), context(enable_compile=True))
    plain = parallelize_model(Decoder(), context())
    compile_parallelized_model(plain, context())
    assert describe_compiled(plain) == []
    ddp = MeshContext.from_meshes(context().device_mesh, strategy_config=DDPConfig())
    compile_parallelized_model(plain, ddp)
    assert describe_compiled(plain) == []


def test_a_model_without_blocks_is_refused_and_nothing_else_is_compiled():
    on_ranks(1, refused)


class Prompted(Wrapper):
    """A wrapper with parameters of its own, which is the root unit."""

    def __init__(self, base):
        super().__init__(base)
        self.prompt = nn.Parameter(torch.ones(()))

    def forward(self, *args):
        return super().forward(*args) * self.prompt


def through_a_wrapper(make, compiled_first):
    expected = steps(parallel(make(tiny()), None))
    if compiled_first:  # and wrapped afterwards
        model = make(parallel(tiny(), "eager"))
        compile_parallelized_model(model, context(enable_compile=True), backend="aot_eager")
    else:
        model = parallel(make(tiny()))
    backends = {vars(each)["forward"]._kind.backend for each in model.base.layers}
    found = steps(model)
    error = difference(found, expected)
    return error, backends, describe_compiled(model), describe_compiled(model.base)


@pytest.mark.parametrize(
    ("make", "compiled_first"), [(Wrapper, False), (Wrapper, True), (Prompted, False)]
)
def test_a_backend_and_the_table_of_blocks_find_a_base_model_in_its_wrapper(make, compiled_first):
    error, backends, outer, base = on_ranks(1, through_a_wrapper, make, compiled_first)[0]
    assert error < 1e-5
    assert backends == {"aot_eager"}
    assert outer == base
    (blocks,) = outer
    assert (blocks.class_name, blocks.blocks, blocks.runs) == ("Block", 2, 2 * 2)


def backends_that_nothing_is_compiled_with():
    compiled = context(enable_compile=True)
    ddp = MeshContext.from_meshes(compiled.device_mesh, strategy_config=DDPConfig())
    model, replicated = parallelize_model(tiny(), compiled), parallelize_model(tiny(), ddp)
    cases = [
        (model, compiled, "nosuch", "backend='nosuch' is none .* use one of aot_eager, .*inductor"),
        (replicated, ddp, "eager", "backend='eager' under strategy='ddp' .*strategy='fsdp2'"),
        (replicated, compiled, None, "compile=True under strategy='ddp' .*strategy='fsdp2'"),
        (replicated.module, compiled, None, "compile=True under strategy='ddp'"),
        (DistributedDataParallel(tiny()), compiled, None, "True under DistributedDataParallel"),
        (model, context(), "eager", "enable_compile=False; make it .*enable_compile=True"),
        (tiny(), MeshContext(), "eager", "enable_compile=False; make it .*enable_compile=True"),
    ]
    for subject, mesh_context, backend, message in cases:
        with pytest.raises(ValueError, match=message):
            compile_parallelized_model(subject, mesh_context, backend=backend)
    compile_parallelized_model(replicated, ddp)
    assert describe_compiled(replicated) == []


def test_a_backend_that_nothing_would_be_compiled_with_is_an_error_at_once():
    on_ranks(1, backends_that_nothing_is_compiled_with)


def compiled_tensor_parallel(wrap):
    sizes = ParallelismSizes(tp_size=2)
    split = DistributedSetup.build("fsdp2", parallelism_sizes=sizes).mesh_context
    model = parallelize_model(tp_toys.Decoder(), split)
    model = Wrapper(model) if wrap else model
    messages = []
    asking = FSDP2Config(enable_compile=True)
    for given in (
        context(enable_compile=True),
        MeshContext.from_meshes(split.device_mesh, strategy_config=asking),
    ):
        with pytest.raises(ValueError, match="enable_compile=True beside tp_size=2"):
            compile_parallelized_model(model, given)
        messages.append(describe_compiled(model))
    with pytest.raises(ValueError, match="enable_compile=True beside tp_size=2"):
        ModelParallelizer()._apply(tp_toys.Decoder(), split.device_mesh, enable_compile=True)
    return messages


@pytest.mark.parametrize("wrap", [False, True])
def test_a_tensor_parallel_model_is_refused_whatever_context_is_given(wrap):
    assert on_ranks(2, compiled_tensor_parallel, wrap) == [[[], []]] * 2


def asks_for_a_view(x):
    return x[0] if x._is_view() else x


def test_what_is_private_in_torch_is_where_it_was():
    """Fails when the tracer can be asked for views, or its errors are others."""
    with pytest.raises(compat.compiler_errors()) as caught:
        torch.compile(asks_for_a_view, fullgraph=True, backend="eager")(torch.ones(2))
    assert compat.is_graph_break(caught.value)
    assert not compat.is_graph_break(ValueError())
    own = torch.compile(compat.as_own_tensor, fullgraph=True, backend="eager")(torch.ones(2)[:1])
    assert own.tolist() == [1.0]
    double = torch.fx.symbolic_trace(lambda x: x * 2)
    assert compat.compiler_backend("eager")(double, [torch.ones(2)])(torch.ones(2)).sum() == 4
