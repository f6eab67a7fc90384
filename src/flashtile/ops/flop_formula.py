"""FLOPs of the operators: multiply and add count as two, the backward pass has five products for the forward's two.

A causal mask halves them; any other mask counts as if every query saw every key, since what it hides may lie on the
device.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from flashtile.kernel.rules import mask_predicate
from flashtile.mask import causal


def flops(q_shape, k_shape, v_shape, is_causal: bool) -> int:
    """Return ``2 * batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v)``, halved if causal."""
    batch, heads_q, seqlen_q, head_dim = q_shape
    seqlen_k, head_dim_v = v_shape[-2:]
    total = 2 * batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v)
    return total // 2 if is_causal else total


def _forward_flops(q_shape, k_shape, v_shape, scale, is_causal, *args, **kwargs) -> int:
    return flops(q_shape, k_shape, v_shape, is_causal)


def _backward_flops(do_shape, q_shape, k_shape, v_shape, o_shape, lse_shape, dlse_shape, scale, is_causal, *_, **__):
    return flops(q_shape, k_shape, v_shape, is_causal) * 5 // 2


def _rules_forward_flops(q_shape, k_shape, v_shape, scale, rules, *args, **kwargs) -> int:
    return flops(q_shape, k_shape, v_shape, mask_predicate(rules) is causal().predicate)


def _rules_backward_flops(do_shape, q_shape, k_shape, v_shape, o_shape, lse_shape, dlse_shape, scale, rules, *_, **__):
    return _rules_forward_flops(q_shape, k_shape, v_shape, scale, rules) * 5 // 2


def _register_flop_formulas(flop_counter: Any) -> None:
    operators = torch.ops.flashtile
    flop_counter.register_flop_formula(operators.forward)(_forward_flops)
    flop_counter.register_flop_formula(operators.backward)(_backward_flops)
    flop_counter.register_flop_formula(operators.forward_with_rules)(_rules_forward_flops)
    flop_counter.register_flop_formula(operators.backward_with_rules)(_rules_backward_flops)


class _AfterImport:
    """Runs ``action(module)`` once module ``name`` has been imported, by whomever."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.action(module)

            spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Tell PyTorch's FLOP counter, once it is imported: that takes Triton along (0.3 s, and a warning without it)."""
    name = "torch.utils.flop_counter"
    if name in sys.modules:
        _register_flop_formulas(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, _register_flop_formulas))  # pyright: ignore[reportArgumentType]
