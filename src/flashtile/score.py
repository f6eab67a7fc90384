"""Scores as values: what happens to a scaled logit before the softmax.

A score is two plain Python functions and their runtime arguments; like masks they run in PyTorch and in kernels.

    forward(where, q_idx, k_idx, s, args)     -> the new logit, s being softmax_scale * (q . k) in natural units
    derivative(where, q_idx, k_idx, s, args)  -> d(new logit) / ds at the same s

``None`` in place of a score means that logits stay as they are; the kernels then spend nothing on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashtile.mask import jitted


class DeviceScore(NamedTuple):
    """A score as the kernels receive it: jitted functions (compile-time constants) and runtime arguments."""

    forward: Any
    derivative: Any
    args: tuple


@dataclass(frozen=True)
class Score:
    """A score value; see the module's text for the meaning of the two functions."""

    name: str
    forward: Callable
    derivative: Callable
    args: tuple = ()

    def on_device(self) -> DeviceScore:
        """Return the form that kernels take."""
        return DeviceScore(jitted(self.forward), jitted(self.derivative), self.args)


def _identity_forward(where, q_idx, k_idx, s, args):
    return s


def _identity_derivative(where, q_idx, k_idx, s, args):
    return 1.0


@functools.cache
def identity() -> Score:
    """Leave every logit as it is, but scale logits before the row maximum is taken."""
    return Score("identity", _identity_forward, _identity_derivative)


def for_scale(score: Score | None, softmax_scale: float) -> Score | None:
    """Return the score that a kernel must use: without one it takes the row maximum before scaling, right for
    positive scales only, so that other scales get ``identity()``."""
    return identity() if score is None and softmax_scale <= 0 else score
