"""What the model takes, gives and refuses, and how it starts."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from beam_toys import FULL, SLIDING, T6, beam_config, tiny_beam, token_ids
from torch import nn

from shardwalk.model_beam import BeamConfig, BeamForCausalLM
from shardwalk.model_beam.model import BeamModel
from shardwalk.moe_ep import Gate, GroupedExperts
from shardwalk.parallelizer_core import materialize
from shardwalk.parallelizer_core.fp32_pins import pin_fp32_parameters

SMALL = {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
IDS = token_ids(2, 12)
EMBEDDINGS = torch.zeros(2, 12, 64)


def on_meta(dtype: torch.dtype = torch.float32, **changes) -> BeamForCausalLM:
    with torch.device("meta"):
        return BeamForCausalLM(beam_config(**{**SMALL, **changes})).to(dtype)


def test_a_soft_cap_is_float32_and_its_absence_keeps_the_dtype():
    capped = tiny_beam(dtype=torch.bfloat16, **SMALL)
    out = capped(IDS, labels=IDS)
    assert out.logits.dtype == out.loss.dtype == torch.float32
    logits = capped.lm_head(capped.model(IDS).last)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(out.logits, torch.tanh(logits.float() / 30) * 30)

    plain = tiny_beam(dtype=torch.bfloat16, final_logit_softcapping=None, **SMALL)(IDS, labels=IDS)
    assert plain.logits.dtype == torch.bfloat16
    assert plain.loss.dtype == torch.float32


def test_a_cast_of_the_model_keeps_the_router_and_the_rotary_tables():
    model = tiny_beam(**SMALL)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    kept = {name for name, tensor in cast.state_dict().items() if tensor.dtype == torch.float32}
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2)]
    assert kept == {f"{gate}.{x}" for gate in gates for x in ("weight", "e_score_correction_bias")}
    for name in kept:
        assert torch.equal(cast.state_dict()[name], model.state_dict()[name])

    def tables_of(model):
        seen = []
        model.model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["rotary"]), with_kwargs=True
        )
        model(IDS)
        return seen[0]

    for mine, other in zip(tables_of(cast), tables_of(model), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, other)


def test_a_block_casts_its_hidden_states_and_nothing_else():
    model = tiny_beam(dtype=torch.bfloat16, **SMALL)
    block = model.model.layers[2]
    x, scale = torch.randn(1, 4, 64), torch.full((1, 4), 1.001)
    with pytest.raises(RuntimeError, match="dtype"):
        block(x, query_scale=scale)
    block.compute_dtype = torch.bfloat16
    seen = []
    block.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0].dtype, kwargs["query_scale"])),
        with_kwargs=True,
    )
    assert block(x, query_scale=scale).dtype == torch.bfloat16
    assert seen[0][0] == torch.bfloat16
    assert seen[0][1] is scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_no_rows_gives_a_loss_of_zero_and_zero_gradients(dtype):
    model = tiny_beam(dtype=dtype, attention_bias=True, **SMALL)
    out = model(IDS[:0], torch.ones(0, 12, dtype=torch.bool), labels=IDS[:0])
    assert out.logits.shape == (0, 12, 256)
    assert out.loss.item() == 0
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_loss_without_targets_is_zero():
    model = tiny_beam(**SMALL)
    out = model(IDS, labels=torch.full_like(IDS, -100))
    out.loss.backward()
    assert out.loss.item() == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_labels_are_the_tokens_themselves():
    model = tiny_beam(**SMALL)
    labels = IDS.clone()
    labels[0, 3:6] = -100
    out = model(IDS, labels=labels)
    wanted = nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(out.loss, wanted)


@pytest.mark.parametrize("kept", [1, 5, 12, 50])
def test_logits_of_the_last_positions(kept):
    model = tiny_beam(**SMALL)
    wanted = model(IDS).logits[:, -kept:]
    torch.testing.assert_close(model(IDS, logits_to_keep=kept).logits, wanted)


def test_logits_of_some_positions():
    model = tiny_beam(**SMALL)
    wanted, index = model(IDS).logits, torch.tensor([7, 0, -1])
    torch.testing.assert_close(model(IDS, logits_to_keep=index).logits, wanted[:, index])
    flat = model(IDS[0], logits_to_keep=index).logits
    torch.testing.assert_close(flat, wanted[0, index])


def test_embeddings_stand_for_tokens():
    model = tiny_beam(**SMALL)
    embeddings = model.get_input_embeddings()(IDS)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(IDS).logits)
    assert model.get_output_embeddings() is model.lm_head


def test_layers_in_a_dict_and_copies_give_the_same():
    model = tiny_beam(tie_word_embeddings=True, **SMALL)
    wanted = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IDS).logits, wanted)
        assert twin.lm_head.weight is twin.model.embed_tokens.weight
        assert twin.config == model.config
    layers = model.model.layers
    model.model.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
    assert torch.equal(model(IDS).logits, wanted)


def test_a_meta_model_starts_as_documented():
    torch.manual_seed(0)
    changes = {"pad_token_id": 3, "attention_bias": True, "initializer_range": 0.05}
    model = on_meta(**changes)
    materialize(model, init="reset_parameters", seed=4)
    assert_initial(model, std=0.05)
    assert not model.model.embed_tokens.weight[3].any()
    assert model.model.embed_tokens.weight[2].any()
    fresh = BeamForCausalLM(beam_config(**SMALL, **changes))
    assert_initial(fresh, std=0.05)

    again, other = on_meta(**changes), on_meta(**changes)
    materialize(again, init="reset_parameters", seed=4)
    materialize(other, init="reset_parameters", seed=5)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def assert_initial(model: nn.Module, *, std: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Gate):
            assert module.weight.std().item() == pytest.approx(std, rel=0.1)
            assert abs(module.weight.mean().item()) < 0.1 * std
        if isinstance(module, GroupedExperts):
            for weight in module.parameters():
                assert weight.std().item() == pytest.approx(std, rel=0.1)
                assert not torch.equal(weight[0], weight[1])
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        if name.endswith("bias"):
            assert not tensor.any(), name


@pytest.mark.parametrize("made", ["fresh", "on_meta"])
def test_a_tied_head_leaves_the_row_of_padding_at_zero(made):
    changes = {"pad_token_id": 3, "tie_word_embeddings": True}
    if made == "fresh":
        model = BeamForCausalLM(beam_config(**SMALL, **changes))
    else:
        model = on_meta(**changes)
        materialize(model, init="reset_parameters")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight[3].any()
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_bfloat16_meta_model_has_a_float32_router():
    model = on_meta(torch.bfloat16)
    materialize(model, init="reset_parameters")
    for layer in (1, 2):
        gate = model.model.layers[layer].mlp.gate
        assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model(IDS).logits.isfinite().all()


def test_the_router_is_pinned_where_there_is_one():
    pinned = pin_fp32_parameters(tiny_beam(**SMALL))
    assert set(pinned) == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)}
    dense = tiny_beam(**{**SMALL, "mlp_layer_types": ["dense"] * 3})
    assert pin_fp32_parameters(dense) == {}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "neither is given"),
        ({"input_ids": IDS, "inputs_embeds": EMBEDDINGS}, ValueError, "both are given"),
        ({"input_ids": IDS.float()}, TypeError, "input_ids has dtype torch.float32"),
        ({"input_ids": IDS[None]}, ValueError, "input_ids has shape [1, 2, 12]"),
        ({"inputs_embeds": EMBEDDINGS[0]}, ValueError, "inputs_embeds has shape [12, 64]"),
        ({"inputs_embeds": IDS}, TypeError, "inputs_embeds has dtype torch.int64"),
        ({"inputs_embeds": EMBEDDINGS[..., 1:]}, ValueError, "[2, 12, 63], and its width must be 64"),
        ({"inputs_embeds": EMBEDDINGS.half()}, TypeError, "use inputs_embeds.to(torch.float32)"),
        ({"input_ids": IDS.tolist()}, TypeError, "input_ids must be a tensor, not a list"),
        ({"input_ids": IDS[0], "labels": [1] * 12}, TypeError, "labels must be a tensor"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 12, 12)},
            ValueError, "masks over pairs of tokens are not taken",
        ),
        ({"input_ids": IDS, "attention_mask": IDS[:, :11]}, ValueError, "has shape [2, 11]"),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 12)}, TypeError, "0 is padding"),
        ({"input_ids": IDS, "position_ids": torch.arange(12)}, ValueError, "has shape [12]"),
        ({"input_ids": IDS, "position_ids": torch.zeros(2, 12)}, TypeError, "use integers"),
        ({"input_ids": IDS, "sequence_ids": IDS[:1]}, ValueError, "sequence_ids has shape [1, 12]"),
        ({"input_ids": IDS, "sequence_ids": IDS > 5}, TypeError, "sequence_ids has dtype"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, ValueError, "labels has shape [2, 11]"),
        ({"input_ids": IDS, "labels": IDS.float()}, TypeError, "labels has dtype"),
        ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, ValueError, "leave logits_to_keep at 0"),
        ({"input_ids": IDS, "logits_to_keep": -1}, ValueError, "logits_to_keep=-1 is not allowed"),
        ({"input_ids": IDS, "logits_to_keep": True}, TypeError, "must be an integer"),
        ({"input_ids": IDS, "logits_to_keep": 1.0}, TypeError, "must be an integer"),
        ({"input_ids": IDS, "logits_to_keep": IDS}, ValueError, "one list"),
        ({"input_ids": IDS, "logits_to_keep": IDS > 5}, TypeError, "logits_to_keep has dtype"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(given, error, words):
    model = tiny_beam(**SMALL)
    with pytest.raises(error, match=re.escape(words)):
        model(**given)


def test_embeddings_of_another_dtype_are_taken_where_something_casts_them():
    model = tiny_beam(**SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs_embeds=EMBEDDINGS.bfloat16())
    assert on_meta(mlp_layer_types=["dense"] * 3)(
        inputs_embeds=EMBEDDINGS.to("meta")
    ).logits.is_meta
    for block in model.model.blocks:
        block.compute_dtype = torch.float32
    assert model(inputs_embeds=EMBEDDINGS.double()).logits.dtype == torch.float32


def test_a_model_without_weights_names_what_gives_it_some():
    model = BeamForCausalLM.on_meta(beam_config(**SMALL))
    for given in ({"input_ids": IDS}, {"input_ids": IDS[0]}, {"inputs_embeds": EMBEDDINGS}):
        with pytest.raises(ValueError, match=r"call materialize\(model, checkpoint=folder\)"):
            model(**given)
    dense = on_meta(mlp_layer_types=["dense"] * 3)
    assert dense(IDS.to("meta")).logits.is_meta


def test_what_is_no_configuration_is_refused_with_the_way_to_one(tmp_path):
    theirs = pytest.importorskip("transformers").BeamConfig(**T6)
    ways = {
        r"from_dict\(config.to_dict\(\)\)": theirs, r"from_dict\(config\)": T6,
        r"from_pretrained\(folder\)": tmp_path, r"BeamConfig\(\.\.\.\)": None,
    }  # fmt: skip
    for way, given in ways.items():
        for make in (BeamForCausalLM, BeamForCausalLM.on_meta, BeamModel):
            if make == BeamForCausalLM.on_meta and given is tmp_path:
                continue
            with pytest.raises(TypeError, match=f"config must be a BeamConfig, not .*{way}"):
                make(given)
    assert (
        BeamConfig.from_dict(theirs.to_dict()).to_dict().items() >= beam_config().to_dict().items()
    )


def test_the_model_without_its_head_takes_rows_only():
    with pytest.raises(ValueError, match="must have"):
        tiny_beam(**SMALL).model(IDS[0])


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="output_router_logits=True"):
        BeamForCausalLM(beam_config(output_router_logits=True))
    dense = beam_config(mlp_layer_types=["dense"] * 6)
    for option in ({"bias_update_speed": 1e-3}, {"dispatcher": "all_to_all"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.* has no effect"):
            BeamForCausalLM(dense, **option)
    sparse = BeamForCausalLM(beam_config(**SMALL), bias_update_speed=1e-3, dispatcher="local")
    assert sparse.model.layers[1].mlp.config.bias_update_speed == 1e-3
