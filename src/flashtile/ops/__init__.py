"""Attention as PyTorch operators: ``torch.ops.flashtile.forward`` and ``backward``, and the same two with rules.

Compilers, tracers, transforms and policies see each as one opaque call with a schema, and find here what they need to
know about it: shapes and strides (fake), derivative, autocast rule, vmap rule, FLOPs. No mathematics here.
"""

from flashtile.ops.flop_formula import flops, register
from flashtile.ops.plain import Backward, Forward, backward, forward
from flashtile.ops.rules import (
    AtOnce,
    BackwardWithRules,
    ForwardWithRules,
    arguments,
    backward_with_rules,
    forward_with_rules,
    run_forward,
)

register()

__all__ = [
    "AtOnce",
    "Backward",
    "BackwardWithRules",
    "Forward",
    "ForwardWithRules",
    "arguments",
    "backward",
    "backward_with_rules",
    "flops",
    "forward",
    "forward_with_rules",
    "run_forward",
]
