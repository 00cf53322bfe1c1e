"""What a step under tensor parallelism communicates, counted against the sum by hand.

The stack has L = 2 blocks. A hidden state is rows x length x width elements; the norms of a block
have the parameters weight and bias (of the attention, of the queries) or weight alone (of the
feed-forward, of the keys).
"""

from __future__ import annotations

import pytest
import torch

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import describe_units, parallelize_model
from shardwalk.parallelizer_core.testing import cached, run_on_ranks
from shardwalk.parallelizer_core.testing.collectives import CountCollectives
from tests.matrix.plain_stack import PlainStack

LAYERS, ROWS, LENGTH, WIDTH, VOCABULARY = 2, 2, 8, 16, 40
HIDDEN = ROWS * LENGTH * WIDTH * 4
HEAD = 4


def step(sequence_parallel: bool) -> dict[str, dict[str, int]]:
    """Calls and bytes of a step, those over data-parallel ranks apart."""
    sizes = ParallelismSizes(tp_size=2)
    config = FSDP2Config(
        sequence_parallel=sequence_parallel,
        mp_policy={"param_dtype": None, "reduce_dtype": None},
    )
    setup = cached(
        ("tp counts", sequence_parallel),
        lambda: DistributedSetup.build(config, parallelism_sizes=sizes),
    )
    torch.manual_seed(0)
    model = PlainStack(
        vocabulary=VOCABULARY, dim=WIDTH, n_heads=4, n_kv_heads=2, head_dim=HEAD, layers=LAYERS
    )
    parallelize_model(model, setup.mesh_context)
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
    with CountCollectives() as counted:
        model(tokens).sum().backward()
    units = sum(1 for _ in describe_units(model))
    return {"calls": dict(counted.calls), "bytes": dict(counted.bytes), "units": {"units": units}}


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "split"])
def counted(request: pytest.FixtureRequest) -> tuple[bool, list[dict[str, dict[str, int]]]]:
    return request.param, run_on_ranks(4, step, request.param)


def test_data_parallel_traffic_is_that_of_the_units(counted) -> None:
    _, reports = counted
    for report in reports:
        units = report["units"]["units"]
        assert units == LAYERS + 3
        assert (
            report["calls"]["_allgather_base_"] == units + (LAYERS - 1) + 1
        )  # freed blocks, table
        assert report["calls"]["_reduce_scatter_base_"] == units


def test_tensor_parallel_traffic_is_the_sum_by_hand(counted) -> None:
    split, reports = counted
    # Forward: the table's rows, the gathered logits. Backward: the head's input.
    all_reduces, all_reduced = 2, 2 * HIDDEN
    all_gathers, gathered = 1, ROWS * LENGTH * VOCABULARY // 2 * 4
    reduce_scatters, scattered = 0, 0
    # Norms of local heads: gradients of a weight and a bias, and of a weight.
    all_reduces += 3 * LAYERS
    all_reduced += 3 * LAYERS * HEAD * 4
    if split:
        # Norms of the block and the biases of its two row-parallel layers see local tokens.
        all_reduces += 5 * LAYERS
        all_reduced += 5 * LAYERS * WIDTH * 4
        # Attention and feed-forward: gather and scatter, in both directions; the last block's
        # output forward, the first one's input backward.
        all_gathers += 4 * LAYERS + 2
        gathered += (4 * LAYERS + 2) * HIDDEN // 2
        reduce_scatters += 4 * LAYERS
        scattered += 4 * LAYERS * HIDDEN
    else:
        # Outputs of attention and feed-forward forward, their inputs backward.
        all_reduces += 4 * LAYERS
        all_reduced += 4 * LAYERS * HIDDEN
    for report in reports:
        calls, sent = report["calls"], report["bytes"]
        assert (calls["all_reduce"], sent["all_reduce"]) == (all_reduces, all_reduced)
        name = "all_gather_into_tensor"
        assert (calls[name], sent[name]) == (all_gathers, gathered)
        name = "reduce_scatter_tensor"
        assert (calls.get(name, 0), sent.get(name, 0)) == (reduce_scatters, scattered)
