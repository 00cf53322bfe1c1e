"""`autocast_dtype`: calls of the model run under autocast, with the numbers of one process there."""

import pytest
import torch
import torch.distributed as dist
from walk_toys import Decoder, context, full_gradients, ids

from shardwalk.mesh import DDPConfig, MeshContext
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.parallel_state import unwrap_model
from shardwalk.parallelizer_core.testing import run_on_ranks


def gradients_of(model, rows):
    """And the dtypes of the products in it, in a recompute too."""
    dtypes = []
    for block in unwrap_model(model).layers:
        block.up.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    model(rows).float().logsumexp(-1).mean().backward()
    names = full_gradients(unwrap_model(model))
    return {name: gradient for name, gradient in names.items() if gradient is not None}, dtypes


def decoder():
    torch.manual_seed(3)
    return Decoder()


def parallel(strategy, mode):
    options = {"autocast_dtype": "bfloat16", "activation_checkpointing": mode}
    mesh_context = context(**options)
    if strategy == "ddp":
        mesh = mesh_context.device_mesh
        mesh_context = MeshContext.from_meshes(mesh, strategy_config=DDPConfig(**options))
    model = parallelize_model(decoder(), mesh_context)
    keys = list(model.state_dict())
    found, dtypes = gradients_of(model, ids(4, 5).chunk(2)[dist.get_rank()])
    return found, dtypes, keys


@pytest.mark.parametrize("mode", [False, "full"])
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_gradients_are_those_of_one_process_under_autocast(strategy, mode):
    expected = []
    for rows in ids(4, 5).chunk(2):
        plain = decoder()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logits = plain(rows)
        assert logits.dtype is torch.bfloat16
        logits.float().logsumexp(-1).mean().backward()
        expected.append(full_gradients(plain))
    for found, dtypes, keys in run_on_ranks(2, parallel, strategy, mode):
        assert set(dtypes) == {torch.bfloat16}
        assert len(dtypes) == (6 if mode else 3)
        assert keys == list(decoder().state_dict())
        for name, gradient in found.items():
            wanted = (expected[0][name] + expected[1][name]) / 2
            assert gradient.dtype is torch.float32
            assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
