"""Adapters by peft around layers that tensor parallelism splits: the numbers of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from peft import LoraConfig
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

from shardwalk.mesh import FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core.tensor_parallel import ColumnParallel, RowParallel, WholeInput
from shardwalk.parallelizer_core.tensor_parallel.parallelize import plan_tensors
from shardwalk.parallelizer_core.testing import ParityCase, TokenBatches, assert_parity
from tests.matrix.lora_models import lora, with_adapters
from tests.matrix.tiny_transformers import MODELS, SIZES, normal_weights

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TABLES = [*LINEAR, "embed_tokens", "lm_head"]


def run(model: Any, *, sequence_parallel: bool, world: int = 4, **options: Any) -> None:
    parity_case = ParityCase(
        model=model, batches=TokenBatches(vocabulary=61, micro_batches=2), init=normal_weights
    )
    config = FSDP2Config(
        sequence_parallel=sequence_parallel, mp_policy={"param_dtype": None, "reduce_dtype": None}
    )
    options = {"strategy": config, "optimizers": ("adamw",), **options}
    sizes = ParallelismSizes(tp_size=2)
    assert_parity(parity_case, world_size=world, parallelism_sizes=sizes, **options)


def fused() -> Any:
    """Query, key and value of one layer, and gate and up of one, each cut in its components."""
    sizes = {**SIZES, "num_hidden_layers": 2, "rope_parameters": None}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    base = Phi3ForCausalLM(Phi3Config(**sizes))
    return with_adapters(base, target_modules=["qkv_proj", "gate_up_proj", "o_proj"])


def two_adapters() -> Any:
    """Two adapters, of which the second trains, on layers with biases."""
    base = MODELS["llama"](False, num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model = with_adapters(base, target_modules=["q_proj", "o_proj", "up_proj"])
    other = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter("other", other)
    model.set_adapter("other")
    return model


FORMS: dict[str, Any] = {
    "every table": partial(lora, "llama", layers=2, target_modules=TABLES, use_rslora=True),
    "tied, norms of heads": partial(lora, "qwen3", tied=True, layers=2, target_modules=LINEAR),
    "a trained head": partial(
        lora, "gemma3", layers=3, target_modules=["v_proj", "down_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
    ),
    "fused projections": fused,
    "two adapters": two_adapters,
}  # fmt: skip


SPLIT_IN_CI = ("every table", "tied, norms of heads", "two adapters")


@pytest.mark.parametrize(
    ("form", "sequence_parallel"),
    [
        pytest.param(
            form, split, marks=() if split == (form in SPLIT_IN_CI) else pytest.mark.widest
        )
        for form in FORMS
        for split in (False, True)
    ],
)
def test_adapters_train_to_the_numbers_of_one_process(form: str, sequence_parallel: bool) -> None:
    run(FORMS[form], sequence_parallel=sequence_parallel, clip=0.05)


def test_an_adapter_of_a_bare_parameter_is_refused_by_name() -> None:
    """Its product has the shape of the whole weight: the first forward failed in a matmul."""
    model: Any = lora(layers=2, target_modules=[], target_parameters=["mlp.gate_proj.weight"])
    options: dict[str, Any] = {"sequence_parallel": False, "sidecar": None}
    match = r"mlp.gate_proj, .*ParamWrapper adds to the parameter weight itself .*or use tp_size=1"
    with pytest.raises(ValueError, match=match):
        plan_tensors(model, 2, requested=None, **options)
    whole = {"model.layers.*.mlp": WholeInput(), "model.layers.*.self_attn.o_proj": RowParallel()}
    whole |= {f"model.layers.*.self_attn.{name}_proj": ColumnParallel() for name in "qkv"}
    whole |= {"model.layers.*.*_layernorm": WholeInput()}
    assert plan_tensors(
        model, 2, requested={f"base_model.model.{p}": s for p, s in whole.items()}, **options
    )
