"""Models of transformers split as they declare it themselves: the numbers of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import AutoModelForCausalLM

from shardwalk.mesh import DistributedSetup, FSDP2Config, MeshContext, ParallelismSizes
from shardwalk.parallelizer_core import (
    export_safetensors,
    load_checkpoint,
    model_state_dict,
    parallelize_model,
    save_checkpoint,
)
from shardwalk.parallelizer_core.tensor_parallel import (
    ColumnParallel,
    LocalCounts,
    LocalParameters,
    RowParallel,
    SharedTail,
    SplitInput,
    WholeInput,
)
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors
from shardwalk.parallelizer_core.tensor_parallel.structure import structural_plan
from shardwalk.parallelizer_core.testing import (
    ParityCase,
    TokenBatches,
    assert_parity,
    cached,
    run_on_ranks,
)
from tests.matrix.declared_models import declared_model
from tests.matrix.tiny_transformers import normal_weights

FULL = {"param_dtype": None, "reduce_dtype": None}
FUSED, GATHERED = ColumnParallel(components=(40, 40)), ColumnParallel(gather_output=True)
COUNTS = LocalCounts(names=("num_key_value_heads", "config.num_attention_heads"))
# What stands in the plan of one layer, beside what structure alone would give.
IN_LAYERS = {
    "Phi3": {
        "self_attn": (COUNTS,),
        "self_attn.qkv_proj": (ColumnParallel(components=(24, 12, 12)),),
        "self_attn.o_proj": (RowParallel(),),
        "mlp.gate_up_proj": (FUSED,),
    },
    "Glm4": {"mlp.gate_up_proj": (FUSED,), "mlp.down_proj": (RowParallel(),)},
    "GPTNeoX": {
        "attention.query_key_value": (ColumnParallel(),),
        "mlp.dense_h_to_4h": (ColumnParallel(),),
    },
    "Olmo2": {
        "self_attn.q_proj": (GATHERED,),
        "self_attn.o_proj": (RowParallel(split_input=True),),
    },
    "DeepseekV2": {
        "self_attn.kv_a_proj_with_mqa": (SharedTail(features=4),),
        "self_attn.kv_a_layernorm": (WholeInput(),),
        "self_attn.q_a_proj": (WholeInput(),),
        "self_attn.kv_b_proj": (ColumnParallel(),),
    },
    "GraniteSWA": {"self_attn": (LocalParameters(cuts={"sinks": 0}),)},
    "Apertus": None,
    "Gemma": {"self_attn.q_proj": (ColumnParallel(shared_input=True),)},
    "Qwen3": {"self_attn.q_norm": (SplitInput(),)},
}
FITTING = [name for name, layer in IN_LAYERS.items() if layer]


def plan_of(name: str, tp_size: int = 2) -> dict[str, tuple[ParallelStyle, ...]]:
    with torch.device("meta"):
        model = declared_model(name)
    return plan_tensors(model, tp_size, requested=None, sequence_parallel=False, sidecar=None)


@pytest.mark.parametrize("name", FITTING)
def test_a_declared_plan_is_translated(name: str) -> None:
    plan = plan_of(name)
    (stack,) = {path.partition(".layers.")[0] for path in plan if ".layers." in path}
    layer = {path.partition(".layers.1.")[2]: s for path, s in plan.items() if ".layers.1." in path}
    assert layer | IN_LAYERS[name] == layer
    assert stack


def test_structure_stands_for_a_declared_plan_with_the_same_cuts() -> None:
    for name in ("Phi3", "Glm4", "Gemma", "Qwen3"):
        with torch.device("meta"):
            model = declared_model(name)
        assert plan_of(name) == structural_plan(model, 2, False)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Apertus", "says nothing of model.layers.0.mlp.act_fn"),
        ("Qwen3Moe", "'model.layers.*.mlp.experts': 'moe_tp_experts' splits experts"),
        ("GptOss", "it splits nothing inside the blocks"),
    ],
)
def test_what_the_declared_plan_leaves_open_is_refused_by_name(name: str, match: str) -> None:
    with pytest.raises(ValueError, match="does not fit the default") as caught:
        plan_of(name)
    assert match.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("GPTNeoX", "num_attention_heads=4"),
        ("Phi3", "num_attention_heads=4 and num_key_value_heads=2"),
        ("DeepseekV2", "the 4 heads of 10 features that .*q_b_proj makes"),
    ],
)
def test_heads_that_tp_does_not_divide_are_refused(name: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"tp_size=3 does not divide {match}"):
        plan_of(name, 3)


def run(name: str, sequence_parallel: bool = False, **options: object) -> None:
    case = ParityCase(
        model=partial(declared_model, name),
        batches=TokenBatches(vocabulary=61, length=7, micro_batches=2),
        init=normal_weights,
    )
    assert_parity(
        case,
        world_size=4,
        parallelism_sizes=ParallelismSizes(tp_size=2),
        strategy=FSDP2Config(mp_policy=FULL, sequence_parallel=sequence_parallel),
        **{"optimizers": ("adamw",), **options},
    )


@pytest.mark.parametrize("name", [n for n in FITTING if n != "Qwen3"])
def test_training_has_the_numbers_of_one_process(name: str) -> None:
    run(name)


def test_fused_layers_over_split_sequences_recomputed_from_meta() -> None:
    run(
        "Phi3",
        sequence_parallel=True,
        setup={"activation_checkpointing": "full"},
        meta_start="checkpoint",
        clip=0.5,
    )


def context(tp_size: int) -> MeshContext:
    made = cached(
        ("declared", tp_size),
        lambda: (
            DistributedSetup.build(
                "fsdp2", parallelism_sizes=ParallelismSizes(tp_size=tp_size)
            ).mesh_context
        ),
    )
    return MeshContext.from_meshes(made.device_mesh, strategy_config=FSDP2Config(mp_policy=FULL))


def built(tp_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = parallelize_model(declared_model("Phi3"), context(tp_size))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """A step of a model over tp 2; its weights and first moments, and whether an export agrees."""
    model, optimizer = built(2, 0)
    ids = torch.arange(1, 15).view(2, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    assert isinstance(fused, DTensor)
    assert Shard(0) in fused.placements
    optimizer.step()
    state = state_of(model, optimizer)
    save_checkpoint(f"{folder}/checkpoint", model, optimizer, step=1)
    export_safetensors(model, f"{folder}/export")
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/export", attn_implementation="eager")
    # Other orders of sums differ in the last bits.
    difference = (loaded(ids).logits - model(input_ids=ids).logits).abs().max()
    return state, dict(loaded.state_dict()), difference.item() < 1e-5


def reloaded(folder: str) -> dict[str, Tensor]:
    model, optimizer = built(1, 1)
    load_checkpoint(f"{folder}/checkpoint", model, optimizer)
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    whole = {f"{n}.moment": m.full_tensor() for n, m in moments.items() if isinstance(m, DTensor)}
    return {**model_state_dict(model, full=True), **whole}


def test_b08_weights_saved_at_tp_2_load_at_tp_1_bit_for_bit(tmp_path: Path) -> None:
    """Fused projections come back in the order of their components, and so do their moments."""
    (state, exported, agrees), *_ = run_on_ranks(2, saved, str(tmp_path))
    assert agrees
    for again in run_on_ranks(2, reloaded, str(tmp_path)):
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], value) for name, value in state.items())
    assert any(name.endswith("qkv_proj.weight.moment") for name in state)
    assert all(torch.equal(state[name], value) for name, value in exported.items() if name in state)
    assert exported.keys() & state.keys()
