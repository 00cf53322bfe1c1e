"""From a name to a dispatcher, and what DeepEP's needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwalk.moe_ep import _torch_compat
from shardwalk.moe_ep.dispatcher import (
    AllToAllDispatcher,
    DeepEPDispatcher,
    LocalDispatcher,
    make_dispatcher,
)
from shardwalk.moe_ep.dispatcher.deepep import buffer_sizes, check_rows, dispatch_arguments
from shardwalk.parallelizer_core.testing import cached, run_on_ranks


def mesh_of_two() -> DeviceMesh:
    mesh: DeviceMesh = cached("two", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    return mesh


def choose() -> None:
    ep = mesh_of_two()
    assert isinstance(make_dispatcher("auto", 8, None), LocalDispatcher)
    assert isinstance(make_dispatcher("auto", 8, ep), AllToAllDispatcher)
    assert isinstance(make_dispatcher("all_to_all", 8, ep), AllToAllDispatcher)
    with pytest.raises(
        ValueError,
        match="dispatcher='local' needs all experts on one rank, and ep_size=2; use 'auto'",
    ):
        make_dispatcher("local", 8, ep)
    with pytest.raises(ValueError, match="ep_size=2 does not divide num_experts=7"):
        make_dispatcher("auto", 7, ep)
    with pytest.raises(
        ImportError, match="needs the package deep_ep .*dispatcher='all_to_all' works"
    ):
        make_dispatcher("deepep", 8, ep)


def test_the_name_and_the_mesh_decide() -> None:
    run_on_ranks(2, choose)


def test_names_that_fit_nothing_are_refused() -> None:
    name: Any = "nccl"
    with pytest.raises(ValueError, match=r"dispatcher='nccl' must be one of \['auto', 'local'"):
        make_dispatcher(name, 8, None)
    for name in ("all_to_all", "deepep"):
        with pytest.raises(ValueError, match=f"dispatcher='{name}' exchanges tokens over a mesh"):
            make_dispatcher(name, 8, None)


def without_gpus(folder: str) -> None:
    import sys

    sys.path.insert(0, folder)
    try:
        with pytest.raises(
            ValueError, match="needs GPUs and NCCL.*runs on gloo; use dispatcher='all_to_all'"
        ):
            DeepEPDispatcher(8, dist.group.WORLD)
        with pytest.raises(ValueError, match="ep_size=2 does not divide num_experts=7"):
            DeepEPDispatcher(7, mesh_of_two())
    finally:
        sys.path.remove(folder)
        sys.modules.pop("deep_ep", None)


def test_deepep_is_refused_without_gpus(tmp_path: Any) -> None:
    """An empty package of that name stands for an install on a machine that cannot use it."""
    (tmp_path / "deep_ep.py").write_text("")
    run_on_ranks(2, without_gpus, str(tmp_path))


def test_deepep_takes_bf16_rows_of_whole_vectors() -> None:
    check_rows(torch.empty(3, 64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"bfloat16 tokens, not torch.float32.*mp_policy"):
        check_rows(torch.empty(3, 64))
    with pytest.raises(ValueError, match=r"16 bytes, and a hidden size of 20 gives 40"):
        check_rows(torch.empty(3, 20, dtype=torch.bfloat16))


def test_the_layout_of_deepep_becomes_the_keywords_of_its_dispatch() -> None:
    names = ("per_rank", "per_rdma_rank", "per_expert", "in_rank", "event")
    weights = torch.rand(3, 2, dtype=torch.float64)
    arguments = dispatch_arguments(names, torch.zeros(3, 2), weights)
    assert arguments["topk_weights"].dtype == torch.float32
    del arguments["topk_idx"], arguments["topk_weights"]
    assert arguments == {
        "num_tokens_per_rank": "per_rank",
        "num_tokens_per_rdma_rank": "per_rdma_rank",
        "num_tokens_per_expert": "per_expert",
        "is_token_in_rank": "in_rank",
    }


def test_a_buffer_is_as_large_as_dispatch_and_combine_need() -> None:
    class Hints:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
            return self.factor * row_bytes * ranks

        def get_rdma_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
            return row_bytes * ranks // self.factor

    class Package:
        class Buffer:
            get_dispatch_config = staticmethod(lambda ranks: Hints(2))
            get_combine_config = staticmethod(lambda ranks: Hints(4))

    assert buffer_sizes(Package, 8, 128) == {
        "num_nvl_bytes": 4096,
        "num_rdma_bytes": 512,
        "explicitly_destroy": True,
    }


def test_the_kernel_of_products_is_where_it_was() -> None:
    """torch's own name may move; and rows without a public kernel still need it."""
    bags, rows, index = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([0, 2, 2, 1, 0])
    products = _torch_compat.products_by_bag(bags, rows, index)
    torch.testing.assert_close(products, (rows * bags[index]).sum(-1))
    schema = torch.ops.aten._embedding_bag_per_sample_weights_backward.default._schema
    assert [argument.name for argument in schema.arguments] == [
        "grad",
        "weight",
        "indices",
        "offsets",
        "offset2bag",
        "mode",
        "padding_idx",
    ]
    assert not hasattr(torch.nn.functional, "embedding_bag_per_sample_weights_backward")


def test_fake_tensors_have_no_public_class_yet() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not hasattr(torch, "FakeTensor")
    with FakeTensorMode():
        assert _torch_compat.is_fake(torch.empty(1))
    assert not _torch_compat.is_fake(torch.empty(1))
