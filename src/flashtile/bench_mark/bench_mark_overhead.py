"""What the host pays: microseconds per call at a tiny shape, and seconds from import to the first result.

Examples:
  python -m flashtile.bench_mark.bench_mark_overhead
  python -m flashtile.bench_mark.bench_mark_overhead --no-first-call --calls 2000

At a tiny shape the device waits for the host, so back-to-back calls measure the host: eager without and with a graph to
be recorded, forward with backward, the operator as compilers see it, inside torch.compile, and replayed from a CUDA
graph. The first call is measured in fresh processes, on a GPU with an empty Triton cache and with a filled one.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from flashtile.bench_mark import measure, progress
from flashtile.bench_mark.measure import Case, attempt
from flashtile.bench_mark.providers import Inputs, Prepared, fresh_compiler, select
from flashtile.bench_mark.result import Result

_COLUMNS = ("provider", "what", "microseconds", "seconds", "status", "reason")


@dataclass
class Options:
    """Measure the host's share."""

    providers: tuple[str, ...] = ()
    """Who is measured; default flashtile fa2 cudnn fa3 on a GPU, flashtile sdpa on a CPU."""
    dtype: Literal["fp16", "bf16", "fp32"] | None = None
    """Data type; default bf16 on a GPU, fp32 on a CPU."""
    batch: int = 1
    """Batch size."""
    heads: int = 2
    """Number of heads."""
    seq_len: int = 64
    """Sequence length: small, so that the device is always done first."""
    head_dim: int = 64
    """Head dimension."""
    calls: int = 500
    """Calls per pass."""
    passes: int = 5
    """Passes; the median counts."""
    first_call: bool = True
    """Time the first call in fresh processes too (some ten seconds)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run."""
    out: Path = Path("out/bench_mark/overhead.json")
    """The result file."""
    commit: str = ""
    """Commit to write into the result where the source tree has no git."""


def calls_of(prepared: Prepared, device: torch.device) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yield what to measure of one provider: a name, and a function that prepares the call."""
    provider, q, k, v = prepared.provider, *prepared.qkv
    yield "eager, no grad", lambda: prepared.timed("forward").call
    if provider.backward:
        yield "eager, grad", lambda: lambda: prepared.attention(*prepared.leaves)
        yield "eager, forward and backward", lambda: prepared.timed("both").call
    if provider.name == "flashtile":
        causal, scale = prepared.case.causal, prepared.case.head_dim**-0.5
        yield (
            "operator, no grad",
            lambda: functools.partial(torch.ops.flashtile.forward.default, q, k, v, scale, causal),
        )
        yield "torch.compile, no grad", lambda: functools.partial(_compiled(prepared), q, k, v)
    if device.type == "cuda":
        yield "CUDA graph, no grad", lambda: measure.cuda_graph_of(prepared.timed("forward").call).replay


def _compiled(prepared: Prepared) -> Callable[..., Any]:
    fresh_compiler()
    return torch.compile(prepared.attention, fullgraph=True, dynamic=False)


FIRST_CALL = """
import time
start = time.perf_counter()
import torch
torch_imported = time.perf_counter()
from flashtile.attention import flash_attention
imported = time.perf_counter()
q, k, v = (torch.randn({shape}, device="{device}", dtype=torch.{dtype}) for _ in range(3))
float(q.sum())
ready = time.perf_counter()
float(flash_attention(q, k, v, is_causal=True).float().sum())
done = time.perf_counter()
print("times", torch_imported - start, imported - torch_imported, done - ready)
"""


def first_call(case: Case, device: torch.device, cache: str) -> tuple[float, float, float]:
    """Return seconds to import torch, to import flashtile, and for the first call, in a fresh process."""
    dtype = str(case.torch_dtype).removeprefix("torch.")
    script = FIRST_CALL.format(shape=case.shape, device=device.type, dtype=dtype)
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("times ")), None)
    if line is None:
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr[-300:]}")
    torch_s, flashtile_s, call_s = map(float, line.split()[1:])
    return torch_s, flashtile_s, call_s


def run(options: Options, console: Console | None = None) -> Result:
    """Measure and return the result."""
    console = console or Console()
    device = progress.device_of(options.device)
    gpu = device.type == "cuda"
    providers = select(options.providers or (("flashtile", "fa2", "cudnn", "fa3") if gpu else ("flashtile", "sdpa")))
    dtype = options.dtype or ("bf16" if gpu else "fp32")
    case = Case(dtype, options.batch, options.heads, options.seq_len, options.head_dim, True)
    result = Result.start("overhead", device, asdict(options), options.commit)
    with progress.saving(result, options.out, console, _COLUMNS):
        inputs = Inputs.random(case, device)
        for provider in providers:
            if reason := provider.unsupported(case, device, "forward"):
                row = {"provider": provider.name, "what": "eager, no grad", "status": "unsupported", "reason": reason}
                result.rows.append(row)
                continue
            prepared = Prepared(provider, case, inputs)
            for what, make in calls_of(prepared, device):

                def microseconds(make: Callable = make, grad: bool = "no grad" not in what, provider: Any = provider):
                    with torch.set_grad_enabled(grad), provider.context():
                        return measure.host_microseconds(make(), device, options.calls, options.passes)

                value, reason = attempt(microseconds)
                row = {"provider": provider.name, "what": what, "microseconds": value}
                result.rows.append({**row, "status": "failed" if value is None else "ok", "reason": reason})
                shown = f"{value:8.1f} us" if value is not None else reason
                console.print(f"{provider.name:10} {what:30} {shown}", highlight=False, soft_wrap=True)
            result.save(options.out)
        if options.first_call:
            _first_calls(case, device, result, console)
        result.complete = True
    return result


def _first_calls(case: Case, device: torch.device, result: Result, console: Console) -> None:
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "filled") if device.type == "cuda" else ("",):
            seconds, reason = attempt(lambda: first_call(case, device, cache))
            which = f"first call, {state} Triton cache" if state else "first call"  # a CPU has no compiled kernels
            names = ("import torch", "import flashtile", which)
            for what, value in zip(names, seconds or (None,) * 3, strict=True):
                row = {"provider": "flashtile", "what": what, "seconds": value}
                result.rows.append({**row, "status": "failed" if value is None else "ok", "reason": reason})
                shown = f"{value:8.2f} s" if value is not None else reason
                console.print(f"{'flashtile':10} {what:30} {shown}", highlight=False, soft_wrap=True)


def main(args: Sequence[str] | None = None) -> Result:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args))


if __name__ == "__main__":
    main()
