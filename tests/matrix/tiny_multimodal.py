"""Tiny models of transformers that see or hear, and batches of which some rows are text only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
)

VOCABULARY, MEDIUM, LENGTH = 61, 60, 9
IGNORED = -100
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llava() -> nn.Module:
    """CLIP's tower of two blocks, a projector of two layers, a text model."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=LlamaConfig(**TEXT),
            image_token_index=MEDIUM,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        )
    )


def qwen_vl() -> nn.Module:
    """A tower whose blocks take fp32 rotary tables beside hidden states."""
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "out_hidden_size": 24,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            vision_config=vision,
            text_config={**TEXT, "rope_parameters": rope},
            image_token_id=MEDIUM,
            video_token_id=59,
            vision_start_token_id=58,
            vision_end_token_id=57,
        )
    )


def qwen_audio() -> nn.Module:
    """A tower over spectra, with a table of positions that it reads without calling it."""
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=8,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=20,
        d_model=16,
        max_source_positions=8,
    )
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(
            audio_config=audio, text_config=Qwen2Config(**TEXT), audio_token_index=MEDIUM
        )
    )


@dataclass(frozen=True)
class Kind:
    """A model, the shape of what it sees in a row, and how many tokens stand for that."""

    make: Any
    shape: tuple[int, ...]
    tokens: int
    tower: str
    projector: str

    def inputs(self, media: Tensor) -> dict[str, Tensor]:
        """The keywords for the media of some rows."""
        if self.make is llava:
            return {"pixel_values": media}
        if self.make is qwen_vl:
            grid = torch.tensor([[1, 2, 2]]).expand(len(media), 3)
            return {"pixel_values": media.flatten(0, 1), "image_grid_thw": grid}
        return {
            "input_features": media,
            "feature_attention_mask": torch.ones(len(media), 16, dtype=torch.long),
        }


KINDS = {
    "llava": Kind(llava, (3, 8, 8), 4, "model.vision_tower", "model.multi_modal_projector"),
    "qwen-vl": Kind(qwen_vl, (4, 3 * 2 * 16), 1, "model.visual", "model.visual.merger"),
    "qwen-audio": Kind(qwen_audio, (8, 16), 4, "model.audio_tower", "model.multi_modal_projector"),
}


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


def build(name: str, frozen: tuple[str, ...] = ()) -> nn.Module:
    return freeze(KINDS[name].make(), *frozen)


@dataclass(frozen=True)
class MediaBatches:
    """Rows of tokens, of which some stand for an image or a sound.

    `with_media` says which rows of a batch have one, step by step; the others are text only.
    """

    name: str
    with_media: tuple[str, ...] = ("11111111",)

    def __call__(self, step: int) -> list[dict[str, Tensor]]:
        kind, generator = KINDS[self.name], torch.Generator().manual_seed(1000 + step)
        has = [mark == "1" for mark in self.with_media[step % len(self.with_media)]]
        ids = torch.randint(1, 50, (len(has), LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        ids = ids[:, :-1].contiguous()
        for row, present in enumerate(has):
            if present:
                ids[row, 2 : 2 + kind.tokens] = MEDIUM
                labels[row, 1 : 1 + kind.tokens] = IGNORED
            labels[row, LENGTH - row % 3 :] = IGNORED
        media = torch.randn(len(has), *kind.shape, generator=generator)
        return [{"input_ids": ids, "labels": labels, "media": media, "has": torch.tensor(has)}]


@dataclass(frozen=True)
class MediaLosses:
    """The loss of each token; ranks without a medium may add a blank row that counts nothing."""

    name: str
    adds_blank: bool = False

    def __call__(self, model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        kind, ids, media, has = KINDS[self.name], rows["input_ids"], rows["media"], rows["has"]
        count = len(ids)
        blank = self.adds_blank and not has.any()
        if blank:
            extra = ids[:1].clone()
            extra[0, 2 : 2 + kind.tokens] = MEDIUM
            ids = torch.cat([ids, extra])
            media, has = torch.zeros(1, *kind.shape), torch.tensor([True])
        given = kind.inputs(media[has]) if has.any() else {}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
        logits = logits[:count].float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="none", ignore_index=IGNORED
        )
        return losses.view_as(rows["labels"])
