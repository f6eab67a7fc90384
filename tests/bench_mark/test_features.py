"""The features benchmark: what is timed is right, for us and for FlexAttention, and no failure is lost."""

import contextlib
import dataclasses
import io
import math
import os
import threading
import time
import warnings
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from rich.console import Console

from flashtile import mask
from flashtile.bench_mark import bench_mark_features as bench
from flashtile.bench_mark import features, turns
from flashtile.bench_mark.bench_mark_features import Options, Task
from flashtile.bench_mark.feature_gate import Gate, expected
from flashtile.bench_mark.features import GROUPS, Feature, Problem, Sizes, features_of
from flashtile.bench_mark.measure import Clock, Timed
from flashtile.bench_mark.result import Result
from flashtile.kernel import launch
from flashtile.mask.picture import tile_states, visible
from tests.reference import FORWARD_FACTOR, assert_accurate, plain, reference

CPU = torch.device("cpu")
SIZES = Sizes("fp32", 78, 24, 39, 8)  # batch 2, 3 heads, 39 tokens; or one sequence of 78, with a window of 4
OURS = [features.CAUSAL, *(f for group in GROUPS for f in features_of(group, "flashtile")[1:])]
FLEX = [features.CAUSAL, *(f for group in GROUPS for f in features_of(group, "flex")[1:])]

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def named(found: list[Feature]) -> Any:
    return pytest.mark.parametrize("feature", found, ids=[f.name for f in found])


def problem_of(feature: Feature, provider: str, sizes: Sizes = SIZES) -> Problem:
    return Problem(feature, provider, feature.setting(sizes, CPU))


def oracle(problem: Problem, compute: Any = reference) -> Any:
    """The tests' own reference, given the rules of a feature."""
    rules, inputs = problem.rules, problem.inputs
    rule = rules.mask if rules.seqlens is None else mask.document(problem.at.ids()) & mask.causal()
    options = {"mask": rule, "score": rules.score, "sinks": rules.sinks, "dropout": rules.dropout, "do": inputs.do}
    return compute(inputs.q, inputs.k, inputs.v, **options)


# --- what is timed ----------------------------------------------------------------------------------------------------


@named(OURS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_ours_pass_the_gate(feature, dtype):
    problem = problem_of(feature, "flashtile", dataclasses.replace(SIZES, dtype=dtype))
    verdict = Gate(problem).judge(backward=True)
    assert not verdict.reason
    assert verdict.errors.keys() == {"o", "dq", "dk", "dv", *(["dlearned"] if feature.learns else [])}


@named(OURS)
def test_the_gate_agrees_with_the_reference(feature):
    problem = problem_of(feature, "flashtile")
    want = oracle(problem)
    for pair in ((0, 0), (problem.case.batch - 1, 2)):
        got = expected(problem, pair, torch.float64)
        for name in ("o", "dq", "dk", "dv"):
            torch.testing.assert_close(got[name], getattr(want, name)[pair], atol=1e-12, rtol=0)


@named(FLEX)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_flex_is_told_the_same(feature, backward, monkeypatch):
    """Backward too, which FlexAttention computes on a CPU, though it refuses to."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)
    problem = problem_of(feature, "flex")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = problem.prepared.outputs(backward)
    want, theirs = oracle(problem), oracle(problem, plain)
    for name, value in got.items():
        assert_accurate(value, getattr(want, name), getattr(theirs, name), FORWARD_FACTOR, name)
    assert not Gate(problem).judge(backward).reason


def test_the_features_are_what_they_are_called():
    """Each differs from plain causal attention, and one that learns has a gradient."""
    alike = {"causal", "causal as a value"}
    for feature in OURS:
        problem = problem_of(feature, "flashtile")
        causal = problem_of(dataclasses.replace(features.CAUSAL, long=feature.long), "flashtile")
        same = torch.equal(problem.prepared.outputs(False)["o"], causal.prepared.outputs(False)["o"])
        assert same == (feature.name in alike), feature.name
        assert (problem.learned is not None) == feature.learns


def test_the_shapes_of_the_real_run():
    tasks = bench.tasks_of(Options(), torch.device("cuda"), "lock")
    assert {task.sizes.head_dim for task in tasks} == {64, 128}
    shapes = {row["feature"]: (row["batch"], row["seqlen"], row["dtype"]) for task in tasks for row in task.rows()}
    assert shapes["softcap"] == (2, 8192, "bf16")
    assert shapes["window"] == shapes["documents"] == shapes["documents, packed"] == (1, 16384, "bf16")
    at = features_of("window", "flashtile")[1].setting(tasks[0].sizes, CPU)
    assert at.rules(mask.window(at.part, 0)).mask == mask.window(1024, 0)
    assert at.cu_seqlens().diff().tolist() == [1024] * 16
    assert at.case.heads * at.case.head_dim == 2048
    flex = {row["feature"] for task in tasks if task.provider == "flex" for row in task.rows()}
    assert flex == {"causal", "full", "window", "documents", "softcap", "alibi"}
    assert len(tasks) == len(set(tasks)) == 2 * (len(GROUPS) + 5)


@pytest.mark.parametrize("broken", ["score", "nan", "gradient"])
def test_a_wrong_feature_does_not_pass(broken, monkeypatch):
    original = features.flash_attention

    def wrong(q, k, v, **options):
        if broken == "score":
            options["score"] = None
        o = original(q, k, v, **options)
        return o * math.nan if broken == "nan" else o

    monkeypatch.setattr(features, "flash_attention", wrong)
    feature = features_of("bias", "flashtile")[2]
    problem = problem_of(feature, "flashtile")
    if broken == "gradient":
        grad = problem.prepared.outputs

        def doubled(backward):
            found = grad(backward)
            return {**found, "dlearned": 2 * found["dlearned"]}

        monkeypatch.setattr(problem.prepared, "outputs", doubled)
    if broken == "score":
        problem.prepared.leaves.pop()
    reason = Gate(problem).judge(backward=True).reason
    assert {"score": "o is off by", "nan": "o holds NaN", "gradient": "dlearned is off by"}[broken] in reason


def configs_of(arch: str) -> dict[str, launch.LaunchConfig]:
    return {kernel: launch.lookup(kernel, arch, 8, 8, torch.float32) for kernel in launch.KERNELS}


@pytest.mark.parametrize("name", ["full", "causal", "window", "documents", "documents, packed", "key padding"])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_visited_tiles_are_those_with_something_to_see(name, mode):
    sizes = Sizes("fp32", 1040, 16, 520, 8)
    configs = configs_of("interpreter")
    (feature,) = (f for f in OURS if f.name == name)
    at = feature.setting(sizes, CPU)
    rules, _ = feature.make(at)
    products = {"forward": {"forward": 2}, "backward": {"backward_dq": 3, "backward_dkdv": 4}}[mode]
    count = 0
    for kernel, factor in products.items():
        config = configs[kernel]
        entries = config.block_m * config.block_n * factor
        lengths = [at.case.seqlen] * at.case.batch if rules.seqlens is None else at.cu_seqlens().diff().tolist()
        for batch, n in enumerate(lengths):
            seen = visible(rules.mask, n, batch=batch)
            count += entries * int((tile_states(seen, config.block_m, config.block_n) > 0).sum())
    assert features.visited(rules, at.case, mode, configs) == count


# --- one process ------------------------------------------------------------------------------------------------------


def task_of(tmp_path, provider: str = "flashtile", group: str = "softcap", **changes) -> Task:
    about = {"modes": ("forward", "backward"), "device": "cpu", "passes": 2, "ms_per_pass": 0.01}
    return Task(provider, group, SIZES, **(about | changes), lock=str(tmp_path / "lock"))


@pytest.mark.parametrize(
    ("provider", "group"), [(name, g) for name in ("flashtile", "flex") for g in GROUPS if features_of(g, name)]
)
def test_every_group_is_measured(provider, group, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_SHORTEST", 32)  # ours is compiled on a shorter problem first
    stages: list[str] = []
    task = task_of(tmp_path, provider, group)
    rows = bench.measure(task, stages.append)
    assert stages == [turns.COMPILING, turns.CHECKING, turns.READY]
    assert [(row["feature"], row["mode"]) for row in rows] == [(row["feature"], row["mode"]) for row in task.rows()]
    for row in rows:
        if provider == "flex" and row["mode"] == "backward":
            assert (row["status"], row["reason"]) == ("unsupported", "FlexAttention has no backward pass on CPUs")
            continue
        assert row["status"] == "ok", row["reason"]
        assert row["times_plain"] == pytest.approx(row["ms"] / row["plain_ms"])
        assert row["error"] <= row["error_limit"]
        assert "met" not in row  # the targets are a GPU's
        assert "tiles" not in row  # nor has its path tiles


def test_what_is_wrong_is_not_timed_and_the_rest_is(tmp_path, monkeypatch):
    broken = dataclasses.replace(GROUPS["alibi"][0], make=lambda at: 1 // 0)
    lying = dataclasses.replace(GROUPS["softcap"][0], name="lying", as_value=True)
    monkeypatch.setitem(GROUPS, "mixed", (broken, lying, GROUPS["softcap"][0]))
    original = features.flash_attention

    def wrong(q, k, v, **options):
        o = original(q, k, v, **options)
        return 0.9 * o if "mask" in options else o  # the lying one alone gives its mask as a value

    monkeypatch.setattr(features, "flash_attention", wrong)
    rows = {(r["feature"], r["mode"]): r for r in bench.measure(task_of(tmp_path, group="mixed"), lambda stage: None)}
    assert rows["alibi", "forward"]["status"] == "failed"
    assert "ZeroDivisionError" in rows["alibi", "backward"]["reason"]
    assert rows["lying", "forward"]["status"] == "wrong"
    assert "ms" not in rows["lying", "backward"]
    assert rows["softcap", "backward"]["status"] == "ok"


def test_targets():
    window, softcap = (problem_of(GROUPS[name][0], "flashtile") for name in ("window", "softcap"))
    row = {"mode": "forward", "times_plain": 1.3}
    bench._judge(row, softcap, configs_of("sm_90"))
    assert (row["target"], row["met"]) == (1.35, True)
    for times_plain, met in ((0.9, True), (0.95, False)):
        row = {"mode": "forward", "times_plain": times_plain}
        bench._judge(row, window, configs_of("sm_90"))
        assert row["tiles"] == 4 / 5  # two query tiles: two and two key tiles instead of two and three
        assert (row["target"], row["met"]) == (pytest.approx(1.15 * 4 / 5), met)


def test_compiled_kernels_are_counted(tmp_path, monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    before, calls = knobs.compilation.listener, []
    original = bench.flash_attention

    def compiles_thrice(*args, **options):
        calls.append((args[0].shape[2], options["mask"].args, options["score"].args[0]))
        if len(calls) <= 3:
            knobs.compilation.listener(src=type("Source", (), {"name": "kernel"}), cache_hit=False)
        return original(*args, **options)

    monkeypatch.setattr(bench, "flash_attention", compiles_thrice)
    monkeypatch.setattr(bench, "CALLS", 6)
    rows = bench.count_compiles(task_of(tmp_path, group=bench.COMPILES), CPU)
    assert [row["kernels"] for row in rows] == [1, 2, 3, 3, 3, 3]
    assert (rows[-1]["target"], rows[-1]["met"]) == (3, True)
    assert all(len(set(column)) >= 3 for column in zip(*calls, strict=True))
    assert knobs.compilation.listener is before


def test_the_tiles_are_those_of_the_kernels_that_serve(monkeypatch):
    from flashtile import dispatch

    for name in ("window", "documents, packed"):
        (feature,) = (f for f in OURS if f.name == name)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        dispatch.select.cache_clear()
        assert not problem_of(feature, "flashtile").configs()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        dispatch.select.cache_clear()
        assert problem_of(feature, "flashtile").configs() == configs_of("interpreter")


def test_kernels_are_counted_on_gpus_only(tmp_path):
    (row,) = bench.measure(task_of(tmp_path, group=bench.COMPILES), lambda stage: None)
    assert (row["status"], row["reason"]) == ("unsupported", "kernels are compiled on GPUs only")


# --- turns ------------------------------------------------------------------------------------------------------------


def test_turns_exclude_each_other(tmp_path):
    lock, seen = str(tmp_path / "lock"), []

    def other() -> None:
        with turns.turn(lock):
            seen.append("other")

    with turns.turn(lock):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        seen.append("first")
    thread.join()
    assert seen == ["first", "other"]


def test_the_clock_takes_a_turn_for_each_pass():
    events: list[str] = []

    @contextlib.contextmanager
    def turn():
        events.append("(")
        yield
        events.append(")")

    clock = Clock(CPU, passes=3, ms_per_pass=0.001, turn=turn)
    clock.time({name: Timed(lambda name=name: events.append(name)) for name in "ab"})
    passes = "".join(events).strip("()").split(")(")
    assert len(passes) == 1 + 3  # one to find out how long the calls take
    assert all(set(calls) == {"a", "b"} for calls in passes)


@dataclasses.dataclass(frozen=True)
class Job:
    """A task whose ``kind`` says what becomes of it."""

    kind: str
    group: int = 0

    def rows(self, status: str, reason: str) -> list[dict]:
        return [{"kind": self.kind, "status": status, "reason": reason}]

    def is_partner(self, other: "Job") -> bool:
        return other != self and self.group == other.group


RELEASE = threading.Event()
SEEN: list[str] = []


def do(job: Job, tell) -> list[dict]:
    tell(turns.COMPILING)
    if job.kind == "slow":
        RELEASE.wait(20)
    if job.kind == "bad":
        raise ValueError("no")
    SEEN.append(f"{job.kind} is ready")
    tell(turns.READY)
    SEEN.append(f"{job.kind} goes")
    return job.rows("ok", "")


class FakeProcess:
    exitcode = 7

    def join(self, timeout=None) -> None: ...

    def kill(self) -> None:
        RELEASE.set()


def in_a_thread(measure, job: Job) -> turns.Worker:
    here, there = Pipe()
    if job.kind == "crash":
        there.close()
    else:
        threading.Thread(target=turns.work, args=(measure, job, there), daemon=True).start()
    return turns.Worker(job, FakeProcess(), here)


def gathered(monkeypatch, jobs: list[Job], processes: int = 2, seconds: float = 60.0, patience: float = 60.0) -> dict:
    monkeypatch.setattr(turns.Worker, "start", staticmethod(in_a_thread))
    RELEASE.clear()
    SEEN.clear()
    return {job.kind: rows[0] for job, rows in turns.gather(do, jobs, processes, seconds, patience)}


def test_whatever_becomes_of_a_process_is_a_row(monkeypatch):
    rows = gathered(monkeypatch, [Job(kind, i) for i, kind in enumerate(("good", "bad", "crash", "slow", "last"))],
                    patience=3)  # fmt: skip
    assert rows["good"]["status"] == rows["last"]["status"] == "ok"
    assert (rows["bad"]["status"], rows["bad"]["reason"]) == ("failed", "ValueError: no")
    assert rows["crash"]["reason"] == "its process ended while starting: exit 7"
    assert rows["slow"]["reason"] == "was compiling for more than 3 s"


def test_the_time_limit_is_told(monkeypatch):
    rows = gathered(monkeypatch, [Job("slow"), Job("good", 1)], processes=1, seconds=0.5)
    over = "the time limit was over"
    assert rows["slow"] == {"kind": "slow", "status": "skipped", "reason": f"{over} while it was compiling"}
    assert rows["good"]["reason"] == f"{over} before it began"


def test_partners_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(turns, "_HURRY", 0.0)
    gathered(monkeypatch, [Job("a"), Job("b"), Job("c", 1)], processes=1)
    assert SEEN.index("b is ready") < SEEN.index("a goes")
    gathered(monkeypatch, [Job("a"), Job("bad")], processes=1)
    assert SEEN == ["a is ready", "a goes"]


def test_near_the_end_nobody_waits(monkeypatch):
    rows = gathered(monkeypatch, [Job("good"), Job("slow")], seconds=4.0)
    assert rows["good"]["status"] == "ok"
    assert rows["slow"]["status"] == "skipped"


# --- the whole --------------------------------------------------------------------------------------------------------


def options(tmp_path, **changes) -> Options:
    small = {"tokens": 64, "seq_len": 32, "width": 16, "head_dim": (8,), "device": "cpu", "passes": 1,
             "ms_per_pass": 0.01, "out": tmp_path / "result.json", "commit": "abc"}  # fmt: skip
    return Options(**(small | changes))


def inline(measure, tasks, processes, seconds, patience):
    for task in tasks:
        yield task, measure(task, lambda stage: None)


def test_a_whole_run(tmp_path, console, monkeypatch):
    monkeypatch.setattr(bench, "gather", inline)
    result = bench.run(options(tmp_path, compiles=True), console)
    loaded = Result.load(tmp_path / "result.json")
    assert loaded.benchmark == "features"
    assert loaded.commit == "abc"
    assert loaded.complete
    assert [row["feature"] for row in loaded.rows] == [row["feature"] for row in result.rows]
    assert {row["feature"] for row in loaded.rows} == {"compiles", *(f.name for f in OURS)}
    rows = {(row["feature"], row["provider"], row["mode"]): row for row in result.rows}
    for name, theirs in (("window", "window"), ("documents, packed", "documents"), ("causal as a value", "causal")):
        ours, flex = rows[name, "flashtile", "forward"], rows[theirs, "flex", "forward"]
        assert ours["vs_flex"] == pytest.approx(flex["ms"] / ours["ms"])
    assert "vs_flex" not in rows["window", "flashtile", "backward"]
    text = console.file.getvalue()
    assert "head_dim 8, backward" in text
    assert rows["softcap", "flex", "backward"]["reason"] == "FlexAttention has no backward pass on CPUs"
    assert "unsupported" in text  # in the table
    assert "unsupported: " not in text
    assert "targets met" not in text  # a CPU has none


def test_no_time_leaves_rows_that_say_so(tmp_path, console):
    result = bench.run(options(tmp_path, seconds=-1.0, groups=("bias", "window")), console)
    assert {row["status"] for row in result.rows} == {"skipped"}
    assert len(result.rows) == 2 + 1 + 2 * 2
    assert not result.complete
    assert "not reached: window, flex, d8 forward: the time limit was over before it began" in console.file.getvalue()


def test_an_interrupt_keeps_what_was_measured(tmp_path, console, monkeypatch):
    def interrupted(measure, tasks, *rest):
        yield tasks[0], measure(tasks[0], lambda stage: None)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "gather", interrupted)
    bench.run(options(tmp_path, groups=("softcap",)), console)
    loaded = Result.load(tmp_path / "result.json")
    assert [row["provider"] for row in loaded.rows] == ["flex", "flex"]
    assert not loaded.complete
    assert "interrupted" in console.file.getvalue()


def test_the_table(tmp_path):
    result = Result.start("features", CPU, {}, commit="abc")
    base = {"head_dim": 64, "mode": "forward", "status": "ok", "reason": "", "spread": 0.021}
    result.rows = bench.in_order([
        {**base, "feature": "softcap", "provider": "flashtile", "ms": 1.5, "times_plain": 1.5, "target": 1.35,
         "met": False},
        {**base, "feature": "window", "provider": "flashtile", "ms": 0.5, "times_plain": 0.14, "tiles": 0.13,
         "target": 0.15, "met": True},
        {**base, "feature": "window", "provider": "flex", "ms": 1.0, "times_plain": 0.2},
        {**base, "feature": "softcap", "provider": "flex", "status": "failed", "reason": "RuntimeError: [no] compiler"},
        {**base, "feature": "compiles", "provider": "flashtile", "mode": "both", "kernels": 3},
        {**base, "feature": "sinks", "provider": "flex", "status": "unsupported", "reason": "has no sinks"},
    ])  # fmt: skip
    result.summary = bench.summary_of(result.rows)
    lines = bench.report(result)
    window, softcap = (next(line for line in lines if line.startswith(name)).split() for name in ("window", "softcap"))
    assert window == ["window", "0.5", "2.1%", "0.14", "0.13", "0.15", "met", "|", "1", "0.2", "2"]
    assert softcap == ["softcap", "1.5", "2.1%", "1.5", "1.35", "MISSED", "|", "failed"]
    assert "failed: softcap, flex, d64 forward: RuntimeError: [no] compiler" in lines
    assert "unsupported: sinks, flex, d64 forward: has no sinks" in lines
    assert any("[3]" in line for line in lines)
    assert lines[-1] == "1 of 2 targets met; missed: softcap forward d64"


def test_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--groups window softcap" in shown
    with pytest.raises(ValueError, match="unknown group no; known: plain, window"):
        bench.run(options(tmp_path, groups=("no",)))
    with pytest.raises(ValueError, match="nothing to measure: flex has no bias"):
        bench.run(options(tmp_path, groups=("bias",), providers=("flex",)))


@pytest.mark.slow
def test_in_processes_of_their_own(tmp_path):
    """From the command line, with nothing replaced."""
    assert "TRITON_INTERPRET" not in os.environ
    args = ["--groups", "window", "--head-dim", "8", "--tokens", "64", "--seq-len", "32", "--width", "16",
            "--device", "cpu", "--processes", "2", "--passes", "1", "--ms-per-pass", "0.01"]  # fmt: skip
    result = bench.main([*args, "--out", str(tmp_path / "result.json")])
    assert result.complete
    status = {(row["provider"], row["mode"]): row["status"] for row in result.rows}
    assert status == {("flashtile", "forward"): "ok", ("flashtile", "backward"): "ok", ("flex", "forward"): "ok",
                      ("flex", "backward"): "unsupported"}  # fmt: skip
    assert "vs_flex" in result.rows[0]
