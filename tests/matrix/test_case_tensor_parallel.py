"""Failures of tensor parallelism that users reported, each with its right value."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import materialize, model_state_dict, parallelize_model
from shardwalk.parallelizer_core.tensor_parallel import ColumnParallel, RowParallel
from shardwalk.parallelizer_core.testing import (
    ParityCase,
    TokenBatches,
    assert_parity,
    cached,
    run_on_ranks,
)
from tests.matrix.plain_stack import PlainStack, uniform_weights

FULL = {"param_dtype": None, "reduce_dtype": None}
sequences = pytest.mark.parametrize(
    "sequence_parallel", [False, True], ids=["whole sequences", "split sequences"]
)


def context(tp_size: int, **strategy: object) -> MeshContext:
    sizes = ParallelismSizes(tp_size=tp_size)
    made = cached(
        ("tp cases", tp_size),
        lambda: DistributedSetup.build("fsdp2", parallelism_sizes=sizes).mesh_context,
    )
    config = FSDP2Config(mp_policy=FULL, **strategy)
    return MeshContext.from_meshes(made.device_mesh, strategy_config=config)


def stack_case(length: int = 7, vocabulary: int = 61, **sizes: object) -> ParityCase:
    return ParityCase(
        model=partial(PlainStack, vocabulary=vocabulary, **sizes),
        batches=TokenBatches(vocabulary=vocabulary, length=length),
        init=uniform_weights,
    )


def run(parity_case: ParityCase, world_size: int, tp_size: int, **options: object) -> None:
    strategy = {k: options.pop(k) for k in ("sequence_parallel", "tp_plan") if k in options}
    assert_parity(
        parity_case,
        world_size=world_size,
        parallelism_sizes=ParallelismSizes(tp_size=tp_size),
        strategy=FSDP2Config(mp_policy=FULL, **strategy),
        **options,
    )


@sequences
def test_b05_norms_beside_split_layers_have_whole_equal_gradients(sequence_parallel: bool) -> None:
    """Norms of local heads and of local tokens, over three steps; P5 without a second call."""
    run(stack_case(), 2, 2, sequence_parallel=sequence_parallel, optimizers=("sgd",), steps=3)


@sequences
def test_b05_every_rank_has_the_same_bits_of_a_whole_gradient(sequence_parallel: bool) -> None:
    own, other = run_on_ranks(2, whole_gradients, sequence_parallel)
    assert own.keys() == other.keys()
    assert {"layers.0.attention.q_norm.bias", "layers.0.feed_forward.down_proj.bias"} <= own.keys()
    for name, gradient in own.items():
        assert torch.equal(gradient, other[name]), name
        assert gradient.abs().max() > 0, name


def whole_gradients(sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """The gradients of what no rank holds a part of, as this rank has them."""
    torch.manual_seed(0)
    model = parallelize_model(PlainStack(), context(2, sequence_parallel=sequence_parallel))
    shapes = {name: parameter.shape for name, parameter in PlainStack().named_parameters()}
    model(torch.arange(14).view(2, 7)).logsumexp(-1).square().sum().backward()
    return {
        name: parameter.grad.to_local()
        for name, parameter in model.named_parameters()
        if parameter.to_local().shape == shapes[name]
    }


def torch_plan() -> dict[str, object]:
    """torch's own styles, sequences split between the layers of a block."""
    hidden = Shard(1)
    plan: dict[str, object] = {
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(hidden, None),
            desired_input_layouts=(Replicate(), None),
            use_local_output=True,
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=hidden),
        "layers.*.feed_forward.up_proj": ColwiseParallel(input_layouts=hidden),
        "layers.*.feed_forward.down_proj": RowwiseParallel(output_layouts=hidden),
        "layers.*.attention.[qk]_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "layers.*.attention_norm": SequenceParallel(use_local_output=True),
        "layers.*.ffn_norm": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(use_local_output=True),
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "head": ColwiseParallel(input_layouts=hidden, output_layouts=Replicate()),
    }
    return plan


class LocalHeads(PlainStack):
    """A stack that was written for the local heads of a plan, two of four."""

    def __init__(self, local: int) -> None:
        super().__init__()
        for layer in self.layers:
            attention = layer.attention
            attention.n_heads = attention.n_kv_heads = local


def with_torch_plan(length: int) -> str | None:
    torch.manual_seed(0)
    whole = PlainStack()
    model = LocalHeads(2)
    model.load_state_dict(whole.state_dict())
    parallelize_model(model, context(2, tp_plan=torch_plan()))
    tokens = torch.arange(2 * length).view(2, length)
    try:
        logits = model(tokens)
    except ValueError as error:
        return str(error)
    torch.testing.assert_close(logits, whole(tokens), rtol=1e-5, atol=1e-5)
    logits.square().mean().backward()
    whole(tokens).square().mean().backward()
    for name, parameter in whole.named_parameters():
        gradient = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    return None


@pytest.mark.parametrize("length", [8, 7, 6])
def test_b11_torchs_own_styles_split_even_sequences_and_refuse_others(length: int) -> None:
    """7 tokens on 2 ranks ended in an abort of one of them; shardwalk's own styles take any."""
    for message in run_on_ranks(2, with_torch_plan, length):
        if length % 2:
            assert message is not None
            assert "length of 7" in message
            assert "tp_size=2" in message
        else:
            assert message is None


@sequences
@pytest.mark.parametrize("tp_size", [2, 4])
def test_b14_the_bias_of_a_row_split_layer_counts_once(
    tp_size: int, sequence_parallel: bool
) -> None:
    for difference, gradient_difference in run_on_ranks(
        tp_size, biased_outputs, tp_size, sequence_parallel
    ):
        assert difference < 1e-6
        assert gradient_difference < 1e-6


def biased_outputs(tp_size: int, sequence_parallel: bool) -> tuple[float, float]:
    """Largest relative differences of outputs and of the biases' gradients from one process."""
    torch.manual_seed(0)
    whole, model = PlainStack(), PlainStack()
    with torch.no_grad():
        for layer in whole.layers:
            layer.attention.wo.bias.fill_(1.0)
            layer.feed_forward.down_proj.bias.fill_(1.0)
    model.load_state_dict(whole.state_dict())
    parallelize_model(model, context(tp_size, sequence_parallel=sequence_parallel))
    tokens = torch.arange(18).view(2, 9)
    logits, expected = model(tokens), whole(tokens)
    logits.mean().backward()
    expected.mean().backward()
    differences = [
        _relative(model.get_parameter(name).grad.full_tensor(), parameter.grad)
        for name, parameter in whole.named_parameters()
        if name.endswith(("wo.bias", "down_proj.bias"))
    ]
    return _relative(logits, expected), max(differences)


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (value - expected).detach().abs().max()
    return float(difference / expected.detach().abs().max())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_b26_a_vocabulary_that_does_not_divide(tp_size: int, tied: bool) -> None:
    """33 rows, the last rank's short; some labels are the last id, some are ignored."""
    run(stack_case(vocabulary=33, tied=tied), tp_size, tp_size)


def test_b26_the_whole_head_comes_back_row_for_row() -> None:
    for shape, is_equal in run_on_ranks(4, gathered_head):
        assert (shape, is_equal) == ((33, 18), True)


def gathered_head() -> tuple[tuple[int, ...], bool]:
    torch.manual_seed(0)
    model = PlainStack(vocabulary=33)
    head = model.head.weight.detach().clone()
    parallelize_model(model, context(4))
    gathered = model_state_dict(model, full=True)["head.weight"]
    return tuple(gathered.shape), torch.equal(gathered, head)


def test_b25_a_tied_table_stays_one_parameter() -> None:
    for names, is_tied in run_on_ranks(4, tied_names):
        assert is_tied
        assert names == ["embed.weight"]


def tied_names() -> tuple[list[str], bool]:
    with torch.device("meta"):
        model = PlainStack(tied=True)
    parallelize_model(model, context(2))
    materialize(model, init=uniform_weights)
    tables = [n for n, p in model.named_parameters() if n in ("embed.weight", "head.weight")]
    return tables, model.head.weight is model.embed.weight


HEADS = [(4, 2, 4), (6, 3, 2), (4, 1, 2)]


@pytest.mark.parametrize(("heads", "kv_heads", "tp_size"), HEADS)
def test_b57_key_value_heads_that_do_not_divide_are_refused(
    heads: int, kv_heads: int, tp_size: int
) -> None:
    for message in run_on_ranks(tp_size, refusal, heads, kv_heads, tp_size):
        assert f"tp_size={tp_size}" in message
        assert f"num_key_value_heads={kv_heads}" in message


def refusal(heads: int, kv_heads: int, tp_size: int) -> str:
    model: nn.Module = PlainStack(n_heads=heads, n_kv_heads=kv_heads)
    with pytest.raises(ValueError) as caught:
        parallelize_model(model, context(tp_size))
    return str(caught.value)


def test_b57_key_value_heads_that_divide() -> None:
    run(stack_case(n_heads=4, n_kv_heads=2), 2, 2)


@pytest.mark.parametrize("token", [61, 99, -1])
def test_a_token_outside_the_vocabulary_is_an_error_on_every_rank(token: int) -> None:
    assert run_on_ranks(2, unknown_token, token) == [True, True]


def unknown_token(token: int) -> bool:
    model = parallelize_model(PlainStack(), context(2))
    with pytest.raises(IndexError):
        model(torch.tensor([[1, 2, token]]))
    return True


def test_ranks_with_other_plans_are_told_before_anything_is_cut() -> None:
    for message in run_on_ranks(2, other_plans):
        assert "tp_plan is another one on tp ranks [1] than on tp rank 0" in message


def other_plans() -> str:
    plan = None
    if torch.distributed.get_rank():
        plan = {
            "layers.*.feed_forward.up_proj": ColumnParallel(),
            "layers.*.feed_forward.down_proj": RowParallel(),
        }
    with pytest.raises(ValueError) as caught:
        parallelize_model(PlainStack(), context(2, tp_plan=plan))
    return str(caught.value)


@pytest.mark.parametrize("length", [5, 6])
def test_ranks_of_one_group_that_read_other_rows_are_told(length: int) -> None:
    for message in run_on_ranks(2, other_rows, length):
        assert "tp ranks [1] called the model with other inputs than tp rank 0" in message


def other_rows(length: int) -> str:
    """Other tokens, or as many as the other rank has and one more."""
    model = parallelize_model(PlainStack(), context(2))
    rank = torch.distributed.get_rank()
    tokens = torch.arange(length + rank * (length % 2)).view(1, -1) + rank
    with pytest.raises(ValueError) as caught:
        model(tokens)
    model(torch.arange(length).view(1, -1)).sum().backward()
    return str(caught.value)
