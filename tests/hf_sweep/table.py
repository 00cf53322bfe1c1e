"""The results of a sweep as JSON, and as the page of the docs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tests.hf_sweep.checks import CHECKS, Result

_HEADS = {"fsdp2": "FSDP2", "tp2": "TP2", "checkpointing": "FSDP2, full checkpointing"}


def load_results(path: Path) -> dict[str, Result]:
    """The results by model type and class; none where there is no file."""
    if not path.exists():
        return {}
    return {
        key: Result(**fields) for key, fields in json.loads(path.read_text())["results"].items()
    }


def save_results(results: dict[str, Result], path: Path) -> None:
    """Write them with the versions that they were found with."""
    ordered = {key: dataclasses.asdict(results[key]) for key in sorted(results, key=str.lower)}
    content = {"versions": versions(), "results": ordered}
    path.write_text(json.dumps(content, indent=1) + "\n")


def versions() -> dict[str, str]:
    """What the results depend on beside shardwalk."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def table(results: dict[str, Result]) -> str:
    """The page of the docs."""
    built = [r for r in _sorted(results) if not r.reason]
    missing = [r for r in _sorted(results) if r.reason]
    used = " and ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        "# Models of transformers, swept",
        "",
        "<!-- Written by `python -m nox -s hf_sweep`; changes by hand are lost. -->",
        "",
        f"With {used}, in fp32 on two gloo ranks: every causal language model and every",
        "image-text-to-text model of the auto-model mappings, tiny, made from the defaults of its",
        "configuration. **equal**: loss, every gradient and every parameter after a step of SGD are",
        "those of one process. **refused**: a ValueError before the first step says what does not",
        "fit. **beside text**: the layout in which an image went in. What is refused or otherwise has",
        "the reason in the notes, cut short; hf-sweep.json has all of it.",
        "",
        *_counts(built, missing),
        "",
        "| model | class | beside text | "
        + " | ".join(_HEADS[c.name] for c in CHECKS)
        + " | notes |",
        "|---|---|---|" + "---|" * (len(CHECKS) + 1),
        *(_row(result) for result in built),
        "",
        "## Not built",
        "",
        "| model | class | why |",
        "|---|---|---|",
        *(f"| {r.model_type} | {r.class_name} | {_cell(r.reason, 300)} |" for r in missing),
    ]
    return "\n".join(lines) + "\n"


def _counts(built: list[Result], missing: list[Result]) -> list[str]:
    lines = [
        f"{len(built)} are built, {len(missing)} are not (listed below).",
        "",
        "| | equal | refused | otherwise |",
        "|---|---|---|---|",
    ]
    for check in CHECKS:
        words = Counter(r.outcomes.get(check.name, "").partition(":")[0] for r in built)
        others = sum(n for word, n in words.items() if word not in ("equal", "refused"))
        lines.append(f"| {_HEADS[check.name]} | {words['equal']} | {words['refused']} | {others} |")
    return lines


def _row(result: Result) -> str:
    outcomes = [result.outcomes.get(check.name, "") for check in CHECKS]
    words = [outcome.partition(":")[0] or "not run" for outcome in outcomes]
    notes = list(result.notes)
    if result.idle * 100 > result.parameters:
        notes.append(f"{result.idle / result.parameters:.0%} of the parameters take no part")
    said = {
        check.name: _short(o.partition(": ")[2]) for check, o in zip(CHECKS, outcomes, strict=True)
    }
    if said["checkpointing"] == said["fsdp2"]:
        del said["checkpointing"]
    notes += [f"{_HEADS[name]}: {text}" for name, text in said.items() if text]
    beside = result.beside_text or ("none" if result.kind == "image-text" else "")
    cells = [result.model_type, result.class_name, beside, *words, _cell("; ".join(notes), 300)]
    return "| " + " | ".join(cells) + " |"


def _short(said: str) -> str:
    """What a refusal says of this model, without the ways out that all of them name."""
    text = said.partition("; pass tp_plan")[0].removeprefix("tp_size=2: ")
    return text.replace(" does not fit the default tensor-parallel plan:", ":")


def _cell(text: str, length: int) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= length else text[: length - 3] + "..."


def _sorted(results: dict[str, Result]) -> list[Result]:
    return [results[key] for key in sorted(results, key=str.lower)]
