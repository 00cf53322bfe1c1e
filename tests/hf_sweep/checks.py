"""Running one architecture through the parallel forms, against one process."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwalk.mesh import DistributedSetup, FSDP2Config, ParallelismSizes
from shardwalk.parallelizer_core import parallelize_model
from shardwalk.parallelizer_core.testing import (
    ParityCase,
    ParityError,
    RankError,
    RankPool,
    RankTimeoutError,
    Subject,
    Tolerance,
    assert_parity,
    cached,
)
from tests.hf_sweep.batches import quiet, token_losses
from tests.hf_sweep.recipes import Architecture, Found, Recipe, find_recipe

RANKS = 2
FULL_PRECISION: dict[str, Any] = {"mp_policy": {}}
# Wider than that of the other tables, for sizes that nobody chose: the noise of some stacks under
# tensor parallelism comes to 2e-5 (in float64 they agree to 1e-8), and gradients that are zero in
# exact arithmetic (biases of keys, attention over one key) to 1e-8 of the largest gradient.
TOLERANCE = Tolerance(relative=5e-5, floor=1e-2)
TENSOR_PARALLEL = ParallelismSizes(tp_size=RANKS)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One column of the table.

    Attributes:
        sizes: of the mesh; None shards over all ranks.
        setup: further arguments of `DistributedSetup.build`.
    """

    name: str
    sizes: ParallelismSizes | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)


CHECKS = [
    Check(name="fsdp2"),
    Check(name="tp2", sizes=TENSOR_PARALLEL),
    Check(name="checkpointing", setup={"activation_checkpointing": "full"}),
]


@dataclass(kw_only=True)
class Result:
    """What the sweep found out about one architecture.

    Attributes:
        outcomes: by check: ``equal``, or ``refused``, ``differs``, ``error``, ``hangs`` or ``dies``
            and what was said after a colon.
        reason: why it was not built.
        seconds: of everything, on the machine as it was.
    """

    model_type: str
    class_name: str
    kind: str
    outcomes: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    beside_text: str = ""
    parameters: int = 0
    idle: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Sweep:
    """The pools of one sweep: one process that looks for recipes, ranks that train."""

    def __init__(self, limit: float = 120.0) -> None:
        self.limit = limit
        self._alone = RankPool(1, timeout=limit, warnings_as_errors=False)
        self._ranks = RankPool(RANKS, timeout=limit, warnings_as_errors=False)
        self._models = 0

    def run(self, one: Architecture, checks: list[Check]) -> Result:
        """Find a recipe for `one` and run the checks on it."""
        start = time.monotonic()
        result = Result(model_type=one.model_type, class_name=one.class_name, kind=one.kind)
        try:
            found: Found = self._alone.run(find_recipe, one)[0]
        except RankError as error:
            found = Found(recipe=None, reason=outcome_of(error))
        if found.recipe is None:
            result.reason = found.reason
        else:
            result.beside_text = found.recipe.beside_text
            result.notes = [f"text alone: {found.note}"] if found.note else []
            result.parameters, result.idle = found.parameters, found.idle
            for check in checks:
                result.outcomes[check.name] = self.check(found.recipe, check)
        result.seconds = round(time.monotonic() - start, 1)
        self._retire()
        return result

    def check(self, recipe: Recipe, check: Check) -> str:
        """Compare one parallel form with one process."""
        try:
            refused = self._ranks.run(refusal, recipe, check.sizes, dict(check.setup))
            if any(refused):
                return f"refused: {refused[0]}" if len(set(refused)) == 1 else f"error: {refused}"
            check_parity(recipe, check, self._ranks)
        except (RankError, ParityError, ValueError) as error:
            return outcome_of(error)
        return "equal"

    def close(self) -> None:
        """End all processes."""
        self._alone.close()
        self._ranks.close()

    def _retire(self) -> None:
        """Start anew now and then, since ranks keep every module that a model imported."""
        self._models += 1
        if self._models % 40 == 0:
            self.close()


def check_parity(recipe: Recipe, check: Check, pool: RankPool | None = None) -> None:
    """One step of SGD on two ranks and on one process: loss, every gradient, every parameter."""
    case = ParityCase(model=recipe, batches=recipe.batch, token_losses=token_losses)
    assert_parity(
        case,
        world_size=RANKS,
        parallelism_sizes=check.sizes,
        setup=check.setup,
        subject=Subject(parallelize=parallelize_quietly),
        optimizers=("sgd",),
        steps=1,
        tolerance=TOLERANCE,
        pool=pool,
    )


def parallelize_quietly(model: nn.Module, setup: Any) -> nn.Module:
    """`parallelize_model` without the warnings of models."""
    with quiet():
        return parallelize_model(model, setup.mesh_context)


def refusal(recipe: Recipe, sizes: ParallelismSizes | None, setup: dict[str, Any]) -> str:
    """What `parallelize_model` says against the model, nothing where it takes it."""
    key = ("sweep", sizes, tuple(sorted(setup.items())))
    made = cached(key, lambda: _setup(sizes, setup))
    try:
        parallelize_quietly(recipe(), made)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def _setup(sizes: ParallelismSizes | None, setup: dict[str, Any]) -> DistributedSetup:
    return DistributedSetup.build(FSDP2Config(**FULL_PRECISION), parallelism_sizes=sizes, **setup)


def is_fine(check: str, outcome: str) -> bool:
    """Whether an outcome is as it should be: equal, or refused before tensor parallelism."""
    return outcome == "equal" or (check == "tp2" and outcome.startswith("refused"))


def is_ours(trace: str) -> bool:
    """Whether the last frame of the rank that failed first stands in shardwalk."""
    files = re.findall(r'File "([^"]*)", line', trace.partition("also rank")[0])
    return bool(files) and "/shardwalk/" in files[-1]


def outcome_of(error: Exception) -> str:
    """One line for what went wrong."""
    text = str(error)
    if isinstance(error, ParityError):
        return "differs: " + " / ".join(line.strip() for line in text.splitlines()[1:6])
    if isinstance(error, RankTimeoutError):
        return f"hangs: {text.splitlines()[0]}"
    if isinstance(error, RankError):
        first = text.splitlines()[0].partition(": ")[2]
        frames = re.findall(
            r'File "[^"]*/([^"/]+)", line (\d+), in (\w+)', text.partition("also rank")[0]
        )
        where = f" ({frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]})" if frames else ""
        if first.startswith("ValueError: ") and is_ours(text):
            return f"refused: {first.partition(': ')[2]} (in the first step)"
        return f"{'dies' if 'died with' in first else 'error'}: {first[:300]}{where}"
    return f"error: {' '.join(text.split())[:300]}"
