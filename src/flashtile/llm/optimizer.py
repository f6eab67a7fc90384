"""What moves the weights: AdamW, the learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from flashtile.llm.config import TrainingConfig

__all__ = ["AdamW", "clip_gradients", "cosine_lr", "make_optimizer"]


def make_optimizer(model: nn.Module, config: TrainingConfig) -> AdamW:
    """Return AdamW over the model's parameters; matrices decay, vectors (norm gains) do not.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.max_lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def cosine_lr(it: int, max_lr: float, min_lr: float, warmup_iters: int, cosine_cycle_iters: int) -> float:
    """Return the learning rate of iteration `it`: a linear warm-up, half a cosine down, then `min_lr`.

        it < warmup_iters:           max_lr * it / warmup_iters
        it <= cosine_cycle_iters:    min_lr + (1 + cos(pi * progress)) / 2 * (max_lr - min_lr)
        after:                       min_lr

    where progress runs from 0 at `warmup_iters` to 1 at `cosine_cycle_iters`.
    """
    if it < warmup_iters:
        return max_lr * it / warmup_iters
    if it >= cosine_cycle_iters:
        return min_lr
    progress = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    return min_lr + (1 + math.cos(math.pi * progress)) / 2 * (max_lr - min_lr)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, eps: float = 1e-6) -> Tensor:
    """Scale all gradients, in place, by `min(1, max_norm / (norm + eps))` and return the norm from before.

    The norm is that of all gradients as one vector, in fp32 at least. No gradients have norm 0.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    scale = (max_norm / (norm + eps)).clamp(max=1.0)  # a tensor: reading it would make the GPU wait
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm
