"""The Beam decoder with its head, for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwalk.model_beam.config import BeamConfig, checked_config, moe_config
from shardwalk.model_beam.inputs import (
    Rows,
    check_embeddings,
    check_kept,
    check_source,
    check_weights,
)
from shardwalk.model_beam.layers import BeamAttention, Block, RMSNorm
from shardwalk.model_beam.outputs import BeamModelOutput, BeamOutput
from shardwalk.model_beam.parallelization import PARALLELIZER
from shardwalk.model_beam.pretrained import load_pretrained, model_on_meta, save_pretrained
from shardwalk.model_beam.state_dict import BeamStateDictAdapter
from shardwalk.moe_ep import Gate, GroupedExperts
from shardwalk.moe_ep.config import DispatcherName
from shardwalk.parallelizer_core import ModelParallelizer, StateDictAdapter

IGNORED_LABEL = -100


class BeamModel(nn.Module):
    """Embeddings, blocks and the last norm; see `BeamForCausalLM`."""

    parallelizer: ClassVar[ModelParallelizer] = PARALLELIZER

    def __init__(
        self,
        config: BeamConfig,
        *,
        bias_update_speed: float = 0.0,
        dispatcher: DispatcherName = "auto",
    ) -> None:
        super().__init__()
        self.config = checked_config(config)
        moe = (
            moe_config(config, bias_update_speed=bias_update_speed, dispatcher=dispatcher)
            if config.has_sparse_layers
            else None
        )
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.layers: nn.ModuleList | nn.ModuleDict = nn.ModuleList(
            Block(config, index, moe if kind == "sparse" else None)
            for index, kind in enumerate(config.mlp_layer_types)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> BeamModelOutput:
        """Run the blocks; the arguments are those of `BeamForCausalLM`."""
        x = self._embedded(input_ids, inputs_embeds)
        rows = Rows.of(
            x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            sequence_ids=sequence_ids,
        )
        blocks, states = self.blocks, []
        kinds = dict.fromkeys(block.layer_type for block in blocks)
        arguments = {kind: rows.for_layer(self.config, kind) for kind in kinds}
        for block in blocks:
            if output_hidden_states:
                states.append(x)
            x = block(x, **arguments[block.layer_type])
        x = self.norm(x)
        return BeamModelOutput(
            last=x, rows=rows, hidden_states=(*states, x) if output_hidden_states else None
        )

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        given = check_source(input_ids, inputs_embeds)
        check_weights(self.norm.weight, given)
        if inputs_embeds is None:
            return cast(Tensor, self.embed_tokens(given))
        casts = any(block.compute_dtype is not None for block in self.blocks)
        check_embeddings(given, self.config.hidden_size, None if casts else self.embed_tokens)
        return given

    @property
    def blocks(self) -> list[Block]:
        """The blocks in their order, whether a list or a dict holds them."""
        layers = self.layers
        held = layers.values() if isinstance(layers, nn.ModuleDict) else layers
        return [cast(Block, block) for block in held]


class BeamForCausalLM(nn.Module):
    """The Beam language model, with the module tree and names of its published checkpoints.

    Args:
        config: sizes and rules.
        bias_update_speed: what an update adds to or takes from each router's correction bias
            (`shardwalk.moe_ep.attach_router_bias_update`); 0 leaves them.
        dispatcher: how tokens reach experts on other ranks.

    Raises:
        TypeError: `config` is no `BeamConfig`.
        ValueError: ``config.output_router_logits``, which this model does not give, and options of
            experts without a layer of experts.
    """

    parallelizer: ClassVar[ModelParallelizer] = PARALLELIZER
    state_dict_adapter: ClassVar[StateDictAdapter] = BeamStateDictAdapter()

    def __init__(
        self,
        config: BeamConfig,
        *,
        bias_update_speed: float = 0.0,
        dispatcher: DispatcherName = "auto",
    ) -> None:
        super().__init__()
        _check_options(checked_config(config), bias_update_speed, dispatcher)
        self.config = config
        self.model = BeamModel(config, bias_update_speed=bias_update_speed, dispatcher=dispatcher)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            self._init_weights(module)

    @classmethod
    def on_meta(
        cls, config: BeamConfig | str | Path, *, dtype: torch.dtype | None = None, **options: Any
    ) -> Self:
        """A model without memory yet, in that storage dtype; see `pretrained.model_on_meta`."""
        return model_on_meta(cls, config, dtype=dtype, **options)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: torch.dtype | None = None, **options: Any
    ) -> Self:
        """The whole model of a folder of files; see `pretrained.load_pretrained`."""
        return load_pretrained(cls, folder, dtype=dtype, **options)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write files as transformers loads them, with all ranks; see `pretrained`."""
        save_pretrained(self, folder, **options)

    @property
    def _keep_in_fp32_modules_strict(self) -> list[str]:
        return ["e_score_correction_bias", "mlp.gate.weight"] if self._has_experts() else []

    def _has_experts(self) -> bool:
        return any(block.is_sparse for block in self.model.blocks)

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a module's own weights, N(0, initializer_range); norms are 1, biases 0."""
        std = self.config.initializer_range
        if self.config.tie_word_embeddings and module is self.lm_head:
            return  # it is the embedding, whose row for padding is 0
        if isinstance(module, nn.Linear | nn.Embedding | Gate):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear | Gate) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
        if isinstance(module, Gate) and module.e_score_correction_bias is not None:
            nn.init.zeros_(module.e_score_correction_bias)
        if isinstance(module, GroupedExperts):
            for weight in module.parameters(recurse=False):
                nn.init.normal_(weight, std=std)
        if isinstance(module, BeamAttention):
            nn.init.zeros_(module.gate_bias)
        if isinstance(module, RMSNorm):
            module.reset_parameters()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
    ) -> BeamOutput:
        """Logits of the next token, and the loss of labels.

        Several sequences may be packed into a row, none of which sees another: give `sequence_ids`,
        or `position_ids` that start anew.

        Args:
            input_ids: int64 or int32 [B, S], or one row as [S]; then all else may be [S] too, and
                what comes back has no dimension of rows.
            attention_mask: bool or integers [B, S]; 0 is padding, which nobody sees and no expert
                gets. Its own logits mean nothing. Padding between tokens is a place too: the window
                of a sliding layer counts columns, as that of transformers does.
            position_ids: integers [B, S] or [1, S]; None counts tokens from 0 in each sequence,
                without padding.
            inputs_embeds: floating point [B, S, H] instead of `input_ids`, in the dtype of the
                weights where neither a precision policy nor autocast casts it.
            sequence_ids: integers [B, S]; neighbours with the same number are one sequence.
            labels: integers [B, S], the tokens themselves (position i is predicted by i - 1); -100
                is no target, and neither is the first token of a sequence nor padding. The loss is
                the mean over targets, and 0 without any.
            logits_to_keep: the last so many positions, or the indices of some; 0 is all.
            output_hidden_states: whether to return those too.

        Raises:
            TypeError: an argument of another type or dtype.
            ValueError: shapes that do not fit, arguments that exclude each other, weights on meta.
        """
        check_kept(logits_to_keep, labels)
        is_flat = _is_flat(input_ids)
        if is_flat:
            input_ids, attention_mask, position_ids, sequence_ids, labels = (
                given.unsqueeze(0) if given is not None and _is_flat(given) else given
                for given in (input_ids, attention_mask, position_ids, sequence_ids, labels)
            )
        found: BeamModelOutput = self.model(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_hidden_states=output_hidden_states,
        )
        logits = self._logits(kept_positions(found.last, logits_to_keep))
        loss = None if labels is None else _loss(logits, found.rows.targets(labels, IGNORED_LABEL))
        output = BeamOutput(logits=logits, loss=loss, hidden_states=found.hidden_states)
        return output.of_one_row() if is_flat else output

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(_wide(logits) / cap) * cap


def _check_options(
    config: BeamConfig, bias_update_speed: float, dispatcher: DispatcherName
) -> None:
    if config.output_router_logits:
        raise ValueError(
            "output_router_logits=True: this model returns no router logits; set it to False, "
            "and use shardwalk.moe_ep.expert_load_report or record_routes to see the routers"
        )
    given = {"bias_update_speed": bias_update_speed or None, "dispatcher": dispatcher}
    for name, value in given.items():
        if not config.has_sparse_layers and value not in {None, "auto"}:
            raise ValueError(
                f"{name}={value!r} has no effect, since mlp_layer_types holds no sparse layer; "
                f"leave it out, or make a layer sparse"
            )


def _is_flat(given: Tensor | None) -> bool:
    return isinstance(given, Tensor) and given.ndim == 1


def kept_positions(hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The hidden states [B, kept, H] of the last positions, or of those with these indices."""
    if isinstance(logits_to_keep, Tensor):
        return hidden[:, logits_to_keep]
    return hidden[:, -logits_to_keep:] if logits_to_keep else hidden


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    total = F.cross_entropy(
        _wide(logits).flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / (targets != IGNORED_LABEL).sum().clamp(min=1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
