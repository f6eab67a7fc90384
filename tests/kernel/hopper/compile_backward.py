"""Compile the backward kernel for a Hopper GPU that is not there, in the forms that tests ask for.

A program, because a process that has Triton's interpreter switched on cannot compile: a list of jobs in JSON on stdin,
a list of reports in JSON on stdout. See ``compile_all`` in ``tests/kernel/offline.py``.
"""

import json
import sys
from typing import Any, NamedTuple

import torch

from flashtile import mask, score
from flashtile.kernel import launch
from flashtile.kernel.hopper import backward as hopper
from flashtile.seqlen import Seqlens
from tests.kernel.compile_masks import floors
from tests.kernel.compile_scores import floors_of_logits, one
from tests.kernel.hopper import offline
from tests.kernel.offline import DTYPES

MASKS = {
    "full": mask.full,
    "causal": mask.causal,
    "window": lambda: mask.window(100, 0),
    "prefix": lambda: mask.prefix([7, 9]) | mask.causal(),
    "document": lambda: mask.document(torch.arange(300) // 100) & mask.causal(),
    "lists": lambda: mask.causal().without_ranges(),
    "own": lambda: mask.Mask.of(floors, (3, 5)),
}
SCORES = {
    "": lambda: None,
    "softcap": lambda: score.softcap(3.0),
    "alibi": lambda: score.alibi(torch.rand(4)),
    "softcap, alibi": lambda: score.softcap(3.0).then(score.alibi(torch.rand(4))),
    "own": lambda: score.Score.of(floors_of_logits, one, (3,)),
    "bias": lambda: score.bias(torch.rand(300, 301)[:, :300]),  # its rows are nothing for the copy engine
    "bf16 bias": lambda: _bias(4, 300, 304, dtype=torch.bfloat16),
    "fp32 bias": lambda: _bias(300, 304),
    "bias, softcap": lambda: _bias(2, 1, 300, 304, dtype=torch.float16).then(score.softcap(3.0)),
}


def _bias(*shape: int, dtype: torch.dtype = torch.float32) -> score.Score:
    return score.bias(torch.zeros(shape, dtype=dtype)[..., :300])


class Job(NamedTuple):
    """One compilation, with the launch table's configuration."""

    head_dim: int
    head_dim_v: int
    mask: str = "causal"
    score: str = ""
    dtype: str = "bf16"
    packed: bool = False
    deterministic: bool = False


def run(job: Job) -> dict[str, Any]:
    """Compile one job; return its report, or the error's text."""
    dtype = DTYPES[job.dtype]
    batch = 1 if job.packed else 2
    q, k = (torch.empty(batch, heads, 300, job.head_dim, dtype=dtype) for heads in (4, 2))
    v, do = (torch.empty(batch, heads, 300, job.head_dim_v, dtype=dtype) for heads in (2, 4))
    lse = torch.empty(batch, 4, 300)
    starts = torch.tensor([0, 100, 300], dtype=torch.int32)
    seqlens = Seqlens(starts, starts) if job.packed else None
    config = launch.lookup_hopper("hopper_backward", job.head_dim, job.head_dim_v, dtype)
    if job.score:
        SCORES[job.score]().on_device(True)  # as where the portable kernels have been used before
    try:
        launched = offline.gluon_launches(
            lambda: hopper.backward(
                do, q, k, v, do, lse, None, softmax_scale=0.1, mask=MASKS[job.mask](), score=SCORES[job.score](),
                seqlens=seqlens, deterministic=job.deterministic, config=config,
            )
        )  # fmt: skip
        (kernel,) = launched
        return offline.report(offline.compile_launch(kernel))._asdict()
    except Exception as error:
        return {"error": f"{error!r}; from {error.__cause__!r}"}


if __name__ == "__main__":
    print(json.dumps([run(Job(*job)) for job in json.load(sys.stdin)]))
