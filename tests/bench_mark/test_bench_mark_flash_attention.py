"""The sweep: what it measures, and what is left when something goes wrong in the middle."""

import io

import pytest
import torch
from rich.console import Console

from flashtile.bench_mark import bench_mark_flash_attention as bench
from flashtile.bench_mark.bench_mark_flash_attention import Bench, Options
from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import PROVIDERS, Provider, deterministic_algorithms, naive_attention
from flashtile.bench_mark.result import Result


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def options(tmp_path, **changes) -> Options:
    small = {
        "seq_len": (16, 32), "head_dim": (8,), "batch_size": (1,), "heads": 1, "causal": "yes", "device": "cpu",
        "passes": 1, "ms_per_pass": 0.01, "memory": False, "providers": ("sdpa", "naive", "fa2"),
        "out": tmp_path / "result.json", "commit": "abc",
    }  # fmt: skip
    return Options(**(small | changes))


def test_performance24_is_24_shapes():
    cases = bench.cases(Options(preset="performance24"), torch.device("cuda"))
    assert len(set(cases)) == 24
    assert all(c.batch * c.seqlen == 16384 and c.heads * c.head_dim == 2048 and c.dtype == "bf16" for c in cases)


def test_serving_is_fixed_shapes_and_the_forward_pass(tmp_path, console, monkeypatch, cpu_path):
    cases = bench.cases(Options(preset="serving"), torch.device("cuda"))
    assert {(c.batch, c.heads, c.heads_kv, c.seqlen, c.window) for c in cases} == {
        (2, 32, 8, 8192, 0), (1, 32, 0, 32768, 4096), (1, 32, 8, 32768, 4096), (1, 32, 0, 16384, 0),
        (1, 32, 0, 131072, 0),
    }  # fmt: skip
    assert all((c.dtype, c.head_dim, c.causal) == ("bf16", 128, True) for c in cases)
    with pytest.raises(ValueError, match="fixed, but heads, window is given"):
        bench.cases(Options(preset="serving", heads=2, window=3), torch.device("cuda"))
    monkeypatch.setattr(bench, "_SERVING", (Case("fp32", 1, 4, 16, 8, True, heads_kv=2, window=4),))
    small = Options(preset="serving", device="cpu", providers=("flashtile", "sdpa"), passes=1, ms_per_pass=0.01,
                    out=tmp_path / "result.json")  # fmt: skip
    rows = bench.run(small, console).rows
    assert [(r["mode"], r["status"], r["heads_kv"], r["window"]) for r in rows] == [
        ("forward", "ok", 2, 4), ("forward", "unsupported", 2, 4),
    ]  # fmt: skip


def test_grouped_heads_and_windows_from_the_command_line(tmp_path, cpu_path):
    args = ["--seq-len", "16", "--head-dim", "8", "--heads", "4", "--heads-kv", "2", "--window", "4", "--device", "cpu"]
    args += ["--providers", "flashtile", "--passes", "1", "--ms-per-pass", "0.01", "--out", str(tmp_path / "r.json")]
    rows = bench.main(args).rows
    assert [(r["mode"], r["status"], r["causal"], r["heads_kv"], r["window"]) for r in rows] == [
        ("forward", "ok", True, 2, 4), ("backward", "ok", True, 2, 4),
    ]  # fmt: skip


def test_deterministic_gradients_are_rows_beside_the_plain_ones(tmp_path, console, monkeypatch, cpu_path):
    def varies(q, k, v):
        q = q.view_as(q)
        if q.requires_grad and torch.get_deterministic_debug_mode() == 2:
            q.register_hook(lambda dq: dq + 1e-7 * torch.rand_like(dq))
        return naive_attention(q, k, v, True)

    provider = Provider("varies", "varies", lambda case: varies, deterministic={"context": deterministic_algorithms})
    monkeypatch.setitem(PROVIDERS, "varies", provider)
    chosen = options(
        tmp_path, modes=("backward", "deterministic"), seq_len=(16,), providers=("flashtile", "naive", "varies")
    )
    result = bench.run(chosen, console)
    rows = {(row["provider"], row["mode"]): row for row in result.rows}
    ours, plain = rows["flashtile", "deterministic"], rows["flashtile", "backward"]
    assert ours["times_backward"] == pytest.approx(ours["ms"] / plain["ms"])
    assert "times_backward" not in plain
    assert result.summary["deterministic"]["flashtile"]["times_backward_largest"] == ours["times_backward"]
    assert rows["naive", "deterministic"]["reason"] == "no deterministic backward pass"
    assert rows["varies", "backward"]["status"] == "ok"
    assert rows["varies", "deterministic"]["reason"] == "dq differ from run to run"
    assert "times_backward" in console.file.getvalue()


def test_errors_are_held_against_those_of_fa3(tmp_path, console, monkeypatch):
    for name, error in (("flashtile", 1e-10), ("fa3", 1e-3)):
        off = lambda case, error=error: lambda q, k, v: (1 + error * q.shape[-2]) * naive_attention(q, k, v, True)  # noqa: E731
        monkeypatch.setitem(PROVIDERS, name, Provider(name, name, off))
    chosen = options(tmp_path, dtype=("fp64",), modes=("forward",), inputs="heavy", providers=("flashtile", "fa3"))
    result = bench.run(chosen, console)
    ours, theirs = ([r for r in result.rows if r["provider"] == name] for name in ("flashtile", "fa3"))
    assert {row["status"] for row in theirs} == {"wrong"}
    assert {row["status"] for row in ours} == {"ok"}
    summary = result.summary["forward"]["flashtile"]
    for error in ("error", "relative_error"):
        ratios = [mine[error] / other[error] for mine, other in zip(ours, theirs, strict=True)]
        assert [row[f"{error}_vs_fa3"] for row in ours] == ratios
        assert summary[f"{error}_vs_fa3_largest"] == max(ratios)
        assert min(ratios) <= summary[f"{error}_vs_fa3"] <= max(ratios)
    assert "error_vs_fa3" in console.file.getvalue()
    assert result.settings["inputs"] == "heavy"


def test_a_sweep(tmp_path, console):
    result = bench.run(options(tmp_path, modes=("forward", "backward", "both"), memory=True), console)
    assert Result.load(tmp_path / "result.json").rows == [
        {k: (float(f"{v:.6g}") if isinstance(v, float) else v) for k, v in row.items()} for row in result.rows
    ]
    assert result.complete
    assert len(result.rows) == 2 * 3 * 3
    for row in result.rows:
        if row["provider"] == "fa2":
            assert (row["status"], row["reason"]) == ("unsupported", "runs on cuda only")
        else:
            assert row["status"] == "ok"
            assert row["error"] <= row["error_limit"]
            assert row["ms"] > 0
            assert row["tflops"] > 0
            assert "peak_mib" in row
            assert row["best_peer"] == {"sdpa": "naive", "naive": "sdpa"}[row["provider"]]
    naive, sdpa = (result.summary["forward"][name] for name in ("naive", "sdpa"))
    assert naive["vs_best_peer"] * sdpa["vs_best_peer"] == pytest.approx(1.0)


def test_an_interrupt_keeps_what_was_measured(tmp_path, console, monkeypatch):
    original, seen = Bench.run, []

    def interrupted(self, case):
        if seen:
            raise KeyboardInterrupt
        seen.append(case)
        return original(self, case)

    monkeypatch.setattr(Bench, "run", interrupted)
    result = bench.run(options(tmp_path), console)
    loaded = Result.load(tmp_path / "result.json")
    assert len(loaded.rows) == len(result.rows) == 2 * 3
    assert not loaded.complete
    assert "interrupted" in console.file.getvalue()


def test_a_time_limit_leaves_rows_that_say_so(tmp_path, console):
    result = bench.run(options(tmp_path, seconds=-1.0), console)
    assert {row["status"] for row in result.rows} == {"skipped"}
    assert not result.complete


def test_a_peer_that_fails_or_is_wrong_is_a_row(tmp_path, console, monkeypatch):
    def crashes(q, k, v):
        raise RuntimeError("CUDA says no")

    monkeypatch.setitem(PROVIDERS, "crash", Provider("crash", "crash", lambda case: crashes))
    wrong = Provider("wrong", "wrong", lambda case: lambda q, k, v: 0.9 * naive_attention(q, k, v, True))
    monkeypatch.setitem(PROVIDERS, "wrong", wrong)
    result = bench.run(options(tmp_path, providers=("naive", "crash", "wrong")), console)
    rows = {(row["provider"], row["mode"]): row for row in result.rows}
    assert rows["naive", "backward"]["status"] == "ok"
    assert (rows["crash", "forward"]["status"], rows["crash", "forward"]["reason"]) == (
        "failed",
        "RuntimeError: CUDA says no",
    )
    assert rows["wrong", "forward"]["status"] == "wrong"
    assert "ms" not in rows["wrong", "forward"]
    assert "CUDA says no" in console.file.getvalue()


def test_who_is_not_measured_has_a_reason(tmp_path, console):
    bench.run(options(tmp_path, providers=("fa2", "flashtile"), head_dim=(300,), seq_len=(16,)), console)
    told = console.file.getvalue()
    assert "fa2              not measured: runs on cuda only" in told
    assert "flashtile        not measured: head_dim is at most 256" in told


def test_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
    assert "performance24" in capsys.readouterr().out
    args = ["--seq-len", "16", "--head-dim", "8", "--causal", "no", "--device", "cpu", "--providers", "naive"]
    result = bench.main([*args, "--passes", "1", "--ms-per-pass", "0.01", "--out", str(tmp_path / "r.json")])
    assert {row["status"] for row in result.rows} == {"ok"}
