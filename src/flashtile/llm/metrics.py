"""What a run reports: losses, speed, and the share of the hardware's speed that it reaches."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashtile.llm.atomic import atomic_write
from flashtile.llm.config import ModelConfig

PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "MI300X": 1307.4e12,
}
"""Dense bf16 FLOP/s from the makers' data sheets; the first name that occurs in the device's name counts."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU by its name, None if it is not in the table."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)


def flops_per_token(config: ModelConfig) -> float:
    """Return the FLOPs of one training step (forward and backward) per token.

        6 * (weights in matrix products) + 6 * num_layers * context_length * d_model

    The second term is attention, 12 L n d without a mask, of which causality leaves half. Recomputation does not count.

    Source: Chowdhery et al., PaLM, appendix B, https://arxiv.org/abs/2204.02311.
    """
    d = config.d_model
    attention = 2 * d * d + 2 * d * config.kv_heads * config.head_dim
    block = attention + 3 * d * config.ffn_width
    matrices = config.num_layers * block + d * config.vocab_size
    return 6 * matrices + 6 * config.num_layers * config.context_length * d


@dataclass
class History:
    """What a run has recorded: a dictionary per training step and one per validation."""

    train: list[dict[str, Any]] = field(default_factory=list)
    """step, loss, lr, grad_norm; every `log_interval` steps also tokens_per_second and, where known, mfu."""
    val: list[dict[str, Any]] = field(default_factory=list)
    """step, val_loss, val_perplexity."""
    interrupted: bool = False
    """Whether Ctrl-C ended the run before its last step."""

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [row["loss"] for row in self.train]

    @property
    def val_losses(self) -> list[float]:
        """The loss of each validation."""
        return [row["val_loss"] for row in self.val]

    def median(self, name: str) -> float | None:
        """Return the median of a metric over the second half of its records, past warm-up and compilation."""
        values = [row[name] for row in self.train if name in row]
        values = sorted(values[len(values) // 2 :])
        return values[len(values) // 2] if values else None


class MetricLog:
    """Keeps a History and writes it to `metrics.jsonl` and, if asked, to TensorBoard."""

    def __init__(self, directory: Path, *, resume_step: int = 0, tensorboard: bool = False) -> None:
        """Start a log, or continue one: records later than `resume_step` belong to a lost run and are dropped."""
        self.history = History()
        self._path = directory / "metrics.jsonl"
        kept = [row for row in _read_rows(self._path) if row["step"] <= resume_step] if resume_step else []
        for row in kept:
            self._remember(row)
        with atomic_write(self._path) as file:
            file.writelines(_line(row).encode() for row in kept)
        self._file = self._path.open("a", encoding="utf-8")
        self._writer = None
        if not resume_step:
            shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import: only who asks pays

            self._writer = SummaryWriter(directory / "tensorboard", purge_step=resume_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Record `{"step": ..., name: value, ...}`."""
        self._remember(row)
        self._file.write(_line(row))
        if self._writer is not None:
            for name, value in row.items():
                if name != "step":
                    self._writer.add_scalar(name, value, row["step"])

    def _remember(self, row: dict[str, Any]) -> None:
        (self.history.val if "val_loss" in row else self.history.train).append(row)

    def flush(self) -> None:
        """Hand everything recorded to the operating system."""
        self._file.flush()

    def sync(self) -> None:
        """Put everything recorded on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run may leave half a last line


def read_history(directory: Path | str) -> History:
    """Return the History that a run has written to its folder; empty if it has written none."""
    history = History()
    for row in _read_rows(Path(directory, "metrics.jsonl")):
        (history.val if "val_loss" in row else history.train).append(row)
    return history


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
