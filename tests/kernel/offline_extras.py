"""Compile the tangent and statistics kernels for a GPU that is not there: what ``offline.py`` does for the passes.

As a program, a list of jobs in JSON on stdin to a list of reports in JSON on stdout; ``compile_all`` starts it.
"""

import json
import sys
from typing import Any, NamedTuple

import torch

from flashtile.kernel import flash_attention_jvp, flash_attention_statistics
from flashtile.kernel.launch import LaunchConfig
from tests.kernel import offline
from tests.kernel.offline import DTYPES, MASKS, compile_launch, launches, report


class Job(NamedTuple):
    """One compilation: "jvp", "columns", "rows" or "chosen_rows", as launched (or with the numbers of ``config``)."""

    kernel: str
    arch: str
    head_dim: int
    dtype: str = "bf16"
    mask: str = "causal"
    top_k: int = 0
    config: tuple[int, int, int, int] | None = None


def call(job: Job) -> Any:
    """Call the host function of a job with every optional tensor given."""
    q, k, v, o = (torch.empty(2, 2, 1024, job.head_dim, dtype=DTYPES[job.dtype]) for _ in range(4))
    lse, rows = torch.zeros(2, 2, 1024), torch.arange(100)
    rules: dict[str, Any] = {"softmax_scale": 0.1, "mask": MASKS[job.mask]()}
    rules["config"] = LaunchConfig(*job.config) if job.config else None
    if job.kernel == "jvp":
        return flash_attention_jvp.jvp(q, k, v, q, k, v, o, lse, **rules)
    if job.kernel == "columns":
        return flash_attention_statistics.column_sums(q, k, lse, weights=lse, **rules)
    if job.kernel == "rows":
        return flash_attention_statistics.row_statistics(q, k, lse, top_k=job.top_k, **rules)
    return flash_attention_statistics.chosen_rows(q, k, lse, rows, **rules)


def run(job: Job) -> dict[str, Any]:
    """Compile one job; return its report, or the error's text."""
    try:
        (launched,) = launches(job.arch, lambda: call(job))
        return report(compile_launch(launched, job.arch))._asdict()
    except Exception as error:
        return {"error": f"{error!r}; from {error.__cause__!r}"}


def compile_all(jobs: list[Job], timeout: float = 600) -> list[dict[str, Any]]:
    """Return ``run`` of every job, computed by one process without the interpreter."""
    return offline.compile_all(jobs, timeout, "tests.kernel.offline_extras")


if __name__ == "__main__":
    print(json.dumps([run(Job(*job)) for job in json.load(sys.stdin)]))
