"""The video transformer: an encoder over the whole window, and a decoder that denoises cells."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardwalk.model_praxis.config import MoeTrainingSettings, PraxisConfig
from shardwalk.model_praxis.layers import RotaryTable
from shardwalk.model_praxis.masks import Layout


@dataclass(frozen=True, kw_only=True)
class BackboneOutput:
    """What one pass gives.

    The action expert's keys are [globals | clean frames | noised frames]: `globals_in` in front of
    a tap, with `key_layout`, `key_positions` and `key_rotary`.

    Attributes:
        velocity: [B, C, T, h, w], or None without decoding.
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


class Backbone(nn.Module):
    """Both towers: attributes `encoder` and `decoder`, each with `blocks`.

    Args:
        config: the whole configuration.
        training: what training does to the routers; by default nothing.
    """

    def __init__(self, config: PraxisConfig, training: MoeTrainingSettings | None = None) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(
        self, *, noised: Tensor, clean: Tensor | None, anchor: Tensor, text: Tensor, times: Tensor,
        offsets: Tensor | None = None, decode: bool = True,
    ) -> BackboneOutput:  # fmt: skip
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
        raise NotImplementedError
