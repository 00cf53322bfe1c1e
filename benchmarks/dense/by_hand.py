"""What memory and traffic come to by the sizes alone; all tensors are fp32."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from overhead.sides import Checkpointing, Variant

from .sides import LlamaVariant

_FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class _BlockBytes:
    """What the backward of a block reads, beside weights, and what it makes.

    A `hidden` is rows x length x dim, an `inner` rows x length x ffn.

    Attributes:
        input: the block's: 1 hidden.
        attention: what its backward reads of its results: output (1 hidden), sums of exponentials.
        kept_products: of the other products: queries, keys and values (3 hidden), the gate.
        rest: each norm's root, normalized tokens and result; rotated queries and keys with their
            angles; the output's copy in the order of tokens; the sum before the second norm;
            activated gate, up, and the product of both.
        down: the last product, which selective checkpointing keeps and no backward reads.
        gradients: while the gated product goes backward: that of the block's output, and of gate
            and up instead of their product, which is gone.
    """

    input: int
    attention: int
    kept_products: int
    rest: int
    down: int
    gradients: int


def _block(sizes: Variant) -> _BlockBytes:
    tokens = sizes.rows * sizes.length * _FLOAT
    hidden, inner = tokens * sizes.dim, tokens * sizes.ffn
    angles = 4 * sizes.length * (sizes.dim // sizes.heads // 2) * _FLOAT
    return _BlockBytes(
        input=hidden,
        attention=hidden + tokens * sizes.heads,
        kept_products=3 * hidden + inner,
        rest=8 * hidden + 3 * inner + 2 * tokens + angles,
        down=hidden,
        gradients=hidden + 2 * inner,
    )


def peak_of_activations(sizes: Variant, mode: Checkpointing) -> int:
    """Bytes in the backward of the last block, whose weights are left out.

    Every block has what its forward kept, and this one all that its backward reads.
    """
    block = _block(sizes)
    kept = block.input
    if mode != "full":
        kept += block.attention + block.kept_products
    read = block.input + block.attention + block.kept_products + block.rest
    if not mode:
        return sizes.layers * read + block.gradients
    own_copies = block.down if mode == "selective" else 0
    return sizes.layers * (kept + own_copies) + read - kept + block.gradients


def products_of_step(sizes: Variant, mode: Checkpointing) -> float:
    """The matrix products of a block's step over those without a recompute.

    The backward has two for every one of the forward. A recompute stops before the last one, and
    selective checkpointing has every other one at hand.
    """
    attention_out, one_of_three = sizes.dim**2, sizes.dim * sizes.ffn
    forward = 3 * sizes.dim**2 + attention_out + 3 * one_of_three
    again = {False: 0, "selective": attention_out + one_of_three, "full": forward - one_of_three}
    return 1 + again[mode] / (3 * forward)


@dataclass(frozen=True, kw_only=True)
class Units:
    """Elements of the units of a decoder with L blocks on one rank of a tensor-parallel group.

    Attributes:
        block: projections and two norms; with adapters, these too.
        adapters: of a block.
        table: the embedding, or the head.
        root: the last norm.
        layers: L.
    """

    block: int
    adapters: int
    table: int
    root: int
    layers: int

    @property
    def all(self) -> int:
        """Elements of the whole model."""
        return self.layers * self.block + 2 * self.table + self.root

    @property
    def all_adapters(self) -> int:
        """Elements of all adapters."""
        return self.layers * self.adapters


def units_of(sizes: LlamaVariant) -> Units:
    """The units by the sizes: a projection of a x b has adapters of rank x (a + b)."""
    dim, ffn = sizes.dim, sizes.ffn
    kv = dim // sizes.heads * sizes.kv_heads
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn)]
    projections = sum(rows * columns for rows, columns in shapes)
    adapters = sizes.rank * sum(rows + columns for rows, columns in shapes)
    return Units(
        block=projections // sizes.tp + 2 * dim + adapters,
        adapters=adapters,
        table=sizes.vocabulary * dim // sizes.tp,
        root=dim,
        layers=sizes.layers,
    )


def traffic_of_split_layers(sizes: LlamaVariant) -> dict[str, tuple[int, int]]:
    """Calls and bytes that a rank gives to the collectives of a step, by their names."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def add(name: str, times: int, elements: int) -> None:
        calls[name] += times
        sent[name] += times * elements * _FLOAT

    units, shards, layers = units_of(sizes), sizes.world_size // sizes.tp, sizes.layers
    # Each unit is gathered forward; backward again the blocks but the last, and the embedding.
    add("_allgather_base_", 2 * layers - 1, units.block // shards)
    add("_allgather_base_", 3, units.table // shards)
    add("_allgather_base_", 1, units.root // shards)
    add("_reduce_scatter_base_", layers, units.block)
    add("_reduce_scatter_base_", 2, units.table)
    add("_reduce_scatter_base_", 1, units.root)
    tokens = sizes.rows * sizes.length
    hidden = tokens * sizes.dim
    # The embedding's rows forward, the head's input backward; the logits.
    add("all_reduce", 2, hidden)
    add("all_gather_into_tensor", 1, tokens * sizes.vocabulary // sizes.tp)
    if sizes.sequence_parallel:
        # Attention and feed-forward gather and scatter, both ways; the last block's output
        # forward, the first one's input backward; gradients of two norms.
        add("all_gather_into_tensor", 4 * layers + 2, hidden // sizes.tp)
        add("reduce_scatter_tensor", 4 * layers, hidden)
        add("all_reduce", 2 * layers, sizes.dim)
    else:
        # Outputs of attention and feed-forward forward, their inputs backward.
        add("all_reduce", 4 * layers, hidden)
    return {name: (calls[name], sent[name]) for name in calls}


def held_by_training(sizes: LlamaVariant) -> int:
    """Bytes between steps: shards of weights, and AdamW's two moments of what trains."""
    units = units_of(sizes)
    trained = units.all_adapters if sizes.rank else units.all
    return (units.all + 2 * trained) // sizes.world_size * _FLOAT


def peak_of_training(sizes: LlamaVariant) -> int:
    """Bytes at the peak of a step, activations left out.

    With all weights: the first block's gradients are reduced, from a buffer of their size, beside
    its weights and the embedding's, which was gathered ahead; all other gradients are shards.
    With adapters: the last block's weights are copied out of the buffer that they were gathered in,
    beside that of the block before, and the root unit, which has the tables, stays gathered.
    """
    units = units_of(sizes)
    if sizes.rank:
        root = 2 * units.table + units.root
        return held_by_training(sizes) + (root + 3 * units.block) * _FLOAT
    shards = (units.all - units.block - units.table) // sizes.world_size
    return held_by_training(sizes) + (shards + 3 * units.block + units.table) * _FLOAT
