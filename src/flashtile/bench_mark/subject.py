"""Timing of whole modules: one call with its inputs and weights, compared with a reference before the clock starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashtile.bench_mark import measure
from flashtile.bench_mark.measure import Clock, Timed, attempt
from flashtile.bench_mark.result import Row

# Relative differences between two orders of rounding that are no sign of a mistake: outputs, and gradients of them.
_CLOSE_ENOUGH = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Subject:
    """Something to be timed: a call, the tensors it is called on, and the weights that get gradients as well."""

    call: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    parameters: Sequence[nn.Parameter] = ()
    columns: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_module(cls, module: nn.Module, inputs: Sequence[Tensor], compiled: bool, columns: dict[str, Any]) -> Subject:
        """Return a module's call, through ``torch.compile`` if asked for."""
        call: Any = torch.compile(module, dynamic=False) if compiled else module
        return cls(call, inputs, tuple(module.parameters()), columns)

    def __post_init__(self) -> None:
        self._leaves = [t.detach().requires_grad_() for t in self.inputs]
        self._wanted = [*self._leaves, *self.parameters]
        self._o: Tensor | None = None

    def timed(self, mode: str, do: Tensor) -> Timed:
        """Return what the clock calls: the forward pass, the gradients of inputs and weights, or both."""
        if mode == "forward":
            return Timed(lambda: self.call(*self.inputs), torch.no_grad)
        if mode == "both":
            return Timed(lambda: torch.autograd.grad(self.call(*self._leaves), self._wanted, do))
        o = self._o = self.call(*self._leaves) if self._o is None else self._o
        return Timed(lambda: torch.autograd.grad(o, self._wanted, do, retain_graph=True))

    def total_bytes(self, mode: str) -> int:
        """Return the bytes of inputs and weights, and of their gradients: what any implementation has to hold."""
        given = measure.tensor_bytes([*self.inputs, *self.parameters])
        return given if mode == "forward" else 2 * given


def measure_subjects(
    clock: Clock, subjects: Mapping[str, Subject], reference: str, modes: Sequence[str], seed: int = 0
) -> list[Row]:
    """Return a row per subject and mode: milliseconds, peak memory, and how far it is from the reference subject."""
    expected = _results(subjects[reference], seed)
    rows: list[Row] = []
    good: dict[str, Subject] = {}
    for name, subject in subjects.items():
        difference, reason = attempt(lambda subject=subject: _difference(_results(subject, seed), expected))
        status = "failed" if difference is None else "ok"
        if difference is not None and not difference <= _CLOSE_ENOUGH[expected[0].dtype]:
            status, reason = "wrong", f"differs from {reference} by {difference:.1e}"
        if status == "ok":
            good[name] = subject
        for mode in modes:
            rows.append({"name": name, "mode": mode, **subject.columns, "status": status, "reason": reason,
                         "difference": difference})  # fmt: skip
    by_key = {(row["name"], row["mode"]): row for row in rows}
    do = _gradient(expected[0], seed)
    for mode in modes:
        calls: dict[str, Timed] = {}
        for name, subject in good.items():
            timed, reason = attempt(functools.partial(subject.timed, mode, do))
            if timed is None:
                by_key[name, mode].update(status="failed", reason=reason)
            else:
                calls[name] = timed
        timings, failures = clock.time(calls)
        for name, reason in failures.items():
            by_key[name, mode].update(status="failed", reason=reason)
        for name, timing in timings.items():
            by_key[name, mode].update(ms=timing.median_ms, spread=timing.spread, samples=timing.samples)
            peak, _ = attempt(lambda timed=calls[name]: _peak(timed, clock.device))
            if peak is not None:
                held = good[name].total_bytes(mode) + measure.tensor_bytes(do)
                by_key[name, mode].update(peak_mib=peak / 2**20, total_mib=(peak + held) / 2**20)
    for subject in good.values():
        subject._o = None
    return rows


def _peak(timed: Timed, device: torch.device) -> int:
    with timed.context():
        return measure.peak_extra_bytes(timed.call, device)


def _gradient(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def _results(subject: Subject, seed: int) -> tuple[Tensor, ...]:
    """Return the output and the gradients of inputs and weights."""
    forward = subject.timed("forward", torch.empty(0))
    with forward.context():
        o = forward.call()
    return o, *subject.timed("both", _gradient(o, seed)).call()


def _difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        for a, b in zip(found, expected, strict=True)
    )
