"""What the fields of a configuration count, by their names, and what they shrink to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What fields shrink to; a recipe tries a few of these.

    Attributes:
        width: hidden sizes, of every tower alike, so that projections between them fit.
        heads: query heads; `width / heads` is the size of one.
        key_value_heads: where the default has fewer of them than query heads.
        ffn: inner sizes of feed-forward layers and experts.
        vocabulary: rows of every table of tokens.
        layers: of every stack, where no list of kinds asks for more.
        copies: layers of each kind, where lists name kinds.
        experts: of every layer that has them.
        multiples: whether a width that is a multiple of its tower's stays that multiple.
        image, patch: pixels of the edge of an image and of a patch.
        set: fields with values of their own, by name, wherever they stand.
    """

    width: int = 64
    heads: int = 4
    key_value_heads: int = 2
    ffn: int = 96
    vocabulary: int = 128
    layers: int = 2
    copies: int = 1
    experts: int = 4
    multiples: bool = True
    image: int = 16
    patch: int = 4
    set: tuple[tuple[str, Any], ...] = ()

    @property
    def head(self) -> int:
        """The size of one head."""
        return self.width // self.heads


CODES = 32  # of a codebook; several of them fit into the vocabulary one after the other

Target = Callable[[Sizes, int], int]


def _at_most(limit: int) -> Target:
    return lambda sizes, value: min(value, limit)


def _as_is(sizes: Sizes, value: int) -> int:
    return value


def _field(name: str) -> Target:
    return lambda sizes, value: min(value, getattr(sizes, name))


def _exactly(name: str) -> Target:
    return lambda sizes, value: getattr(sizes, name)


# The first pattern that matches a whole name decides. What none matches goes by its value.
RULES: list[tuple[str, Target]] = [
    (r"chunk_size_feed_forward|chunk_size_lm_head|seed|vocab_offset", _as_is),
    (r".*(kernel|stride|padding|dilation|factor|mult|expand|temporal|ratio|_rate).*", _at_most(16)),
    (r"type_vocab_size|additional_vocab_size|task_type_vocab_size|.*segment_types", _at_most(8)),
    (r"index_kpool|num_codebooks", _at_most(2)),
    (r"axial_pos_embds_dim", lambda sizes, value: sizes.width // 2),
    (r"axial_pos_shape|(local|lsh)_attn_chunk_length", _at_most(3)),  # of a text of 3 x 3 tokens
    (r"image_grid_pinpoints", lambda sizes, value: sizes.image * max(1, round(value / 336))),
    (r".*feature_layers?", lambda sizes, value: min(value, sizes.layers - 1)),
    (r"codebook_size", _at_most(CODES)),
    (r".*vocab.*|.*num_embeddings|num_position_embeddings", _field("vocabulary")),
    (r".*source_positions|max_speech_positions", _at_most(32)),
    (r".*max.*(position|length|seq_len|pos_emb|distance|relative).*|n_positions|n_ctx", _at_most(64)),
    (r"max_seq_len|context_length|seq_len|rel_extent|canvas_length|.*num_patches", _at_most(64)),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers|num_kv_shared_layers", _at_most(1)),
    (r".*(mtp|nextn|residual_layers|lstm_layers|conv_layers|adapter_layers|add_layers).*", _at_most(2)),
    (r".*(period|interval|frequency|every_n_layers|_step|pattern|group_size|cycles)", _at_most(2)),
    (r".*layer_offset", lambda sizes, value: value % 2),
    (r".*(n_group|topk_group|expert_group)", lambda sizes, value: 2 if value > 4 else 1),
    (r".*shared_experts?", _at_most(1)),
    (r".*(per_tok|per_token|top_?k|moe_k).*", _at_most(2)),
    (r".*(num|routed|local|n)_experts?|zero_expert_num", _field("experts")),
    (r"qk_(nope|rope)_head_dim", lambda sizes, value: min(value, sizes.head // 2)),
    (r"qk_head_dim|(.*_)?rotary_dim", _exactly("head")),
    (r".*(head_dim|dim_head|head_size|headdim|d_kv|d_head|kv_channels).*", _exactly("head")),
    (r".*(mamba|ssm).*heads", lambda sizes, value: 2 * sizes.heads),
    (r".*(kv|key_value|_key_).*heads?", _field("key_value_heads")),
    (r".*heads?(_per_layer)?", _field("heads")),
    (r".*(intermediate|ffn|d_ff|dff|dim_ff|mlp_dim|d_inner|feed_forward|expert_dim).*", _exactly("ffn")),
    (r"\w*d_ssm", lambda sizes, value: 2 * sizes.width),
    (r".*(rank|lora).*", _at_most(8)),
    (r".*(d_state|state_size)", _at_most(8)),
    (r".*image.*_size|image_size|crop_size|resolution|.*img_size", _field("image")),
    (r".*patch_size", _field("patch")),
    (r".*(hidden_size|hidden_dim|d_model|embd|embed_dim|emb_dim|embedding_size|_width).*", _exactly("width")),
    (r"dim|width|embedding_dim|.*(projection|output|input|out|in|embeds)_(dim|size)", _exactly("width")),
    (r"(.*_)?(num_)?(hidden_)?layers?|n_layers?|depth|.*_depth|num_blocks|.*_layers", _field("layers")),
    (r".*(window|chunk|radius).*", _at_most(8)),
    (r".*mel_bins|feature_size|input_feat.*", _at_most(16)),
    (r".*(channels|channel|groups|filters).*", _at_most(32)),
    (r".*(num_latents|n_latents|query_num|query_tokens|image_tokens|tokens_per_image|seq_length).*", _at_most(4)),
]  # fmt: skip
_COMPILED = [(re.compile(pattern), target) for pattern, target in RULES]


def target_of(name: str) -> Target | None:
    """What a field of this name shrinks to; None where no rule knows it."""
    return next((target for pattern, target in _COMPILED if pattern.fullmatch(name)), None)


ID = re.compile(
    r".*(_token_id|_token_index|_token_ids|token_id|_start_id|_end_id|_newline_id|_patch_id)"
)
INDICES = re.compile(r".*(indexes|indices|idxs|layer_ids|_layers|layers_ids|feature_layers?)")
DEPTH = re.compile(r"(num_)?(hidden_)?layers|n_layers?|depth|(encoder|decoder)_layers|num_blocks")
MISSING = {"dropout": 0.0, "rope_theta": 10000.0}  # what some parts are read for and do not have
PLAIN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
OFF = re.compile(r".*(dropout|pdrop|layerdrop|drop_path|drop_rate|jitter|noise).*")
STD = re.compile(r"initializer_range|init_std|initializer_std")
