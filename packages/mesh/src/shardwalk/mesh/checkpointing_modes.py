"""Activation checkpointing as one setting: its modes, its scopes and how requests combine."""

from collections.abc import Sequence
from typing import Literal

from shardwalk.mesh.validation import check_choice, nearest

__all__ = [
    "ActivationCheckpointingMode",
    "ActivationCheckpointingScope",
    "FrozenMultimodalSharding",
    "ResolvedActivationCheckpointing",
    "activation_checkpointing_groups",
    "merge_activation_checkpointing",
    "normalize_activation_checkpointing",
    "normalize_activation_checkpointing_scope",
]

ActivationCheckpointingMode = bool | Literal["full", "selective"]
"""What may be asked for: False (unset), True or "full", or "selective"."""

ResolvedActivationCheckpointing = Literal[False, "full", "selective"]
"""What the walk reads."""

_ScopeName = Literal["all", "language", "vision", "audio", "multimodal"]

ActivationCheckpointingScope = _ScopeName | Sequence[_ScopeName]
"""Which layer groups are checkpointed: one name or several; "multimodal" is all but language."""

FrozenMultimodalSharding = Literal["root", "per_layer", "replicate"]
"""Where the parameters of a fully frozen tower live."""

_SCOPES: dict[str, frozenset[str]] = {
    "all": frozenset({"language", "vision", "audio"}),
    "language": frozenset({"language"}),
    "vision": frozenset({"vision"}),
    "audio": frozenset({"audio"}),
    "multimodal": frozenset({"vision", "audio"}),
}


def normalize_activation_checkpointing(
    value: object, option: str = "activation_checkpointing"
) -> ResolvedActivationCheckpointing:
    """Return False, "full" or "selective"; True means "full". Raises ValueError for the rest."""
    if value is False:
        return False
    if value is True or value == "full":
        return "full"
    if value == "selective":
        return "selective"
    hint = nearest(value, ["full", "selective"]) if isinstance(value, str) else ""
    raise ValueError(
        f"{option}={value!r} must be False, True (the same as 'full'), 'full' or 'selective'{hint}"
    )


def normalize_activation_checkpointing_scope(
    value: object, option: str = "activation_checkpointing_scope"
) -> ActivationCheckpointingScope:
    """Return the scope: one name, or a tuple of several; None means "all".

    Raises ValueError for an unknown name or no name at all.
    """
    if value is None:
        return "all"
    if not isinstance(value, (list, tuple)):
        check_choice(option, value, _SCOPES)
        return value  # type: ignore[return-value]
    if not value:
        raise ValueError(f"{option}={value!r} selects nothing; use activation_checkpointing=False")
    for name in value:
        check_choice(option, name, _SCOPES)
    names = tuple(dict.fromkeys(value))
    return names[0] if len(names) == 1 else names


def activation_checkpointing_groups(scope: ActivationCheckpointingScope) -> frozenset[str]:
    """Return the layer groups ("language", "vision", "audio") that a scope selects."""
    normal = normalize_activation_checkpointing_scope(scope)
    names = (normal,) if isinstance(normal, str) else normal
    return frozenset().union(*(_SCOPES[name] for name in names))


def merge_activation_checkpointing(**requests: object) -> ResolvedActivationCheckpointing:
    """Combine the requests made in several places, keyed by where each was made.

    False leaves the setting to the others. Raises ValueError when two places ask for different
    modes.
    """
    modes = {
        place: normalize_activation_checkpointing(value, f"{place} activation_checkpointing")
        for place, value in requests.items()
    }
    asked = {place: mode for place, mode in modes.items() if mode}
    if len(set(asked.values())) > 1:
        listed = ", ".join(f"{place}: {mode!r}" for place, mode in asked.items())
        raise ValueError(
            "activation_checkpointing is one setting but was given different modes "
            f"({listed}); set it in one place, or to the same mode"
        )
    return next(iter(asked.values()), False)
