"""Calls of a model that cannot work while its output heads leave their logits split."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

_WAY_OUT = "keep_logits_split(model, enabled=False)"


def guard_calls(model: nn.Module) -> None:
    """Let a loss of the model that needs whole logits, and `generate`, name what to do instead."""
    if not isinstance(vars(model).get("forward"), _Forward):
        model.forward = _Forward(model.forward, is_of_class="forward" not in vars(model))
    if callable(getattr(model, "generate", None)):
        vars(model)["generate"] = _refuse_generate


def release_calls(model: nn.Module) -> None:
    """Let `model` be called as before `guard_calls`."""
    forward = vars(model).get("forward")
    if isinstance(forward, _Forward):
        del vars(model)["forward"]
        if not forward.is_of_class:
            model.forward = forward.inner
    if vars(model).get("generate") is _refuse_generate:
        del vars(model)["generate"]


@dataclass
class _Forward:
    """The forward of a model; an error over split logits beside labels says what to do.

    The model's own loss is called all the same: it may be one for split logits.
    """

    inner: Callable[..., Any]
    is_of_class: bool

    def __post_init__(self) -> None:
        self.__signature__ = inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.inner(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" not in str(error) or not self._has_labels(args, kwargs):
                raise
            raise ValueError(
                f"labels were given to a model whose logits keep_logits_split leaves split over "
                f"the vocabulary, and its loss takes whole ones; leave labels out and call "
                f"parallel_cross_entropy(model(ids).logits, labels) with labels that you shift, or "
                f"call {_WAY_OUT}"
            ) from error

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        return given.get("labels") is not None


def _refuse_generate(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"generate needs whole logits, and keep_logits_split leaves them split over the "
        f"vocabulary; call {_WAY_OUT} before it"
    )
