"""What a mixture-of-experts layer is made of, validated as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

ScoreFunction = Literal["softmax", "sigmoid"]
Activation = Literal[
    "swiglu", "geglu", "geglu_tanh", "quick_geglu", "relu2", "swiglu_clamped", "swiglu_oai"
]
BalanceLossScope = Literal["sequence", "micro_batch"]
DispatcherName = Literal["auto", "local", "all_to_all", "deepep"]

_LIMITED = ("swiglu_clamped", "swiglu_oai")
_SLOPED = ("quick_geglu", "swiglu_oai")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The sizes and rules of one mixture-of-experts layer.

    Attributes:
        hidden_size: width of the tokens.
        intermediate_size: inner width of each expert.
        num_experts: routed experts, over all ranks.
        top_k: experts that a token goes to.
        score_function: "softmax" over the experts, or a "sigmoid" of each.
        softmax_before_top_k: whether the softmax runs over all experts before the choice, or over
            the chosen ones after it.
        num_groups: contiguous groups of experts of equal size; 1 limits nothing.
        top_k_groups: groups that a token may choose from. A group is as good as its best expert
            (arXiv:2405.04434), with a correction bias as the sum of its two best biased scores
            (arXiv:2412.19437).
        normalize_weights: whether the weights of a token are divided by their sum.
        normalize_epsilon: added to that sum.
        scaling_factor: multiplies the weights at the end.
        router_bias: whether the router's projection has a bias.
        correction_bias: whether a bias per expert, outside of any gradient, shifts the choice (and
            never the weights).
        activation: the experts' nonlinearity.
        activation_limit: bound of the inputs of "swiglu_clamped" (needed) and "swiglu_oai".
        activation_alpha: slope inside the sigmoid of "quick_geglu" and "swiglu_oai". None, for both
            of these, is the activation's own value.
        expert_bias: whether the experts' projections have biases.
        fp32_product: whether gate and up are multiplied in float32.
        num_shared_experts: experts that every token goes to, computed as one.
        shared_intermediate_size: their inner width together; None is `num_shared_experts` times
            `intermediate_size`.
        shared_gate: whether a sigmoid of a projection of the token weighs the shared experts.
        latent_size: width in which tokens travel and the routed experts work; None is
            `hidden_size`.
        balance_loss_coefficient: strength of the balance loss; 0 is none.
        balance_loss_scope: over what it asks for balance: each sequence, or each micro-batch of all
            data-parallel ranks together.
        bias_update_speed: what an update adds to or takes from each correction bias; 0 leaves them.
        dispatcher: how tokens reach experts; "auto" is "local" on one expert-parallel rank and
            "all_to_all" on several.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a value that is not allowed, or that another one would leave without effect.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    score_function: ScoreFunction = "softmax"
    softmax_before_top_k: bool = True
    num_groups: int = 1
    top_k_groups: int = 1
    normalize_weights: bool = True
    normalize_epsilon: float = 1e-20
    scaling_factor: float = 1.0
    router_bias: bool = False
    correction_bias: bool = False
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    activation_alpha: float | None = None
    expert_bias: bool = False
    fp32_product: bool = False
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    balance_loss_coefficient: float = 0.0
    balance_loss_scope: BalanceLossScope = "sequence"
    bias_update_speed: float = 0.0
    dispatcher: DispatcherName = "auto"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_names()
        self._check_ranges()
        self._check_choice()
        self._check_unused()

    @property
    def group_size(self) -> int:
        """Experts of one group."""
        return self.num_experts // self.num_groups

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = str(field.type).split(" | ")
            if "None" in kinds and value is None:
                continue
            if kinds[0] == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{field.name}={value!r} must be an integer")
            if kinds[0] == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name}={value!r} must be True or False")
            if kinds[0] == "float" and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise TypeError(f"{field.name}={value!r} must be a number")

    def _check_names(self) -> None:
        for name, kind in (
            ("score_function", ScoreFunction),
            ("activation", Activation),
            ("balance_loss_scope", BalanceLossScope),
            ("dispatcher", DispatcherName),
        ):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not allowed; use one of {list(allowed)}")

    def _check_ranges(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups",
                     "top_k_groups", "shared_intermediate_size", "latent_size"):  # fmt: skip
            self._require(name, at_least=1)
        for name in ("num_shared_experts", "normalize_epsilon", "balance_loss_coefficient",
                     "bias_update_speed"):  # fmt: skip
            self._require(name, at_least=0)
        for name in ("scaling_factor", "activation_limit", "activation_alpha"):
            self._require(name, above=0)

    def _require(self, name: str, *, at_least: float = -math.inf, above: float = -math.inf) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not (math.isfinite(value) and value >= at_least and value > above):
            bound = f"above {above}" if math.isfinite(above) else f"{at_least} or more"
            raise ValueError(f"{name}={value!r} is not allowed; it must be {bound}, and finite")

    def _check_choice(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} is more than num_experts={self.num_experts}; "
                f"use 1 to {self.num_experts}"
            )
        if self.num_experts % self.num_groups:
            divisors = [n for n in range(1, self.num_experts + 1) if not self.num_experts % n]
            raise ValueError(
                f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}; "
                f"use one of {divisors}"
            )
        if self.top_k_groups > self.num_groups:
            raise ValueError(
                f"top_k_groups={self.top_k_groups} is more than num_groups={self.num_groups}; "
                f"use 1 to {self.num_groups}"
            )
        left = self.top_k_groups * self.group_size
        if self.top_k > left:
            raise ValueError(
                f"top_k={self.top_k} is more than the {left} experts that top_k_groups="
                f"{self.top_k_groups} of num_groups={self.num_groups} groups hold; lower top_k, "
                f"or raise top_k_groups"
            )
        if self.correction_bias and self.top_k_groups < self.num_groups and self.group_size < 2:
            raise ValueError(
                f"num_groups={self.num_groups} leaves one expert per group, and with "
                f"correction_bias=True a group counts by its two best; use "
                f"{self.num_experts // 2} groups or fewer, or correction_bias=False"
            )

    def _check_unused(self) -> None:
        """Refuse what would be accepted and do nothing."""
        default = type(self)
        self._needs(
            "softmax_before_top_k", not self.softmax_before_top_k and self._is_sigmoid,
            'score_function="softmax"',
        )  # fmt: skip
        self._needs(
            "normalize_epsilon",
            self.normalize_epsilon != default.normalize_epsilon and not self.normalize_weights,
            "normalize_weights=True",
        )
        self._needs(
            "bias_update_speed",
            self.bias_update_speed > 0 and not self.correction_bias,
            "correction_bias=True",
        )
        limit, alpha = self.activation_limit, self.activation_alpha
        self._needs(
            "activation_limit", limit is not None and self.activation not in _LIMITED,
            f"an activation of {list(_LIMITED)}",
        )  # fmt: skip
        self._needs(
            "activation_alpha", alpha is not None and self.activation not in _SLOPED,
            f"an activation of {list(_SLOPED)}",
        )  # fmt: skip
        if self.activation == "swiglu_clamped" and limit is None:
            raise ValueError('activation="swiglu_clamped" needs an activation_limit')
        without_shared = self.num_shared_experts == 0
        self._needs("shared_gate", self.shared_gate and without_shared, "num_shared_experts")
        self._needs(
            "shared_intermediate_size",
            self.shared_intermediate_size is not None and without_shared,
            "num_shared_experts",
        )

    @property
    def _is_sigmoid(self) -> bool:
        return self.score_function == "sigmoid"

    def _needs(self, name: str, is_unused: bool, needed: str) -> None:
        if is_unused:
            raise ValueError(
                f"{name}={getattr(self, name)!r} has no effect without {needed}; set that, or "
                f"leave {name} at its default"
            )
