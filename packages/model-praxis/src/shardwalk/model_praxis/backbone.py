"""The video transformer: an encoder over the whole window, and a decoder that denoises cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.config import (
    BackboneConfig,
    MoeTrainingSettings,
    PraxisConfig,
    TowerConfig,
)
from shardwalk.model_praxis.config_backbone import TEXT, VIDEO
from shardwalk.model_praxis.embeddings import (
    ModulationOut,
    TextIn,
    TimeFeatures,
    VideoOut,
    patchify,
)
from shardwalk.model_praxis.layers import Block, Modulation, RotaryTable, rotary_table
from shardwalk.model_praxis.masks import Layout, Mask, attention_mask, chunk_causal_rule
from shardwalk.model_praxis.positions import decoder_positions, encoder_positions
from shardwalk.model_praxis.windows import WindowShape, window_shape

_REGISTER_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class BackboneOutput:
    """What one pass gives.

    The action expert's keys are [globals | clean frames | noised frames]: `globals_in` in front of
    a tap, with `key_layout`, `key_positions` and `key_rotary`.

    Attributes:
        velocity: [B, C, T, h, w] in the dtype of the weights, or None without decoding.
        taps: the outputs of the tap blocks, each [B, clean + noised tokens, De], clean first.
        globals_in: the encoder's input for registers, anchor and text, [B, R + A + X, De].
        key_layout: the slots of the keys: global, clean (none for one chunk), noised.
        key_positions: int64 [B or 1, keys].
        key_rotary: the table of `key_positions`.
        frame_positions: int64 [B or 1, T]: that of the first token of each noised frame.
    """

    velocity: Tensor | None
    taps: tuple[Tensor, ...]
    globals_in: Tensor
    key_layout: Layout
    key_positions: Tensor
    key_rotary: RotaryTable
    frame_positions: Tensor


class EncoderTower(nn.Module):
    """The tower over [registers | anchor | text | noised frames | clean frames], in patches.

    Attributes:
        registers: [R, De].
        video_in, text_in, time_proj: make the rest of the sequence.
        blocks: the `Block`s.
        video_out: gives the decoder's modulation.
    """

    def __init__(self, config: BackboneConfig, training: MoeTrainingSettings) -> None:
        super().__init__()
        tower, patch = config.encoder, config.patch_size
        self.patch = patch
        self.registers = nn.Parameter(torch.empty(tower.num_registers, tower.dim))
        channels = config.input_projections[VIDEO].features
        self.video_in = nn.Linear(channels * patch * patch, tower.dim)
        self.text_in = TextIn(config.input_projections[TEXT], tower.dim, tower.norm_eps)
        self.time_proj = TimeFeatures(tower.dim)
        self.blocks = _blocks(config, tower, training)
        self.video_out = ModulationOut(tower.dim, patch, config.decoder.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the registers."""
        nn.init.normal_(self.registers, std=_REGISTER_STD)

    def embed(
        self, *, noised: Tensor, clean: Tensor | None, anchor: Tensor, text: Tensor, times: Tensor
    ) -> Tensor:
        """The input sequence, [B, tokens, De]; arguments as those of the backbone."""
        frames_per_chunk = noised.shape[2] // times.shape[1]
        frames = torch.cat((anchor, noised, *(() if clean is None else (clean,))), dim=2)
        at_zero = times.new_zeros(len(times), frames.shape[2] - noised.shape[2])
        moving = times.repeat_interleave(frames_per_chunk, dim=1)
        all_times = torch.cat((at_zero[:, :1], moving, at_zero[:, 1:]), dim=1)
        dtype = self.registers.dtype
        patches = self.video_in(patchify(frames, self.patch).to(self.video_in.weight.dtype))
        video = (patches + self.time_proj(all_times)[:, :, None]).to(dtype)
        registers = self.registers.expand(len(text), -1, -1)
        words = self.text_in(text).to(dtype)
        return torch.cat((registers, video[:, 0], words, video[:, 1:].flatten(1, 2)), dim=1)

    def forward(
        self, x: Tensor, *, rotary: RotaryTable, mask: Mask, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the blocks on an input sequence.

        Returns:
            The output of the last block, and those of the blocks of `taps`, in their order.
        """
        tapped = []
        for index, block in enumerate(self.blocks):
            x = block(x, rotary=rotary, mask=mask)
            if index in taps:
                tapped.append(x)
        return x, tuple(tapped)


class DecoderTower(nn.Module):
    """The tower over [registers | noised frames], one token per latent cell.

    Attributes:
        registers: [R, Dd].
        video_in: [C] to [Dd].
        blocks: the `Block`s.
        video_out: gives the velocity.
    """

    def __init__(self, config: BackboneConfig, training: MoeTrainingSettings) -> None:
        super().__init__()
        tower = config.decoder
        self.registers = nn.Parameter(torch.empty(tower.num_registers, tower.dim))
        self.video_in = nn.Linear(config.input_projections[VIDEO].features, tower.dim)
        self.blocks = _blocks(config, tower, training)
        channels = config.output_projections[VIDEO].features
        self.video_out = VideoOut(tower.dim, channels, tower.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the registers."""
        nn.init.normal_(self.registers, std=_REGISTER_STD)

    def forward(
        self, noised: Tensor, modulation: Modulation, *, rotary: RotaryTable, mask: Mask
    ) -> Tensor:
        """The velocity of latents.

        Args:
            noised: [B, C, T, h, w].
            modulation: of its cells, [B, T h w, Dd]; registers are not modulated.
            rotary: of registers and cells.
            mask: of registers and cells.

        Returns:
            [B, C, T, h, w].
        """
        latents = noised.movedim(1, -1)
        cells = self.video_in(latents.flatten(1, 3).to(self.video_in.weight.dtype))
        registers = self.registers.expand(len(cells), -1, -1)
        x = torch.cat((registers, cells.to(registers.dtype)), dim=1)
        modulation = _unmodulated_front(modulation, registers)
        for block in self.blocks:
            x = block(x, rotary=rotary, mask=mask, modulation=modulation)
        velocity = self.video_out(x[:, registers.shape[1] :])
        out: Tensor = velocity.unflatten(1, latents.shape[1:4]).movedim(-1, 1)
        # No view leaves the policy: in a sharded one an in-place op on it would drop a hook.
        return out.clone(memory_format=torch.contiguous_format)


class Backbone(nn.Module):
    """Both towers: `encoder` and `decoder`, each with `blocks`.

    Args:
        config: the whole configuration.
        training: what training does to the routers; by default nothing.
    """

    def __init__(self, config: PraxisConfig, training: MoeTrainingSettings | None = None) -> None:
        super().__init__()
        self.config, settings = config, training or MoeTrainingSettings()
        self.encoder = EncoderTower(config.backbone, settings)
        self.decoder = DecoderTower(config.backbone, settings)

    def forward(
        self,
        *,
        noised: Tensor,
        clean: Tensor | None,
        anchor: Tensor,
        text: Tensor,
        times: Tensor,
        offsets: Tensor | None = None,
        decode: bool = True,
    ) -> BackboneOutput:
        """Denoise the video of a window.

        Args:
            noised: latents [B, C, T, h, w]; T is chunks x latents per chunk.
            clean: those of all chunks but the last, [B, C, T - L, h, w]; None for one chunk.
            anchor: the latent frame before the first chunk, [B, C, 1, h, w].
            text: states of the text encoder, [B, X, hidden_dim].
            times: the time of each noised chunk, float [B, chunks]; 0 is clean, 1 is noise.
            offsets: int64 [B, 3], added to the positions of anchor, text and video.
            decode: whether the decoder runs; without it the velocity is None.

        Raises:
            ValueError: for tensors whose shapes do not fit together or the configuration.
        """
        window = window_shape(
            self.config, noised=noised, clean=clean, anchor=anchor, text=text, times=times,
            offsets=offsets,
        )  # fmt: skip
        positions = self._encoder_positions(window, noised, offsets)
        rotary = self._rotary(positions)
        embedded = self.encoder.embed(
            noised=noised, clean=clean, anchor=anchor, text=text, times=times
        )
        mask = attention_mask(chunk_causal_rule, window.layout, device=noised.device)
        hidden, taps = self.encoder(
            embedded, rotary=rotary, mask=mask, taps=self.config.action_expert.taps
        )
        first, last = window.globals, window.globals + window.noised
        conditions = hidden[:, first:last]
        return BackboneOutput(
            velocity=self._decode(noised, conditions, window, offsets) if decode else None,
            taps=tuple(window.clean_first(tap[:, first:]) for tap in taps),
            globals_in=embedded[:, :first],
            key_layout=window.key_layout,
            key_positions=window.key_order(positions),
            key_rotary=RotaryTable(*(window.key_order(part) for part in rotary)),
            frame_positions=positions[:, first : last : window.cells],
        )

    def _decode(
        self, noised: Tensor, conditions: Tensor, window: WindowShape, offsets: Tensor | None
    ) -> Tensor:
        rows = noised.shape[3] // self.config.backbone.patch_size
        by_frame = conditions.unflatten(1, (window.frames, window.cells))
        registers = self.config.backbone.decoder.num_registers
        *_, frames, height, width = noised.shape
        positions = decoder_positions(
            self.config.backbone.rope, registers=registers, frames=frames, height=height,
            width=width, offsets=offsets, device=noised.device,
        )  # fmt: skip
        layout = window.decoder_layout(registers, height * width)
        velocity: Tensor = self.decoder(
            noised,
            self.encoder.video_out.modulation(by_frame, rows),
            rotary=self._rotary(positions),
            mask=attention_mask(chunk_causal_rule, layout, device=noised.device),
        )
        return velocity

    def _encoder_positions(
        self, window: WindowShape, noised: Tensor, offsets: Tensor | None
    ) -> Tensor:
        patch = self.config.backbone.patch_size
        return encoder_positions(
            self.config.backbone.rope, registers=window.registers, text=window.text,
            frames=window.frames, clean_frames=window.clean_frames,
            height=noised.shape[3] // patch, width=noised.shape[4] // patch, offsets=offsets,
            device=noised.device,
        )  # fmt: skip

    def _rotary(self, positions: Tensor) -> RotaryTable:
        config = self.config.backbone
        return rotary_table(positions, config.attention.head_dim, config.rope.theta)


def _blocks(
    config: BackboneConfig, tower: TowerConfig, training: MoeTrainingSettings
) -> nn.ModuleList:
    moe = config.layer_moe(tower, training)
    return nn.ModuleList(
        Block(tower, config.attention, None if index <= tower.dense_layers else moe, index=index)
        for index in range(1, tower.num_layers + 1)
    )


def _unmodulated_front(modulation: Modulation, registers: Tensor) -> Modulation:
    shift, scale = modulation
    size = (len(shift), registers.shape[1], shift.shape[2])
    return Modulation(
        shift=torch.cat((shift.new_zeros(size), shift), dim=1),
        scale=torch.cat((scale.new_ones(size), scale), dim=1),
    )
