"""Which kernels attention may use in a recompute: those that its forward could.

`torch.nn.attention.sdpa_kernel` around a forward is left again when the backward comes. Another
kernel would have other rounding, another random mask under dropout, and other saved tensors than
the graph of the forward expects.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from torch.nn.attention import sdpa_kernel

from shardwalk.parallelizer_core._torch_compat import enabled_attention_backends


class AttentionBackends(AbstractContextManager[None]):
    """While entered, attention chooses among the backends that were enabled when this was made.

    May be entered again and inside itself.
    """

    def __init__(self) -> None:
        self._enabled = enabled_attention_backends()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(self._enabled, set_priority=True))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()
