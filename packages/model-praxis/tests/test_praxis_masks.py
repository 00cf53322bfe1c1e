"""Who sees whom, in both forms of a mask."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from shardwalk.model_praxis.layers import attend
from shardwalk.model_praxis.masks import (
    Slot,
    _MaskCache,
    attention_mask,
    chunk_causal_rule,
    dense_mask,
    expert_cross_rule,
    expert_self_rule,
    flex_mask,
    tags_of,
)
from shardwalk.model_praxis.windows import WindowShape


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def window(cells: int = 2, text: int = 1, chunks: int = 3) -> WindowShape:
    return WindowShape(
        registers=1, text=text, frames=2 * chunks, clean_frames=2 * chunks - 2, frames_per_chunk=2,
        cells=cells,
    )  # fmt: skip


def words(layout):
    """Each token as (kind, chunk), spelled out from the slots by hand."""
    found = []
    for slot in layout:
        for frame in range(slot.frames):
            chunk = None if slot.kind == "global" else frame // slot.frames_per_chunk
            found += [(slot.kind, chunk)] * slot.tokens_per_frame
    return found


SEES = {
    # query: the keys that it sees, for chunk 1 of three
    ("global", None): [("global", None)],
    ("noised", 1): [("global", None), ("noised", 1), ("clean", 0)],
    ("clean", 1): [("global", None), ("clean", 0), ("clean", 1)],
}


def test_a_chunk_sees_globals_itself_and_the_clean_past():
    layout = window().layout
    mask, tokens = dense_mask(chunk_causal_rule, layout, layout), words(layout)
    assert mask.dtype == torch.bool
    assert set(SEES) < set(tokens)
    for (row, query), (column, key) in itertools.product(enumerate(tokens), repeat=2):
        if query in SEES:
            assert mask[row, column] == (key in SEES[query]), (query, key)
    first, last = tokens.index(("noised", 0)), tokens.index(("noised", 2))
    assert {tokens[i] for i in mask[first].nonzero()} == {("global", None), ("noised", 0)}
    assert {tokens[i] for i in mask[last].nonzero()} == {
        ("global", None), ("noised", 2), ("clean", 0), ("clean", 1),
    }  # fmt: skip


def test_in_the_decoder_a_chunk_sees_registers_and_itself():
    layout = window().decoder_layout(2, 3)
    mask = dense_mask(chunk_causal_rule, layout, layout)
    chunk = torch.arange(-1, 3).repeat_interleave(torch.tensor([2, 6, 6, 6]))
    assert torch.equal(mask, (chunk[:, None] == chunk) | (chunk == -1))


def expert_queries(chunks: int = 3):
    """One pose, two learned tokens and the actions of two frames for each chunk."""
    return (
        Slot(kind="noised", frames=chunks, tokens_per_frame=1),
        Slot(kind="noised", frames=chunks, tokens_per_frame=2),
        Slot(kind="noised", frames=2 * chunks, tokens_per_frame=1, frames_per_chunk=2),
    )


def test_the_expert_sees_its_chunk_and_what_that_is_denoised_from():
    queries, keys = expert_queries(), window().key_layout
    assert [slot.kind for slot in keys] == ["global", "clean", "noised"]
    chunks = [0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    mine = torch.tensor(chunks)
    assert torch.equal(dense_mask(expert_self_rule, queries, queries), mine[:, None] == mine)
    mask, tokens = dense_mask(expert_cross_rule, queries, keys), words(keys)
    for row, chunk in enumerate(chunks):
        past = {("clean", earlier) for earlier in range(chunk)}
        seen = {tokens[column] for column in mask[row].nonzero()}
        assert seen == {("global", None), ("noised", chunk)} | past


def test_one_chunk_has_no_clean_tokens():
    layout = window(chunks=1).layout
    assert [slot.kind for slot in layout] == ["global", "noised"]
    assert dense_mask(chunk_causal_rule, layout, layout).shape == (8, 8)


def test_tags_are_int32():
    tags = tags_of(window().layout)
    assert {column.dtype for column in tags} == {torch.int32}
    assert tags.kind.tolist() == [0] * 4 + [1] * 12 + [2] * 8
    assert tags.chunk.tolist() == [-1] * 4 + [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4
    assert tags.frame[4:10].tolist() == [0, 0, 1, 1, 2, 2]


LAYOUTS = {
    "encoder": (chunk_causal_rule, window(cells=40, text=70).layout, None),
    "decoder": (chunk_causal_rule, window().decoder_layout(2, 60), None),
    "expert, itself": (expert_self_rule, expert_queries(), None),
    "expert, video": (expert_cross_rule, expert_queries(), window(cells=40).key_layout),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_flex_mask_is_the_dense_one(case):
    rule, queries, keys = LAYOUTS[case]
    keys = queries if keys is None else keys
    dense = dense_mask(rule, queries, keys)
    flex = flex_mask(rule, queries, keys)
    assert flex.shape[-2:] == dense.shape
    by_token = create_mask(flex.mask_mod, 1, 1, *dense.shape, device="cpu")
    assert torch.equal(by_token[0, 0], dense)
    rows, columns = (-(-size // 128) * 128 for size in dense.shape)
    padded = torch.zeros(rows, columns, dtype=torch.bool)
    padded[: dense.shape[0], : dense.shape[1]] = dense
    by_block = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)
    assert torch.equal(flex.to_dense()[0, 0].bool(), by_block)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_gives_what_the_dense_mask_gives():
    layout = window().layout
    length = sum(slot.tokens for slot in layout)
    query, key, value = (torch.randn(2, length, heads, 16) for heads in (4, 2, 2))
    dense = attend(query, key, value, dense_mask(chunk_causal_rule, layout, layout))
    flex = attend(query, key, value, flex_mask(chunk_causal_rule, layout, layout))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-6)


def test_masks_are_kept_by_layout_and_can_be_trained_with():
    with torch.inference_mode():
        mask = attention_mask(chunk_causal_rule, window(cells=3).layout, device="cpu")
    assert not mask.is_inference()
    again = attention_mask(chunk_causal_rule, window(cells=3).layout, device="cpu")
    other = attention_mask(chunk_causal_rule, window(cells=4).layout, device="cpu")
    assert again is mask
    assert other.shape != mask.shape


def test_the_cache_forgets_what_was_used_longest_ago():
    cache, built = _MaskCache(2), []
    for key in "abacab":
        cache.get(key, lambda key=key: built.append(key) or torch.zeros(1))
    assert built == ["a", "b", "c", "b"]
