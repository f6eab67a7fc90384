"""Compile the passes and the gradients of scores for GPUs that are not there.

A program, because a process that has Triton's interpreter switched on cannot compile: takes architectures, prints a
JSON list of results.
"""

import json
import sys

import torch

from flashtile import mask
from flashtile.kernel import launch
from flashtile.kernel.flash_attention_backward import backward
from flashtile.kernel.flash_attention_score_gradient import parameter_gradients
from flashtile.kernel.flash_attention_triton import forward
from flashtile.score import Score, alibi, bias, real, relative_position, softcap
from flashtile.seqlen import Seqlens
from tests.kernel import offline

BATCH, HEADS, LENGTH = 2, 4, 1024


def floors_of_logits(where, q_idx, k_idx, s, args):
    far = (real(q_idx, s) - real(k_idx, s)) / 8.0
    return s + far % -3.0 + far // 2.0 + (q_idx - k_idx) % args[0]


def one(where, q_idx, k_idx, s, args):
    return 1.0


def scores(dtype: torch.dtype) -> dict[str, Score]:
    return {
        "softcap": softcap(30.0),
        "slopes, softcap": alibi(torch.rand(HEADS)).then(softcap(30.0)),
        "bias": bias(torch.rand(HEADS, LENGTH, LENGTH).to(dtype)),
        "bias of keys": bias(torch.rand(BATCH, 1, 1, LENGTH)),
        "own": Score.of(floors_of_logits, one, (3,)),
        "table": relative_position(torch.rand(32, HEADS)),
    }


def compile_all(arch: str, head_dim: int, dtype: torch.dtype, passes: bool = True) -> list[dict]:
    """Compile every launch that the passes (or the gradients alone) make with every score."""
    q, k, v, do, o = (torch.empty(BATCH, HEADS, LENGTH, head_dim, dtype=dtype) for _ in range(5))
    lse = torch.empty(BATCH, HEADS, LENGTH)
    results = []
    for name, score in scores(dtype).items():
        rules = {"softmax_scale": 0.1, "mask": mask.causal(), "score": score}
        needs = [t.is_floating_point() for t in score.tensors()]

        def call(rules: dict = rules, needs: list[bool] = needs) -> None:
            if passes:
                forward(q, k, v, **rules)
                backward(do, q, k, v, o, lse, None, **rules)
            parameter_gradients(do, q, k, v, o, lse, lse, needs=needs, **rules)

        results += compiled(arch, name, call)
    return results


def compile_packed(arch: str) -> list[dict]:
    """Compile the gradient to slopes of packed sequences, without ``seqused``."""
    q = torch.empty(1, HEADS, LENGTH, 64, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 10, LENGTH], dtype=torch.int32)
    rules = {"softmax_scale": 0.1, "mask": mask.causal(), "score": alibi(torch.rand(HEADS)), "needs": [True]}
    seqlens = Seqlens(cu_seqlens, cu_seqlens)
    call = lambda: parameter_gradients(q, q, q, q, q, torch.empty(q.shape[:3]), None, seqlens=seqlens, **rules)  # noqa: E731
    return compiled(arch, "packed", call)


def compiled(arch: str, name: str, call) -> list[dict]:
    results = []
    for launched in offline.launches(arch, call):
        result = {"score": name, "arch": arch, "kernel": launched.kernel.__name__}
        try:
            report = offline.report(offline.compile_launch(launched, arch))
            limit = offline.SHARED_LIMIT[launch.SAME_ROWS.get(arch, arch)]
            result |= {"spilled": report.spilled, "fits": report.shared <= limit}
        except Exception as error:
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            result |= {"error": str(root)[-500:]}
        results.append(result)
    return results


if __name__ == "__main__":
    found = []
    for arch in sys.argv[1:]:
        on_hopper = arch == "sm_90"
        found += compile_all(arch, 64 if on_hopper else 128, torch.bfloat16, passes=on_hopper)
        found += compile_packed(arch)
    found += compile_all("sm_80", 32, torch.float32)  # the exact forms of what 16-bit inputs have rough ones of
    print(json.dumps(found))
