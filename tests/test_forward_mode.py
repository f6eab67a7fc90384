"""Forward-mode derivatives through the public functions: torch.func.jvp and dual tensors, on every backend."""

from typing import Any

import pytest
import torch

from flashtile import flash_attention, flash_attention_varlen, mask, score
from tests.test_attention import INTERPRETED, everywhere_and_interpreted

TANGENT_OPTIONS = {
    "plain": {"is_causal": True},
    "window-softcap-sinks": {"mask": mask.window(4, 1), "score": score.softcap(3.0), "sinks": torch.ones(2)},
}


@pytest.mark.parametrize("name", TANGENT_OPTIONS)
def test_forward_mode(name):
    from torch.autograd import forward_ad

    options = TANGENT_OPTIONS[name]
    primals = tuple(torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    tangents = tuple(torch.randn_like(t) for t in primals)

    def call(q, k, v, **other) -> Any:
        return flash_attention(q, k, v, return_lse=True, **options, **other)

    got = torch.func.jvp(lambda *t: call(*t, backend="cpu"), primals, tangents)[1]
    want = torch.func.jvp(lambda *t: call(*t, differentiable_twice=True), primals, tangents)[1]
    torch.testing.assert_close(got, want)
    with forward_ad.dual_level():
        o, lse = call(*map(forward_ad.make_dual, primals, tangents), backend="cpu")
        torch.testing.assert_close((forward_ad.unpack_dual(o).tangent, forward_ad.unpack_dual(lse).tangent), want)


def _central_differences(call, primals, tangents, step=1e-6):
    ahead = call(*(p + step * t for p, t in zip(primals, tangents, strict=True)))
    behind = call(*(p - step * t for p, t in zip(primals, tangents, strict=True)))
    return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_forward_mode_with_dropout_and_packed_sequences(packed):
    cu_seqlens = torch.tensor([0, 7, 7, 23], dtype=torch.int32)

    def call(q, k, v, backend="cpu") -> Any:
        drawn = torch.Generator().manual_seed(3)  # the same weights are dropped in every call
        if packed:
            return flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, is_causal=True, dropout_p=0.3,
                                          generator=drawn, return_lse=True, backend=backend)  # fmt: skip
        return flash_attention(
            q, k, v, is_causal=True, dropout_p=0.3, generator=drawn, return_lse=True, backend=backend
        )

    shape = (23, 2, 8) if packed else (2, 2, 23, 8)
    primals = tuple(torch.randn(shape, dtype=torch.float64) for _ in range(3))
    tangents = tuple(torch.randn_like(t) for t in primals)
    want = _central_differences(call, primals, tangents)
    for got, expected in zip(torch.func.jvp(call, primals, tangents)[1], want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)
    if INTERPRETED:
        single = tuple(t.float() for t in primals), tuple(t.float() for t in tangents)
        kernels = torch.func.jvp(lambda *t: call(*t, backend="triton"), *single)[1]
        for got, expected in zip(kernels, want, strict=True):
            torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


def test_forward_mode_says_what_it_lacks():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(NotImplementedError, match="sinks or a score's tensors"):
        torch.func.jvp(lambda s: flash_attention(q, q, q, sinks=s, backend="cpu"), (torch.ones(2),), (torch.ones(2),))


@everywhere_and_interpreted
@pytest.mark.parametrize("name", TANGENT_OPTIONS)
def test_forward_mode_of_every_backend(name, device, backend):
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in TANGENT_OPTIONS[name].items()}
    primals = tuple(torch.randn(1, 2, n, 8, device=device) for n in (19, 23, 23))
    tangents = tuple(torch.randn_like(t) for t in primals)

    def tangents_of(**how) -> Any:
        return torch.func.jvp(
            lambda *t: flash_attention(*t, return_lse=True, **options, **how),  # pyright: ignore[reportCallIssue]
            primals, tangents,
        )[1]  # fmt: skip

    for ours, want in zip(tangents_of(backend=backend), tangents_of(differentiable_twice=True), strict=True):
        torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", [{}, {"mask": mask.window(2, 1)}], ids=["plain", "window"])
@pytest.mark.parametrize(
    "second",
    [(torch.func.jacfwd, torch.func.jacrev), (torch.func.jacfwd,) * 2, (torch.func.jacrev, torch.func.jacfwd)],
    ids=["hessian", "forward-forward", "reverse-forward"],
)
def test_second_derivatives_say_what_to_do(second, rule) -> None:
    q = torch.ones(1, 1, 2, 4)
    outer, inner = second
    with pytest.raises(NotImplementedError, match=r"differentiable once.*differentiable_twice=True"):
        outer(inner(lambda q: flash_attention(q, q, q, backend="cpu", **rule).sum()))(q)
