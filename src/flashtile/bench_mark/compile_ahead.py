"""Fill Triton's cache from several processes at once, so that no benchmark waits for one compilation at a time."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from rich.console import Console

from flashtile.bench_mark.measure import Case, attempt

Job = TypeVar("Job")
_FEWEST_JOBS = 3  # starting a process costs about as much as one compilation


def in_processes(
    work: Callable[[Job], str], jobs: Sequence[Job], seconds: float = 300.0, processes: int | None = None
) -> list[str | None]:
    """Return ``work(job)`` of every job, None for those that were not done in time; ``work`` returns a reason or "".

    A process that dies (a compiler crash) is a reason too.
    """
    if not jobs:
        return []
    processes = processes or max(1, min(len(jobs), (os.cpu_count() or 2) - 1))
    results: list[str | None] = [None] * len(jobs)
    deadline = time.monotonic() + seconds
    executor = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {executor.submit(work, job): i for i, job in enumerate(jobs)}
        for future in as_completed(futures, timeout=max(0.1, deadline - time.monotonic())):
            value, reason = attempt(future.result)
            results[futures[future]] = reason if value is None else value
    except TimeoutError:
        pass
    finally:
        workers = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        # Work still running is past its deadline; nothing waits for it.
        for worker in workers:
            if any(result is None for result in results):
                worker.terminate()
            worker.join(timeout=5)
    return results


def _compile_case(job: tuple[Case, bool]) -> str:
    import torch

    from flashtile.bench_mark.providers import PROVIDERS, Inputs, Prepared

    case, backward = job
    inputs = Inputs.random(case, torch.device("cuda"))
    _, reason = attempt(lambda: Prepared(PROVIDERS["flashtile"], case, inputs).outputs(backward))
    return reason


def compile_ahead(cases: Sequence[Case], backward: bool, console: Console, seconds: float = 120.0) -> None:
    """Compile our kernels for these cases; a failure only shows later, where the case itself is measured.

    Lengths and numbers of heads compile nothing new, so one small problem stands for all that share the rest.
    """
    small = {dataclasses.replace(case, batch=2, heads=4, seqlen=256) for case in cases}
    if len(small) < _FEWEST_JOBS:
        return
    start = time.monotonic()
    in_processes(_compile_case, [(case, backward) for case in sorted(small, key=str)], seconds)
    console.print(f"compiled {len(small)} variants in {time.monotonic() - start:.1f} s", highlight=False)
