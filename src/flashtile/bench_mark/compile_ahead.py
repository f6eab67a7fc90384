"""Fill Triton's cache from several processes at once, so that no benchmark waits for one compilation at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from rich.console import Console

from flashtile.bench_mark.measure import Case, attempt

Job = TypeVar("Job")
_FEWEST_JOBS = 3  # starting a process costs about as much as one compilation


class Pool:
    """Worker processes that live until the ``with`` block ends; a compiler that crashes takes only its job with it."""

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or max(1, (os.cpu_count() or 2) - 1)
        self._executor: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        """End the workers, also those in the middle of a job."""
        if self._executor is None:
            return
        workers = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
            worker.join(timeout=5)
        self._executor = None

    def run(
        self, work: Callable[[Job], str], jobs: Sequence[Job], seconds: float, retries: int = 2
    ) -> list[str | None]:
        """Return ``work(job)`` of every job: a reason, "" for success, None where the time was over first."""
        results: list[str | None] = [None] * len(jobs)
        if not jobs or seconds <= 0:
            return results
        deadline = time.monotonic() + seconds
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
            self._executor = concurrent.futures.ProcessPoolExecutor(min(self.processes, len(jobs)), context)
        futures = {self._executor.submit(work, job): i for i, job in enumerate(jobs)}
        broken = False
        try:
            for future in concurrent.futures.as_completed(futures, timeout=seconds):
                error = future.exception()
                broken |= isinstance(error, BrokenProcessPool)
                if error is None:
                    results[futures[future]] = future.result()
                elif not broken:
                    results[futures[future]] = f"{type(error).__name__}: {error}"
        except concurrent.futures.TimeoutError:
            pass
        if None in results:
            self._stop()
        if broken:
            # Nobody knows which job did it: the rest is tried again, at last one by one.
            rest = [i for i, result in enumerate(results) if result is None]
            groups = [rest] if retries > 1 else [[i] for i in rest]
            for group in groups if retries else ():
                left = deadline - time.monotonic()
                for i, result in zip(group, self.run(work, [jobs[i] for i in group], left, retries - 1), strict=True):
                    results[i] = result
            if not retries:
                results = ["the compiler crashed" if result is None else result for result in results]
        return results


def _compile_case(job: tuple[str, Case, bool]) -> str:
    import torch

    from flashtile.bench_mark.providers import PROVIDERS, Inputs, Prepared

    provider, case, backward = job
    inputs = Inputs.random(case, torch.device("cuda"))
    _, reason = attempt(lambda: Prepared(PROVIDERS[provider], case, inputs).outputs(backward))
    return reason


def compile_ahead(
    cases: Sequence[Case], providers: Sequence[str], backward: bool, console: Console, seconds: float = 120.0
) -> None:
    """Compile the kernels of these providers, all ours, for these cases.

    A failure only shows later, where the case itself is measured.

    Lengths and numbers of heads compile nothing new, so one small problem stands for all that share the rest.
    """
    small = {dataclasses.replace(case, batch=2, heads=4, seqlen=256) for case in cases}
    jobs = [(provider, case, backward) for case in sorted(small, key=str) for provider in providers]
    if len(jobs) < _FEWEST_JOBS:
        return
    start = time.monotonic()
    with Pool() as pool:
        results = pool.run(_compile_case, jobs, seconds)
    done = sum(result == "" for result in results)
    console.print(f"compiled {done} of {len(jobs)} variants in {time.monotonic() - start:.1f} s", highlight=False)
