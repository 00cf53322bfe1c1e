"""The example trains a tiny model and passes its own checks, and refuses options in one line."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ["--model", "tiny", "--steps", "1", "--length", "400"]  # paragraphs of unequal length


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


@pytest.mark.slow
@pytest.mark.parametrize("words", ["hsdp", "ddp", "tp --ranks 6 --sequence-parallel"])
def test_ranks_agree_with_one_process_and_resume_on_fewer(words: str) -> None:
    done = run(EXAMPLES / "finetune.py", *QUICK, "--mesh", *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", equal (relative ") == 4, done.stdout
    assert "DIFFERENT" not in done.stdout
    assert "per rank, " in done.stdout


@pytest.mark.slow
def test_modes_of_checkpointing_agree_and_show_their_peak_memory() -> None:
    words = ["--mesh", "fsdp", "--ranks", "2", "--checkpointing", "selective"]
    done = run(EXAMPLES / "finetune.py", *QUICK, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", equal (relative ") == 8, done.stdout
    assert "DIFFERENT" not in done.stdout
    rows = re.findall(r"^(off|full|selective) +(\d.*)$", done.stdout, re.MULTILINE)
    peaks = {mode: [float(peak) for peak in row.split(", ")] for mode, row in rows}
    assert [len(row) for row in peaks.values()] == [2, 2, 2]
    assert sum(peaks["full"]) < sum(peaks["off"]), peaks


def test_ranks_that_do_not_share_the_heads_are_refused_in_one_line() -> None:
    done = run(EXAMPLES / "finetune.py", *QUICK, "--mesh", "tp", "--tp", "2")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "tp_size=2" in line
    assert "num_attention_heads=9" in line


@pytest.mark.slow
def test_the_script_trains_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [EXAMPLES / "finetune.py", *QUICK, "--mesh", "fsdp", "--save", tmp_path / "saved"]
    done = run(*torchrun, *script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 0 ") == 1, done.stdout
    assert (tmp_path / "saved" / "trainer_state.pt").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--lr", "-1"], "--lr -1.0 must be above 0"),
        (["--mesh", "pp"], "invalid choice 'pp' for argument '--mesh'"),
        (["--ranks", "3", "--batch", "6"], "world_size 3"),
        (["--mesh", "tp", "--ranks", "4"], "world_size 4"),
        (["--tp", "3"], "--tp 3 means nothing with --mesh hsdp; use --mesh tp"),
        (["--sequence-parallel"], "--sequence-parallel means nothing with --mesh hsdp"),
        (["--batch", "6"], "--batch 6 must be a multiple of --accumulate x the ranks with data"),
        (["--resume", "nowhere"], "--resume nowhere is no folder"),
    ],
)
def test_options_that_do_not_work_are_refused_by_name(example, capsys, words, message) -> None:
    tyro = pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as raised:
        tyro.cli(example("options").Options, args=words)
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_numbers_that_differ_do_not_pass(example) -> None:
    console = pytest.importorskip("rich.console").Console(quiet=True)
    equal = example("report").equal
    assert equal(console, "loss", 2.00001, 2.0)
    assert not equal(console, "loss", 2.0001, 2.0)
    assert not equal(console, "loss", float("nan"), 2.0)


def test_an_interrupted_conversion_is_started_again(example, monkeypatch, tmp_path) -> None:
    smollm2 = example("smollm2")
    monkeypatch.setenv("SHARDWALK_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path)

    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.converted()
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder: folder.mkdir())
    assert smollm2.converted().is_dir()
    monkeypatch.setattr(smollm2, "convert", interrupted)
    assert smollm2.converted().parent == tmp_path
