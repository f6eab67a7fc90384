"""The demonstration and the comparison of attention settings, in small."""

import json
import os

import pytest
from rich.console import Console

from flashtile.llm.config import PRESETS
from flashtile.llm.demo import run_demo
from flashtile.llm.experiment import compare_attention
from flashtile.llm.metrics import History
from flashtile.llm.plot import plot_loss
from tests.llm.conftest import QUICK, TINY


@pytest.fixture
def console():
    with open(os.devnull, "w") as nowhere:
        yield Console(record=True, width=200, file=nowhere)


def test_demo_trains_plots_and_writes_twice_in_a_row(corpus, console, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "demo", (TINY, QUICK))
    first = run_demo(tmp_path, data=corpus, prompt="def f1[/b]", console=console)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    second = run_demo(tmp_path, data=corpus, console=console)
    assert second.losses == first.losses
    text = console.export_text()
    assert "Tokenizing" in text
    assert "tokenized earlier" in text
    assert f"Loss {first.losses[0]:.2f} at the first step" in text
    assert "def f1[/b]" in text  # the sample is text, not markup
    assert f"flashtile generate --model {tmp_path / 'model'}" in text


def test_demo_takes_other_steps_and_attention(corpus, console, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "demo", (TINY, QUICK))
    history = run_demo(tmp_path, data=corpus, steps=2, attention="naive", console=console)
    assert len(history.losses) == 2
    assert "attention 'naive'" in console.export_text()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(suffix, tmp_path):
    history = History(
        train=[{"step": n, "loss": 5.0 / n} for n in range(1, 9)], val=[{"step": 8, "val_loss": 1.0}], interrupted=False
    )
    path = plot_loss({"one": history, "two": History()}, tmp_path / f"loss.{suffix}", "a title")
    assert path.stat().st_size > 5000
    assert path.read_bytes().lstrip().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


def test_comparison(corpus, console, tmp_path):
    result = compare_attention(["flash", "naive", "sdpa"], TINY, QUICK, tmp_path, data=corpus, console=console)
    assert result == json.loads((tmp_path / "comparison.json").read_text())
    assert set(result["runs"]) == {"flash", "naive", "sdpa"}
    for run in result["runs"].values():
        assert len(run["losses"]) == QUICK.steps
        assert run["max_loss_difference"] < 1e-3
        assert run["tokens_per_second"] > 0
        assert run["mfu"] is run["peak_memory_bytes"] is None
    assert result["runs"]["flash"]["max_loss_difference"] == 0
    with pytest.raises(FileExistsError, match="holds a comparison already"):
        compare_attention(["flash"], TINY, QUICK, tmp_path, data=corpus, console=console)
    with pytest.raises(ValueError, match="each once, got naive, naive"):
        compare_attention(["naive", "naive"], TINY, QUICK, tmp_path, data=corpus, console=console)
    assert result["device"] == "cpu"
    assert result["versions"]["torch"]
    assert result["model_config"]["d_model"] == 32
    for suffix in ("png", "svg"):
        assert (tmp_path / f"comparison.{suffix}").exists()
    assert "at most" in console.export_text()
