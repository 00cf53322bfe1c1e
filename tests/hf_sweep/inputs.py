"""What a model may be called with, by the names of its arguments and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.hf_sweep.batches import LAST_TOKEN, TEXT, Argument, Batch, Constant


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The images of a model; `merge` patches of an edge become one token."""

    channels: int
    image: int
    patch: int
    frames: int
    merge: int

    @property
    def grid(self) -> int:
        """Patches along an edge."""
        return max(1, self.image // self.patch)


Shape = Callable[[Geometry], tuple[int, ...]]

# The pixels of one image, by the shape of its row.
IMAGES: dict[str, Shape] = {
    "image": lambda g: (1, g.channels, g.image, g.image),
    "packed patches": lambda g: (g.grid**2, g.channels * g.frames * g.patch**2),
    "1 tile": lambda g: (1, 1, g.channels, g.image, g.image),
    "2 tiles": lambda g: (1, 2, g.channels, g.image, g.image),
    "3 tiles": lambda g: (1, 3, g.channels, g.image, g.image),
    "5 tiles": lambda g: (1, 5, g.channels, g.image, g.image),
    "row of patches": lambda g: (1, g.grid**2, g.channels * g.patch**2),
    "image of patches": lambda g: (g.grid**2, g.channels, g.patch, g.patch),
    "4 tiles of an image": lambda g: (1, 1, 4, g.channels, g.image, g.image),
}

# Arguments that say something about the image of each row.
ABOUT_IMAGES: dict[str, Callable[[Geometry], Constant]] = {
    "image_grid_thw": lambda g: (1, g.grid, g.grid),
    "image_grid_hw": lambda g: (g.grid, g.grid),
    "image_sizes": lambda g: (g.image, g.image),
    "target_sizes": lambda g: (g.grid, g.grid),
    "spatial_shapes": lambda g: (g.grid, g.grid),
    "aspect_ratio_ids": lambda g: (1,),
    "aspect_ratio_mask": lambda g: ((1, 0, 0, 0),),
    "cross_attention_mask": lambda g: (((1, 0, 0, 0),),) * TEXT,
    "num_local_patches": lambda g: 0,
    "image_merge_sizes": lambda g: g.merge,
    "image_attention_mask": lambda g: ((1,),) * TEXT,
    "image_position_ids": lambda g: tuple((x, y) for y in range(g.grid) for x in range(g.grid)),
}
MARKS = (
    "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask",
)  # fmt: skip


IMAGE_TOKENS = (
    "image_token_id", "image_token_index", "image_patch_id", "im_patch_id", "media_token_id",
    "video_token_index",
    "video_token_id",
)  # fmt: skip
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")


def batches(model: nn.Module, errors: list[Exception]) -> Iterator[tuple[Batch, str]]:
    """Batches to try and what is in them beside text; images first, text alone last."""
    config, names = model.config, set(inspect.signature(model.forward).parameters)
    bases = [
        replace(base, arguments=base.arguments + _others(names, config))
        for base in _texts(names, config)
    ]
    geometry = geometry_of(config)
    for base in bases:
        for layout in IMAGES if geometry and "pixel_values" in names else ():
            for known in _choices(names):
                try:
                    yield _with_image(base, layout, geometry, known, model), layout
                except Exception as error:
                    errors.append(error)
        if "flattened_patches" in names:
            patches = _flattened(geometry, config)
            yield replace(base, arguments=(*base.arguments, patches)), "flattened patches"
        for layout, argument in _sounds(names, config):
            try:
                yield _with_sound(base, argument, model), layout
            except Exception as error:
                errors.append(error)
    yield from ((base, "") for base in bases)
    ones = tuple(name for name in ("attention_mask",) if name in names)
    marks = tuple(mark for mark in MARKS if mark in names)
    yield from ((replace(base, ones=ones, marks=marks), "") for base in bases)


def _texts(names: set[str], config: Any) -> list[Batch]:
    """Tokens for a decoder alone, and for one behind an encoder."""
    plain = [Batch()] if "input_ids" in names else []
    if "decoder_input_ids" not in names:
        return plain
    source = (
        (Argument(name="input_ids", shape=(1, 7), tokens=True),) if "input_ids" in names else ()
    )
    behind = Batch(name="decoder_input_ids", arguments=source)
    return [behind, *plain] if getattr(config, "is_encoder_decoder", False) else [*plain, behind]


def _others(names: set[str], config: Any) -> tuple[Argument, ...]:
    """Arguments that go with text."""
    found = []
    if "qformer_input_ids" in names:
        found.append(Argument(name="qformer_input_ids", shape=(1, 4), tokens=True))
    if "bbox" in names:
        found.append(Argument(name="bbox", constant=((0.1, 0.2, 0.3, 0.4),) * 7))
    if "state" in names and (size := getattr(config, "max_state_dim", None)):
        found.append(Argument(name="state", shape=(1, size)))
    return tuple(found)


def _choices(names: set[str]) -> list[set[str]]:
    """What to tell about an image: all of it, then without sizes that only some towers read."""
    return [names, names - {"image_sizes"}] if "image_sizes" in names else [names]


def _with_image(
    base: Batch, layout: str, geometry: Geometry, names: set[str], model: nn.Module
) -> Batch:
    pixels = Argument(name="pixel_values", shape=IMAGES[layout](geometry))
    arguments = [pixels, *_about_images(names, geometry, layout)]
    if "high_res_pixel_values" in names:
        arguments.append(Argument(name="high_res_pixel_values", shape=pixels.shape))
    marks = tuple(mark for mark in MARKS if mark in names)
    marked = "image_embeds_position_mask" in marks
    prefix = _prefix(base, model, arguments, "get_image_features", IMAGE_TOKENS, marked=marked)
    return replace(base, prefix=prefix, marks=marks, arguments=(*base.arguments, *arguments))


def _with_sound(base: Batch, sound: Argument, model: nn.Module) -> Batch:
    """Sound in place of the text before a decoder, or as the tokens that stand for it."""
    kept = tuple(one for one in base.arguments if one.name != "input_ids")
    prefix = _prefix(base, model, [sound], "get_audio_features", AUDIO_TOKENS)
    return replace(base, prefix=prefix, arguments=(*kept, sound))


def _prefix(
    base: Batch,
    model: nn.Module,
    arguments: list[Argument],
    method: str,
    tokens: tuple[str, ...],
    *,
    marked: bool = False,
) -> tuple[int, ...]:
    """The tokens in the place of which the model puts features of these arguments."""
    given = (getattr(model.config, name, None) for name in tokens)
    token = next((value for value in given if isinstance(value, int)), None)
    if token is None and marked:
        token = LAST_TOKEN  # what stands there says nothing, its mark does
    count = count_features(model, [*base.arguments, *arguments], method)
    return (token,) * count if token is not None and base.name == "input_ids" else ()


def _about_images(names: set[str], geometry: Geometry, layout: str) -> list[Argument]:
    found = [
        Argument(name=name, constant=make(geometry))
        for name, make in ABOUT_IMAGES.items()
        if name in names
    ]
    if "pixel_attention_mask" in names:
        shape = IMAGES[layout](geometry)
        whole = (
            (1,) * geometry.grid**2
            if len(shape) < 5
            else (((1,) * shape[-1],) * shape[-2],) * shape[1]
        )
        found.append(Argument(name="pixel_attention_mask", constant=whole))
    return found


def _flattened(geometry: Geometry | None, config: Any, side: int = 3) -> Argument:
    """Patches with their row and column before their pixels."""
    known = (first_size(part, "patch_embed_hidden_size") for part in parts_of(config))
    size = next((size for size in known if size), 0)
    size = size or (geometry.channels * geometry.patch**2 if geometry else 0)
    noise = torch.randn((side**2, size), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [(float(at // side), float(at % side), *pixels) for at, pixels in enumerate(noise)]
    return Argument(name="flattened_patches", constant=tuple(rows))


def _sounds(names: set[str], config: Any) -> Iterator[tuple[str, Argument]]:
    """Sound as features of frames, either way round, or as samples."""
    name = next((n for n in ("input_features", "input_values") if n in names), None)
    if name is None or "pixel_values" in names:
        return
    bins = next(
        (
            size
            for part in parts_of(config)
            if (
                size := first_size(
                    part, "num_mel_bins", "feature_size", "n_mel_bins", "input_feat_per_channel"
                )
            )
        ),
        16,
    )
    frames = 2 * (first_size(config, "max_source_positions") or 32)
    yield "bins x frames", Argument(name=name, shape=(1, bins, frames))
    yield "frames x bins", Argument(name=name, shape=(1, frames, bins))
    yield "samples", Argument(name=name, shape=(1, 1600))
    yield "channel of samples", Argument(name=name, shape=(1, 1, 1600))


def count_features(model: nn.Module, arguments: list[Argument], method: str, rows: int = 2) -> int:
    """How many features the model makes of a row of these arguments, 0 without such a method."""
    inner = getattr(model, "model", None)
    owner: Any = next((one for one in (inner, model) if hasattr(one, method)), None)
    if owner is None:
        return 0
    extract = getattr(owner, method)
    generator = torch.Generator().manual_seed(0)
    names = set(inspect.signature(extract).parameters)
    given = {one.name: one.rows(rows, generator) for one in arguments if one.name in names}
    with torch.no_grad():
        features = extract(**given)
    pooled = getattr(features, "pooler_output", None)
    features = features if pooled is None else pooled
    parts = (
        [features]
        if isinstance(features, Tensor)
        else [f for f in features if isinstance(f, Tensor)]
    )
    return sum(part.numel() // part.shape[-1] for part in parts) // rows


def geometry_of(config: Any) -> Geometry | None:
    """The images of the first part of a configuration that has patches; None without one."""
    for part in parts_of(config):
        patch = first_size(part, "patch_size", "encoder_stride")
        if patch is None:
            continue
        sizes = ("spatial_merge_size", "merge_size")
        merge = first_size(part, *sizes) or first_size(config, *sizes) or 1
        return Geometry(
            channels=first_size(part, "num_channels", "in_channels", "in_chans") or 3,
            image=first_size(part, "image_size") or patch * merge * 2,
            patch=patch,
            frames=first_size(part, "temporal_patch_size", "patch_temporal") or 1,
            merge=merge,
        )
    return None


def parts_of(config: Any) -> Iterator[Any]:
    """The parts of a configuration, inner ones first."""
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from parts_of(value)
    yield config


def first_size(part: Any, *names: str) -> int | None:
    """The first of these fields that is a number, or begins with one."""
    for name in names:
        value = getattr(part, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if type(value) is int:
            return value
    return None
