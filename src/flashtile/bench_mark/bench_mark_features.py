"""What masks, scores and packed sequences cost: against plain causal attention, and against FlexAttention.

Examples:
  python -m flashtile.bench_mark.bench_mark_features                     everything, in some 200 s on a GPU
  python -m flashtile.bench_mark.bench_mark_features --groups window softcap --head-dim 64 --providers flashtile
  python -m flashtile.bench_mark.bench_mark_features --groups plain --compiles       and count compiled kernels

Each group of features has a process of its own for each provider and head_dim, in which plain causal attention of the
same shape takes its turns too: a feature's ratio is to that one. Processes compile at the same time, but check and time
alone, one pass at a time behind a file lock; ours and FlexAttention's of a group wait for each other, so that their
passes alternate. What compiles beside a pass may launch a kernel once or twice meanwhile: the medians bear it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from flashtile import mask, score
from flashtile.attention import flash_attention
from flashtile.bench_mark import progress
from flashtile.bench_mark.feature_gate import Gate
from flashtile.bench_mark.features import GROUPS, Feature, Problem, Sizes, features_of, visited
from flashtile.bench_mark.measure import DTYPES, Clock, Timed, attempt, release
from flashtile.bench_mark.providers import fresh_compiler
from flashtile.bench_mark.result import Result, Row, cell
from flashtile.bench_mark.turns import CHECKING, COMPILING, READY, gather, turn

Mode = Literal["forward", "backward"]
COMPILES = "compiles"
_COLUMNS = ("feature", "provider", "head_dim", "mode", "ms", "spread", "times_plain", "tiles", "target", "met",
            "vs_flex", "status")  # fmt: skip
_TABLE = "{:>8} {:>9} {:>7} {:>6} {:>6} {:6} | {:>8} {:>7} {:>9}"
_HEADINGS = ("ours, ms", "spread", "x plain", "tiles", "target", "", "flex, ms", "x plain", "flex/ours")
CALLS, SETTLED = 30, 4  # calls that compiled kernels are counted over, and after how many of them no more may come
_SHORTEST = 2048  # tokens that our kernels are compiled on


@dataclass
class Options:
    """Measure features: correctness first, then milliseconds, and times plain causal attention."""

    groups: tuple[str, ...] = ()
    """Groups of features; default all: plain window documents softcap alibi bias bias_of_heads relative_position sinks
    dropout key_padding."""
    providers: tuple[Literal["flashtile", "flex"], ...] = ("flashtile", "flex")
    """Who is measured; FlexAttention has the first five groups."""
    head_dim: tuple[int, ...] = ()
    """Head dimensions; default 64 128 on a GPU, 16 on a CPU."""
    seq_len: int | None = None
    """Length of a sequence; default 8192 on a GPU, 128 on a CPU. Window and documents take one sequence of all tokens,
    the window and each document a sixteenth of it."""
    tokens: int | None = None
    """batch x seqlen; default 16384 on a GPU, 256 on a CPU."""
    width: int | None = None
    """heads x head_dim; default 2048 on a GPU, 32 on a CPU."""
    dtype: Literal["fp16", "bf16", "fp32"] | None = None
    """Data type; default bf16 on a GPU, fp32 on a CPU."""
    modes: tuple[Mode, ...] = ("forward", "backward")
    """Passes to time."""
    backend: str | None = None
    """Backend of flashtile, such as triton; default the fastest for each call, so that a feature may have another one
    than plain attention."""
    compiles: bool = False
    """Count kernels compiled over 30 lengths, windows and caps, in one more process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run."""
    out: Path = Path("out/bench_mark/features.json")
    """The result file."""
    seconds: float = 200.0
    """Time limit: what is not measured by then becomes rows that say so."""
    patience: float = 150.0
    """Seconds that a process may stay at one step, such as compiling, before it counts as failed."""
    processes: int | None = None
    """Processes that compile at the same time; default 8 on a GPU, 1 on a CPU."""
    passes: int = 5
    """Turns that each call takes, in shuffled order."""
    ms_per_pass: float = 20.0
    """Milliseconds of samples per turn."""
    commit: str = ""
    """Commit to write into the result where the source tree has no git."""


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    provider: str
    group: str
    sizes: Sizes
    modes: tuple[str, ...]
    device: str
    passes: int
    ms_per_pass: float
    lock: str

    def __str__(self) -> str:
        return f"{self.provider} {self.group} d{self.sizes.head_dim}"

    def is_partner(self, other: Task) -> bool:
        """Return whether another task times the same group of another provider."""
        return (self.group, self.sizes) == (other.group, other.sizes) and self.provider != other.provider

    def features(self) -> list[Feature]:
        """Return the features that get rows: plain causal attention only in its own group."""
        return features_of(self.group, self.provider)[0 if self.group == "plain" else 1 :]

    def rows(self, status: str = "pending", reason: str = "") -> list[Row]:
        """Return a row per feature and pass."""
        about = {"provider": self.provider, "head_dim": self.sizes.head_dim, "status": status, "reason": reason}
        if self.group == COMPILES:
            return [{"feature": COMPILES, "mode": "both", **about}]
        found = []
        for feature in self.features():
            case = feature.setting(self.sizes, torch.device("cpu")).case
            shape = {"dtype": case.dtype, "batch": case.batch, "heads": case.heads, "seqlen": case.seqlen}
            modes = [mode for mode in self.modes if mode == "backward" or not feature.backward_only]
            found += [{"feature": feature.name, "mode": mode, **about, **shape} for mode in modes]
        return found


# --- in a process of its own ------------------------------------------------------------------------------------------


def measure(task: Task, tell: Callable[[str], None]) -> list[Row]:
    """Compile, check and time the features of a task, plain causal attention beside them; return their rows."""
    tell(COMPILING)
    device = progress.device_of(task.device)
    if task.group == COMPILES:
        if device.type != "cuda":
            return task.rows("unsupported", "kernels are compiled on GPUs only")
        return count_compiles(task, device)
    rows = {(row["feature"], row["mode"]): row for row in task.rows()}
    modes = _supported_modes(task, device, rows)
    features = features_of(task.group, task.provider)
    problems: dict[str, Problem] = {}
    for feature in features:
        problem, reason = attempt(functools.partial(_compiled, feature, task, device, "backward" in modes))
        if problem is None:
            _fail(rows, feature.name, modes, "failed", reason)
        else:
            problems[feature.name] = problem
    tell(CHECKING)
    with turn(task.lock):
        for name, problem in list(problems.items()):
            if not _check(problem, modes, rows):
                del problems[name]
        release()
    clock = Clock(device, task.passes, task.ms_per_pass, turn=functools.partial(turn, task.lock))
    tell(READY)
    calls: dict[str, Timed] = {}
    for name, problem in problems.items():
        for mode in modes:
            if name != features[0].name and (name, mode) not in rows:
                continue
            timed, reason = attempt(functools.partial(problem.prepared.timed, mode))
            if timed is None:
                _fail(rows, name, [mode], "failed", reason)
            else:
                calls[f"{name} {mode}"] = timed
    timings, failures = clock.time(calls)
    for (name, mode), row in rows.items():
        timing, plain = timings.get(f"{name} {mode}"), timings.get(f"{features[0].name} {mode}")
        if timing is None:
            if f"{name} {mode}" in failures:
                row.update(status="failed", reason=failures[f"{name} {mode}"])
            continue
        row.update(status="ok", ms=timing.median_ms, min_ms=timing.min_ms, spread=timing.spread, samples=timing.samples)
        if plain is not None:
            row.update(plain_ms=plain.median_ms, times_plain=timing.median_ms / plain.median_ms)
        if task.provider == "flashtile":
            _judge(row, problems[name], problems[name].configs())
    return list(rows.values())


def _supported_modes(task: Task, device: torch.device, rows: dict[tuple[str, str], Row]) -> list[str]:
    if task.provider == "flashtile":
        return list(task.modes)
    fresh_compiler()
    if device.type == "cuda":
        from torch._inductor import config

        config.compile_threads = 1  # the processes are parallel enough
        return list(task.modes)
    for (_, mode), row in rows.items():
        if mode == "backward":
            row.update(status="unsupported", reason="FlexAttention has no backward pass on CPUs")
    return [mode for mode in task.modes if mode != "backward"]


def _fail(rows: dict[tuple[str, str], Row], name: str, modes: Sequence[str], status: str, reason: str) -> None:
    for mode in modes:
        if (name, mode) in rows:  # plain attention has no rows except in its own group
            rows[name, mode].update(status=status, reason=reason)


def _compiled(feature: Feature, task: Task, device: torch.device, backward: bool) -> Problem:
    """Return a feature's problem with all that it needs compiled.

    Our kernels serve any length, so a short problem will do, and nobody's time is disturbed; FlexAttention compiles for
    the very shape.
    """
    sizes = task.sizes
    if task.provider == "flashtile" and sizes.tokens > _SHORTEST:
        short = dataclasses.replace(sizes, tokens=_SHORTEST, seq_len=sizes.seq_len * _SHORTEST // sizes.tokens)
        Problem(feature, task.provider, feature.setting(short, device)).prepared.outputs(backward)
    with turn(task.lock):
        problem = Problem(feature, task.provider, feature.setting(sizes, device))
    if task.provider == "flex":
        problem.prepared.outputs(backward)
    return problem


def _check(problem: Problem, modes: Sequence[str], rows: dict[tuple[str, str], Row]) -> bool:
    """Compare with the formula and note the errors; return whether the feature may be timed."""
    name = problem.feature.name
    verdict, reason = attempt(lambda: Gate(problem).judge("backward" in modes))
    if verdict is None:
        _fail(rows, name, modes, "failed", reason)
        return False
    if verdict.reason:
        _fail(rows, name, modes, "wrong", verdict.reason)
    columns = {"error": verdict.errors, "error_limit": verdict.limits, "relative_error": verdict.relative}
    for mode in modes:
        names = [n for n in verdict.errors if (n == "o") == (mode == "forward")]
        if (name, mode) in rows and names:
            rows[name, mode].update({column: max(values[n] for n in names) for column, values in columns.items()})
    return not verdict.reason


def _judge(row: Row, problem: Problem, configs: Mapping[str, Any]) -> None:
    """Add the share of tiles that are visited, where it is not plain attention's, and the target, which is a GPU's."""
    feature, target = problem.feature, problem.feature.most
    if not configs:
        return
    if problem.rules.mask != mask.causal() or problem.rules.seqlens is not None:
        work, plain = (visited(r, problem.case, row["mode"], configs) for r in (problem.rules, problem.at.rules()))
        row["tiles"] = work / plain
        target = target if feature.most_by_tiles is None else feature.most_by_tiles * row["tiles"]
    if target is not None and "times_plain" in row:
        row.update(target=target, met=row["times_plain"] <= target)


def count_compiles(task: Task, device: torch.device) -> list[Row]:
    """Return, after each of 30 calls with other lengths, windows and caps, how many kernels Triton has compiled.

    Kernels that Triton had in its cache on disk count too. Lengths are even and odd, windows multiples of 16 or not:
    all that Triton tells apart comes up in the first four calls.
    """
    from triton import knobs

    dtype, shape = DTYPES[task.sizes.dtype], (1, max(1, task.sizes.width // task.sizes.head_dim))
    compiled: list[str] = []
    rows = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **about: compiled.append(about["src"].name)
    try:
        for i in range(CALLS):
            seqlen, window, cap = 1000 + 33 * i, 128 + 8 * (i // 2), 10.0 + i
            size = (*shape, seqlen, task.sizes.head_dim)
            q, k, v, do = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(4))
            rules: Any = {"mask": mask.window(window, 0), "score": score.softcap(cap), "backend": task.sizes.backend}
            o = flash_attention(q, k, v, **rules)
            torch.autograd.grad(o, (q, k, v), do)
            counted = {"call": i + 1, "seqlen": seqlen, "window": window, "cap": cap, "kernels": len(compiled)}
            rows += [{**row, **counted} for row in task.rows("ok")]
    finally:
        knobs.compilation.listener = before
    rows[-1].update(target=rows[SETTLED - 1]["kernels"], met=len(compiled) <= rows[SETTLED - 1]["kernels"])
    return rows


# --- the whole --------------------------------------------------------------------------------------------------------


def tasks_of(options: Options, device: torch.device, lock: str) -> list[Task]:
    """Return the tasks, FlexAttention's first: they compile the longest."""
    gpu = device.type == "cuda"
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        raise ValueError(f"unknown group {', '.join(unknown)}; known: {', '.join(GROUPS)}")
    found = []
    for group in options.groups or GROUPS:
        for head_dim in options.head_dim or ((64, 128) if gpu else (16,)):
            sizes = Sizes(
                options.dtype or ("bf16" if gpu else "fp32"),
                options.tokens or (16384 if gpu else 256),
                options.width or (2048 if gpu else 32),
                options.seq_len or (8192 if gpu else 128),
                head_dim,
                options.backend,
            )
            for provider in sorted(options.providers, reverse=True):
                if features_of(group, provider):
                    found.append(Task(provider, group, sizes, options.modes, device.type, options.passes,
                                      options.ms_per_pass, lock))  # fmt: skip
    if not found:
        raise ValueError(f"nothing to measure: {', '.join(options.providers)} has no {', '.join(options.groups)}")
    if options.compiles:
        found.insert(0, dataclasses.replace(found[0], provider="flashtile", group=COMPILES))
    return found


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return rows by head_dim, pass, feature, provider, with ``vs_flex``: how many times as fast as FlexAttention."""
    every = [feature for features in GROUPS.values() for feature in features]
    names = [COMPILES, *(feature.name for feature in every)]
    peers = {feature.name: feature.peer or feature.name for feature in every}
    ms = {(r["feature"], r["mode"], r["head_dim"]): r["ms"] for r in rows if r["provider"] == "flex" and "ms" in r}
    for row in rows:
        theirs = ms.get((peers.get(row["feature"]), row["mode"], row["head_dim"]))
        if row["provider"] != "flex" and "ms" in row and theirs is not None:
            row["vs_flex"] = theirs / row["ms"]
    modes = {"forward": 0, "backward": 1, "both": 2}
    return sorted(rows, key=lambda r: (r["head_dim"], modes[r["mode"]], names.index(r["feature"]), r["provider"]))


def run(options: Options, console: Console | None = None) -> Result:
    """Measure, write the result file after each process, and return the result."""
    console = console or Console()
    started = time.monotonic()
    device = progress.device_of(options.device)
    result = Result.start("features", device, asdict(options), options.commit)
    processes = options.processes or (8 if device.type == "cuda" else 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        progress.saving(result, options.out, console, _COLUMNS),
        progress.bar(console) as bar,
    ):
        tasks = tasks_of(options, device, str(Path(folder) / "lock"))
        shown = bar.add_task("processes", total=len(tasks))
        left = options.seconds - (time.monotonic() - started)
        with contextlib.closing(gather(measure, tasks, processes, left, options.patience)) as measured:
            for task, rows in measured:
                result.rows = in_order([*result.rows, *rows])
                result.summary = summary_of(result.rows)
                result.save(options.out)
                bar.console.print(line_of(task, rows), highlight=False, markup=False, soft_wrap=True)
                bar.advance(shown)
        result.complete = all(row["status"] != "skipped" for row in result.rows)
    for line in report(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return result


def summary_of(rows: Sequence[Row]) -> dict:
    """Return how many targets there are and which are missed, and the kernels compiled after each call."""
    judged = [row for row in rows if "met" in row]
    missed = [f"{row['feature']} {row['mode']} d{row['head_dim']}" for row in judged if not row["met"]]
    found = {"targets": len(judged), "met": len(judged) - len(missed), "missed": missed}
    counts = [row["kernels"] for row in rows if "kernels" in row]
    return found | ({"kernels": counts} if counts else {})


def line_of(task: Task, rows: Sequence[Row]) -> str:
    """Return one line for the log: milliseconds, or what became of it."""
    shown = {f"{r['feature']} {r['mode']}": f"{r['ms']:.3f} ms" if "ms" in r else r["status"] for r in rows}
    reasons = dict.fromkeys(r["reason"] for r in rows if r["reason"] and r["status"] != "unsupported")
    return f"{task!s:<36}" + ", ".join(f"{k} {v}" for k, v in shown.items()) + "".join(f"\n    {r}" for r in reasons)


def report(result: Result) -> list[str]:
    """Return the lines of the table for people: a block per head_dim and pass, what is missing, the targets."""
    lines = []
    rows = [row for row in result.rows if row["feature"] != COMPILES]
    for head_dim, mode in dict.fromkeys((row["head_dim"], row["mode"]) for row in rows):
        here = {(r["feature"], r["provider"]): r for r in rows if (r["head_dim"], r["mode"]) == (head_dim, mode)}
        lines.append(f"\nhead_dim {head_dim}, {mode:<20} {_TABLE.format(*_HEADINGS)}")
        for name in dict.fromkeys(feature for feature, _ in here):
            ours, flex = here.get((name, "flashtile"), {}), here.get((name, "flex"), {})
            verdict = "" if "met" not in ours else "met" if ours["met"] else "MISSED"
            spread = f"{ours['spread']:.1%}" if "spread" in ours else ""
            cells = [ours.get("ms", ours.get("status")), spread, *map(ours.get, ("times_plain", "tiles", "target"))]
            cells += [verdict, flex.get("ms", flex.get("status")), flex.get("times_plain"), ours.get("vs_flex")]
            lines.append(f"{name:<35} {_TABLE.format(*map(cell, cells))}")
    counts = result.summary.get("kernels")
    if counts:
        lines.append(f"\nkernels compiled after each of {len(counts)} lengths, windows and caps: {counts}")
    targets = result.summary.get("targets", 0)  # a GPU's; without them the table has said what is unsupported
    for row in result.rows:
        if row["status"] not in ("ok", *(() if targets else ("unsupported",))):
            what = {"skipped": "not reached"}.get(row["status"], row["status"])
            about = f"{row['feature']}, {row['provider']}, d{row['head_dim']} {row['mode']}"
            lines.append(f"{what}: {about}: {row['reason']}")
    missed = "; missed: " + ", ".join(result.summary["missed"]) if result.summary.get("missed") else ""
    if targets:
        lines.append(f"{result.summary['met']} of {targets} targets met{missed}")
    return [result.caption(), *lines]


def main(args: Sequence[str] | None = None) -> Result:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args))


if __name__ == "__main__":
    main()
