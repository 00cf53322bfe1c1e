"""The example of a policy trains, adapts and draws on two ranks, in a world that obeys its laws."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--ranks 2 --steps 1 --lora-steps 1 --batch 2 --size 64 --experts 2"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


@pytest.mark.slow
def test_two_ranks_train_and_adapt_and_all_checks_pass(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "tracks.png"
    script = [sys.executable, EXAMPLES / "train_praxis.py", *SMALL.split(), "--figure", figure]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count(", equal (relative ") == 3, done.stdout
    assert "actions of merged adapters: equal" in done.stdout
    assert done.stdout.count("step 0  loss ") == 2
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_world_obeys_its_laws(example) -> None:
    pytest.importorskip("tyro")
    chase = example("chase")
    from shardwalk.model_praxis import PraxisConfig

    config = PraxisConfig.from_dict(chase.document(size=64, experts=2))
    numbers = range(40)
    episode, window = chase.play(config, numbers), chase.windows(config, numbers)
    disc, hand = episode.disc, episode.hand
    assert disc.abs().max() <= 0.8
    speeds = disc.diff(dim=1).norm(dim=-1)
    assert speeds.max() < 0.0501
    assert (speeds > 0.0499).float().mean() > 0.9  # all but where a wall is hit
    closing = (hand[:, 1:] - disc[:, 1:]) / (hand[:, :-1] - disc[:, 1:])
    torch.testing.assert_close(closing, torch.full_like(closing, 0.75), rtol=1e-3, atol=1e-3)
    led = chase.hand_tracks(config, window, window.actions)
    torch.testing.assert_close(led, hand[:, 1:])
    mirrored = chase.windows(config, numbers, mirrored=True)
    axes = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(chase.hand_tracks(config, mirrored, mirrored.actions), led * axes)
    assert torch.equal(mirrored.latents, window.latents)
    brightest = window.anchor[:, 0, 0].flatten(1).argmax(1)
    column = ((disc[:, 0, 0] + 1) / 2 * chase.SIDE).long()
    row = ((disc[:, 0, 1] + 1) / 2 * chase.SIDE).long()
    assert (brightest == row * chase.SIDE + column).float().mean() > 0.9
    one = chase.windows(config, [7])
    assert torch.equal(one.latents[0], window.latents[7])
    assert not torch.equal(one.latents[0], window.latents[8])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--lora-lr", "0"], "--lora-lr 0.0 must be above 0"),
        (["--size", "96"], "--size 96 must be a multiple of 64"),
        (["--batch", "6"], "--batch 6 must be a multiple of --ranks 4"),
        (["--experts", "3"], "--experts 3 must be a multiple of --ep 2"),
        (["--ep", "3", "--experts", "9"], "ep_size"),
        (["--resume", "nowhere"], "--resume nowhere is no folder"),
    ],
)
def test_options_that_do_not_work_are_refused_by_name(
    example, monkeypatch, capsys, words, message
) -> None:
    tyro = pytest.importorskip("tyro")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as raised:
        tyro.cli(example("praxis_options").Options, args=words)
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
