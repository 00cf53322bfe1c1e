"""No field of a strategy is accepted and ignored: the source of core reads every one of them."""

import ast
import dataclasses
from pathlib import Path

import pytest

import shardwalk.parallelizer_core
from shardwalk.mesh import DDPConfig, FSDP2Config, MegatronFSDPConfig, MultimodalDistributedConfig

SOURCE = Path(shardwalk.parallelizer_core.__file__).parent
# These reach the walk as properties of the context, which resolves them.
RESOLVED = {"activation_checkpointing"}


def reads_of(*names):
    """The attributes that code reads of a variable with one of the names, or by name."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                of = node.value
                owner = getattr(of, "id", getattr(of, "attr", getattr(of, "func", None)))
                owner = getattr(owner, "id", owner)
                if owner in names:
                    found.add(node.attr)
            # for name in ("enable_compile", ...): getattr(strategy, name)
            if isinstance(node, ast.For) and "getattr(strategy, name)" in ast.unparse(node):
                found |= {
                    each.value for each in ast.walk(node.iter) if isinstance(each, ast.Constant)
                }
    return found


@pytest.mark.parametrize(
    "config", [FSDP2Config, DDPConfig, MultimodalDistributedConfig], ids=lambda cls: cls.__name__
)
def test_every_field_is_read(config):
    reads = reads_of("config", "strategy", "fsdp2_config", "strategy_config", "multimodal")
    names = {field.name for field in dataclasses.fields(config)}
    assert names - reads - RESOLVED - {"vision"} == set()  # vision has no options yet
    assert "no_such_field" not in reads


def test_every_field_of_megatron_fsdp_is_mapped_by_name_or_by_rule():
    text = (SOURCE / "megatron_fsdp.py").read_text()
    assert "for field in fields(config)" in text
    by_rule = {"megatron_fsdp_unit_modules", "check_for_nan_in_grad", "grad_reduce_in_fp32"}
    by_rule |= {"preserve_fp32_weights", "init_fsdp_with_meta_device", "average_in_collective"}
    assert by_rule <= {field.name for field in dataclasses.fields(MegatronFSDPConfig)}
    assert by_rule <= reads_of("config")
