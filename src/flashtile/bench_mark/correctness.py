"""The gate before the clock: every provider is checked on the inputs that it is timed on.

A provider passes if its largest error against fp64 is at most twice (gradients: three times) that of plain PyTorch in
the same dtype, plus 1e-5, on every head looked at, and if nothing in the whole of its outputs is NaN or infinite. Fresh
memory is poisoned with NaN first, so an element that was never written shows.

Long cases are compared in part, since a whole reference of them costs more than all else: on some heads, and where
only the forward pass is asked for, on some blocks of query rows of a few heads. Heads and blocks are evenly spread, the
first and the last among them; a mistake in rows that are not among them passes unless it is NaN or infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import Inputs, Prepared, naive_attention

FACTOR = {"o": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
SLACK = 1e-5
_ROWS = 2048  # query rows per block of the reference, which bounds its memory
_MOST_SCORES = {"cuda": 2**30, "cpu": 2**26}
_MOST_HEADS = 64
_FEWEST_HEADS = 4  # of q, where some rows of them do
_SAMPLED_ROWS = 256  # query rows per block of a sample
_RUNS = 3  # runs that deterministic gradients have to agree in


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool, window: int = 0, first: int = 0
) -> dict[str, torch.Tensor]:
    """Return o, dq, dk, dv of the heads that share k and v in fp64, a block of query rows at a time.

    ::

        s = q k^T / sqrt(d)    p = softmax(s)    o = p v    dv = p^T do
        ds = p (do v^T - rowsum(do o))    dq = ds k / sqrt(d)    dk = ds^T q / sqrt(d)

    q, do ``(group, rows, head_dim)``, the first row at the position ``first``; k, v ``(seqlen, head_dim)``.
    """
    q, k, v, do = (t.double() for t in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    columns = torch.arange(k.shape[0], device=q.device)
    for head in range(q.shape[0]):
        for start in range(0, q.shape[1], _ROWS):
            rows = head, slice(start, min(start + _ROWS, q.shape[1]))
            s = q[rows] @ k.T * scale
            if causal:
                behind = first + start + torch.arange(s.shape[0], device=q.device)[:, None] - columns
                s.masked_fill_((behind < 0) | (behind >= window) if window else behind < 0, float("-inf"))
            p = torch.softmax(s, dim=-1)
            o[rows] = p @ v
            dv += p.T @ do[rows]
            delta = (do[rows] * o[rows]).sum(-1, keepdim=True)
            ds = p.mul_(do[rows] @ v.T - delta)
            dq[rows] = ds @ k * scale
            dk += ds.T @ q[rows] * scale
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool, window: int = 0, first: int = 0
) -> dict[str, torch.Tensor]:
    """Return what ``reference`` does from plain PyTorch in the inputs' dtype."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = naive_attention(q, k, v, causal, window, first)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, (q, k, v), do)), strict=True))


@dataclass
class Verdict:
    """What the gate found; ``reason`` is empty for a provider that passed."""

    errors: dict[str, float]
    limits: dict[str, float]
    relative: dict[str, float]
    reason: str = ""


def _spread(total: int, count: int) -> list[int]:
    """Return at most ``count`` of the numbers below ``total``, evenly spread, the first and the last among them."""
    return sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(min(total, count))})


class Gate:
    """Holds the expected values of one case's inputs: on all heads, where that is cheap, else in part as said above.

    ``heads`` are those of k and v, counted through the batch, each with all the heads of q that share it. ``blocks``
    are the query rows looked at; for the gradients these are all rows.
    """

    def __init__(self, case: Case, inputs: Inputs, most_scores: int | None = None, backward: bool = True) -> None:
        device = inputs.q.device
        most_scores = most_scores or _MOST_SCORES.get(device.type, _MOST_SCORES["cpu"])
        total = case.batch * case.heads // case.group
        count = min(total, _MOST_HEADS, most_scores // (case.group * case.seqlen**2))
        self.blocks = [slice(0, case.seqlen)]
        if not backward:
            count = max(count, min(total, max(2, _FEWEST_HEADS // case.group)))
            rows = most_scores // (max(1, count) * case.group * case.seqlen)
            if rows < case.seqlen:
                chosen = _spread(math.ceil(case.seqlen / _SAMPLED_ROWS), max(2, rows // _SAMPLED_ROWS))
                self.blocks = [slice(i * _SAMPLED_ROWS, min((i + 1) * _SAMPLED_ROWS, case.seqlen)) for i in chosen]
        self.heads = _spread(total, max(1, count))
        self.expected: list[dict[str, torch.Tensor]] = []
        self.limits = dict.fromkeys(FACTOR if backward else ("o",), 0.0)
        for head in self.heads:
            k, v = (t.flatten(0, 1)[head] for t in (inputs.k, inputs.v))
            q, do = (t.reshape(total, case.group, *t.shape[2:])[head] for t in (inputs.q, inputs.do))
            found: dict[str, list[torch.Tensor]] = {name: [] for name in self.limits}
            for block in self.blocks:
                arguments = q[:, block], k, v, do[:, block], case.causal, case.window, block.start
                expected, rough = reference(*arguments), plain(*arguments)
                for name in self.limits:
                    error = (rough[name].double() - expected[name]).abs().max().item()
                    if not math.isfinite(error):
                        raise OverflowError(f"plain attention in {case.dtype} overflows: no limit for {name}")
                    self.limits[name] = max(self.limits[name], FACTOR[name] * error + SLACK)
                    found[name].append(expected[name])
            self.expected.append({name: torch.cat(values, dim=-2) for name, values in found.items()})

    def judge(self, prepared: Prepared, backward: bool) -> Verdict:
        """Run a provider on poisoned memory and compare."""
        case = prepared.case
        poison(case, self.expected[0]["o"].device)
        found = prepared.outputs(backward)
        verdict = Verdict({}, {name: self.limits[name] for name in found}, {})
        for name, value in found.items():
            of_q = name in ("o", "dq")
            shape = case.shape if of_q else case.shape_kv
            if tuple(value.shape) != shape:
                verdict.reason = f"{name} has shape {tuple(value.shape)}, not {shape}"
                return verdict
            if not bool(torch.isfinite(value).all()):
                verdict.reason = f"{name} holds NaN or infinity"
                return verdict
            worst, difference_2, expected_2 = 0.0, 0.0, 0.0
            for head, expected in zip(self.heads, self.expected, strict=True):
                batch, kv = divmod(head, case.shape_kv[1])
                got = value[batch, kv * case.group : (kv + 1) * case.group] if of_q else value[batch, kv]
                got = torch.cat([got[..., block, :] for block in self.blocks], dim=-2)
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


def varying(prepared: Prepared) -> str:
    """Return which gradients differ in any bit between runs on the same inputs, in words, empty if none does."""
    first = prepared.outputs(backward=True)
    for _ in range(_RUNS - 1):
        again = prepared.outputs(backward=True)
        if names := [name for name in ("dq", "dk", "dv") if not torch.equal(first[name], again[name])]:
            return f"{', '.join(names)} differ from run to run"
    return ""


def poison(case: Case, device: torch.device) -> None:
    """Fill memory of the outputs' sizes with NaN and free it, so that the allocator hands it out next."""
    shapes = [(shape, case.torch_dtype) for shape in (case.shape, case.shape_kv)] * 2
    shapes += [(case.shape, torch.float32), (case.shape[:3], torch.float32)]
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape, dtype in shapes]
    del blocks
