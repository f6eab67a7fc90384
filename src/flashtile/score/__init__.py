"""Scores as values: what happens to a scaled logit before the softmax.

A score is two plain Python functions and their runtime arguments; like masks they run in PyTorch and in kernels.

    forward(where, q_idx, k_idx, s, args)     -> the new logit, s being softmax_scale * (q . k) in natural units
    derivative(where, q_idx, k_idx, s, args)  -> d(new logit) / ds at the same s

Numbers and tensors live in ``args``, so a new cap or a new bias compiles nothing new. Beside arithmetic the functions
may call ``exp2 log2 tanh absolute select``, ``gather read`` and ``real`` from here. ``a.then(b)`` applies ``a`` first.

Gradients flow to the tensors that a score declares (``gradients``): each says what the logit's derivative with respect
to one entry of the tensor is, and which entry that is. ``docs/scores.md`` has an example of every score.

The kernels for Hopper take a score by ``parts``, where it has them: a form that costs less per logit (see ``Parts``).

``None`` in place of a score means that logits stay as they are; the kernels then spend nothing on it.
"""

from flashtile.score.functions import Entries, absolute, exp2, log2, read, real, tanh
from flashtile.score.gradcheck import gradcheck
from flashtile.score.kinds import (
    alibi,
    bias,
    few_registers,
    for_scale,
    identity,
    only_adds,
    relative_position,
    softcap,
    temperature,
)
from flashtile.score.value import Bucket, DeviceParts, DeviceScore, Gradient, Parameter, Parts, Score
from flashtile.seqlen import gather, select

__all__ = [
    "Bucket",
    "DeviceParts",
    "DeviceScore",
    "Entries",
    "Gradient",
    "Parameter",
    "Parts",
    "Score",
    "absolute",
    "alibi",
    "bias",
    "exp2",
    "few_registers",
    "for_scale",
    "gather",
    "gradcheck",
    "identity",
    "log2",
    "only_adds",
    "read",
    "real",
    "relative_position",
    "select",
    "softcap",
    "tanh",
    "temperature",
]
