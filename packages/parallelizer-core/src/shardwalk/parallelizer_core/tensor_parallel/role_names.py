"""The names under which modules hold what has a role in attention and feed-forward layers.

One table per role; nothing here knows a model.
"""

from __future__ import annotations

QUERY_NAMES = ("q_proj", "wq", "query", "q", "to_q", "query_proj", "q_linear")
KEY_NAMES = ("k_proj", "wk", "key", "k", "to_k", "key_proj", "k_linear")
VALUE_NAMES = ("v_proj", "wv", "value", "v", "to_v", "value_proj", "v_linear")
OUTPUT_NAMES = ("o_proj", "wo", "out_proj", "o", "to_out", "output_proj", "out", "proj", "dense")
FUSED_QUERY_KEY_VALUE_NAMES = ("qkv_proj", "query_key_value", "qkv", "Wqkv", "wqkv", "to_qkv",
                               "c_attn", "qkv_linear", "in_proj")  # fmt: skip
HEAD_NORM_NAMES = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm",
                   "norm_q", "norm_k", "q_ln", "k_ln", "v_norm")  # fmt: skip
COLUMN_NAMES = ("gate_proj", "up_proj", "w1", "w3", "gate", "up", "fc1", "fc_in", "lin1", "linear1")
ROW_NAMES = ("down_proj", "w2", "down", "fc2", "fc_out", "lin2", "linear2")
FUSED_GATED_NAMES = ("gate_up_proj", "gate_up", "up_gate_proj", "w12", "w13", "Wi", "wi",
                     "fc1", "linear1", "up_proj", "dense_h_to_4h")  # fmt: skip
FUSED_ROW_NAMES = ("w3", "Wo", "wo", "dense_4h_to_h", "c_proj")
HEAD_WIDTH_ATTRIBUTES = ("head_dim", "head_size", "dim_head", "d_head", "attention_head_size")
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_q_heads",
                "n_q_heads", "num_query_heads", "n_local_heads", "nhead", "nheads")  # fmt: skip
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads",
                    "n_local_kv_heads", "num_k_heads", "num_v_heads")  # fmt: skip
