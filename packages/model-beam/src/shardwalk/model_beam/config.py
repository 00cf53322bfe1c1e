"""The sizes and rules of a Beam decoder, as its ``config.json`` holds them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from shardwalk.model_beam.config_checks import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    check_types,
    check_values,
)
from shardwalk.model_beam.config_keys import MODEL_TYPE, check_extra, check_model_type
from shardwalk.model_beam.rope_parameters import check_rope_parameters, with_rope_types
from shardwalk.moe_ep.activations import Activation
from shardwalk.moe_ep.config import DispatcherName, MoEConfig

_FULL_EVERY = 6
_DENSE_LAYERS = 3
_THETA = 10000.0
CONFIG_NAME = "config.json"


@dataclass(frozen=True, kw_only=True)
class BeamConfig:
    """A Beam decoder. Names and defaults are those of its Hugging Face ``config.json``.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the tokens.
        intermediate_size: inner width of the dense MLPs.
        num_hidden_layers: layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; it divides the query heads.
        head_dim: width of a head; heads times this need not be the hidden size.
        hidden_act: one of `config_checks.ACTIVATIONS`, for dense MLPs and experts.
        max_position_embeddings: context of training; only the rotary type ``dynamic`` reads it.
        initializer_range: standard deviation of fresh weights.
        rms_norm_eps: added to the mean square in every norm.
        use_cache: kept for the file: whether generation keeps keys and values.
        tie_word_embeddings: whether the head is the embedding.
        rope_parameters: by layer type: None for no rotation (queries get `rotary.query_scale`), or
            a mapping with ``rope_theta``, ``rope_type`` and that type's fields. None altogether is
            the plain rotation in sliding layers and none in full ones.
        attention_bias: whether the projections to q, k, v and back have biases.
        attention_dropout: share of attention weights dropped in training.
        sliding_window: keys that a query of a sliding layer sees, itself included.
        moe_intermediate_size: inner width of each expert.
        num_experts: experts of a sparse layer.
        num_experts_per_tok: experts that a token goes to.
        n_group: contiguous groups of experts.
        topk_group: groups that a token may choose from.
        norm_topk_prob: whether a token's weights are divided by their sum.
        routed_scaling_factor: multiplies the experts' sum.
        output_router_logits: kept for the file: whether Hugging Face's model returns them.
        final_logit_softcapping: c in c tanh(logits / c), or None for none.
        layer_types: "sliding_attention" or "full_attention" for each layer. None is every sixth and
            the last one full.
        mlp_layer_types: "dense" or "sparse" for each layer. None is three dense, the rest sparse.
        pad_token_id: a token whose embedding gets no gradient, or None.
        bos_token_id: kept for the file.
        eos_token_id: kept for the file; one or several.
        extra: keys of the file which do not change the network, given back by `to_dict`.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a value that is not allowed, alone or beside the others. What only sparse
            layers use is not looked at without one.
    """

    vocab_size: int = 151936
    hidden_size: int = 5120
    intermediate_size: int = 20480
    num_hidden_layers: int = 52
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    # None stands for a rule in three fields, and never remains after construction.
    rope_parameters: Mapping[str, Mapping[str, Any] | None] = field(default=None, hash=False)  # type: ignore[arg-type]
    attention_bias: bool = False
    attention_dropout: float = 0.0
    sliding_window: int | None = 512
    moe_intermediate_size: int = 2560
    num_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    output_router_logits: bool = False
    final_logit_softcapping: float | None = 30.0
    layer_types: tuple[str, ...] = None  # type: ignore[assignment]
    mlp_layer_types: tuple[str, ...] = None  # type: ignore[assignment]
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_extra(self.extra, self.field_names())
        self._set("extra", copy.deepcopy(dict(self.extra)))
        check_types(self)
        self._bring_into_form()
        self._resolve_rules()
        check_values(self)
        check_rope_parameters(
            self.rope_parameters, layer_types=self.layer_types, head_dim=self.head_dim
        )

    def _bring_into_form(self) -> None:
        """Lists as tuples, and whole numbers of float fields as floats."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, list):
                self._set(entry.name, tuple(value))
            elif str(entry.type).startswith("float") and value is not None:
                self._set(entry.name, float(value))

    def _resolve_rules(self) -> None:
        count = self.num_hidden_layers
        if self.layer_types is None:
            full = [*range(_FULL_EVERY - 1, count, _FULL_EVERY), count - 1]
            self._set("layer_types", tuple(FULL if i in full else SLIDING for i in range(count)))
        if self.mlp_layer_types is None:
            dense = min(_DENSE_LAYERS, count)
            self._set("mlp_layer_types", ("dense",) * dense + ("sparse",) * (count - dense))
        if self.rope_parameters is None:
            plain = {"rope_type": "default", "rope_theta": _THETA}
            self._set("rope_parameters", {SLIDING: plain, FULL: None})
        self._set("rope_parameters", with_rope_types(self.rope_parameters))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names that this class shares with ``config.json``."""
        return tuple(entry.name for entry in fields(cls) if entry.name != "extra")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], /) -> Self:
        """The configuration that the keys of a ``config.json`` describe.

        Keys that do not change the network (versions, dtype, labels, generation) go to ``extra``.

        Raises:
            TypeError: for a value of another type.
            ValueError: for another ``model_type``, for a key that is not known, and for a value
                that is not allowed.
        """
        check_model_type(values)
        names = cls.field_names()
        known = {name: values[name] for name in names if name in values}
        extra = {key: values[key] for key in values if key not in names and key != "model_type"}
        return cls(**known, extra=extra)

    @classmethod
    def from_pretrained(cls, folder: str | Path, /) -> Self:
        """The configuration of the ``config.json`` in a local folder.

        Raises:
            FileNotFoundError: without that file.
            TypeError, ValueError: as `from_dict`, and for a file that holds no JSON object.
        """
        path = Path(folder) / CONFIG_NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is not there; give a local folder that holds {CONFIG_NAME} (and, where "
                f"weights are read, safetensors files): names of models on a hub are not looked up"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{path} is no JSON file: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds {type(values).__name__}; it must be a JSON object")
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes this configuration of, as JSON holds it (no tuples)."""
        values = {name: getattr(self, name) for name in self.field_names()}
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = list(value)
        return copy.deepcopy({**self.extra, **values, "model_type": MODEL_TYPE})

    def save_pretrained(self, folder: str | Path, /) -> None:
        """Write ``config.json`` into a folder, which is made if there is none."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (path / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    @property
    def has_sparse_layers(self) -> bool:
        """Whether any layer has experts."""
        return "sparse" in self.mlp_layer_types

    @property
    def gated_activation(self) -> Activation:
        """What stands between the two products of a dense MLP, multiplied in float32."""
        return Activation(name=ACTIVATIONS[self.hidden_act], fp32_product=True)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts, not a dense MLP."""
        return self.mlp_layer_types[layer] == "sparse"

    def window_of(self, layer: int) -> int | None:
        """Keys that a query of a layer sees, itself included; None is all before it."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rope_of(self, layer: int) -> Mapping[str, Any] | None:
        """The rotation of a layer, or None for a layer without one."""
        return self.rope_parameters[self.layer_types[layer]]


def checked_config(config: object) -> BeamConfig:
    """`config`, unless it is no `BeamConfig`.

    Raises:
        TypeError: names the type and the way to a `BeamConfig`.
    """
    if isinstance(config, BeamConfig):
        return config
    way_out = "make one with BeamConfig(...)"
    if isinstance(config, Mapping):
        way_out = "use BeamConfig.from_dict(config)"
    elif hasattr(config, "to_dict"):
        way_out = "use BeamConfig.from_dict(config.to_dict())"
    elif isinstance(config, str | Path):
        way_out = "use BeamConfig.from_pretrained(folder)"
    raise TypeError(f"config must be a BeamConfig, not a {type(config).__name__}; {way_out}")


def moe_config(
    config: BeamConfig, /, *, bias_update_speed: float = 0.0, dispatcher: DispatcherName = "auto"
) -> MoEConfig:
    """The sparse layers of a Beam decoder, as moe-ep describes them.

    ``routed_scaling_factor`` is not part of it: Beam multiplies the experts' sum, after its
    rounding, and not the weights of a token.

    Args:
        config: of a decoder with a sparse layer.
        bias_update_speed: what an update adds to or takes from each correction bias. It belongs to
            the training, not to the network, so `config` has no field for it.
        dispatcher: how tokens reach experts.

    Raises:
        ValueError: without a sparse layer, and for values that moe-ep does not allow.
    """
    if not config.has_sparse_layers or config.n_group is None or config.topk_group is None:
        raise ValueError(
            "mlp_layer_types holds no sparse layer, so there are no experts to configure; make a "
            'layer "sparse", or leave out the call'
        )
    return MoEConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        score_function="sigmoid",
        num_groups=config.n_group,
        top_k_groups=config.topk_group,
        normalize_weights=config.norm_topk_prob,
        scaling_factor=1.0,
        correction_bias=True,
        activation=ACTIVATIONS[config.hidden_act],
        fp32_product=True,
        bias_update_speed=bias_update_speed,
        dispatcher=dispatcher,
    )
