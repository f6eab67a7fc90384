"""Clipping, the schedule and AdamW against their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from flashtile.llm import AdamW, TransformerLM, clip_gradients, cosine_lr
from flashtile.llm.optimizer import make_optimizer
from tests.llm.conftest import QUICK, TINY


def parameters_with(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clips_to_the_global_norm(max_norm):
    gradients = [torch.randn(3, 4), torch.randn(5)]
    ours, theirs = parameters_with(*gradients), parameters_with(*gradients)
    ours.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    norm = clip_gradients(ours, max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=False):
        torch.testing.assert_close(a.grad, b.grad)
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in ours if p.grad is not None))
    assert after == pytest.approx(min(max_norm, float(norm)), rel=1e-4)


def test_clipping_accepts_a_generator_and_nothing():
    (parameter,) = parameters_with(torch.tensor([3.0, 4.0]))
    assert clip_gradients((p for p in [parameter]), 1.0) == 5
    assert clip_gradients([], 1.0) == 0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_half_precision_gradients_do_not_overflow_the_norm():
    (parameter,) = parameters_with(torch.full((4,), 30_000.0).half())
    assert clip_gradients([parameter], 1.0) == 60_000
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5).half(), atol=1e-3, rtol=1e-3)


def test_cosine_schedule():
    rates = [cosine_lr(it, 1.0, 0.1, 7, 21) for it in range(25)]
    assert rates[:8] == pytest.approx([it / 7 for it in range(8)])
    assert rates[7] == 1.0
    assert rates[14] == pytest.approx(0.55)  # half way down
    assert rates[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 3 / 14)) / 2)
    assert rates[21:] == [0.1] * 4
    assert rates[7:22] == sorted(rates[7:22], reverse=True)


@pytest.mark.parametrize(("warmup", "end"), [(0, 5), (0, 0), (5, 5), (9, 5)])
def test_degenerate_schedules_stay_in_range(warmup, end):
    assert all(0 <= cosine_lr(it, 1.0, 0.1, warmup, end) <= 1 for it in range(12))
    assert cosine_lr(20, 1.0, 0.1, warmup, end) == 0.1


def test_adamw_follows_its_formula():
    weight, gradients = torch.randn(4, 3), [torch.randn(4, 3) for _ in range(5)]
    parameter = nn.Parameter(weight.clone())
    optimizer = AdamW([parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    m, v, expected = torch.zeros(4, 3), torch.zeros(4, 3), weight.clone()
    for t, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        expected = expected - 0.1 * 0.2 * expected
        expected = expected - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    torch.testing.assert_close(parameter.data, expected)


def test_matrices_decay_and_gains_do_not():
    model = TransformerLM.from_config(replace(TINY, tie_embeddings=True))
    optimizer = make_optimizer(model, QUICK)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert len(decay) == len(names)
    assert all(value == (0 if ".ln" in f".{name}" else QUICK.weight_decay) for name, value in names.items())
