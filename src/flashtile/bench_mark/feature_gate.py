"""The gate before the clock of bench_mark_features: any mask, score, sinks, dropout, and a learned tensor's gradient.

``expected`` is the formula, written with autograd over blocks of query rows and none of our passes: in fp64 it says
what is right, in the inputs' dtype how far off plain PyTorch is. The limits are those of ``correctness``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from flashtile import mask
from flashtile.bench_mark.correctness import FACTOR, SLACK, Verdict, poison
from flashtile.bench_mark.features import Problem
from flashtile.dropout import keep_mask
from flashtile.seqlen import Where

_ROWS = 2048  # query rows per block of the formula, which bounds its memory
_MOST_SCORES = {"cuda": 2**28, "cpu": 2**22}  # that are compared where heads share no gradient


def expected(problem: Problem, pair: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return o, dq, dk, dv of one (batch, head), and its share of the learned tensor's gradient, computed in ``dtype``.

    ::

        s = score(scale * q k^T) where visible, else -inf        p = softmax(s, and the sink)        o = dropped(p) v

    The gradients of q, k, v, s and the sink are autograd's; what a logit reads of a learned tensor, and with which
    weight, is the score's own word. Results in fp64.
    """
    rules, n, device = problem.rules, problem.case.seqlen, problem.at.device
    given = (problem.inputs.q, problem.inputs.k, problem.inputs.v, problem.inputs.do)
    q, k, v, do = (t[pair].detach().to(dtype) for t in given)
    k.requires_grad_()
    v.requires_grad_()
    batch, head = (torch.tensor(i, device=device) for i in pair)
    where, columns = Where(batch, head, n, n), torch.arange(n, device=device)[None, :]
    rule = rules.mask if rules.seqlens is None else rules.mask & mask.document(problem.at.ids())
    found = {name: torch.zeros(q.shape, dtype=torch.float64, device=device) for name in ("o", "dq", "dk", "dv")}
    for start in range(0, n, _ROWS):
        block = slice(start, min(start + _ROWS, n))
        rows = torch.arange(block.start, block.stop, device=device)[:, None]
        place = (where, rows, columns)
        q_rows = q[block].detach().requires_grad_()
        scaled = q_rows @ k.mT * rules.softmax_scale
        s = scaled if rules.score is None else rules.score.forward(*place, scaled, rules.score.args).to(dtype)
        logits, wanted = s.masked_fill(~rule.predicate(*place, rule.args), -math.inf), [q_rows, k, v, s]
        if rules.sinks is not None:
            sink = rules.sinks[pair[1]].detach().to(dtype).requires_grad_()
            logits, wanted = torch.cat([logits, sink.expand(len(rows), 1)], dim=1), [*wanted, sink]
        p = torch.softmax(logits, dim=-1)[:, :n]
        if rules.dropout is not None:
            p = p.masked_fill(~keep_mask(rules.dropout.seed, *place, rules.dropout.p), 0.0) * rules.dropout.rescale
        o = p @ v
        dq, dk, dv, ds, *dsink = torch.autograd.grad(o, wanted, do[block])
        found["o"][block], found["dq"][block] = o.detach(), dq
        found["dk"] += dk
        found["dv"] += dv
        if dsink:
            found["dlearned"] = found.get("dlearned", 0.0) + dsink[0].double()
        elif problem.learned is not None:
            _add_share(found, problem, block, place, scaled.detach(), ds.double())
    return found


def _add_share(
    found: dict[str, Tensor], problem: Problem, block: slice, place: Any, scaled: Tensor, ds: Tensor
) -> None:
    """Add what a block of rows does to the entries of the score's tensor that this head reads."""
    score: Any = problem.rules.score
    (parameter,) = score.parameters()
    de = ds * parameter.score.derivative(*place, scaled, parameter.score.args)
    if parameter.bucket is not None:
        number = parameter.bucket.number(*place, parameter.bucket.args).expand(de.shape)
        share = torch.bincount(number.flatten(), de.flatten(), minlength=len(parameter.tensor))
        found["dlearned"] = found.get("dlearned", 0.0) + share
        return
    shape = parameter.tensor.shape[2:]
    total = found.setdefault("dlearned", torch.zeros(shape, dtype=torch.float64, device=ds.device))
    shared = [dim for dim in (0, 1) if shape[dim] == 1]
    here = total if shape[0] == 1 else total[block]
    here += de.sum(dim=shared, keepdim=True) if shared else de


class Gate:
    """The gate of ``correctness``, for any feature: expected values on some heads, and the error that plain PyTorch
    makes on them in the inputs' dtype.

    The limit is as there; with few elements plain may be luckier than its dtype, and counts as one rounding of the
    largest value at least. Where heads share a learned tensor every head is computed, else those spread evenly.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # By name, then by place: (batch, head), or the head whose entries of the learned tensor they are.
        self.expected: dict[str, dict[Any, Tensor]] = {}
        self.limits: dict[str, float] = {}
        shares: dict[int, Tensor] = {}
        for pair in self._pairs():
            wanted = expected(problem, pair, torch.float64)
            plain = expected(problem, pair, problem.case.torch_dtype)
            if problem.learned is not None:
                head = pair[1] if problem.case.heads == _heads_of(problem.learned) else 0
                known = self.expected.setdefault("dlearned", {})
                known[head] = known.get(head, 0.0) + wanted.pop("dlearned")
                shares[head] = shares.get(head, 0.0) + plain.pop("dlearned")
            for name, value in wanted.items():
                self.expected.setdefault(name, {})[pair] = value
                self._allow(name, plain[name], value)
        for head, share in shares.items():
            self._allow("dlearned", share, self.expected["dlearned"][head])

    def _allow(self, name: str, plain: Tensor, value: Tensor) -> None:
        rounding = torch.finfo(self.problem.case.torch_dtype).eps / 2 * value.abs().max().item()
        limit = FACTOR.get(name, FACTOR["dq"]) * max(_distance(plain, value), rounding) + SLACK
        self.limits[name] = max(self.limits.get(name, 0.0), limit)

    def _pairs(self) -> list[tuple[int, int]]:
        case, learned = self.problem.case, self.problem.learned
        most = _MOST_SCORES.get(self.problem.at.device.type, _MOST_SCORES["cpu"]) // case.seqlen**2
        if learned is None:
            every = list(itertools.product(range(case.batch), range(case.heads)))
            return [every[i] for i in _spread(len(every), most)]
        own_entries = _heads_of(learned) == case.heads
        heads = _spread(case.heads, most // case.batch) if own_entries else range(case.heads)
        return list(itertools.product(range(case.batch), heads))

    def judge(self, backward: bool) -> Verdict:
        """Run the call on poisoned memory and compare."""
        problem = self.problem
        poison(problem.case, problem.at.device)
        if problem.learned is not None:
            dtypes = {problem.learned.dtype, torch.float32}
            poisoned = [torch.full_like(problem.learned, math.nan, dtype=dtype) for dtype in dtypes]
            del poisoned
        found = problem.prepared.outputs(backward)
        verdict = Verdict({}, {name: self.limits[name] for name in found}, {})
        for name, value in found.items():
            learned = problem.learned if name == "dlearned" else None
            shape = tuple(problem.case.shape if learned is None else learned.shape)
            if tuple(value.shape) != shape:
                verdict.reason = f"{name} has shape {tuple(value.shape)}, not {shape}"
                return verdict
            if not bool(torch.isfinite(value).all()):
                verdict.reason = f"{name} holds NaN or infinity"
                return verdict
            compared = [
                (value[place] if learned is None else _entries(value, place), want)
                for place, want in self.expected[name].items()
            ]
            verdict.errors[name] = max(_distance(got, want) for got, want in compared)
            size = sum(want.square().sum().item() for _, want in compared)
            off = sum((got.double() - want).square().sum().item() for got, want in compared)
            verdict.relative[name] = (off / max(size, 1e-300)) ** 0.5
        wrong = [
            f"{name} is off by {error:.2e}, allowed {self.limits[name]:.2e}"
            for name, error in verdict.errors.items()
            if not error <= self.limits[name]
        ]
        verdict.reason = "; ".join(wrong)
        return verdict


def _heads_of(learned: Tensor) -> int:
    """Return how many heads a learned tensor tells apart: ``(heads,)``, ``(buckets, heads)``, ``(1, heads, ...)``."""
    return learned.shape[min(1, learned.ndim - 1)]


def _entries(learned: Tensor, head: int) -> Tensor:
    """Return the entries that a head reads."""
    return learned[head] if learned.ndim == 1 else learned[:, head] if learned.ndim == 2 else learned[0, head]


def _distance(got: Tensor, want: Tensor) -> float:
    return (got.double() - want).abs().max().item()


def _spread(total: int, count: int) -> list[int]:
    """Return ``count`` numbers below ``total``, at least two if there are so many: evenly, first and last included."""
    count = max(1, min(total, max(count, 2)))
    return sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
