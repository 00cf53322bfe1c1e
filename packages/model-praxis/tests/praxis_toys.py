"""A small configuration, lawful random inputs for it, and weights that hide no mistake."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from shardwalk.model_praxis import PraxisConfig


def tiny_document(**changes: Any) -> dict[str, Any]:
    """A config.json; changes by dotted path with "__" for the dots."""
    document = json.loads(json.dumps(_TINY))
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = document
        for section in sections:
            place = place[section]
        place[key] = value
    return document


def tiny_config(**changes: Any) -> PraxisConfig:
    return PraxisConfig.from_dict(tiny_document(**changes))


_TINY: dict[str, Any] = {
    "model_type": "praxis",
    "torch_dtype": "float32",
    "backbone": {
        "encoder": {"dim": 64, "num_layers": 4, "ffn_dim": 96, "dense_layers": 1, "num_registers": 3},
        "decoder": {"dim": 64, "num_layers": 2, "ffn_dim": 96, "dense_layers": 1, "num_registers": 2},
        "attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        "moe": {"num_experts": 8, "top_k": 2, "expert_dim": 32, "shared_dim": 48, "route_scale": 1.5},
        "rope": {"frame_stride": 1024, "row_stride": 32},
        "patch_size": 2,
        "input_projections": {
            "VideoTensor": {"features": 6},
            "TextEncodingTensor": {"features": 20, "hidden_dim": 40},
        },
        "output_projections": {"VideoTensor": {"features": 6}},
    },
    "action_expert": {
        "dim": 32, "num_heads": 2, "head_dim": 16, "mlp_dim": 48, "taps": [1, 3],
        "num_future_tokens": 2, "time_features": 16,
    },
    "action_space": {"row_dim": 5, "proprio_dim": 7, "rows_per_token": 4},
    "normalization": {
        "action_q01": [-1.0] * 5, "action_q99": [1.0] * 5,
        "proprio_mean": [0.0] * 7, "proprio_std": [1.0] * 7,
    },
    "chunking": {
        "chunk_frames": 8, "latents_per_chunk": 2, "window_chunks": 3, "window_frames": 25,
    },
    "video": {
        "canvas_height": 64, "canvas_width": 64, "latent_channels": 6, "latent_height": 4,
        "latent_width": 4,
    },
    "text_encoder": {
        "name": "text", "hidden_dim": 20, "max_tokens": 12, "unconditional_caption": "",
    },
}  # fmt: skip


def random_inputs(
    config: PraxisConfig, *, windows: int = 1, chunks: int = 3, text: int = 5, seed: int = 0,
    offsets: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the backbone's forward."""
    generator = torch.Generator().manual_seed(seed)
    video, per_chunk = config.video, config.chunking.latents_per_chunk

    def latents(frames: int) -> Tensor:
        size = (windows, video.latent_channels, frames, video.latent_height, video.latent_width)
        return torch.randn(size, generator=generator)

    noised = latents(chunks * per_chunk)
    clean = latents((chunks - 1) * per_chunk) if chunks > 1 else None
    states = (windows, text, config.text_encoder.hidden_dim)
    size, stride = (windows, 3), config.backbone.rope.frame_stride
    return {
        "noised": noised,
        "clean": clean,
        "anchor": latents(1),
        "text": torch.randn(states, generator=generator),
        "times": torch.rand((windows, chunks), generator=generator),
        "offsets": torch.randint(stride, size, generator=generator) if offsets else None,
    }


@torch.no_grad()
def randomize(model: nn.Module, *, seed: int = 0) -> None:
    """Draw every weight, also those that start at 0, and the biases of the routers.

    Each is drawn for its name, so that models which share modules share their values.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in tensors:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        value = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(value * _std(name, tensor) + (name.endswith("phases") * 0.5))


def _std(name: str, tensor: Tensor) -> float:
    if name.endswith(("e_score_correction_bias", "norm.weight", "norm1.weight", "norm2.weight")):
        return 0.2
    if name.endswith(("frequencies", "phases", "registers")):
        return 1.0
    return 1 / math.sqrt(tensor.shape[-1]) if tensor.ndim > 1 else 0.1
