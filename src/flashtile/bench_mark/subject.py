"""Timing of whole modules: one call with its inputs and weights, checked against fp64 before the clock starts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashtile.bench_mark import measure
from flashtile.bench_mark.measure import Clock, Timed, attempt
from flashtile.bench_mark.result import Row

# How much larger than the reference's own error an error may be: every tensor, relative to its norm in fp64.
FACTOR, SLACK = 3.0, 1e-5


@dataclass
class Subject:
    """Something to be timed: a call, the tensors it is called on, and the weights that get gradients as well."""

    call: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    columns: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None

    @classmethod
    def of_module(cls, module: nn.Module, inputs: Sequence[Tensor], compiled: bool, columns: dict[str, Any]) -> Subject:
        """Return a module's call, through ``torch.compile`` if asked for."""
        call: Any = torch.compile(module, dynamic=False) if compiled else module
        return cls(call, inputs, columns, module)

    def __post_init__(self) -> None:
        self.parameters = list(self.module.parameters()) if self.module else []
        self._leaves = [t.detach().requires_grad_() for t in self.inputs]
        self._wanted = [*self._leaves, *self.parameters]
        self._o: Tensor | None = None

    def in_fp64(self) -> Subject:
        """Return the same in fp64, not compiled."""
        inputs = [t.double() for t in self.inputs]
        if self.module is None:
            return Subject(self.call, inputs)
        return Subject.of_module(copy.deepcopy(self.module).double(), inputs, False, {})

    def timed(self, mode: str, do: Tensor) -> Timed:
        """Return what the clock calls: the forward pass, the gradients of inputs and weights, or both."""
        if mode == "forward":
            return Timed(lambda: self.call(*self.inputs), torch.no_grad)
        if mode == "both":
            return Timed(lambda: torch.autograd.grad(self.call(*self._leaves), self._wanted, do))
        o = self._o = self.call(*self._leaves) if self._o is None else self._o
        return Timed(lambda: torch.autograd.grad(o, self._wanted, do, retain_graph=True))

    def results(self, do: Tensor) -> tuple[Tensor, ...]:
        """Return the output and the gradients of inputs and weights."""
        with torch.no_grad():
            o = self.call(*self.inputs)
        return o, *self.timed("both", do.to(o.dtype)).call()

    def total_bytes(self, mode: str) -> int:
        """Return the bytes of inputs and weights, and of their gradients: what any implementation has to hold."""
        given = measure.tensor_bytes([*self.inputs, *self.parameters])
        return given if mode == "forward" else 2 * given

    def forget(self) -> None:
        """Let go of the graph that "backward" keeps."""
        self._o = None


def measure_subjects(
    clock: Clock, subjects: Mapping[str, Subject], reference: str, modes: Sequence[str], seed: int = 0
) -> list[Row]:
    """Return a row per subject and mode: milliseconds, peak memory, and the largest relative error against fp64.

    A subject is wrong, and not timed, where an output or gradient is further from fp64 than three times what the
    reference subject is, plus 1e-5.
    """
    with torch.no_grad():
        o = subjects[reference].call(*subjects[reference].inputs)
    do = torch.randn(o.shape, generator=torch.Generator(o.device).manual_seed(seed), device=o.device, dtype=o.dtype)
    expected = subjects[reference].in_fp64().results(do)
    limits = [FACTOR * error + SLACK for error in _errors(subjects[reference].results(do), expected)]
    rows: dict[tuple[str, str], Row] = {}
    good: dict[str, Subject] = {}
    for name, subject in subjects.items():
        errors, reason = attempt(lambda subject=subject: _errors(subject.results(do), expected))
        status = "failed" if errors is None else "ok"
        pairs = enumerate(zip(errors or limits, limits, strict=True))
        wrong = [f"tensor {i}: {error:.1e} > {limit:.1e}" for i, (error, limit) in pairs if not error <= limit]
        if wrong:
            status, reason = "wrong", f"relative errors against fp64: {', '.join(wrong)}"
        if status == "ok":
            good[name] = subject
        row = {"name": name, **subject.columns, "status": status, "reason": reason, "error": max(errors or [0.0])}
        rows |= {(name, mode): {**row, "mode": mode} for mode in modes}
    measure.release()
    for mode in modes:
        calls: dict[str, Timed] = {}
        for name, subject in good.items():
            timed, reason = attempt(functools.partial(subject.timed, mode, do))
            if timed is None:
                rows[name, mode].update(status="failed", reason=reason)
            else:
                calls[name] = timed
        timings, failures = clock.time(calls)
        for name, reason in failures.items():
            rows[name, mode].update(status="failed", reason=reason)
        for name, timing in timings.items():
            rows[name, mode].update(ms=timing.median_ms, spread=timing.spread, samples=timing.samples)
            peak, _ = attempt(lambda timed=calls[name]: _peak(timed, clock.device))
            if peak is not None:
                held = good[name].total_bytes(mode) + measure.tensor_bytes(do)
                rows[name, mode].update(peak_mib=peak / 2**20, total_mib=(peak + held) / 2**20)
    for subject in good.values():
        subject.forget()
    return list(rows.values())


def _errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(found, expected, strict=True)]


def _peak(timed: Timed, device: torch.device) -> int:
    with timed.context():
        return measure.peak_extra_bytes(timed.call, device)
