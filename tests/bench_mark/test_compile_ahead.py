"""Work in several processes: reasons come back, and neither a slow nor a crashing compiler stops the rest."""

from flashtile.bench_mark.compile_ahead import Pool
from tests.bench_mark.work import work


def test_jobs_in_processes():
    with Pool(2) as pool:
        assert pool.run(work, ["good", "bad"], 60.0) == ["", "no bad"]
        assert pool.run(work, ["good", "slow"], 2.0) == ["", None]
        assert pool.run(work, [], 60.0) == []


def test_a_crash_takes_only_its_own_job():
    with Pool(1) as pool:
        assert pool.run(work, ["crash", "good"], 60.0) == ["the compiler crashed", ""]
