"""The plain baseline: the language model's readable attention, with and without torch.compile.

Examples:
  python -m flashtile.bench_mark.bench_mark_atten
  python -m flashtile.bench_mark.bench_mark_atten --d-model 512 1024 --seq-len 1024 4096 --attentions naive flash sdpa

``ScaledDotProductAttention`` alone, then the multi-head modules around it, over widths and lengths: time and peak
memory of the forward and backward passes. This is what a page of PyTorch gives, and what the kernels are for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from flashtile.bench_mark import progress
from flashtile.bench_mark.measure import DTYPES, Clock, attempt, release
from flashtile.bench_mark.providers import available_bytes, fresh_compiler
from flashtile.bench_mark.result import Result, Row
from flashtile.bench_mark.subject import Subject, measure_subjects
from flashtile.llm.config import Attention
from flashtile.llm.transformer import MultiHeadAttention, MultiHeadAttentionWithRoPE, ScaledDotProductAttention

Module = Literal["ScaledDotProductAttention", "MultiHeadAttention", "MultiHeadAttentionWithRoPE"]
_MODULES: tuple[Module, ...] = ("ScaledDotProductAttention", "MultiHeadAttention", "MultiHeadAttentionWithRoPE")
_COLUMNS = ("module", "attention", "compiled", "mode", "d_model", "seq_len", "ms", "spread", "peak_mib", "status")
_MATRICES = 8  # score-sized matrices alive at once in a forward and backward pass of the plain formula


@dataclass
class Options:
    """Measure the readable attention modules."""

    modules: tuple[Module, ...] = _MODULES
    """Modules to time."""
    attentions: tuple[Literal["naive", "flash", "sdpa"], ...] = ("naive",)
    """Who computes attention inside the multi-head modules."""
    d_model: tuple[int, ...] = ()
    """Widths; default 512 1024 2048 on a GPU, 64 128 on a CPU."""
    seq_len: tuple[int, ...] = ()
    """Lengths; default 512 2048 4096 on a GPU, 128 256 on a CPU."""
    batch_size: int = 1
    """Sequences."""
    head_dim: int | None = None
    """Width of a head; default 64 on a GPU, 32 on a CPU."""
    causal: bool = True
    """Causal attention."""
    compile: Literal["both", "yes", "no"] = "both"
    """With torch.compile, without, or both."""
    modes: tuple[Literal["forward", "backward", "both"], ...] = ("forward", "backward")
    """Passes to time."""
    dtype: Literal["fp16", "bf16", "fp32"] | None = None
    """Data type; default bf16 on a GPU, fp32 on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run."""
    out: Path = Path("out/bench_mark/atten.json")
    """The result file."""
    seconds: float = 300.0
    """Time limit: no new shape is begun after it."""
    passes: int = 3
    """Turns that each subject takes, in shuffled order."""
    ms_per_pass: float = 20.0
    """Milliseconds of samples per turn."""
    commit: str = ""
    """Commit to write into the result where the source tree has no git."""


def subjects_of(options: Options, device: torch.device, batch: int, d_model: int, seq_len: int) -> dict[str, Subject]:
    """Return the modules to be timed on one shape; equal seeds give all of a kind the same weights."""
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    head_dim = min(d_model, options.head_dim or (64 if device.type == "cuda" else 32))
    heads = d_model // head_dim
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, seq_len, d_model, generator=generator, device=device, dtype=dtype)
    split = (batch, heads, seq_len, head_dim)
    qkv = [torch.randn(split, generator=generator, device=device, dtype=dtype) for _ in range(3)]
    compiled_options = {"both": (False, True), "yes": (True,), "no": (False,)}[options.compile]
    found: dict[str, Subject] = {}
    for name in options.modules:
        attentions: Sequence[Attention] = ("naive",) if name == "ScaledDotProductAttention" else options.attentions
        pairs: list[tuple[bool, Attention]] = [(c, a) for c in compiled_options for a in attentions]
        for compiled, attention in pairs:
            torch.manual_seed(0)
            if name == "ScaledDotProductAttention":
                module, inputs = ScaledDotProductAttention(options.causal), qkv
            elif name == "MultiHeadAttention":
                module = MultiHeadAttention(
                    d_model, heads, is_causal=options.causal, attention=attention, device=device, dtype=dtype
                )
                inputs = [x]
            else:
                module = MultiHeadAttentionWithRoPE(
                    d_model, heads, seq_len, is_causal=options.causal, attention=attention, device=device, dtype=dtype
                )
                inputs = [x]
            columns = {"module": name, "attention": attention, "compiled": compiled, "batch": batch,
                       "heads": heads, "d_model": d_model, "seq_len": seq_len}  # fmt: skip
            label = f"{name} {attention}{' compiled' if compiled else ''}"
            found[label] = Subject.of_module(module, inputs, compiled, columns)
    return found


def measure_shape(options: Options, clock: Clock, batch: int, d_model: int, seq_len: int) -> list[Row]:
    """Return the rows of one shape; each module's first variant is the reference of the others."""
    head_dim = min(d_model, options.head_dim or (64 if clock.device.type == "cuda" else 32))
    needed = _MATRICES * batch * (d_model // head_dim) * seq_len**2 * 8  # the check is in fp64
    if needed > (available := available_bytes(clock.device)):
        reason = f"needs about {needed / 2**30:.0f} GiB for score matrices, {available / 2**30:.0f} GiB are free"
        return [{"module": m, "d_model": d_model, "seq_len": seq_len, "mode": mode, "status": "unsupported",
                 "reason": reason} for m in options.modules for mode in options.modes]  # fmt: skip
    rows: list[Row] = []
    fresh_compiler()
    every = subjects_of(options, clock.device, batch, d_model, seq_len)
    for module in options.modules:
        subjects = {name: s for name, s in every.items() if s.columns["module"] == module}
        got, reason = attempt(
            lambda subjects=subjects: measure_subjects(clock, subjects, next(iter(subjects)), options.modes)
        )
        failed = {"module": module, "d_model": d_model, "seq_len": seq_len, "status": "failed", "reason": reason}
        rows += got or [{**failed, "mode": mode} for mode in options.modes]
        release()
    return rows


def run(options: Options, console: Console | None = None) -> Result:
    """Measure, write the result file after each shape, and return the result."""
    console = console or Console()
    started = time.monotonic()
    device = progress.device_of(options.device)
    gpu = device.type == "cuda"
    clock = Clock(device, options.passes, options.ms_per_pass)
    result = Result.start("atten", device, asdict(options), options.commit)
    widths = options.d_model or ((512, 1024, 2048) if gpu else (64, 128))
    lengths = options.seq_len or ((512, 2048, 4096) if gpu else (128, 256))
    shapes = list(itertools.product(widths, lengths))
    with progress.saving(result, options.out, console, _COLUMNS), progress.bar(console) as bar:
        task = bar.add_task("shapes", total=len(shapes))
        for d_model, seq_len in shapes:
            if time.monotonic() - started > options.seconds:
                bar.console.print(f"the time limit of {options.seconds:g} s is over")
                break
            bar.update(task, description=f"d_model {d_model} seq_len {seq_len}")
            rows = measure_shape(options, clock, options.batch_size, d_model, seq_len)
            result.rows += rows
            result.save(options.out)
            for row in rows:
                shown = f"{row['ms']:9.3f} ms  {row.get('peak_mib', 0):9.1f} MiB" if "ms" in row else row["reason"]
                name = row.get("name", row["module"])
                line = f"d_model {d_model:5} seq_len {seq_len:5} {name:45} {row['mode']:8} {shown}"
                bar.console.print(line, highlight=False, soft_wrap=True)
            bar.advance(task)
        else:
            result.complete = True
    return result


def main(args: Sequence[str] | None = None) -> Result:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args))


if __name__ == "__main__":
    main()
