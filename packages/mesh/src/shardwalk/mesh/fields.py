"""Normalizing the fields of frozen configs after construction."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwalk.mesh import validation
from shardwalk.mesh.checkpointing_modes import (
    normalize_activation_checkpointing,
    normalize_activation_checkpointing_scope,
)

__all__ = ["Config", "Fields"]


class Config:
    """Base of the frozen config dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, fit for the constructor; nested objects are kept as such."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields}


class Fields:
    """Checks the fields of one config, naming them ``Class.field``, and stores normal forms."""

    def __init__(self, config: object) -> None:
        self.config = config

    def option(self, name: str) -> str:
        """Return the name of a field as errors show it."""
        return f"{type(self.config).__name__}.{name}"

    def convert(self, name: str, function: Callable[[str, Any], object]) -> None:
        """Replace a field by ``function(option, value)``."""
        value = function(self.option(name), getattr(self.config, name))
        object.__setattr__(self.config, name, value)

    def booleans(self, *names: str, optional: bool = False) -> None:
        """Each field must be True or False (or None where ``optional``)."""
        for name in names:
            value = getattr(self.config, name)
            validation.check_boolean(self.option(name), value, optional=optional)

    def integer(
        self, name: str, minimum: int = 1, maximum: int | None = None, *, optional: bool = False
    ) -> None:
        """The field must be an integer within the bounds."""
        validation.check_integer(
            self.option(name),
            getattr(self.config, name),
            minimum=minimum,
            maximum=maximum,
            optional=optional,
        )

    def choice(self, name: str, allowed: Iterable[str], *, optional: bool = False) -> None:
        """The field must be one of the names."""
        value = getattr(self.config, name)
        if not (optional and value is None):
            validation.check_choice(self.option(name), value, allowed)

    def dtype(self, name: str) -> None:
        """The field becomes a floating dtype or None."""
        self.convert(name, validation.parse_dtype)

    def nested(self, name: str, cls: type) -> None:
        """The field becomes a ``cls``; a dict of its options is accepted."""
        self.convert(name, lambda option, value: validation.config_from_mapping(cls, value, option))

    def activation_checkpointing(self) -> None:
        """The two checkpointing fields get their normal forms."""
        self.convert(
            "activation_checkpointing",
            lambda option, value: normalize_activation_checkpointing(value, option),
        )
        self.convert(
            "activation_checkpointing_scope",
            lambda option, value: normalize_activation_checkpointing_scope(value, option),
        )


def string_keys(option: str, value: Mapping[Any, object]) -> None:
    """Raise TypeError unless every key is a string."""
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{option} has the key {key!r}, but its keys must be strings")
