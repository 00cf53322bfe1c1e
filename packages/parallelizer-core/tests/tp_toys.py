"""Plain models for the tests of tensor-parallel plans: no transformers, no ranks."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, KV, HEAD_DIM, FFN, WORDS = 12, 4, 2, 4, 20, 33


class Attention(nn.Module):
    def __init__(self, *, heads=HEADS, kv=KV, qk_norm=False):
        super().__init__()
        self.heads, self.num_kv_heads, self.head_dim = heads, kv, HEAD_DIM
        self.q_proj = nn.Linear(WIDTH, heads * HEAD_DIM)
        self.k_proj = nn.Linear(WIDTH, kv * HEAD_DIM)
        self.v_proj = nn.Linear(WIDTH, kv * HEAD_DIM)
        self.o_proj = nn.Linear(heads * HEAD_DIM, WIDTH)
        self.q_norm = nn.RMSNorm(HEAD_DIM) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(HEAD_DIM) if qk_norm else nn.Identity()

    def forward(self, hidden_states):
        rows, length, _ = hidden_states.shape
        q = self.q_norm(self.q_proj(hidden_states).view(rows, length, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(hidden_states).view(rows, length, self.num_kv_heads, -1))
        v = self.v_proj(hidden_states).view(rows, length, self.num_kv_heads, -1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, self.heads * self.head_dim))


class Gated(nn.Module):
    def __init__(self, ffn=FFN):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, ffn, bias=False)
        self.up_proj = nn.Linear(WIDTH, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedWithResidual(Gated):
    def forward(self, x):
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, attention=Attention, mlp=Gated, **kwargs):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention(**kwargs), mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class FlatBlock(nn.Module):
    """Attention and a plain feed-forward layer whose linear layers stand in the block itself."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.head_dim = HEADS, HEAD_DIM
        self.norm = nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, HEADS * HEAD_DIM) for _ in range(3))
        self.q_norm = nn.RMSNorm(HEAD_DIM)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x):
        shape = (*x.shape[:2], self.n_heads, self.head_dim)
        q, k = self.q_norm(self.wq(self.norm(x)).view(shape)), self.wk(self.norm(x)).view(shape)
        v = self.wv(self.norm(x)).view(shape)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(x)))


class Decoder(nn.Module):
    def __init__(self, block=Block, *, blocks=2, tied=False, words=WORDS, head_words=None):
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(blocks)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, head_words or words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain_plan(model, sequence_parallel=False):
    """A plan function, as a user would register it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if sequence_parallel:
        raise NotImplementedError("no sequence parallelism here")
    return {
        "layers.*.mlp.*_proj": ColwiseParallel(),
        "layers.*.attention.o_proj": RowwiseParallel(),
    }


def meta(make, /, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)
