"""The tuner: candidates that fit, a whole group tuned in the interpreter, and the table it writes."""

import io
import json

import pytest
import torch
from rich.console import Console

pytest.importorskip("triton")

from flashtile.bench_mark import tune_launch
from flashtile.bench_mark.measure import DTYPES, Clock
from flashtile.bench_mark.result import Result
from flashtile.bench_mark.tune_launch import Group, Options, Tuner
from flashtile.kernel import launch
from flashtile.kernel.launch import LaunchConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", launch.KERNELS)
@pytest.mark.parametrize("head_dim", Options().head_dims)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_group_has_a_choice_of_candidates(kernel, head_dim, dtype):
    group = Group(kernel, head_dim, dtype)
    found = tune_launch.candidates(group)
    assert 3 <= len(set(found)) == len(found) <= 40
    assert set(found) <= set(tune_launch.candidates(group, thorough=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("kernel", launch.KERNELS)
def test_a_group_is_tuned(kernel):
    options = Options(seq_lens=(16,), tokens=16, width=16, finalists=1)
    tuner = Tuner(options, CPU, Clock(CPU, passes=1, ms_per_pass=0.01), samples=1)
    group = Group(kernel, 16, "fp32")
    rows = tuner.screen(group, [LaunchConfig(16, 16, 4, 1)])
    finalists = tuner.finalists(rows)
    assert any(row["current"] for row in finalists)
    tuner.decide(group, finalists)
    assert sum(row["chosen"] for row in rows) == 1
    assert all(row["status"] == "ok" for row in rows)
    assert tuner.winners.keys() == {group}


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
def test_a_wrong_configuration_is_refused(monkeypatch):
    tuner = Tuner(Options(seq_lens=(32,), tokens=32, width=16), CPU, Clock(CPU, passes=1, ms_per_pass=0.01))
    now = tuner.current(Group("forward", 16, "fp32"))

    def caller(group, case, inputs, others):
        return lambda config: lambda: (torch.ones(3) * (2 if config.block_m == 99 else 1),)

    monkeypatch.setattr(tune_launch, "caller", caller)
    rows = tuner.screen(Group("forward", 16, "fp32"), [LaunchConfig(99, 16, 4, 1)])
    assert {row["block_m"]: row["status"] for row in rows} == {99: "failed", now.block_m: "ok"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
def test_a_whole_run(tmp_path, monkeypatch):
    """Everything but the GPU: the pool compiles nothing, one candidate fails to compile, one is not reached in time."""
    compiled = []

    def run(self, work, jobs, seconds):
        compiled.append(jobs)
        reasons = {(job.config.block_m, job.config.block_n): "" for job in jobs} | {(8, 8): "no", (4, 4): None}
        return [reasons[job.config.block_m, job.config.block_n] for job in jobs]

    sizes = ((16, 16), (16, 32), (8, 8), (4, 4))
    monkeypatch.setattr(tune_launch.Pool, "run", run)
    monkeypatch.setattr(tune_launch.progress, "device_of", lambda name: CPU)
    monkeypatch.setattr(tune_launch, "candidates", lambda group, thorough: [LaunchConfig(m, n, 4, 1) for m, n in sizes])
    table = tmp_path / "table.json"
    table.write_text(tune_launch.TABLE.read_text())
    log = io.StringIO()
    options = Options(kernels=("forward",), head_dims=(16,), dtypes=("fp32",), seq_lens=(16,), tokens=16, width=16,
                      finalists=1, out=tmp_path / "tune.json", commit="abc")  # fmt: skip
    tune_launch.run(options, Console(file=log, width=200))
    result = Result.load(tmp_path / "tune.json")
    assert result.complete
    assert [row["status"] for row in result.rows] == ["ok", "ok", "ok", "failed", "skipped"]
    assert sum(row["chosen"] for row in result.rows) == 1
    screened, finals = compiled
    assert len(screened) == 4
    assert 1 <= len(finals) <= 2  # the finalist and the table's own, full; one if it is the same
    assert "forward d16 fp32" in log.getvalue()
    tune_launch.write_table(result, Console(file=log), table)
    assert any(row["source"].startswith("measured on") for row in json.loads(table.read_text()))


def test_the_table_is_rewritten(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(tune_launch.TABLE.read_text())
    before = json.loads(path.read_text())
    result = Result.start("tune_launch", CPU, {}, commit="abc")
    row = {"arch": "sm_90", "kernel": "forward", "dtype": "bf16", "block_m": 64, "block_n": 32, "num_warps": 4,
           "num_stages": 3, "status": "ok", "chosen": True}  # fmt: skip
    head_dims = (64, 96)
    result.rows = [{**row, "head_dim": head_dim} for head_dim in head_dims] + [{**row, "head_dim": 8, "chosen": False}]
    tune_launch.write_table(result, Console(file=io.StringIO()), path)
    after = {(r["arch"], r["kernel"], r["head_dim"], r["bits"]): r for r in json.loads(path.read_text())}
    for head_dim in head_dims:
        written = after["sm_90", "forward", head_dim, DTYPES["bf16"].itemsize * 8]
        assert written["num_stages"] == 3
        assert written["source"] == f"measured on {result.device['name']}, {result.date[:10]}"
    assert ("sm_90", "forward", 8, 16) not in after
    for old in before:
        key = (old["arch"], old["kernel"], old["head_dim"], old["bits"])
        assert key in after
        if key[:2] != ("sm_90", "forward") or key[2] not in head_dims:
            assert after[key] == old
    assert len(path.read_text().splitlines()) == len(after) + 2
