"""The same training run under several attention settings: do they learn alike, and how fast are they?

`flashtile compare` is this from a shell.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flashtile.llm.atomic import atomic_write
from flashtile.llm.config import Attention, ModelConfig, TrainingConfig
from flashtile.llm.data import prepare_data
from flashtile.llm.metrics import History, device_name
from flashtile.llm.plot import plot_loss
from flashtile.llm.training import RunExistsError, check_attention_runs, train


def compare_attention(
    settings: Sequence[Attention],
    model_config: ModelConfig,
    training_config: TrainingConfig,
    out_dir: Path | str,
    *,
    data: Path | str | None = None,
    overwrite: bool = False,
    commit: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Train one model per setting from the same weights on the same batches; write `comparison.{json,png,svg}`.

    Args:
        settings: values of ModelConfig.attention, each once.
        out_dir: gets the results and a folder per run.
        data: as for `train`; tokenized once.
        overwrite: start afresh although `out_dir` holds a comparison.
        commit: what to write into the result where the source tree has no git.

    Returns:
        what `comparison.json` holds: the configs, device, versions, commit, date, and per setting the loss of every
        step, the validation losses, the median tokens/s and MFU of the second half, and peak GPU memory in bytes.
        `max_loss_difference` is the largest difference from the first setting's loss over all steps.

    Raises:
        what `train` raises; ValueError for no setting, or one that is named twice.
    """
    console = console or Console()
    out = Path(out_dir)
    if not settings or len(set(settings)) < len(settings):
        raise ValueError(f"settings want one or more names, each once, got {', '.join(settings) or 'none'}")
    if not overwrite and (
        (out / "comparison.json").exists() or any((out / s / "checkpoint.pt").exists() for s in settings)
    ):
        raise RunExistsError(
            f"{out} holds a comparison already: start afresh (overwrite=True) or choose another out_dir"
        )
    (device, *_) = [check_attention_runs(replace(model_config, attention=s), training_config) for s in settings]
    dataset = prepare_data(
        data,
        vocab_size=model_config.vocab_size,
        val_fraction=training_config.val_fraction,
        cache_dir=out / "data",
        context_length=model_config.context_length,
        say=console.print,
    )
    histories: dict[str, History] = {}
    runs: dict[str, dict[str, Any]] = {}
    result = {
        **provenance(device),
        **({"commit": commit} if commit else {}),
        "data": {"name": dataset.name, "key": dataset.key, "train_tokens": len(dataset.train)},
        "model_config": asdict(model_config),
        "training_config": asdict(training_config),
        "runs": runs,
    }
    title = f"{device_name(device)}, same weights, same batches"
    for setting in settings:
        console.rule(f"attention {setting!r}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        config = replace(model_config, attention=setting)
        history = train(config, training_config, out / setting, data=dataset, overwrite=True, console=console)
        if history.interrupted:
            raise KeyboardInterrupt
        histories[setting] = history
        runs[setting] = {
            "losses": history.losses,
            "val": history.val,
            "tokens_per_second": history.median("tokens_per_second"),
            "mfu": history.median("mfu"),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "max_loss_difference": max(
                abs(a - b) for a, b in zip(history.losses, histories[settings[0]].losses, strict=True)
            ),
        }
        with atomic_write(out / "comparison.json") as file:  # after every run: an interruption keeps the finished ones
            file.write(json.dumps(result, indent=1).encode())
        for suffix in ("png", "svg"):
            plot_loss(histories, out / f"comparison.{suffix}", title)
    widest = max(map(len, runs))
    for setting, run in runs.items():
        mfu = "" if run["mfu"] is None else f", MFU {run['mfu']:.1%}"
        apart = f", at most {run['max_loss_difference']:.2g} from {settings[0]!r}" if setting != settings[0] else ""
        console.print(
            f"{setting:>{widest}}: {run['tokens_per_second']:,.0f} tokens/s{mfu}, validation loss "
            f"{run['val'][-1]['val_loss']:.4f}{apart}",
            soft_wrap=True,
        )
    return result


def provenance(device: torch.device) -> dict[str, Any]:
    """Return where and when a result was made: device, versions, commit (None outside a repository), date in UTC."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    try:
        here = Path(__file__).parent
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        commit = git.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": {"python": platform.python_version()} | {p: installed(p) for p in ("torch", "triton", "flashtile")},
        "commit": commit,
    }
