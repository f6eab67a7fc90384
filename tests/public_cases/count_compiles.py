"""How many kernels Triton would compile as lengths and options change, on a GPU that is not there.

As a program, with a GPU's name, a head_dim and a backend: prints, in JSON, how many there are after each of 30 lengths,
for every kind of problem. A process of its own, because one that has Triton's interpreter switched on cannot ask.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton._C.libtriton import native_specialize_impl
from triton.compiler import make_backend

from flashtile import mask, score
from flashtile.dropout import Dropout
from flashtile.kernel import launcher
from flashtile.kernel.backend import load
from flashtile.seqlen import Seqlens
from tests.kernel.offline import launches, target_of

LENGTHS = [1000 + 33 * i for i in range(30)]
Options = Callable[[int], dict]

EVERY: dict[str, Options] = {
    "full": lambda n: {},
    "causal": lambda n: {"mask": mask.causal()},
    "window": lambda n: {"mask": mask.window(n // 3, n // 9)},
    "chunked": lambda n: {"mask": mask.chunked(n // 7)},
    "padding": lambda n: {"mask": mask.key_padding(n - 3) & mask.causal()},
    "document": lambda n: {"mask": mask.document(torch.arange(n) // 100) & mask.causal()},
    "softcap": lambda n: {"score": score.softcap(n / 20)},
    "alibi": lambda n: {"score": score.alibi(torch.full((2,), n / 20)).then(score.temperature(n / 500))},
    "bias by key": lambda n: {"score": score.bias(torch.zeros(1, 1, 1, n))},
    "sinks and dropout": lambda n: {"dropout": Dropout(n / 9000, torch.tensor([n]))},
    "packed": lambda n: {"mask": mask.causal(), "seqlens": _packed(n)},
    "packed, window": lambda n: {"mask": mask.window(n // 3, 0), "seqlens": _packed(n)},
}


def _packed(n: int) -> Seqlens:
    cu_seqlens = torch.tensor([0, n // 3, n], dtype=torch.int32)
    return Seqlens(cu_seqlens, cu_seqlens)


def kernels(arch: str, n: int, head_dim: int, backend: str, options: dict) -> set[str]:
    """Return the kernels, each with all that its code depends on, of a forward and a backward pass at length ``n``."""
    q, k, v, o, do = (torch.empty(1, 2, n, head_dim, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.empty(1, 2, n)
    rules: dict[str, Any] = {"softmax_scale": n**-0.5, "mask": mask.full(), **options}
    forward_only: dict[str, Any] = {"sinks": torch.zeros(2)} if "dropout" in options else {}

    passes = load(backend)

    def call():
        passes.forward(q, k, v, **rules, **forward_only)
        passes.backward(do, q, k, v, o, lse, None, **rules)

    compiler = type(make_backend(target_of(arch)))
    found = set()
    for fn, args, constants, config in launches(arch, call):
        special = [
            native_specialize_impl(compiler, launcher._as_triton(arg), False, not param.do_not_specialize, True)
            for param, arg in zip(fn.params, args, strict=False)
        ]
        found.add(f"{fn.__name__} {special} {constants} {config}")
    return found


def counts(arch: str, head_dim: int, backend: str, options: Options) -> list[int]:
    """Return how many kernels there are after each length."""
    known: set[str] = set()
    totals = []
    for n in LENGTHS:
        known |= kernels(arch, n, head_dim, backend, options(n))
        totals.append(len(known))
    return totals


if __name__ == "__main__":
    arch, head_dim, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    every = {name: options for name, options in EVERY.items() if backend == "triton" or "dropout" not in name}
    with contextlib.ExitStack() as stack:
        if backend == "hopper":  # what asks for a GPU
            from flashtile.kernel.hopper import schedule

            counter = torch.zeros(1, dtype=torch.int32)
            stack.enter_context(mock.patch.object(schedule, "counter_of", return_value=counter))
            stack.enter_context(mock.patch.object(schedule, "multiprocessors", return_value=132))
        print(json.dumps({name: counts(arch, head_dim, backend, options) for name, options in every.items()}))
