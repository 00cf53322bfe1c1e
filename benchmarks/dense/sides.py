"""What is compared: a stack whose activations dominate, and a model whose weights do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from overhead.sides import Variant, walked
from torch import nn

from shardwalk.mesh import FSDP2Config, ParallelismSizes

# Many tokens in narrow blocks: the weights of a block are a hundredth of what its backward needs.
STACK = Variant(vocabulary=64, dim=64, heads=2, ffn=176, layers=8, rows=8, length=256)


@dataclass(frozen=True, kw_only=True)
class LlamaVariant(Variant):
    """A decoder of transformers; `tp` and `world_size / tp` divide its sizes.

    Attributes:
        kv_heads: heads of keys and values.
        tp: ranks that split a layer.
        sequence_parallel: whether they split the sequence too.
        rank: of the adapters on every projection of a block; 0 trains all weights instead.
    """

    kv_heads: int = 2
    tp: int = 1
    sequence_parallel: bool = False
    rank: int = 0

    def build(self) -> nn.Module:
        """The model with weights of torch's random state, frozen beside adapters."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.dim,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            use_cache=False,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        return with_adapters(model, self.rank) if self.rank else model

    def config(self) -> FSDP2Config:
        """The strategy, with the options of tensor parallelism."""
        return replace(super().config(), sequence_parallel=self.sequence_parallel)

    def sizes(self) -> ParallelismSizes:
        """The sizes of the mesh."""
        return replace(super().sizes(), tp_size=self.tp)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """`model`, frozen, with an adapter on every projection of its blocks."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # peft reads an attribute that transformers renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    return adapted


# Few tokens in wide blocks: weights, gradients and optimizer are nearly all of the memory.
FINE_TUNED = LlamaVariant(dim=256, heads=8, kv_heads=8, ffn=704, layers=8, rows=1, length=4)
SPLIT = LlamaVariant(
    world_size=4, tp=2, vocabulary=256, dim=64, heads=4, ffn=128, layers=3, rows=2, length=16
)


def recomputing_nothing(variant: Variant) -> nn.Module:
    """The walked model that keeps all activations."""
    return walked(replace(variant, checkpointing=False))


def recomputing_selectively(variant: Variant) -> nn.Module:
    """The walked model that keeps attention and every other matrix product."""
    return walked(replace(variant, checkpointing="selective"))


def recomputing_blocks(variant: Variant) -> nn.Module:
    """The walked model that keeps the inputs of its blocks."""
    return walked(replace(variant, checkpointing="full"))


def without_prefetch(variant: Variant) -> nn.Module:
    """The walked model in torch's own order of gathering."""
    return walked(replace(variant, prefetch=False))


def with_prefetch(variant: Variant) -> nn.Module:
    """The walked model with explicit chains of prefetch."""
    return walked(replace(variant, prefetch=True))


CHECKPOINTING = {
    "off": recomputing_nothing,
    "selective": recomputing_selectively,
    "full": recomputing_blocks,
}
PREFETCH = {"off": without_prefetch, "on": with_prefetch}
WALKED = {"walked": walked}
