"""Finding a tiny configuration and inputs with which a model of transformers trains."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from shardwalk.parallelizer_core.testing.parity_case import Rows, share_of_rows
from tests.hf_sweep.batches import Batch, quiet, token_losses
from tests.hf_sweep.field_rules import MISSING, Sizes
from tests.hf_sweep.inputs import batches, parts_of
from tests.hf_sweep.shrink import shrink

KINDS = {
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "text-to-text": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
BESIDE_TEXT = ("image-text", "speech")  # kinds of which text alone is no more than a way out
ATTEMPTS = 14


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class and the configuration that an auto-model mapping pairs it with."""

    model_type: str
    kind: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.model_type}/{self.class_name}"


def architectures(*kinds: str) -> list[Architecture]:
    """Every architecture of these kinds, each class once, in the order of names."""
    found: dict[tuple[str, str], Architecture] = {}
    for kind in kinds:
        for model_type, names in KINDS[kind].items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(
                (model_type, name), Architecture(model_type=model_type, kind=kind, class_name=name)
            )
    return sorted(found.values(), key=lambda one: (one.model_type.lower(), one.class_name))


def architecture(class_name: str) -> Architecture:
    """The architecture of a model class."""
    return next(one for one in architectures(*KINDS) if one.class_name == class_name)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to build a tiny model and what to call it with; calling the recipe builds it.

    Attributes:
        fill: sizes that the defaults leave open get a value.
        sections: rotary parameters get the sections of multimodal positions.
        attention: the implementation, None for the model's own choice.
        beside_text: what the batch holds beside text.
    """

    architecture: Architecture
    sizes: Sizes = field(default_factory=Sizes)
    fill: bool = False
    sections: bool = False
    attention: str | None = None
    batch: Batch = field(default_factory=Batch)
    beside_text: str = ""

    def config(self) -> Any:
        """The tiny configuration."""
        cls = config_class(self.architecture)
        fields = shrink(
            defaults_of(cls, self.sizes), self.sizes, fill=self.fill, sections=self.sections
        )
        made = cls.from_dict(fields)
        for part in parts_of(made):
            if getattr(part, "use_cache", False):
                part.use_cache = False
        if self.attention is not None:
            made._attn_implementation = self.attention
        return made

    def __call__(self) -> nn.Module:
        """The model, all of whose parameters have values that differ."""
        torch.manual_seed(0)
        with quiet(), filled_memory():
            model: nn.Module = getattr(transformers, self.architecture.class_name)(self.config())
        settle_weights(model)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()  # statistics of a rank's own rows are not those of one process
        return model


def settle_weights(model: nn.Module) -> None:
    """Give parameters that are constant or left open values of their own.

    Zeros hide wrong gradients (of biases, behind closed gates), and memory that no constructor
    wrote to differs between processes.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = torch.empty(parameter.shape).normal_(0.0, 0.05, generator=generator)
            if not parameter.isfinite().all():
                parameter.copy_(noise)
            elif parameter.min() == parameter.max():
                parameter.add_(noise)
        for buffer in model.buffers():
            if buffer.is_floating_point() and buffer.isnan().any():
                buffer.zero_()


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """New memory holds NaN, so that what no constructor writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def config_class(one: Architecture) -> Any:
    """The class whose configuration the model takes: a part of the mapped one, for some decoders."""
    mapped = configuration_auto.CONFIG_MAPPING[one.model_type]
    own = getattr(getattr(transformers, one.class_name), "config_class", None)
    return mapped if own is None or issubclass(mapped, own) else own


def defaults_of(cls: Any, sizes: Sizes) -> dict[str, Any]:
    """The fields of a configuration class, those of its parts included.

    A class whose defaults contradict each other is asked again with what a repair has set.
    """
    with quiet():
        try:
            fields: dict[str, Any] = cls().to_dict()
        except Exception:
            if not sizes.set:
                raise
            fields = cls(**dict(sizes.set)).to_dict()
    return fields


@dataclass(frozen=True, kw_only=True)
class Found:
    """The recipe of an architecture, or why it has none.

    Attributes:
        parameters, idle: elements of all parameters, and of those that one step gives no gradient.
        note: why text alone went in where an image or sound could.
    """

    recipe: Recipe | None
    reason: str = ""
    parameters: int = 0
    idle: int = 0
    note: str = ""


def find_recipe(one: Architecture) -> Found:
    """Try sizes and inputs until a forward and a backward run in this process."""
    recipe: Recipe | None = Recipe(architecture=one)
    repairs, first, found = _repairs(), "", None
    for _ in range(ATTEMPTS):
        assert recipe is not None
        errors: list[Exception] = []
        found = _first_batch(recipe, errors) or found
        if found and found.recipe and (found.recipe.beside_text or one.kind not in BESIDE_TEXT):
            return found
        first = first if found or not errors else _reason(errors)
        recipe = _repaired(recipe, errors, repairs)
        if recipe is None:
            break
    return found or Found(recipe=None, reason=first)


def _first_batch(recipe: Recipe, errors: list[Exception]) -> Found | None:
    """What the first batch that the model takes gives; `errors` grows by those of the others."""
    try:
        model = recipe()
    except Exception as error:
        errors.append(error)
        return None
    for batch, beside in batches(model, errors):
        try:
            found = _trained(replace(recipe, batch=batch, beside_text=beside), model)
        except Exception as error:
            errors.append(error)
        else:
            is_less = not beside and recipe.architecture.kind in BESIDE_TEXT
            return replace(found, note=_reason(errors[:1])) if is_less and errors else found
    return None


def _trained(recipe: Recipe, model: nn.Module) -> Found:
    model.zero_grad()
    rows = recipe.batch(0)[0]
    losses = token_losses(model, rows)
    _check_rows(model, rows, losses)
    loss = losses.sum()
    loss.backward()
    gradients = {p: p.grad for p in model.parameters()}
    if not loss.isfinite() or not all(g is None or g.isfinite().all() for g in gradients.values()):
        raise ValueError("one process has a loss or a gradient that is not finite")
    if not any(g is not None and g.any() for g in gradients.values()):
        raise ValueError("one process has no gradient but zeros")
    return Found(
        recipe=recipe,
        parameters=sum(p.numel() for p in gradients),
        idle=sum(p.numel() for p, g in gradients.items() if g is None),
    )


def _check_rows(model: nn.Module, rows: Rows, losses: Tensor) -> None:
    """Refuse what no other split of the rows could give again: dice, and rows that mix."""
    device = torch.device("cpu")
    with torch.no_grad():
        torch.manual_seed(3)
        again = token_losses(model, rows)
        halves = [token_losses(model, share_of_rows(rows, part, 2, device)) for part in range(2)]
    if not torch.equal(again, losses):
        raise ValueError("its forward draws random numbers")
    if not torch.allclose(torch.cat(halves), losses, rtol=2e-5, atol=1e-6):
        raise ValueError("its rows do not stand for themselves: half of them have other losses")


def _repairs() -> Iterator[dict[str, Any]]:
    """Changes of a recipe to try in order, where its errors do not name one."""
    yield {"fill": True}
    yield {"sections": True}
    yield {"sizes": {"multiples": False}}
    yield {"sizes": {"ffn": 4 * Sizes().width}}
    yield {"fill": False, "sizes": {"multiples": True, "ffn": Sizes().ffn}}
    yield {"attention": "eager"}
    yield {"fill": True}
    yield {"sizes": {"key_value_heads": 4}}
    yield {"sizes": {"layers": 4, "copies": 2}}
    yield {"sizes": {"ffn": Sizes().width}}


def _repaired(
    recipe: Recipe, errors: list[Exception], repairs: Iterator[dict[str, Any]]
) -> Recipe | None:
    """The recipe with what its errors ask for, else with the next repair; None at the end."""
    for error in errors:
        if isinstance(error, ImportError):
            return None
        named = _named_value(str(error))
        if named is not None and named[0] not in dict(recipe.sizes.set):
            return replace(recipe, sizes=replace(recipe.sizes, set=(*recipe.sizes.set, named)))
    change = next(repairs, None)
    if change is None:
        return None
    sizes = replace(recipe.sizes, **change.get("sizes", {}))
    return replace(recipe, sizes=sizes, **{k: v for k, v in change.items() if k != "sizes"})


def _named_value(message: str) -> tuple[str, Any] | None:
    """A field and the value that an error asks for."""
    if found := re.search(r"`?(\w+)`? must be (\d+)", message):
        return found[1], int(found[2])
    if found := re.search(r"requires (\w+)=(\d+)", message):
        return found[1], int(found[2])
    if found := re.search(r"missing required fields: \['(\w+)'", message):
        return found[1], 16
    if found := re.search(r"(is_decoder)=(True)", message):
        return found[1], True
    if found := re.search(r"Validation error for field '(\w+)'", message):
        return found[1], None
    found = re.search(r"Config' object has no attribute '(\w+)'", message)
    if found and found[1] in MISSING:
        return found[1], MISSING[found[1]]
    return None


def _reason(errors: list[Exception]) -> str:
    """The error of the last attempt of a round (text alone, where the model was built)."""
    if not errors:
        return "nothing that it takes is known"
    error = errors[-1]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text[:240]} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
    )
