"""`patch_is_packed_sequence`: attention gets no positions to look for packed sequences in."""

import pytest
import torch
from walk_toys import Decoder, context, ids

from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import run_on_ranks


def llama(attention="sdpa"):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config)


def positions_that_attention_sees(patched):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def attention(module, *args, position_ids=None, **kwargs):
        seen.append(position_ids)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("looking", attention)
    model = parallelize_model(llama("looking"), context(patch_is_packed_sequence=patched))
    logits = model(input_ids=ids(), position_ids=torch.arange(5).expand(2, 5)).logits
    return [each is None for each in seen], logits.detach()


def test_blocks_are_not_told_positions_and_have_the_same_numbers():
    pytest.importorskip("transformers")
    (hidden, patched), (shown, plain) = (
        run_on_ranks(1, positions_that_attention_sees, option)[0] for option in (True, False)
    )
    assert hidden == [True, True]
    assert shown == [False, False]
    assert torch.equal(patched, plain)


def packed_rows():
    model = parallelize_model(llama(), context(patch_is_packed_sequence=True))
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    for call in (
        lambda: model(input_ids=ids(1), position_ids=packed),
        lambda: model(ids(1), None, packed),
    ):
        with pytest.raises(ValueError, match="patch_is_packed_sequence=True is for rows of one"):
            call()
    padded = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="position_ids start again within a row"):
        model(input_ids=ids(2), position_ids=padded)
    repeated = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    model(input_ids=ids(2), position_ids=repeated).logits.sum().backward()


def test_packed_sequences_are_refused_in_the_call_that_has_them():
    pytest.importorskip("transformers")
    run_on_ranks(1, packed_rows)


def no_positions():
    model = parallelize_model(Decoder(), context(patch_is_packed_sequence=True))
    with pytest.raises(ValueError, match="a Block gets no keyword arguments"):
        model(ids())
    with pytest.raises(ValueError, match="patch_is_packed_sequence=True changes blocks, and Lin"):
        parallelize_model(torch.nn.Linear(2, 2), context(patch_is_packed_sequence=True))


def test_a_model_whose_blocks_get_no_positions_has_nothing_to_patch():
    run_on_ranks(1, no_positions)
