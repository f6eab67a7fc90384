"""Make the launch table on a real GPU: try tile sizes for each kernel, head_dim and dtype, keep the fastest.

Examples:
  python -m flashtile.bench_mark.tune_launch --seconds 540
  python -m flashtile.bench_mark.tune_launch --head-dims 64 128 256 --dtypes bf16 --seconds 400 --write
  python -m flashtile.bench_mark.tune_launch --apply out/bench_mark/tune_launch.json      no GPU needed

Configurations are compiled in parallel processes, checked against the answer of the table as it is, screened, and the
best few timed against each other in shuffled order. The result file is rewritten after every group; --write, or --apply
later, puts the winners into kernel/launch_table.json. Nothing tunes at run time.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console

from flashtile import mask
from flashtile.bench_mark import progress
from flashtile.bench_mark.compile_ahead import Pool
from flashtile.bench_mark.measure import DTYPES, Case, Clock, Timed, attempt, release
from flashtile.bench_mark.providers import Inputs
from flashtile.bench_mark.result import Result, Row, geometric_mean
from flashtile.kernel import launch
from flashtile.kernel.launch import LaunchConfig

Kernel = Literal["forward", "backward_dq", "backward_dkdv"]
TABLE = Path(launch.__file__).with_name("launch_table.json")
_FIELDS = ("block_m", "block_n", "num_warps", "num_stages")
_SHARED_MEMORY = 227 * 1024  # the largest of any GPU so far; smaller ones refuse at compile time, and that is caught
_REGISTERS = 255
_CLOSE_ENOUGH = {2: 1e-2, 4: 1e-4}  # relative difference of two tilings, by bytes per element


@dataclass
class Options:
    """Tune the launch table."""

    kernels: tuple[Kernel, ...] = ("forward", "backward_dq", "backward_dkdv")
    """Kernels to tune."""
    head_dims: tuple[int, ...] = (128, 64, 256, 96, 32, 192, 16, 160)
    """Head dimensions, the most wanted first."""
    dtypes: tuple[Literal["fp16", "bf16", "fp32"], ...] = ("bf16", "fp32")
    """Data types; a table row serves all types of its width."""
    seq_lens: tuple[int, ...] = (1024, 4096)
    """Lengths to time, full and causal each."""
    tokens: int = 16384
    """batch x seqlen."""
    width: int = 2048
    """heads x head_dim."""
    thorough: bool = False
    """Try every tiling that fits, not only the likely ones: several times the compilations."""
    finalists: int = 4
    """Configurations that are timed against each other after the screening."""
    seconds: float = 540.0
    """Time limit for everything."""
    processes: int | None = None
    """Compiling processes; default one per core, less one."""
    out: Path = Path("out/bench_mark/tune_launch.json")
    """The result file."""
    write: bool = False
    """Put the winners into kernel/launch_table.json."""
    apply: Path | None = None
    """Only put the winners of this result file into kernel/launch_table.json."""
    commit: str = ""
    """Commit to write into the result where the source tree has no git."""


class Group(NamedTuple):
    """One row of the launch table to be found."""

    kernel: str
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.kernel} d{self.head_dim} {self.dtype}"


def candidates(group: Group, thorough: bool = False) -> list[LaunchConfig]:
    """Return the tilings worth compiling: those whose tiles fit registers and shared memory by a rough count."""
    wide = DTYPES[group.dtype].itemsize == 4
    # The tile that stays in registers: query rows, or keys in backward_dkdv; the other one is walked over.
    kept_sizes, walked_sizes = ((32, 64, 128), (16, 32, 64)) if wide else ((64, 128), (32, 64, 128))
    stage_counts = (1, 2) if wide or group.head_dim > 128 else (2, 3)
    if thorough:
        stage_counts = (1, 2, 3, 4)
    found = []
    for kept, walked, warps, stages in itertools.product(kept_sizes, walked_sizes, (4, 8), stage_counts):
        block_m, block_n = (walked, kept) if group.kernel == "backward_dkdv" else (kept, walked)
        config = LaunchConfig(block_m, block_n, warps, stages, "candidate")
        # Two warpgroups for 64 rows share each matrix product's columns: worth it only for a wide accumulator.
        narrow = not wide and warps == 8 and kept < 128 and group.head_dim <= 128
        # fp32 products run on the plain units: many elements per thread compile for minutes, few leave them idle.
        uneven = wide and not 4 <= kept * walked / (32 * warps) <= 16
        if fits(group, config) and (thorough or not (narrow or uneven)):
            found.append(config)
    return found


def fits(group: Group, config: LaunchConfig) -> bool:
    """Estimate registers per thread and shared memory; the compiler has the last word."""
    m, n, d, size = config.block_m, config.block_n, group.head_dim, DTYPES[group.dtype].itemsize
    accumulated, scores, resident, streamed = {
        "forward": (m * d, 1.5 * m * n, m * d, 2 * n * d),
        "backward_dq": (m * d, 2.0 * m * n, 2 * m * d, 2 * n * d),
        "backward_dkdv": (2 * n * d, 2.0 * m * n, 2 * n * d, 2 * m * d),
    }[group.kernel]
    registers = (accumulated + scores) / (32 * config.num_warps) + 24
    shared = size * (resident + config.num_stages * streamed)
    return registers <= _REGISTERS and shared <= _SHARED_MEMORY


def caller(
    group: Group, case: Case, inputs: Inputs, others: dict[str, LaunchConfig]
) -> Callable[[LaunchConfig | None], Callable[[], tuple[torch.Tensor, ...]]]:
    """Return a function from a configuration to the pass to be timed; None is the table's own choice.

    ``others`` holds configurations of the kernels that run beside the tuned one.
    """
    from flashtile.kernel import flash_attention_backward, flash_attention_triton

    rule = mask.causal() if case.causal else mask.full()
    rules: dict[str, Any] = {"softmax_scale": case.head_dim**-0.5, "mask": rule}
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    forward, backward = flash_attention_triton.forward, flash_attention_backward.backward
    if group.kernel == "forward":
        return lambda config: lambda: forward(q, k, v, config=config, **rules)
    o, lse = forward(q, k, v, config=others.get("forward"), **rules)
    if group.kernel == "backward_dq":
        dkdv = others.get("backward_dkdv")
        return lambda config: lambda: backward(do, q, k, v, o, lse, None, config_dq=config, config_dkdv=dkdv, **rules)
    dq = others.get("backward_dq")
    return lambda config: lambda: backward(do, q, k, v, o, lse, None, config_dq=dq, config_dkdv=config, **rules)


class Job(NamedTuple):
    """One compilation."""

    group: Group
    config: LaunchConfig
    causal: bool


def _compile(job: Job) -> str:
    """Compile one configuration by running it on a small problem; return why it failed, or ""."""
    case = Case(job.group.dtype, 2, 4, 256, job.group.head_dim, job.causal)

    def run() -> bool:
        caller(job.group, case, Inputs.random(case, torch.device("cuda")), {})(job.config)()
        torch.cuda.synchronize()
        return True

    _, reason = attempt(run)
    return reason


@dataclass
class Tuner:
    """Measures groups; ``winners`` grows, and later groups run beside earlier winners."""

    options: Options
    device: torch.device
    clock: Clock
    samples: int = 8
    winners: dict[Group, LaunchConfig] = field(default_factory=dict)

    def cases(self, group: Group, masks: Sequence[bool]) -> list[Case]:
        heads = max(1, self.options.width // group.head_dim)
        return [
            Case(group.dtype, max(1, self.options.tokens // seqlen), heads, seqlen, group.head_dim, causal)
            for seqlen in self.options.seq_lens
            for causal in masks
        ]

    def current(self, group: Group) -> LaunchConfig:
        """Return the table's configuration as it is."""
        arch = launch.arch_of(self.device)
        return launch.lookup(group.kernel, arch, group.head_dim, group.head_dim, DTYPES[group.dtype])

    def row(self, group: Group, config: LaunchConfig, status: str = "ok", reason: str = "") -> Row:
        chosen = {name: getattr(config, name) for name in _FIELDS}
        current = _tiling(config) == _tiling(self.current(group))
        return {"arch": launch.arch_of(self.device), **group._asdict(), **chosen, "current": current, "chosen": False,
                "status": status, "reason": reason, "screened_ms": {}, "measured_ms": {}}  # fmt: skip

    def others(self, group: Group) -> dict[str, LaunchConfig]:
        """Return the winners so far among the kernels that run beside this one."""
        return {g.kernel: config for g, config in self.winners.items() if g[1:] == group[1:]}

    def screen(self, group: Group, configs: Sequence[LaunchConfig]) -> list[Row]:
        """Check and time each configuration alone, causal only: that code holds the loop of full tiles too."""
        entries = {_tiling(config): config for config in (*configs, self.current(group))}
        rows = {key: self.row(group, config) for key, config in entries.items()}
        for case in self.cases(group, [True]):
            make = caller(group, case, Inputs.random(case, self.device), self.others(group))
            expected = _first_answer(make, (self.current(group), *configs))
            for key, config in entries.items():
                if rows[key]["status"] == "ok":
                    ms, reason = attempt(functools.partial(self._checked_ms, make(config), expected))
                    if ms is None:
                        rows[key].update(status="failed", reason=reason)
                    else:
                        rows[key]["screened_ms"][str(case)] = ms
            release()
        for row in rows.values():
            if row["status"] == "ok":
                row["screened_geomean_ms"] = geometric_mean(row["screened_ms"].values())
        return sorted(rows.values(), key=lambda row: row.get("screened_geomean_ms", math.inf))

    def finalists(self, rows: Sequence[Row]) -> list[Row]:
        """Return the best of a screening, and the table's own configuration if it works."""
        good = [row for row in rows if row["status"] == "ok"]
        return good[: self.options.finalists] + [row for row in good[self.options.finalists :] if row["current"]]

    def decide(self, group: Group, rows: Sequence[Row]) -> None:
        """Time the finalists against each other, full and causal; mark the one with the lowest geometric mean."""
        configs = {str(i): LaunchConfig(*(row[name] for name in _FIELDS)) for i, row in enumerate(rows)}
        for case in self.cases(group, [False, True]):
            make = caller(group, case, Inputs.random(case, self.device), self.others(group))
            expected = _first_answer(make, (self.current(group), *configs.values()))
            for i, row in enumerate(rows):
                if row["status"] == "ok":
                    ms, reason = attempt(functools.partial(self._checked_ms, make(configs[str(i)]), expected))
                    if ms is None:
                        row.update(status="failed", reason=reason)
            good = {i: Timed(make(config)) for i, config in configs.items() if rows[int(i)]["status"] == "ok"}
            timings, failures = self.clock.time(good)
            for i, timing in timings.items():
                rows[int(i)]["measured_ms"][str(case)] = timing.median_ms
            for i, reason in failures.items():
                rows[int(i)].update(status="failed", reason=reason)
            release()
        for row in rows:
            if row["status"] == "ok":
                row["geomean_ms"] = geometric_mean(row["measured_ms"].values())
        best = min((row for row in rows if row["status"] == "ok"), key=lambda row: row["geomean_ms"], default=None)
        if best:
            best["chosen"] = True
            self.winners[group] = LaunchConfig(*(best[name] for name in _FIELDS))

    def _checked_ms(self, call: Callable[[], tuple[torch.Tensor, ...]], expected: tuple[torch.Tensor, ...]) -> float:
        # The allocator would hand out the last configuration's right answer: poison it first.
        poisoned = [torch.full_like(t, float("nan")) for t in expected]
        del poisoned
        for got, want in zip(call(), expected, strict=True):
            difference = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not difference <= _CLOSE_ENOUGH[expected[0].element_size()]:
                raise ArithmeticError(f"differs from the table's answer by {difference:.1e}")
        return statistics.median(self.clock.samples(Timed(call), self.samples + 2)[2:])


def _first_answer(make: Callable, configs: Sequence[LaunchConfig]) -> tuple[torch.Tensor, ...]:
    """Return the answer of the table's configuration, or of the first that works where that one cannot run here."""
    reason = ""
    for config in configs:
        answer, why = attempt(make(config))
        if answer is not None:
            return answer
        reason = reason or why
    raise RuntimeError(f"no configuration works: {reason}")


def _tiling(config: LaunchConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in _FIELDS)


def run(options: Options, console: Console | None = None) -> Result | None:
    """Tune, save, and write the table if asked to."""
    console = console or Console()
    if options.apply:
        write_table(Result.load(options.apply), console)
        return None
    deadline = time.monotonic() + options.seconds
    device = progress.device_of("cuda")
    result = Result.start("tune_launch", device, asdict(options), options.commit)
    tuner = Tuner(options, device, Clock(device, passes=3, ms_per_pass=15.0))
    batches = [
        [Group(kernel, head_dim, dtype) for kernel in options.kernels]
        for dtype, head_dim in itertools.product(options.dtypes, options.head_dims)
    ]
    columns = ("kernel", "head_dim", "dtype", *_FIELDS, "geomean_ms", "current", "chosen", "status")
    with progress.saving(result, options.out, console, columns), Pool(options.processes) as pool:
        for number, batch in enumerate(batches):
            if time.monotonic() > deadline - 30:
                console.print(f"time is over: {sum(map(len, batches[number:]))} groups were not reached")
                break
            _tune_batch(tuner, batch, pool, deadline, result, console)
            if dead := progress.device_error(device):
                raise RuntimeError(f"the device stopped working in {', '.join(map(str, batch))}: {dead}")
        else:
            result.complete = True
    if options.write:
        write_table(result, console)
    return result


def _tune_batch(
    tuner: Tuner, batch: Sequence[Group], pool: Pool, deadline: float, result: Result, console: Console
) -> None:
    """Tune the kernels of one head_dim and dtype: compile all, screen, compile the finalists' full form, decide."""
    begun = time.monotonic()
    jobs = [Job(g, c, True) for g in batch for c in candidates(g, tuner.options.thorough)]
    reasons = dict(zip(jobs, pool.run(_compile, jobs, 0.7 * (deadline - begun)), strict=True))
    compiled = time.monotonic() - begun
    screened: dict[Group, list[Row]] = {}
    for group in batch:
        mine = [job.config for job in jobs if job.group == group and reasons[job] == ""]
        rows, why = attempt(functools.partial(tuner.screen, group, mine))
        if rows is None:
            console.print(f"{group}: {why}", highlight=False, soft_wrap=True)
        screened[group] = rows or []
        result.rows += screened[group]
        result.rows += [
            tuner.row(
                group, job.config, *(("skipped", "not compiled in time") if reason is None else ("failed", reason))
            )
            for job, reason in reasons.items()
            if job.group == group and reason != ""
        ]
    finals = {group: tuner.finalists(rows) for group, rows in screened.items()}
    full = [Job(g, LaunchConfig(*(row[n] for n in _FIELDS)), False) for g, rows in finals.items() for row in rows]
    pool.run(_compile, full, max(20.0, 0.7 * (deadline - time.monotonic())))
    for group, rows in finals.items():
        _, why = attempt(functools.partial(tuner.decide, group, rows))
        console.print(_line(group, rows, why), highlight=False, soft_wrap=True)
        result.save(tuner.options.out)
    done = sum(reason == "" for reason in reasons.values())
    console.print(
        f"  {done} of {len(jobs)} compiled in {compiled:.0f} s, {time.monotonic() - begun:.0f} s in all",
        highlight=False,
    )


def _line(group: Group, rows: Sequence[Row], why: str) -> str:
    best = next((row for row in rows if row["chosen"]), None)
    now = next((row for row in rows if row["current"]), {})
    if best is None:
        return f"{group!s:28} no winner {why}"
    gain = f"{now['geomean_ms'] / best['geomean_ms']:.3f} times faster than the table's" if "geomean_ms" in now else ""
    return f"{group!s:28} " + " ".join(f"{n} {best[n]}" for n in _FIELDS) + f"  {best['geomean_ms']:.3f} ms  {gain}"


def write_table(result: Result, console: Console, path: Path = TABLE) -> None:
    """Put the chosen configurations into the launch table, one row a line."""
    table = json.loads(path.read_text())
    index = {(row["arch"], row["kernel"], row["head_dim"], row["bits"]): row for row in table}
    changed = 0
    for row in result.rows:
        if not row["chosen"] or row["status"] != "ok":
            continue
        bits = DTYPES[row["dtype"]].itemsize * 8
        key = (row["arch"], row["kernel"], row["head_dim"], bits)
        source = f"measured on {result.device['name']}, {result.date[:10]}"
        index[key] = dict(zip(("arch", "kernel", "head_dim", "bits"), key, strict=True)) | {
            **{name: row[name] for name in _FIELDS},
            "source": source,
        }
        changed += 1
    archs = list(dict.fromkeys(key[0] for key in index))
    kernels = list(dict.fromkeys((*launch.KERNELS, *(key[1] for key in index))))
    order = sorted(index, key=lambda key: (archs.index(key[0]), key[3], kernels.index(key[1]), key[2]))
    path.write_text("[\n" + ",\n".join("  " + json.dumps(index[key]) for key in order) + "\n]\n")
    console.print(f"{changed} rows written into {path}", highlight=False)


def main(args: Sequence[str] | None = None) -> Result | None:
    """Run from the command line."""
    return run(progress.parse(Options, __doc__, args))


if __name__ == "__main__":
    main()
