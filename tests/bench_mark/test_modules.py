"""The module benchmarks and the overhead benchmark, on shapes as small as they go."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from flashtile.bench_mark import bench_mark_atten, bench_mark_llama, bench_mark_overhead, subject
from flashtile.bench_mark.measure import Clock
from flashtile.bench_mark.result import Result

QUICK = {"device": "cpu", "passes": 1, "ms_per_pass": 0.01, "commit": "abc"}


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_atten(tmp_path, console, cpu_path):
    options = bench_mark_atten.Options(
        d_model=(8,),
        seq_len=(16,),
        head_dim=8,
        compile="no",
        attentions=("naive", "flash"),
        out=tmp_path / "a.json",
        **QUICK,
    )
    bench_mark_atten.run(options, console)
    result = Result.load(tmp_path / "a.json")
    assert result.complete
    assert {(row["module"], row["attention"]) for row in result.rows} == {
        ("ScaledDotProductAttention", "naive"),
        *((m, a) for m in ("MultiHeadAttention", "MultiHeadAttentionWithRoPE") for a in ("naive", "flash")),
    }
    assert {row["status"] for row in result.rows} == {"ok"}


def test_llama(tmp_path, console, cpu_path):
    options = bench_mark_llama.Options(seq_len=16, num_heads=1, head_dim=8, d_ff=16, out=tmp_path / "l.json", **QUICK)
    bench_mark_llama.run(options, console)
    result = Result.load(tmp_path / "l.json")
    assert {row["status"] for row in result.rows} == {"ok"}
    assert result.summary["published"] == {"time": 3.4, "memory": 6.0}
    assert {f"{level} both" for level in bench_mark_llama.LEVELS} <= result.summary["ratios"].keys()
    assert "published" in console.file.getvalue()


def test_a_wrong_module_is_not_timed():
    x = [torch.randn(4, 8)]
    right, wrong = nn.Linear(8, 8), nn.Linear(8, 8)
    subjects = {name: subject.Subject.of_module(m, x, False, {}) for name, m in (("right", right), ("wrong", wrong))}
    rows = subject.measure_subjects(Clock(torch.device("cpu"), 1, 0.01), subjects, "right", ["forward", "backward"])
    by_name = {(row["name"], row["mode"]): row for row in rows}
    assert by_name["right", "backward"]["ms"] > 0
    assert by_name["wrong", "forward"]["status"] == "wrong"
    assert "ms" not in by_name["wrong", "forward"]


def test_overhead(tmp_path, console, monkeypatch, cpu_path):
    monkeypatch.setattr(bench_mark_overhead, "_compiled", lambda prepared: prepared.attention)
    options = bench_mark_overhead.Options(
        providers=("flashtile", "sdpa", "fa2"), seq_len=8, head_dim=8, calls=2, passes=1, first_call=False,
        device="cpu", out=tmp_path / "o.json", commit="abc",
    )  # fmt: skip
    bench_mark_overhead.run(options, console)
    rows = Result.load(tmp_path / "o.json").rows
    status = {(row["provider"], row["what"]): row["status"] for row in rows}
    assert status.pop(("fa2", "eager, no grad")) == "unsupported"
    assert set(status.values()) == {"ok"}
    assert ("flashtile", "operator, no grad") in status


@pytest.mark.parametrize(
    ("device", "calls"),
    [("cpu", ["first call"]), ("cuda", ["first call, empty Triton cache", "first call, filled Triton cache"])],
)
def test_only_a_gpu_has_a_cache_of_kernels(device, calls, console, monkeypatch):
    monkeypatch.setattr(bench_mark_overhead, "first_call", lambda *args: (1.0, 2.0, 3.0))
    result = Result.start("overhead", torch.device("cpu"), {}, commit="abc")
    case = bench_mark_overhead.Case("fp32", 1, 1, 8, 8, True)
    bench_mark_overhead._first_calls(case, torch.device(device), result, console)
    assert [row["what"] for row in result.rows if "call" in row["what"]] == calls


def test_the_first_call_runs_in_a_fresh_process(tmp_path):
    case = bench_mark_overhead.Case("fp32", 1, 1, 8, 8, True)
    assert all(seconds > 0 for seconds in bench_mark_overhead.first_call(case, torch.device("cpu"), str(tmp_path)))
