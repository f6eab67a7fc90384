"""One LLaMA-7B-shaped layer at 2,048 tokens: standard attention against flash, in time and memory.

Examples:
  python -m flashtile.bench_mark.bench_mark_llama
  python -m flashtile.bench_mark.bench_mark_llama --seq-len 4096 --batch-size 2 --compile

Three sizes of the same thing: attention alone (32 heads x 128), the attention layer around it (projections and rotary
positions, d_model 4096), and the whole block (with SwiGLU, d_ff 11008). The published figures to beat are 3.4 times the
speed and a sixth of the memory; the result holds both beside what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from flashtile.bench_mark import progress
from flashtile.bench_mark.measure import DTYPES, Clock, attempt, release
from flashtile.bench_mark.providers import fresh_compiler
from flashtile.bench_mark.result import Result, Row
from flashtile.bench_mark.subject import Subject, measure_subjects
from flashtile.llm.transformer import MultiHeadAttentionWithRoPE, TransformerBlock, attend

PUBLISHED = {"time": 3.4, "memory": 6.0}
LEVELS = ("attention", "layer", "block")
_ATTENTIONS: tuple[Literal["naive", "flash", "sdpa"], ...] = ("naive", "flash", "sdpa")
_COLUMNS = ("level", "attention", "mode", "ms", "spread", "peak_mib", "total_mib", "status")


@dataclass
class Options:
    """Measure a LLaMA-7B-shaped layer."""

    seq_len: int | None = None
    """Tokens; default 2048 on a GPU, 256 on a CPU."""
    batch_size: int = 1
    """Sequences."""
    num_heads: int | None = None
    """Heads; default 32 on a GPU, 4 on a CPU."""
    head_dim: int = 128
    """Width of a head; d_model is heads x head_dim."""
    d_ff: int | None = None
    """Inner width of SwiGLU; default 11008 on a GPU, 1408 on a CPU."""
    levels: tuple[Literal["attention", "layer", "block"], ...] = LEVELS
    """What is timed."""
    compile: bool = False
    """Run layer and block through torch.compile."""
    dtype: Literal["fp16", "bf16", "fp32"] | None = None
    """Data type; default bf16 on a GPU, fp32 on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run."""
    out: Path = Path("out/bench_mark/llama.json")
    """The result file."""
    passes: int = 5
    """Turns that each variant takes, in shuffled order."""
    ms_per_pass: float = 50.0
    """Milliseconds of samples per turn."""
    commit: str = ""
    """Commit to write into the result where the source tree has no git."""


@dataclass(frozen=True)
class Shape:
    """The layer's sizes."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    d_ff: int

    @property
    def d_model(self) -> int:
        return self.heads * self.head_dim


def subjects_of(
    level: str, shape: Shape, dtype: torch.dtype, device: torch.device, compiled: bool
) -> dict[str, Subject]:
    """Return the standard, flash and torch variants of one level, with equal weights and inputs."""
    found = {}
    for attention in _ATTENTIONS:
        torch.manual_seed(0)
        columns = {"level": level, "attention": attention, **asdict(shape)}
        if level == "attention":
            split = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
            inputs = [torch.randn(split, device=device, dtype=dtype) for _ in range(3)]
            found[attention] = Subject(_attention(attention), inputs, columns)
            continue
        where: dict[str, Any] = {"attention": attention, "device": device, "dtype": dtype}
        if level == "layer":
            module = MultiHeadAttentionWithRoPE(shape.d_model, shape.heads, shape.seqlen, **where)
        else:
            module = TransformerBlock(shape.d_model, shape.heads, shape.d_ff, shape.seqlen, **where)
        x = torch.randn(shape.batch, shape.seqlen, shape.d_model, device=device, dtype=dtype)
        found[attention] = Subject.of_module(module, [x], compiled, columns)
    return found


def _attention(name: Literal["naive", "flash", "sdpa"]):
    return lambda q, k, v: attend(q, k, v, is_causal=True, attention=name)


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, per level and mode, how many times faster and smaller flash is than the standard formula.

    ``memory`` compares everything that is held (inputs, weights, results and what lies between); ``extra_memory`` only
    what lies between.
    """
    found: dict[str, dict[str, float]] = {}
    keyed = {(row.get("level"), row["mode"], row.get("attention")): row for row in rows if "ms" in row}
    for (level, mode, attention), row in keyed.items():
        standard = keyed.get((level, mode, "naive"))
        if attention != "flash" or standard is None:
            continue
        entry = found[f"{level} {mode}"] = {"time": standard["ms"] / row["ms"]}
        if "total_mib" in row and "total_mib" in standard:
            entry["memory"] = standard["total_mib"] / row["total_mib"]
            entry["extra_memory"] = standard["peak_mib"] / max(row["peak_mib"], 2**-10)
    return found


def run(options: Options, console: Console | None = None) -> Result:
    """Measure and return the result."""
    console = console or Console()
    device = progress.device_of(options.device)
    gpu = device.type == "cuda"
    heads, d_ff = options.num_heads or (32 if gpu else 4), options.d_ff or (11008 if gpu else 1408)
    shape = Shape(options.batch_size, options.seq_len or (2048 if gpu else 256), heads, options.head_dim, d_ff)
    dtype = DTYPES[options.dtype or ("bf16" if gpu else "fp32")]
    clock = Clock(device, options.passes, options.ms_per_pass)
    result = Result.start("llama", device, asdict(options), options.commit)
    result.summary = {"published": PUBLISHED}
    with progress.saving(result, options.out, console, _COLUMNS), progress.bar(console) as bar:
        task = bar.add_task("levels", total=len(options.levels))
        for level in options.levels:
            bar.update(task, description=level)
            fresh_compiler()
            subjects = subjects_of(level, shape, dtype, device, options.compile)
            modes = ("forward", "backward", "both")
            rows, reason = attempt(
                lambda subjects=subjects, modes=modes: measure_subjects(clock, subjects, "naive", modes)
            )
            result.rows += rows or [{"level": level, "mode": "both", "status": "failed", "reason": reason}]
            result.summary["ratios"] = ratios(result.rows)
            result.save(options.out)
            del subjects
            release()
            bar.advance(task)
        result.complete = True
    for row in result.rows:
        shown = f"{row['ms']:9.3f} ms  {row.get('total_mib', 0):9.1f} MiB" if "ms" in row else row["reason"]
        line = f"{row['level']:10} {row.get('attention', ''):6} {row['mode']:8} {shown}"
        console.print(line, highlight=False, soft_wrap=True)
    for name, entry in result.summary.get("ratios", {}).items():
        shown = ", ".join(f"{what} {value:.2f}x" for what, value in entry.items())
        console.print(f"{name:20} standard / flash: {shown}", highlight=False, soft_wrap=True)
    console.print(f"published, attention:  time {PUBLISHED['time']}x, memory {PUBLISHED['memory']}x", highlight=False)
    return result


def main(args: Sequence[str] | None = None) -> Result:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args))


if __name__ == "__main__":
    main()
