"""Every provider of attention against every other: checked first, then timed, over a sweep of shapes.

Examples:
  python -m flashtile.bench_mark.bench_mark_flash_attention                         small sweep on whatever is here
  python -m flashtile.bench_mark.bench_mark_flash_attention --preset performance24 --seconds 240
  python -m flashtile.bench_mark.bench_mark_flash_attention --preset serving
  python -m flashtile.bench_mark.bench_mark_flash_attention --preset performance24 --modes backward deterministic
  python -m flashtile.bench_mark.bench_mark_flash_attention --head-dim 64 128 --seq-len 1024 4096 --causal yes \\
      --providers flashtile fa2 flex --modes forward both

Shapes hold batch x seqlen and heads x head_dim fixed unless --batch-size or --heads says otherwise. The result file is
rewritten after every shape, so Ctrl-C, a time limit or a crash loses at most the shape being measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from flashtile.bench_mark import measure, progress
from flashtile.bench_mark.compile_ahead import compile_ahead
from flashtile.bench_mark.correctness import Gate, Verdict, varying
from flashtile.bench_mark.measure import DETERMINISTIC, Case, Clock, Timed, Timing, attempt
from flashtile.bench_mark.providers import OURS, Inputs, Prepared, Provider, fresh_compiler, select
from flashtile.bench_mark.result import Result, Row, cell, geometric_mean

Mode = Literal["forward", "backward", "both", "deterministic"]
FA2_GOAL = {"geometric mean": 1.15, "lowest": 0.95}
_PERFORMANCE24: dict[str, Any] = {
    "head_dim": (64, 128, 256),
    "seq_len": (512, 2048, 8192, 16384),
    "tokens": 16384,
    "width": 2048,
}
_SERVING = (
    Case("bf16", 2, 32, 8192, 128, True, heads_kv=8),  # LLaMA-3-8B
    Case("bf16", 1, 32, 16384, 128, True),
    Case("bf16", 1, 32, 32768, 128, True, window=4096),
    Case("bf16", 1, 32, 32768, 128, True, heads_kv=8, window=4096),
    Case("bf16", 1, 32, 131072, 128, True),
)
_SHAPES = ("dtype", "head_dim", "seq_len", "batch_size", "heads", "heads_kv", "window", "tokens", "width", "causal")
_GPU_PROVIDERS = ("flashtile", "flashtile_triton", "fa2", "cudnn", "fa3")
# A ratio, and which of its values is the worst.
_RATIOS = {"vs_fa2": "lowest", "vs_best_peer": "lowest", "times_backward": "largest", "error_vs_fa3": "largest",
           "relative_error_vs_fa3": "largest"}  # fmt: skip
_COLUMNS = ("provider", "mode", "dtype", "batch", "heads", "heads_kv", "seqlen", "head_dim", "causal", "window", "ms",
            "spread", "tflops", "peak_mib", "vs_fa2", "vs_best_peer", "times_backward", "error", "status")  # fmt: skip


@dataclass
class Options:
    """Measure attention: correctness first, then milliseconds, TFLOP/s, peak memory, and ratios to the peers."""

    preset: Literal["none", "performance24", "serving"] = "none"
    """performance24: bf16, head_dim 64 128 256, causal or not, seqlen 512 to 16384, 16384 tokens, width 2048.
    serving: bf16, forward, 32 heads of 128: grouped heads, a window, 131072 tokens; the shapes are fixed."""
    dtype: tuple[Literal["fp16", "bf16", "fp32", "fp64"], ...] = ()
    """Data types; default bf16 on a GPU, fp32 on a CPU."""
    head_dim: tuple[int, ...] = ()
    """Head dimensions; default 64 128 on a GPU, 64 on a CPU."""
    seq_len: tuple[int, ...] = ()
    """Sequence lengths; default 512 2048 8192 on a GPU, 128 512 on a CPU."""
    batch_size: tuple[int, ...] = ()
    """Batch sizes; default tokens / seqlen."""
    heads: int | None = None
    """Number of heads; default width / head_dim."""
    heads_kv: int | None = None
    """Number of heads of k and v; default as many as of q."""
    window: int = 0
    """How many keys a query sees, up to its own position, which makes every shape causal; 0: no window."""
    tokens: int | None = None
    """batch x seqlen where no batch size is given; default 16384 on a GPU, 512 on a CPU."""
    width: int | None = None
    """heads x head_dim where no number of heads is given; default 2048 on a GPU, 128 on a CPU."""
    causal: Literal["both", "yes", "no"] = "both"
    """Causal mask, full, or both."""
    modes: tuple[Mode, ...] = ()
    """Passes to time; default forward backward, forward for the preset serving. "both" is forward and backward in one,
    "deterministic" the backward pass with gradients that are the same bit for bit in every run."""
    inputs: Literal["normal", "heavy"] = "normal"
    """Random normal inputs; heavy: four channels of them, the same of q, k and v, times 100."""
    providers: tuple[str, ...] = ()
    """Who is measured; default flashtile fa2 cudnn fa3 on a GPU, flashtile sdpa naive mock on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run."""
    out: Path = Path("out/bench_mark/flash_attention.json")
    """The result file."""
    seconds: float = 540.0
    """Time limit: no new shape is begun after it."""
    passes: int = 5
    """Turns that each provider takes per shape, in shuffled order."""
    ms_per_pass: float = 25.0
    """Milliseconds of samples per turn."""
    memory: bool = True
    """Measure peak memory too."""
    commit: str = ""
    """Commit to write into the result where the source tree has no git."""


def cases(options: Options, device: torch.device) -> list[Case]:
    """Return the shapes that the options ask for, short ones first so that a time limit costs the fewest."""
    if options.preset == "serving":
        if given := [name for name in _SHAPES if getattr(options, name) != getattr(Options, name)]:
            raise ValueError(f"the shapes of the preset serving are fixed, but {', '.join(given)} is given")
        return list(_SERVING)
    gpu = device.type == "cuda"
    preset = _PERFORMANCE24 if options.preset == "performance24" else {}
    tokens = options.tokens or preset.get("tokens") or (16384 if gpu else 512)
    width = options.width or preset.get("width") or (2048 if gpu else 128)
    dtypes: Sequence[str] = options.dtype or ("bf16" if gpu or preset else "fp32",)
    seq_lens = options.seq_len or preset.get("seq_len") or ((512, 2048, 8192) if gpu else (128, 512))
    head_dims = options.head_dim or preset.get("head_dim") or ((64, 128) if gpu else (64,))
    masks = {"both": (True,) if options.window else (False, True), "yes": (True,), "no": (False,)}[options.causal]
    return [
        Case(dtype, batch, options.heads or max(1, width // head_dim), seqlen, head_dim, causal,
             options.heads_kv or 0, options.window)
        for dtype in dtypes
        for seqlen in seq_lens
        for head_dim in head_dims
        for causal in masks
        for batch in options.batch_size or (max(1, tokens // seqlen),)
    ]  # fmt: skip


def default_providers(device: torch.device) -> tuple[str, ...]:
    return _GPU_PROVIDERS if device.type == "cuda" else ("flashtile", "sdpa", "naive", "mock")


@dataclass
class Bench:
    """Measures one case at a time."""

    device: torch.device
    clock: Clock
    providers: list[Provider]
    modes: Sequence[str]
    matmul_tflops: float | None = None
    memory: bool = True
    heavy: bool = False

    def run(self, case: Case) -> list[Row]:
        """Return a row for every provider and mode."""
        rows = {(p.name, mode): _row(p, case, mode) for mode in self.modes for p in self.providers}
        fresh_compiler()
        inputs = Inputs.random(case, self.device, heavy=self.heavy)
        backward = any(mode != "forward" for mode in self.modes)
        gate, reason = attempt(lambda: Gate(case, inputs, backward=backward))
        if gate is None:
            for row in rows.values():
                row.update(status="failed", reason=f"the reference failed: {reason}")
            return list(rows.values())
        ready: dict[tuple[str, str], Prepared] = {}
        for provider in self.providers:
            for deterministic in (False, True):
                modes = [mode for mode in self.modes if (mode == DETERMINISTIC) is deterministic]
                self._admit(provider, modes, case, inputs, gate, rows, ready)
        for mode in self.modes:
            self._time(mode, case, rows, ready)
        done = list(rows.values())
        add_ratios(done)
        return done

    def _admit(
        self, provider: Provider, modes: Sequence[str], case: Case, inputs: Inputs, gate: Gate, rows: dict, ready: dict
    ) -> None:
        """Check one provider; it enters ``ready`` if it is right, else its rows say why it is not timed."""
        wanted = []
        for mode in modes:
            if reason := provider.unsupported(case, self.device, mode):
                rows[provider.name, mode].update(status="unsupported", reason=reason)
            else:
                wanted.append(mode)
        if not wanted:
            return
        backward = any(mode != "forward" for mode in wanted)

        def check() -> tuple[Prepared, Verdict]:
            if DETERMINISTIC not in wanted:
                prepared = Prepared(provider, case, inputs)
                return prepared, gate.judge(prepared, backward)
            prepared = Prepared(provider.with_deterministic_gradients(), case, inputs)
            verdict = gate.judge(prepared, backward)
            verdict.reason = verdict.reason or varying(prepared)
            return prepared, verdict

        checked, reason = attempt(check)
        for mode in wanted:
            row = rows[provider.name, mode]
            if checked is None:
                row.update(status="failed", reason=reason)
                continue
            prepared, verdict = checked
            names = ("o",) if mode == "forward" else ("dq", "dk", "dv")
            if verdict.errors:
                row["error"] = max(verdict.errors.get(n, 0.0) for n in names)
                row["error_limit"] = max(verdict.limits.get(n, 0.0) for n in names)
                row["relative_error"] = max(verdict.relative.get(n, 0.0) for n in names)
            if verdict.reason:
                row.update(status="wrong", reason=verdict.reason)
            else:
                ready[provider.name, mode] = prepared

    def _time(self, mode: str, case: Case, rows: dict, ready: dict[tuple[str, str], Prepared]) -> None:
        calls: dict[str, Timed] = {}
        for (name, its_mode), prepared in ready.items():
            if its_mode != mode:
                continue
            row = rows[name, mode]
            timed, reason = attempt(lambda prepared=prepared: prepared.timed(mode))
            if timed is None:
                row.update(status="failed", reason=reason)
                continue
            calls[name] = timed
        timings, failures = self.clock.time(calls)
        for name, reason in failures.items():
            rows[name, mode].update(status="failed", reason=reason)
        for name, timing in timings.items():
            self._fill(rows[name, mode], case, mode, timing)
            if self.memory:
                self._measure_memory(rows[name, mode], case, mode, ready[name, mode].provider, calls[name])

    def _fill(self, row: Row, case: Case, mode: str, timing: Timing) -> None:
        seconds = timing.median_ms * 1e-3
        row.update(status="ok", ms=timing.median_ms, min_ms=timing.min_ms, spread=timing.spread, samples=timing.samples)
        row["tflops"] = measure.attention_flops(case, mode) / seconds * 1e-12
        row["gb_per_s"] = measure.attention_bytes(case, mode) / seconds * 1e-9
        if self.matmul_tflops:
            row["of_matmul"] = row["tflops"] / self.matmul_tflops

    def _measure_memory(self, row: Row, case: Case, mode: str, provider: Provider, timed: Timed) -> None:
        def peak() -> int:
            with timed.context():
                return measure.peak_extra_bytes(timed.call, self.device)

        extra, reason = attempt(peak)
        if extra is None:
            row["reason"] = f"memory not measured: {reason}"
            return
        row["peak_mib"] = extra / 2**20
        row["linear_mib"] = measure.attention_extra_bytes(case, mode) / 2**20
        tensor = case.batch * case.heads * case.seqlen * case.head_dim * case.torch_dtype.itemsize
        matrix = tensor * case.seqlen // case.head_dim
        if provider.name == "flex" and matrix > 8 * tensor and extra > matrix:
            row.update(status="failed", reason="ran unfused: its peak memory holds the whole score matrix")


def _row(provider: Provider, case: Case, mode: str) -> Row:
    shape = asdict(case) | {"heads_kv": case.shape_kv[1]}
    return {"provider": provider.name, "mode": mode, **shape, "status": "pending", "reason": ""}


def add_ratios(rows: Iterable[Row]) -> None:
    """Add ratios to the rows of one case.

    How much faster each is than FA2 and than the fastest other implementation, how many times its plain backward pass
    the deterministic one takes, and how many times the error of FA3 its own is, timed or not, where neither is zero.
    """
    by_mode: dict[str, list[Row]] = {}
    rows = list(rows)
    found = {(row["provider"], row["mode"]): row for row in rows}
    for row in rows:
        if row["status"] == "ok":
            by_mode.setdefault(row["mode"], []).append(row)
        fa3, plain = found.get(("fa3", row["mode"]), {}), found.get((row["provider"], "backward"), {})
        for error in ("error", "relative_error"):
            if row is not fa3 and row.get(error) and fa3.get(error):
                row[f"{error}_vs_fa3"] = row[error] / fa3[error]
        if row["mode"] == DETERMINISTIC and "ms" in row and "ms" in plain:
            row["times_backward"] = row["ms"] / plain["ms"]
    for group in by_mode.values():
        ms = {row["provider"]: row["ms"] for row in group}
        for row in group:
            peers = {name: t for name, t in ms.items() if name != row["provider"] and name not in OURS}
            if peers:
                best = min(peers, key=peers.__getitem__)
                row["best_peer"], row["vs_best_peer"] = best, peers[best] / row["ms"]
            if "fa2" in ms:
                row["vs_fa2"] = ms["fa2"] / row["ms"]


def summary_of(rows: Sequence[Row]) -> dict:
    """Return, per mode, each provider's geometric means and worst ratios over the shapes where it was measured."""
    found: dict = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for name in dict.fromkeys(row["provider"] for row in rows):
            mine = [row for row in rows if row["mode"] == mode and row["provider"] == name]
            good = [row for row in mine if row["status"] == "ok"]
            entry: dict[str, Any] = {"shapes": len(mine), "measured": len(good)}
            if good:
                entry["tflops"] = geometric_mean(row["tflops"] for row in good)
            for ratio, worst in _RATIOS.items():
                values = [row[ratio] for row in mine if ratio in row]
                if values:
                    entry[ratio] = geometric_mean(values)
                    entry[f"{ratio}_{worst}"] = min(values) if worst == "lowest" else max(values)
            found.setdefault(mode, {})[name] = entry
    return found


def run(options: Options, console: Console | None = None) -> Result:
    """Measure, write the result file after each shape, and return the result."""
    console = console or Console()
    started = time.monotonic()
    device = progress.device_of(options.device)
    providers = select(options.providers or default_providers(device))
    todo = cases(options, device)
    modes = options.modes or (("forward",) if options.preset == "serving" else ("forward", "backward"))
    result = Result.start("flash_attention", device, asdict(options), options.commit)
    clock = Clock(device, options.passes, options.ms_per_pass)
    if device.type == "cuda":
        result.ceilings = {
            "matmul_bf16_tflops": measure.matmul_tflops(clock),
            "copy_gb_per_s": measure.copy_gb_per_s(clock),
        }
        backward = any(mode != "forward" for mode in modes)
        if ours := [p.name for p in providers if p.name.startswith("flashtile")]:
            alike = [replace(case, heads_kv=0) for case in todo]  # numbers of heads compile nothing new
            compile_ahead(alike, ours, backward, console)
    ceiling = result.ceilings.get("matmul_bf16_tflops")
    bench = Bench(device, clock, providers, modes, ceiling, options.memory, options.inputs == "heavy")
    with progress.saving(result, options.out, console, columns=_COLUMNS), progress.bar(console) as bar:
        task = bar.add_task("shapes", total=len(todo))
        for case in todo:
            if time.monotonic() - started > options.seconds:
                rows = [_row(p, case, mode) for mode in modes for p in providers]
                for row in rows:
                    row.update(status="skipped", reason=f"the time limit of {options.seconds:g} s was over")
                result.rows += rows
                continue
            bar.update(task, description=str(case))
            rows = bench.run(case)
            result.rows += rows
            result.summary = summary_of(result.rows)
            result.save(options.out)
            bar.console.print(line_of(case, rows), highlight=False, soft_wrap=True)
            bar.advance(task)
            measure.release()
            if dead := progress.device_error(device):
                raise RuntimeError(f"the device stopped working in {case}: {dead}")
        result.complete = all(row["status"] != "skipped" for row in result.rows)
    print_summary(result, console)
    return result


def line_of(case: Case, rows: Sequence[Row]) -> str:
    """Return one line for the log: TFLOP/s of each provider, or its status."""
    parts = [f"{case!s:<36}"]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        shown = (
            f"{row['provider']} " + (f"{row['tflops']:.3g}" if row["status"] == "ok" else row["status"])
            for row in rows
            if row["mode"] == mode and row["status"] != "unsupported"
        )
        parts.append(f"{mode}: " + "  ".join(shown))
    wrong = [f"{r['provider']}: {r['reason']}" for r in rows if r["status"] in ("wrong", "failed")]
    return "  ".join(parts) + "".join(f"\n    {text}" for text in dict.fromkeys(wrong))


def print_summary(result: Result, console: Console) -> None:
    """Print geometric means, and the goals they are held against."""
    for mode, providers in result.summary.items():
        for name, entry in providers.items():
            text = f"{mode:13} {name:16} "
            if "tflops" in entry:
                text += f"{entry['measured']}/{entry['shapes']} shapes  {cell(entry['tflops']):>7} TFLOP/s"
            else:
                reasons = (r["reason"] for r in result.rows if (r["mode"], r["provider"]) == (mode, name))
                text += "not measured: " + "; ".join(dict.fromkeys(reason for reason in reasons if reason))
            for ratio, worst in _RATIOS.items():
                if ratio in entry:
                    text += f"  {ratio} {entry[ratio]:.3f} ({worst} {entry[f'{ratio}_{worst}']:.3f})"
            console.print(text, highlight=False, soft_wrap=True)
        ours = providers.get("flashtile", {})
        if "vs_fa2" in ours:
            met = ours["vs_fa2"] >= FA2_GOAL["geometric mean"] and ours["vs_fa2_lowest"] >= FA2_GOAL["lowest"]
            goal = " and ".join(f"{name} {value}" for name, value in FA2_GOAL.items())
            console.print(f"{mode:13} goal against FA2 ({goal}): {'met' if met else 'not met'}", highlight=False)


def main(args: Sequence[str] | None = None) -> Result:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args, may_be_zero=("window",)))


if __name__ == "__main__":
    main()
