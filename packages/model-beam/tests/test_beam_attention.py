"""Who sees whom: windows, packed sequences, padding; and how sharply."""

from __future__ import annotations

import pytest
import torch
from beam_toys import FULL, SLIDING, beam_config, tiny_beam, token_ids
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwalk.model_beam.inputs import Rows
from shardwalk.model_beam.layers import BeamAttention
from shardwalk.model_beam.masks import numbered, positions_in, sequences_of, visible_keys
from shardwalk.model_beam.rotary import query_scale
from shardwalk.moe_ep.router import find_gates

INTEGERS = [torch.uint8, torch.uint16, torch.uint32, torch.uint64,
            torch.int8, torch.int16, torch.int32, torch.int64]  # fmt: skip
LENGTHS = [20, 1, 9]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def loads(model: nn.Module) -> list[list[int]]:
    return [gate.load.tolist() for gate in find_gates(model)]


def each_alone(model: nn.Module, sequences: list[Tensor]) -> tuple[list[Tensor], Tensor, int]:
    """Logits of each sequence by itself, the summed loss, and the number of targets."""
    logits, total, targets = [], torch.zeros(()), 0
    for ids in sequences:
        out = model(ids[None], labels=ids[None])
        logits.append(out.logits[0])
        total = total + out.loss * (len(ids) - 1)
        targets += len(ids) - 1
    return logits, total, targets


def assert_same_as_alone(found, spans, model: nn.Module, sequences: list[Tensor]) -> None:
    """Logits, mean loss, gradients and loads of a call are those of the sequences one by one."""
    found.loss.backward()
    got, got_loads = gradients(model), loads(model)
    model.zero_grad()
    for gate in find_gates(model):
        gate.reset_load()
    logits, total, targets = each_alone(model, sequences)
    for mine, alone in zip(spans, logits, strict=True):
        torch.testing.assert_close(mine, alone, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(found.loss, total / targets, atol=1e-6, rtol=1e-6)
    (total / targets).backward()
    wanted = gradients(model)
    largest = max(each.abs().max() for each in wanted.values())
    for name, gradient in wanted.items():
        assert got[name].isfinite().all(), name
        scale = max(gradient.abs().max(), 1e-2 * largest)
        assert (got[name] - gradient).abs().max() <= 1e-5 * scale, name
    assert got_loads == loads(model)


@pytest.mark.parametrize("window", [1, 3, 8, 40])
def test_a_query_sees_exactly_its_window(window):
    length = 12
    seen = visible_keys(length, window=window)
    if window >= length:
        assert seen is None
        return
    counts = seen[0, 0].sum(1)
    assert counts.tolist() == [min(row + 1, window) for row in range(length)]
    assert seen[0, 0].triu(1).sum() == 0


def test_padding_is_seen_by_itself_alone():
    """A row of a mask without any key gives NaN in some kernels."""
    is_token = torch.tensor([[False, True, True, False, True]])
    seen = visible_keys(5, window=3, is_token=is_token)[0, 0].int()
    assert seen.tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 0, 1],
    ]


def test_a_sliding_layer_feels_the_last_key_of_its_window_and_none_before():
    model = tiny_beam(num_hidden_layers=1, layer_types=[SLIDING], mlp_layer_types=["dense"],
                      sliding_window=5)  # fmt: skip
    ids = token_ids(1, 16)
    row, plain = 12, model(ids).logits[0]
    for key in range(16):
        changed = ids.clone()
        changed[0, key] = (changed[0, key] + 1) % 256
        is_equal = torch.equal(model(changed).logits[0, row], plain[row])
        assert is_equal == (key not in range(row - 4, row + 1)), key


def test_a_full_layer_without_rotation_scales_queries_by_position():
    wanted = {0: 1.0000488, 2047: 1.0717735, 100000: 1.4782500}
    scale = query_scale(torch.tensor([list(wanted)]))
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, torch.tensor([list(wanted.values())]), atol=1e-7, rtol=1e-6)

    config = beam_config(layer_types=[FULL] * 6)
    rows = Rows.of(torch.zeros(1, 3, 64), position_ids=torch.tensor([[2047, 2048, 2049]]))
    arguments = rows.for_layer(config, FULL)
    assert arguments["rotary"] is None
    assert arguments["query_scale"][0, 0].item() == pytest.approx(1.0717735, abs=1e-7)
    # A scale of 2 is a softmax of doubled scores: what doubled keys give, which nobody norms.
    attention = BeamAttention(config)
    nn.init.normal_(attention.q_norm.weight)
    x = torch.randn(1, 9, 64)
    scaled = attention(x, query_scale=torch.full((1, 9), 2.0))
    attention.k_norm.weight.data *= 2
    torch.testing.assert_close(scaled, attention(x))


@pytest.mark.parametrize(
    "how", ["sequence_ids", "position_ids", "flat_sequence_ids", "flat_position_ids"]
)
def test_packed_sequences_are_each_alone(how):
    model = tiny_beam()
    sequences = [token_ids(1, length, seed=length)[0] for length in LENGTHS]
    packed = torch.cat(sequences)
    numbers = torch.cat([torch.full((length,), 7 - length) for length in LENGTHS])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    given = (
        {"sequence_ids": numbers} if how.endswith("sequence_ids") else {"position_ids": positions}
    )
    flat = how.startswith("flat")
    arguments = {"input_ids": packed, "labels": packed, **given}
    if not flat:
        arguments = {name: value[None] for name, value in arguments.items()}
    found = model(**arguments, output_hidden_states=True)
    logits = found.logits if flat else found.logits[0]
    assert logits.shape == (30, 256)
    assert found.hidden_states[0].shape == ((30, 64) if flat else (1, 30, 64))
    assert_same_as_alone(found, logits.split(LENGTHS), model, sequences)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_padded_rows_are_those_without_padding(side, wrapped):
    """Also where a wrapper stands around each feed-forward part."""
    model = tiny_beam()
    if wrapped:
        for block in model.model.blocks:
            block.mlp = checkpoint_wrapper(block.mlp)
    sequences = [token_ids(1, length, seed=length)[0] for length in LENGTHS]
    longest = max(LENGTHS)
    ids, mask = torch.full((3, longest), 5), torch.zeros(3, longest, dtype=torch.int64)
    spans = [
        slice(longest - length, longest) if side == "left" else slice(0, length)
        for length in LENGTHS
    ]
    for row, (span, sequence) in enumerate(zip(spans, sequences, strict=True)):
        ids[row, span], mask[row, span] = sequence, 1
    found = model(ids, mask, labels=ids)
    assert found.logits.isfinite().all()
    logits = [found.logits[row, span] for row, span in enumerate(spans)]
    assert_same_as_alone(found, logits, model, sequences)


@pytest.mark.parametrize("by", ["sequence_ids", "position_ids"])
def test_packed_sequences_with_padding_around_them_are_each_alone(by):
    model = tiny_beam()
    sequences = [token_ids(1, length, seed=length)[0] for length in LENGTHS]
    gaps = [3, 0, 2]  # columns of padding before each
    ids, mask, numbers, positions, spans = [], [], [], [], []
    for number, (gap, sequence) in enumerate(zip(gaps, sequences, strict=True)):
        start = sum(map(len, ids)) + gap
        spans.append(slice(start, start + len(sequence)))
        ids += [torch.full((gap,), 5), sequence]
        mask += [torch.zeros(gap), torch.ones(len(sequence))]
        numbers += [torch.full((gap,), 0), torch.full((len(sequence),), number + 1)]
        positions += [torch.full((gap,), -9999), torch.arange(len(sequence))]
    row = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    row[by] = numbers if by == "sequence_ids" else positions
    found = model(**{name: torch.cat(parts).long()[None] for name, parts in row.items()})
    assert_same_as_alone(found, [found.logits[0, span] for span in spans], model, sequences)


def test_sequences_begin_where_positions_or_numbers_say_so():
    positions = torch.tensor([[4, 5, 6, 0, 1, 9, 10]])
    assert sequences_of(positions).tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    is_token = torch.tensor([[False, True, True, False, True, False, True]])
    counted, spread = torch.tensor([[9, 0, 1, 9, 2, 9, 3]]), torch.tensor([[0, 1, 2, 3, 4, 5, 6]])
    anew = torch.tensor([[0, 0, 1, -1, 0, 0, 1]])
    assert sequences_of(counted, is_token).tolist() == [[0] * 7]
    assert sequences_of(spread, is_token).tolist() == [[0] * 7]
    assert sequences_of(anew, is_token).tolist() == [[0, 0, 0, 0, 1, 1, 1]]

    numbers = torch.tensor([[0, 3, 3, 0, 3, 0, 0]])
    assert numbered(numbers).tolist() == [[0, 1, 1, 2, 3, 4, 4]]
    assert numbered(numbers, is_token).tolist() == [[0, 0, 0, 0, 0, 0, 1]]
    everything = torch.ones_like(is_token)
    assert positions_in(numbered(numbers), everything).tolist() == [[0, 0, 1, 0, 0, 0, 1]]
    at_tokens = positions_in(None, is_token)[is_token]
    assert at_tokens.tolist() == [0, 1, 2, 3]


def test_what_excludes_nothing_leaves_the_causal_kernel():
    embeddings = torch.zeros(2, 6, 64)
    plain = torch.arange(3, 9).expand(2, -1)
    for given in (
        {},
        {"attention_mask": torch.ones(2, 6, dtype=torch.int64)},
        {"position_ids": plain},
        {"sequence_ids": torch.full((2, 6), 4)},
    ):
        rows = Rows.of(embeddings, **given)
        assert rows.is_token is None
        assert rows.sequence_ids is None
        assert rows.for_layer(beam_config(), FULL)["mask"] is None
        assert rows.for_layer(beam_config(), SLIDING)["mask"] is None  # a window of 8
    assert torch.equal(Rows.of(embeddings, position_ids=plain[:1]).position_ids, plain)


def test_any_integer_dtype_does_for_masks_and_numbers():
    model = tiny_beam(num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL],
                      mlp_layer_types=["dense", "dense", "sparse"])  # fmt: skip
    ids = token_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    numbers = torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)
    positions = (torch.arange(12) % 5).expand(2, -1)
    with torch.no_grad():
        wanted = model(ids, mask, sequence_ids=numbers, labels=ids)
        for dtype in INTEGERS:
            # int8 does not hold the labels.
            labels = None if dtype == torch.int8 else ids.to(dtype)
            found = model(ids, mask.to(dtype), sequence_ids=numbers.to(dtype), labels=labels)
            assert torch.equal(found.logits, wanted.logits)
            assert labels is None or torch.equal(found.loss, wanted.loss)
            by_position = model(ids, mask.to(dtype), positions.to(dtype))
            assert torch.equal(by_position.logits[mask.bool()], wanted.logits[mask.bool()])
        found = model(ids.int(), mask.bool(), sequence_ids=numbers)
        assert torch.equal(found.logits, wanted.logits)


def test_attention_is_dropped_in_training_only():
    ids = token_ids(2, 12)
    plain = tiny_beam()
    model = tiny_beam(attention_dropout=0.5)
    once, again = model(ids, labels=ids), model(ids, labels=ids)
    assert not torch.equal(once.logits, again.logits)
    once.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval()
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_shared_keys_are_those_of_each_query_head_spelled_out():
    shared = tiny_beam(num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING],
                       mlp_layer_types=["dense"] * 3)  # fmt: skip
    spread = tiny_beam(num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING],
                       mlp_layer_types=["dense"] * 3, num_key_value_heads=4)  # fmt: skip
    state = shared.state_dict()
    for name, weight in state.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = weight.unflatten(0, (2, 16)).repeat_interleave(2, 0).flatten(0, 1)
    spread.load_state_dict(state)
    ids = token_ids(2, 20)
    torch.testing.assert_close(shared(ids).logits, spread(ids).logits, atol=1e-6, rtol=1e-6)
