"""The example with a small Beam trains, resumes, exports and draws, and refuses what does not fit."""

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
    return importlib.import_module("train_beam")


@pytest.mark.slow
def test_two_ranks_train_and_everything_after_agrees(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, export = tmp_path / "loads.png", tmp_path / "export"
    sizes = ["--size", "64", "--layers", "3", "--experts", "4", "--length", "32", "--batch", "4"]
    words = ["--ranks", "2", "--steps", "3", *sizes, "--figure", figure, "--export", export]
    script = [sys.executable, EXAMPLES / "train_beam.py", *words]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = re.findall(r"step [0-3]  loss (\d+\.\d+)", done.stdout)
    assert float(last) < float(first)
    assert re.search(r"next step, resumed: .* equal", done.stdout)
    assert "logits of transformers: equal" in done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert (export / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--size", "96"], "--size 96 must be a multiple of 64"),
        (["--batch", "6"], "--batch 6 must be a multiple of --ranks 4"),
        (["--experts", "9"], "--experts 9 must be a multiple of --ep 2"),
        (["--ep", "3", "--experts", "9"], "3"),
        (["--lr", "0"], "--lr 0.0 must be above 0"),
        (["--resume", "nowhere"], "--resume nowhere is no folder"),
    ],
)
def test_options_that_do_not_work_are_refused_by_name(example, capsys, words, message) -> None:
    with pytest.raises(SystemExit) as raised:
        sys.modules["tyro"].cli(example.Options, args=words)
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
