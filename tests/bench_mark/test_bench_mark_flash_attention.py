"""The sweep: what it measures, and what is left when something goes wrong in the middle."""

import io

import pytest
import torch
from rich.console import Console

from flashtile.bench_mark import bench_mark_flash_attention as bench
from flashtile.bench_mark.bench_mark_flash_attention import Bench, Options
from flashtile.bench_mark.providers import PROVIDERS, Provider, naive_attention
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


def test_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
    assert "performance24" in capsys.readouterr().out
    args = ["--seq-len", "16", "--head-dim", "8", "--causal", "no", "--device", "cpu", "--providers", "naive"]
    result = bench.main([*args, "--passes", "1", "--ms-per-pass", "0.01", "--out", str(tmp_path / "r.json")])
    assert {row["status"] for row in result.rows} == {"ok"}
