"""The demonstration: a small model learns to write Python in about two minutes on two CPU cores."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flashtile.llm.checkpoint import load_model, saved_configs
from flashtile.llm.config import PRESETS, Attention, SamplingConfig
from flashtile.llm.generation import stream
from flashtile.llm.metrics import History
from flashtile.llm.plot import plot_loss
from flashtile.llm.shell import flashtile
from flashtile.llm.training import train

OUT_DIR = "runs/demo"
PROMPT = "def"  # no space behind it: the tokens of names begin with theirs


def run_demo(
    out_dir: Path | str = OUT_DIR,
    *,
    attention: Attention | None = None,
    steps: int | None = None,
    data: Path | str | None = None,
    prompt: str = PROMPT,
    resume: bool = False,
    console: Console | None = None,
) -> History:
    """Train the "demo" preset, plot its loss and sample from it; a second run starts afresh on the tokens of the first.

    Args:
        out_dir: gets what `train` writes and `loss.png`.
        attention: who computes attention; None means "flash", or as before where the run goes on.
        steps: optimizer steps; None means the preset's, or as before.
        data: text to learn, None for the Python standard library's sources, or as before.
        prompt: beginning of the sample.
        resume: go on with a demonstration that was stopped, and finish it: train the rest, plot, sample.

    Returns:
        the run's history.

    Raises:
        what `train` raises.
    """
    console = console or Console()
    started = time.perf_counter()
    model_config, training_config = saved_configs(out_dir) if resume else PRESETS["demo"]
    if attention is not None:
        model_config = replace(model_config, attention=attention)
    if steps is not None:
        training_config = replace(training_config, steps=steps, warmup_steps=min(40, steps // 10))
    history = train(
        model_config, training_config, out_dir, data=data, resume=resume, overwrite=not resume, console=console
    )
    if history.interrupted:
        options = [] if Path(out_dir) == Path(OUT_DIR) else ["--out-dir", out_dir]
        options += [] if prompt == PROMPT else ["--prompt", prompt]
        command = flashtile("demo", "--resume", *options)
        console.print(f"Finish the demonstration with:\n    {command}", soft_wrap=True, markup=False, highlight=False)
        return history
    title = f"A small language model, attention {model_config.attention!r}"
    plot = plot_loss({"demo": history}, Path(out_dir, "loss.png"), title)
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
    more = flashtile("generate", "--model", Path(out_dir, "model"))
    console.print(f"\n\nMore of it:\n    {more}", soft_wrap=True, markup=False, highlight=False)
    return history
