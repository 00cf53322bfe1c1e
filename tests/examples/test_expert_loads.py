"""The example of expert loads trains on two ranks and draws, and refuses what does not fit."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("tyro")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("expert_loads")


def test_two_ranks_train_and_the_loads_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "loads.png"
    words = ["--steps", "3", "--layers", "1", "--rows", "2", "--length", "16"]
    script = [sys.executable, EXAMPLES / "expert_loads.py", *words, "--figure", figure]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = r"step +\d+  loss \d+\.\d+  imbalance (\d+\.\d+), at worst \1  entropy [01]\.\d+  idle"
    assert len(re.findall(line, done.stdout)) == 3, done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_starts(example: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    monkeypatch.setattr(example, "launch", lambda *args: pytest.fail("ranks were started"))
    monkeypatch.setattr(sys, "argv", ["expert_loads.py"])
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        example.main()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--ranks", "3"], "--experts 8 must be a multiple of --ranks 3"),
        (["--top-k", "9"], "top_k=9 is more than num_experts=8"),
        (["--speed", "0"], "--speed 0.0 must be above 0"),
    ],
)
def test_options_that_do_not_work_are_refused_by_name(example, capsys, words, message) -> None:
    with pytest.raises(SystemExit) as raised:
        sys.modules["tyro"].cli(example.Options, args=words)
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_text_is_skewed_equal_on_every_run_and_different_on_every_rank(example) -> None:
    options = example.Options(rows=64)
    tokens, again, other = (example.SkewedText(options, rank).batch() for rank in (0, 0, 1))
    assert tokens.equal(again)
    assert not tokens.equal(other)
    counts = tokens.flatten().bincount(minlength=options.vocabulary)
    assert counts.max() > 10 * counts.double().mean()
