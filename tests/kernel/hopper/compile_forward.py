"""Compile the forward kernel for Hopper: a program that takes jobs as JSON, see ``compile_all`` in tests.kernel."""

import json
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import torch

from flashtile import mask, score
from flashtile.kernel import launch, tile_lists
from flashtile.kernel.hopper.forward import forward
from flashtile.seqlen import Seqlens
from tests.kernel.compile_masks import floors
from tests.kernel.compile_scores import floors_of_logits, one
from tests.kernel.hopper import offline
from tests.kernel.offline import DTYPES

LENGTH = 1024
MASKS = {
    "full": mask.full,
    "causal": mask.causal,
    "window": lambda: mask.window(100, 3),
    "document": lambda: mask.document(torch.arange(LENGTH) // 100) & mask.causal(),
    "lists": lambda: mask.block_sparse(torch.ones(2, 4, 8, 8, dtype=torch.bool), 128, 128),
    "own": lambda: mask.Mask.of(floors, (3, 5)),
}
SCORES = {
    "": lambda: None,
    "softcap": lambda: score.softcap(30.0),
    "alibi": lambda: score.alibi(torch.ones(4)),
    "bias": lambda: score.bias(torch.zeros(2, 4, LENGTH, LENGTH)),
    "softcap, alibi": lambda: score.softcap(30.0).then(score.alibi(torch.ones(4))),
    "own": lambda: score.Score.of(floors_of_logits, one, (3,)),
    "bf16 bias": lambda: _bf16_bias(2, 4, LENGTH, LENGTH),
    "bias, softcap": lambda: _bf16_bias(1, LENGTH, LENGTH).then(score.softcap(30.0)),
    "bias of odd rows": lambda: _bf16_bias(4, LENGTH, LENGTH + 2),
    "bias of keys": lambda: _bf16_bias(2, 1, 1, LENGTH),
}


def _bf16_bias(*shape: int) -> score.Score:
    return score.bias(torch.zeros(shape, dtype=torch.bfloat16)[..., :LENGTH])


class Job(NamedTuple):
    """One compilation; ``config`` are the numbers of a HopperConfig, those of the launch table if empty."""

    head_dim: int
    head_dim_v: int
    mask: str = "causal"
    dtype: str = "bf16"
    score: str = ""
    packed: bool = False
    sinks: bool = False
    config: tuple = ()


def launched(job: Job) -> Any:
    """Return the launch that a request would make."""
    dtype = DTYPES[job.dtype]
    batch, sequences = (1, torch.tensor([0, 300, LENGTH], dtype=torch.int32)) if job.packed else (2, None)
    q = torch.empty(batch, 4, LENGTH, job.head_dim, dtype=dtype)
    k, v = (torch.empty(batch, 2, LENGTH, columns, dtype=dtype) for columns in (job.head_dim, job.head_dim_v))
    table = torch.empty(8, dtype=torch.int32)
    lists = tile_lists.TileLists(table, table, 2, 8, 16)  # which a kernel makes that cannot run here
    if job.score:
        SCORES[job.score]().on_device(True)  # as where the portable kernels have been used before
    with mock.patch.object(tile_lists, "tile_lists", return_value=lists):
        return offline.gluon_launches(
            lambda: forward(
                q, k, v, softmax_scale=0.1, mask=MASKS[job.mask](), score=SCORES[job.score](),
                sinks=torch.zeros(4) if job.sinks else None,
                seqlens=None if sequences is None else Seqlens(sequences, sequences),
                config=launch.HopperConfig(*job.config) if job.config else None,
            )
        )[0]  # fmt: skip


def run(job: Job) -> dict[str, Any]:
    """Compile one job; return its report and seconds, or the error's text."""
    start = time.perf_counter()
    try:
        report = offline.report(offline.compile_launch(launched(job)))
        return report._asdict() | {"seconds": time.perf_counter() - start}
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        return {"error": f"{root!r}"[-1000:]}


if __name__ == "__main__":
    print(json.dumps([run(Job(*job)) for job in json.load(sys.stdin)]))
