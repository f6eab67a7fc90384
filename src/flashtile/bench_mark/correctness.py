"""The gate before the clock: every provider is checked on the inputs that it is timed on.

A provider passes if its largest error against fp64 is at most twice (gradients: three times) that of plain PyTorch in
the same dtype, plus 1e-5, on every head looked at, and if nothing in the whole of its outputs is NaN or infinite. Fresh
memory is poisoned with NaN first, so an element that was never written shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import Inputs, Prepared, naive_attention

FACTOR = {"o": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
SLACK = 1e-5
_ROWS = 2048  # query rows per block of the reference, which bounds its memory
_MOST_SCORES = {"cuda": 2**30, "cpu": 2**26}
_MOST_HEADS = 64


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> dict[str, torch.Tensor]:
    """Return o, dq, dk, dv of one head in fp64, a block of query rows at a time.

    ::

        s = q k^T / sqrt(d)    p = softmax(s)    o = p v    dv = p^T do
        ds = p (do v^T - rowsum(do o))    dq = ds k / sqrt(d)    dk = ds^T q / sqrt(d)

    q, k, v, do ``(seqlen, head_dim)``.
    """
    q, k, v, do = (t.double() for t in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    columns = torch.arange(k.shape[0], device=q.device)
    for start in range(0, q.shape[0], _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[0]))
        s = q[rows] @ k.T * scale
        if causal:
            s.masked_fill_(columns > columns[rows, None], float("-inf"))
        p = torch.softmax(s, dim=-1)
        o[rows] = p @ v
        dv += p.T @ do[rows]
        delta = (do[rows] * o[rows]).sum(-1, keepdim=True)
        ds = p.mul_(do[rows] @ v.T - delta)
        dq[rows] = ds @ k * scale
        dk += ds.T @ q[rows] * scale
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool) -> dict[str, torch.Tensor]:
    """Return o, dq, dk, dv of one head from plain PyTorch in the inputs' dtype."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = naive_attention(q, k, v, causal)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, (q, k, v), do)), strict=True))


@dataclass
class Verdict:
    """What the gate found; ``reason`` is empty for a provider that passed."""

    errors: dict[str, float]
    limits: dict[str, float]
    relative: dict[str, float]
    reason: str = ""


class Gate:
    """Holds the expected values of one case's inputs on some of its heads: all, where that is cheap."""

    def __init__(self, case: Case, inputs: Inputs, most_scores: int | None = None) -> None:
        device = inputs.q.device
        most_scores = most_scores or _MOST_SCORES.get(device.type, _MOST_SCORES["cpu"])
        total = case.batch * case.heads
        count = max(1, min(total, _MOST_HEADS, most_scores // case.seqlen**2))
        # Evenly spread, the first and the last one among them.
        self.heads = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
        flat = [t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v, inputs.do)]
        self.expected: list[dict[str, torch.Tensor]] = []
        self.limits = dict.fromkeys(FACTOR, 0.0)
        for head in self.heads:
            q, k, v, do = (t[head] for t in flat)
            expected = reference(q, k, v, do, case.causal)
            for name, value in plain(q, k, v, do, case.causal).items():
                error = (value.double() - expected[name]).abs().max().item()
                self.limits[name] = max(self.limits[name], FACTOR[name] * error + SLACK)
            self.expected.append(expected)

    def judge(self, prepared: Prepared, backward: bool) -> Verdict:
        """Run a provider on poisoned memory and compare."""
        poison(prepared.case, self.expected[0]["o"].device)
        found = prepared.outputs(backward)
        verdict = Verdict({}, {name: self.limits[name] for name in found}, {})
        for name, value in found.items():
            if tuple(value.shape) != prepared.case.shape:
                verdict.reason = f"{name} has shape {tuple(value.shape)}, not {prepared.case.shape}"
                return verdict
            if not bool(torch.isfinite(value).all()):
                verdict.reason = f"{name} holds NaN or infinity"
                return verdict
            # A selection, not a reshape: a provider's output may have strides that do not flatten.
            value = value[[h // value.shape[1] for h in self.heads], [h % value.shape[1] for h in self.heads]]
            worst, difference_2, expected_2 = 0.0, 0.0, 0.0
            for got, expected in zip(value, self.expected, strict=True):
                difference = got.double() - expected[name]
                worst = max(worst, difference.abs().max().item())
                difference_2 += difference.square().sum().item()
                expected_2 += expected[name].square().sum().item()
            verdict.errors[name] = worst
            verdict.relative[name] = (difference_2 / max(expected_2, 1e-300)) ** 0.5
        wrong = [
            f"{name} is off by {error:.2e}, allowed {self.limits[name]:.2e}"
            for name, error in verdict.errors.items()
            if not error <= self.limits[name]
        ]
        verdict.reason = "; ".join(wrong)
        return verdict


def poison(case: Case, device: torch.device) -> None:
    """Fill memory of the outputs' sizes with NaN and free it, so that the allocator hands it out next."""
    shapes = [(case.shape, case.torch_dtype)] * 4 + [(case.shape, torch.float32), (case.shape[:3], torch.float32)]
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape, dtype in shapes]
    del blocks
