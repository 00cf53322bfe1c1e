"""The policy: a video backbone, and an action expert that reads what the backbone computes."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shardwalk.model_praxis.action_expert import ActionExpert
from shardwalk.model_praxis.backbone import Backbone
from shardwalk.model_praxis.config import MoeTrainingSettings, PraxisConfig
from shardwalk.model_praxis.parallelize import PraxisModelParallelizer
from shardwalk.model_praxis.policy_parts import policy_in
from shardwalk.model_praxis.state_dict import PraxisStateDictAdapter
from shardwalk.parallelizer_core import ModelParallelizer, StateDictAdapter


class PraxisOutput(NamedTuple):
    """What the policy says of a window.

    Attributes:
        velocity: of the video, [B, C, T, h, w]; None without decoding.
        action_velocity: of the action tokens, [B, T, token_dim].
    """

    velocity: Tensor | None
    action_velocity: Tensor


class PraxisPolicy(nn.Module):
    """One call denoises the video and the actions of a window of K chunks, T latent frames.

    The video autoencoder and the text encoder stay outside; their outputs are the inputs. Times are
    1 at noise and 0 at data, velocities are noise - data.

    Attributes:
        backbone: the video transformer.
        action_expert: the action transformer.
        parallelizer: how `parallelize_model` shards it.
        config: what the policy was made from.
        state_dict_adapter: how files hold its weights.

    Args:
        config: the whole configuration.
        training: what training does to the routers; by default nothing.

    Raises:
        TypeError: for documents in place of what is read from them.
    """

    parallelizer: ClassVar[ModelParallelizer] = PraxisModelParallelizer()

    state_dict_adapter: StateDictAdapter

    def __init__(
        self, config: PraxisConfig, *, training: MoeTrainingSettings | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, PraxisConfig):
            raise TypeError(
                f"config must be a PraxisConfig, not {type(config).__name__}; read a document with "
                f"PraxisConfig.from_dict"
            )
        if not isinstance(training, MoeTrainingSettings | None):
            raise TypeError(
                f"training must be MoeTrainingSettings, not {type(training).__name__}; read a "
                f"document with MoeTrainingSettings.from_dict"
            )
        self.config = config
        self.state_dict_adapter = PraxisStateDictAdapter()
        self.backbone = Backbone(config, training)
        self.action_expert = ActionExpert(config)

    def forward(
        self, *, noised: Tensor, times: Tensor, anchor: Tensor, text: Tensor, actions: Tensor,
        action_times: Tensor, proprio: Tensor, clean: Tensor | None = None,
        offsets: Tensor | None = None, decode: bool = True,
    ) -> PraxisOutput:  # fmt: skip
        """Denoise a window.

        Where nothing of the backbone is trained it runs without an autograd graph.

        Args:
            noised: latents [B, C, T, h, w].
            times: of each noised chunk, float [B, K].
            anchor: the latent frame before the first chunk, [B, C, 1, h, w].
            text: states of the text encoder, [B, X, hidden_dim].
            actions: noised action tokens, [B, T, token_dim].
            action_times: of each chunk's actions, float [B, K].
            proprio: normalized poses at the starts of the chunks, [B, K, proprio_dim].
            clean: latents of all chunks but the last, [B, C, T - L, h, w]; None for one chunk.
            offsets: int64 [B, 3], added to the positions of anchor, text and video.
            decode: whether the decoder runs; the actions are the same without it.

        Raises:
            ValueError: for tensors whose shapes do not fit together or the configuration.
        """
        self._check_actions(noised, actions, action_times, proprio)
        with torch.set_grad_enabled(torch.is_grad_enabled() and _is_trained(self.backbone)):
            video = self.backbone(
                noised=noised, clean=clean, anchor=anchor, text=text, times=times,
                offsets=offsets, decode=decode,
            )  # fmt: skip
        action_velocity = self.action_expert(
            actions=actions, action_times=action_times, proprio=proprio, video=video
        )
        return PraxisOutput(velocity=video.velocity, action_velocity=action_velocity)

    @property
    def max_tokens_per_window(self) -> int:
        """The longest sequence of either tower, for a caption of the largest length."""
        config, backbone = self.config, self.config.backbone
        chunks = config.chunking.window_chunks
        latents, video = config.chunking.latents_per_chunk, config.video
        cells = video.latent_height * video.latent_width
        patches = cells // backbone.patch_size**2
        fixed = backbone.encoder.num_registers + patches + config.text_encoder.max_tokens
        encoder = fixed + (2 * chunks - 1) * latents * patches
        return max(encoder, backbone.decoder.num_registers + chunks * latents * cells)

    def _check_actions(
        self, noised: Tensor, actions: Tensor, action_times: Tensor, proprio: Tensor
    ) -> None:
        space, per_chunk = self.config.action_space, self.config.chunking.latents_per_chunk
        batch, frames = noised.shape[0], noised.shape[2]
        chunks = frames // per_chunk
        for name, given, wanted in (
            ("actions", actions, (batch, frames, space.token_dim)),
            ("action_times", action_times, (batch, chunks)),
            ("proprio", proprio, (batch, chunks, space.proprio_dim)),
        ):
            if tuple(given.shape) != wanted:
                raise ValueError(
                    f"{name} has shape {list(given.shape)}, it must have {list(wanted)} for "
                    f"{batch} windows of {frames} latent frames, {per_chunk} to a chunk"
                )


def trains_backbone(policy: nn.Module) -> bool:
    """Whether any parameter of the backbone is trainable.

    If not, training needs neither the backbone's graph nor its decoder.

    Args:
        policy: a `PraxisPolicy`, or a module that holds one, such as a strategy's wrapper.

    Raises:
        TypeError: it neither is nor holds one.
    """
    return _is_trained(policy_in(policy, "trains_backbone").backbone)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
