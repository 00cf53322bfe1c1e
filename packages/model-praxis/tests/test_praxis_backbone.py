"""The two towers: where tokens are, what may not leak, and what goes to the action expert."""

import math

import pytest
import torch
from praxis_toys import random_inputs, randomize, tiny_config
from torch import nn

from shardwalk.model_praxis import Backbone, MoeTrainingSettings
from shardwalk.model_praxis.layers import FeedForward
from shardwalk.model_praxis.masks import tags_of
from shardwalk.model_praxis.positions import decoder_positions, encoder_positions
from shardwalk.moe_ep import MoE
from shardwalk.parallelizer_core import apply_activation_checkpointing, materialize

CONFIG = tiny_config()
STRIDE, REGISTERS, TEXT, CELLS = 1024, 3, 5, 4
GLOBALS = REGISTERS + CELLS + TEXT


@pytest.fixture(scope="module")
def backbone():
    made = Backbone(CONFIG)
    randomize(made)
    return made


def frames_of(chunk: int) -> slice:
    return slice(2 * chunk, 2 * chunk + 2)


def test_leading_blocks_are_dense_and_each_tower_counts_its_own(backbone):
    for tower, sparse in ((backbone.encoder, 3), (backbone.decoder, 1)):
        kinds = [type(block.ffn) for block in tower.blocks]
        assert kinds == [FeedForward] + [MoE] * sparse
        scales = [block.input_scale for block in tower.blocks]
        assert scales == [1 / math.sqrt(index) for index in range(1, 2 + sparse)]


def test_positions_are_those_of_the_plan():
    sizes = {"registers": REGISTERS, "text": TEXT, "frames": 6, "clean_frames": 4}
    rope = CONFIG.backbone.rope
    (found,) = encoder_positions(rope, **sizes, height=2, width=2)
    cells = torch.tensor([1, 2, 33, 34])
    blocks = torch.arange(2, 8)[:, None] * STRIDE
    noised = (blocks + cells).flatten()
    words = STRIDE + 1 + torch.arange(TEXT)
    expected = torch.cat((torch.zeros(3), cells, words, noised, noised[:16])).long()
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    (found,) = decoder_positions(rope, registers=2, frames=2, height=2, width=3)
    cells = torch.tensor([1, 2, 3, 33, 34, 35])
    assert torch.equal(found, torch.cat((torch.zeros(2).long(), cells, cells + STRIDE)))


def test_offsets_move_anchor_text_and_both_copies_of_the_video():
    offsets, rope = torch.tensor([[10, 200, 3000], [0, 0, 1]]), CONFIG.backbone.rope
    sizes = {"registers": 3, "text": 5, "frames": 6, "clean_frames": 4, "height": 2, "width": 2}
    still, moved = (encoder_positions(rope, **sizes, offsets=o) for o in (None, offsets))
    runs = (3, 4, 5, 40)
    shift = torch.tensor([[0, 10, 200, 3000], [0, 0, 0, 1]]).repeat_interleave(
        torch.tensor(runs), 1
    )
    assert torch.equal(moved - still, shift)
    sizes = {"registers": 2, "frames": 6, "height": 4, "width": 4}
    still, moved = (decoder_positions(rope, **sizes, offsets=o) for o in (None, offsets))
    shift = torch.tensor([[0, 3000], [0, 1]]).repeat_interleave(torch.tensor((2, 96)), 1)
    assert torch.equal(moved - still, shift)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_chunk_depends_on_its_noise_and_the_clean_past_alone(backbone, chunk):
    """By gradients: exactly zero where nothing may flow, and never where something must."""
    given = random_inputs(CONFIG, text=TEXT)
    noised, clean, times = (given[name].requires_grad_() for name in ("noised", "clean", "times"))
    out = backbone(**given)
    out.velocity[:, :, frames_of(chunk)].square().sum().backward()
    for other in range(3):
        assert noised.grad[:, :, frames_of(other)].any() == (other == chunk)
        assert times.grad[:, other].any() == (other == chunk)
    for other in range(2):
        assert clean.grad[:, :, frames_of(other)].any() == (other < chunk)
    backbone.zero_grad()


@torch.no_grad()
def test_another_noise_or_a_later_clean_chunk_changes_neither_velocity_nor_routes(backbone):
    given = random_inputs(CONFIG, text=TEXT)
    expected = backbone(**given)
    changed = {**given, "noised": given["noised"].clone(), "clean": given["clean"].clone()}
    changed["noised"][:, :, frames_of(0)] += 1
    changed["noised"][:, :, frames_of(2)] *= -1
    changed["clean"][:, :, frames_of(1)] += 1
    changed["times"] = given["times"] * torch.tensor([0.5, 1.0, 0.1])
    found = backbone(**changed)
    torch.testing.assert_close(
        found.velocity[:, :, frames_of(1)], expected.velocity[:, :, frames_of(1)]
    )
    tokens = slice(16 + 8, 16 + 16)  # the noised tokens of chunk 1, behind 16 clean ones
    for mine, theirs in zip(found.taps, expected.taps, strict=True):
        torch.testing.assert_close(mine[:, tokens], theirs[:, tokens])
        torch.testing.assert_close(mine[:, :8], theirs[:, :8])  # the clean copy of chunk 0
        assert (mine[:, 8:16] - theirs[:, 8:16]).abs().max() > 1e-2
    changed["clean"][:, :, frames_of(0)] += 1
    moved = backbone(**changed).velocity[:, :, frames_of(1)]
    assert (moved - expected.velocity[:, :, frames_of(1)]).abs().max() > 1e-2


@torch.no_grad()
def test_every_input_reaches_the_velocity_of_every_chunk_that_may_see_it(backbone):
    given = random_inputs(CONFIG, text=TEXT, offsets=True)
    expected = backbone(**given).velocity
    for name in ("anchor", "text", "offsets"):
        other = backbone(**{**given, name: given[name].flip(-1)}).velocity
        for chunk in range(3):
            difference = other[:, :, frames_of(chunk)] - expected[:, :, frames_of(chunk)]
            assert difference.abs().max() > 1e-3, (name, chunk)


@torch.no_grad()
def test_what_the_action_expert_gets(backbone):
    given = random_inputs(CONFIG, windows=2, text=TEXT, offsets=True)
    seen = {}
    hooks = [
        backbone.encoder.blocks[index].register_forward_hook(
            lambda _, inputs, output, index=index: seen.update({index: (inputs[0], output)})
        )
        for index in range(4)
    ]
    out = backbone(**given)
    for hook in hooks:
        hook.remove()
    assert torch.equal(out.globals_in, seen[0][0][:, :GLOBALS])
    for tap, index in zip(out.taps, CONFIG.action_expert.taps, strict=True):
        noised, clean = seen[index][1][:, GLOBALS:].split((24, 16), dim=1)
        assert torch.equal(tap, torch.cat((clean, noised), dim=1))
    kinds = [(slot.kind, slot.frames) for slot in out.key_layout]
    assert kinds == [("global", 1), ("clean", 4), ("noised", 6)]
    tags = tags_of(out.key_layout)
    assert out.key_positions.shape == (2, len(tags.kind)) == (2, GLOBALS + 40)
    first = out.key_positions[:, GLOBALS + 16 :: CELLS]
    assert torch.equal(out.frame_positions, first)
    assert torch.equal(
        out.frame_positions - given["offsets"][:, 2:],
        (torch.arange(2, 8) * STRIDE + 1).expand(2, 6),
    )
    assert torch.equal(out.key_positions[:, GLOBALS : GLOBALS + 16 : CELLS], first[:, :4])
    angles = out.key_positions.double()
    torch.testing.assert_close(out.key_rotary.cos[..., 0], angles.cos().float())
    torch.testing.assert_close(out.key_rotary.sin[..., 0], angles.sin().float())


@torch.no_grad()
def test_without_decoding_the_decoder_never_runs(backbone):
    given = random_inputs(CONFIG)
    expected, ran = backbone(**given), []
    hook = backbone.decoder.register_forward_pre_hook(lambda *_: ran.append(1))
    found = backbone(**given, decode=False)
    hook.remove()
    assert found.velocity is None
    assert not ran
    assert all(map(torch.equal, found.taps, expected.taps))


@torch.no_grad()
def test_one_chunk_has_no_clean_tokens(backbone):
    out = backbone(**random_inputs(CONFIG, chunks=1))
    assert [slot.kind for slot in out.key_layout] == ["global", "noised"]
    assert [tap.shape[1] for tap in out.taps] == [8, 8]
    assert out.velocity.shape == (1, 6, 2, 4, 4)


@torch.no_grad()
def test_windows_of_a_batch_do_not_touch_each_other(backbone):
    given = random_inputs(CONFIG, windows=2, offsets=True)
    both = backbone(**given).velocity
    for window in (0, 1):
        alone = backbone(**{name: tensor[[window]] for name, tensor in given.items()}).velocity
        torch.testing.assert_close(alone[0], both[window], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_cell_is_modulated_by_its_own_patch(backbone):
    """The decoder's blocks see registers unmodulated, then cells in order of frame, row, column."""
    given, seen = random_inputs(CONFIG), []
    hook = backbone.decoder.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0], kwargs["modulation"])), with_kwargs=True
    )
    encoded = []
    tail = backbone.encoder.blocks[-1].register_forward_hook(lambda *got: encoded.append(got[-1]))
    backbone(**given)
    hook.remove()
    tail.remove()
    (x, (shift, scale)), out = seen[0], backbone.encoder.video_out
    assert not shift[:, :2].any()
    assert (scale[:, :2] == 1).all()
    frame, row, column = 3, 2, 1  # in the patch (1, 0): its first row, second column
    token = encoded[0][0, GLOBALS + frame * CELLS + 2]
    expected = out(token).view(2, 2, 2, 64)[0, 1]
    cell = 2 + frame * 16 + row * 4 + column
    torch.testing.assert_close(torch.stack((shift[0, cell], scale[0, cell])), expected)
    latent = given["noised"][0, :, frame, row, column]
    torch.testing.assert_close(x[0, cell], backbone.decoder.video_in(latent))


@torch.no_grad()
def test_velocities_come_back_at_their_cells(backbone):
    given, seen = random_inputs(CONFIG), []
    hook = backbone.decoder.blocks[-1].register_forward_hook(lambda *got: seen.append(got[-1]))
    velocity = backbone(**given).velocity
    hook.remove()
    token = seen[0][0, 2 + 5 * 16 + 3 * 4 + 2]
    torch.testing.assert_close(velocity[0, :, 5, 3, 2], backbone.decoder.video_out(token))


def test_the_balance_loss_of_all_sparse_layers_has_the_weight_together():
    made = Backbone(CONFIG, MoeTrainingSettings(balance_loss_weight=0.3))
    gates = [block.ffn.gate for tower in (made.encoder, made.decoder) for block in tower.blocks[1:]]
    for gate in gates:  # equal scores: each layer's loss is its coefficient, wherever tokens go
        nn.init.zeros_(gate.weight)
    made(**random_inputs(CONFIG, windows=2))
    assert len(gates) == CONFIG.backbone.moe_layers == 4
    torch.testing.assert_close(sum(gate.last_balance_loss for gate in gates), torch.tensor(0.3))
    assert Backbone(CONFIG).encoder.blocks[1].ffn.gate.balance_loss is None


def test_checkpointed_towers_give_the_same_gradients():
    given, results = random_inputs(CONFIG, offsets=True), []
    for checkpointed in (False, True):
        made = Backbone(CONFIG, MoeTrainingSettings(balance_loss_weight=0.3))
        randomize(made)
        if checkpointed:
            apply_activation_checkpointing(made, "full")
        out = made(**given)
        (out.velocity.square().mean() + sum(tap.square().mean() for tap in out.taps)).backward()
        results.append({name: parameter.grad for name, parameter in made.named_parameters()})
    plain, checkpointed = results
    assert all(gradient is not None and gradient.any() for gradient in plain.values())
    torch.testing.assert_close(checkpointed, plain)


def test_a_start_on_meta_gets_all_values():
    with torch.device("meta"):
        made = Backbone(CONFIG)
    materialize(made, init="reset_parameters", seed=3)
    plain = Backbone(CONFIG)
    materialize(plain, init="reset_parameters", seed=3)
    torch.testing.assert_close(made.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert made.encoder.time_proj.frequencies.std() > 0.5
    assert made.encoder.registers.any()
    assert not made.encoder.blocks[0].norm1.weight.any()
    assert made(**random_inputs(CONFIG)).velocity.isfinite().all()


@torch.no_grad()
def test_bfloat16_towers_keep_tables_modulation_and_routers_in_float32():
    exact = Backbone(CONFIG)
    randomize(exact)
    made = Backbone(CONFIG)
    made.load_state_dict(exact.state_dict())
    made.bfloat16()
    seen = []
    for block in (*made.encoder.blocks, *made.decoder.blocks):
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((
                args[0],
                kwargs["rotary"],
                kwargs.get("modulation"),
            )),
            with_kwargs=True,
        )
    given = random_inputs(CONFIG, offsets=True)
    out = made(**given)
    assert out.velocity.dtype == torch.bfloat16
    for hidden, rotary, modulation in seen:
        assert hidden.dtype == torch.bfloat16
        assert {part.dtype for part in (*rotary, *(modulation or ()))} == {torch.float32}
    assert made.decoder.blocks[1].ffn.gate.weight.dtype == torch.float32
    assert len(seen) == 6
    reference = exact(**given)
    error = (out.globals_in - reference.globals_in).abs().max()
    assert error < 0.05


REFUSED = {
    "a broken chunk": ({"noised": torch.zeros(1, 6, 5, 4, 4)}, "noised has shape .*latents_per_chunk=2"),
    "too many chunks": ({"noised": torch.zeros(1, 6, 8, 4, 4)}, "T from 1 to 3"),
    "no batch": ({"noised": torch.zeros(6, 6, 4, 4)}, "noised has shape"),
    "other latents": ({"noised": torch.zeros(1, 6, 6, 4, 8)}, "noised has shape .* it must have"),
    "no clean copies": ({"clean": None}, "3 chunk\\(s\\) and clean is None"),
    "a clean copy of the last": ({"clean": torch.zeros(1, 6, 6, 4, 4)}, "clean has shape"),
    "an anchor without frames": ({"anchor": torch.zeros(1, 6, 4, 4)}, "anchor has shape"),
    "times of frames": ({"times": torch.zeros(1, 6)}, "times has shape"),
    "an offset for the batch": ({"offsets": torch.zeros(3).long()}, "offsets has shape"),
    "long text": ({"text": torch.zeros(1, 13, 20)}, "up to text_encoder.max_tokens=12"),
    "another text": ({"text": torch.zeros(1, 5, 8)}, "text has shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_do_not_fit_are_refused(backbone, case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        backbone(**{**random_inputs(CONFIG), **changes})
