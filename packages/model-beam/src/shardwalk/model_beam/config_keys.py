"""Keys of a ``config.json`` beside the network's own: which are kept, and which are refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

MODEL_TYPE = "beam"

_BOOKKEEPING = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_experts_implementation", "_experts_implementation_internal",
    "_name_or_path", "architectures", "attn_implementation", "auto_map", "dtype",
    "experts_implementation", "finetuning_task", "id2label", "label2id", "name_or_path",
    "num_labels", "output_attentions", "output_hidden_states", "prefix", "problem_type",
    "return_dict", "task_specific_params", "tie_last_hidden_states", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "use_return_dict",
})  # fmt: skip
_GENERATION = frozenset({
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids",
    "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
})  # fmt: skip
_ROPE = 'rope_parameters={"sliding_attention": {"rope_type": ..., "rope_theta": ...}, ...}'
_WAY_OUT: dict[str, str] = {
    "quantization_config": "load unquantized weights, and leave the key out",
    "rope_scaling": f"write {_ROPE} instead",
    "rope_theta": f"write {_ROPE} instead",
    "partial_rotary_factor": "heads are rotated whole or not at all; leave the key out",
    "per_layer_config": "layers differ by layer_types and mlp_layer_types alone; leave the key out",
    "is_encoder_decoder": "the network is a decoder; leave the key out",
    "add_cross_attention": "the network is a decoder; leave the key out",
    "tie_encoder_decoder": "the network is a decoder; leave the key out",
    "pruned_heads": "heads cannot be pruned; leave the key out",
    "chunk_size_feed_forward": "MLPs take all tokens at once; leave the key out",
}
"""Keys that are kept while they say nothing (null, false, 0, empty), and refused else."""


def check_model_type(values: Mapping[str, Any]) -> None:
    """Refuse the file of another network.

    Raises:
        ValueError: for another ``model_type``.
    """
    given = values.get("model_type", MODEL_TYPE)
    if given != MODEL_TYPE:
        raise ValueError(
            f'model_type={given!r} is another network; use a config.json with "{MODEL_TYPE}"'
        )


def check_extra(extra: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse keys that might change the network in a way that this package does not know.

    Args:
        extra: keys and values which are no fields of the configuration.
        names: the fields, for the nearest one of them.

    Raises:
        TypeError: for anything but a mapping.
        ValueError: for a key that is not known or has a value with a meaning.
    """
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra={extra!r} must be a mapping of keys of a config.json")
    for key, value in extra.items():
        if key in _WAY_OUT:
            if value:
                raise ValueError(f"{key}={value!r} is not supported; {_WAY_OUT[key]}")
        elif key not in _BOOKKEEPING and key not in _GENERATION:
            raise ValueError(_unknown(key, value, names))


def _unknown(key: str, value: object, names: Collection[str]) -> str:
    known = [*names, *_BOOKKEEPING, *_GENERATION]
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the network's own keys are {sorted(names)}"
    return (
        f"{key}={value!r} is no key of a Beam configuration, and may change the network; {hint} "
        f"Leave it out if it does not"
    )
