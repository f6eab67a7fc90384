"""The demonstration: a small model learns to write Python in about two minutes on two CPU cores."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flashtile.llm.checkpoint import load_model
from flashtile.llm.config import PRESETS, Attention, SamplingConfig
from flashtile.llm.generation import stream
from flashtile.llm.metrics import History
from flashtile.llm.plot import plot_loss
from flashtile.llm.training import train

PROMPT = "def"  # no space behind it: the tokens of names begin with theirs


def run_demo(
    out_dir: Path | str = "runs/demo",
    *,
    attention: Attention = "flash",
    steps: int | None = None,
    data: Path | str | None = None,
    prompt: str = PROMPT,
    console: Console | None = None,
) -> History:
    """Train the "demo" preset, plot its loss and sample from it; a second run starts afresh on the tokens of the first.

    Args:
        out_dir: gets what `train` writes and `loss.png`.
        attention: who computes attention.
        steps: optimizer steps; None means the preset's.
        data: text to learn, None for the Python standard library's sources.
        prompt: beginning of the sample.

    Returns:
        the run's history.

    Raises:
        what `train` raises.
    """
    console = console or Console()
    started = time.perf_counter()
    model_config, training_config = PRESETS["demo"]
    model_config = replace(model_config, attention=attention)
    if steps is not None:
        training_config = replace(training_config, steps=steps, warmup_steps=min(40, steps // 10))
    history = train(model_config, training_config, out_dir, data=data, overwrite=True, console=console)
    if history.interrupted:
        return history
    plot = plot_loss({"demo": history}, Path(out_dir, "loss.png"), f"A small language model, attention {attention!r}")
    first, last = history.losses[0], history.val_losses[-1] if history.val else history.losses[-1]
    console.print(
        f"\nLoss {first:.2f} at the first step, {last:.2f} in validation now: "
        f"of {model_config.vocab_size:,} tokens the model hesitates between {math.exp(last):.0f}.\n"
        f"Took {time.perf_counter() - started:.0f} s. The plot is {plot}\n",
        soft_wrap=True,
        markup=False,
    )
    model, tokenizer = load_model(Path(out_dir, "model"))
    console.print("[bold]What it writes[/bold]")
    console.print(prompt, end="", markup=False, highlight=False)
    for piece in stream(model, tokenizer, prompt, SamplingConfig(max_new_tokens=200, temperature=0.7, seed=0)):
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n\nMore of it: flashtile generate --model {Path(out_dir, 'model')}", soft_wrap=True, markup=False)
    return history
