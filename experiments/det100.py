"""A hundred deterministic backward passes: are all gradients the same bits?"""
import torch
from flashtile import mask as M, score as S, flash_attention
torch.manual_seed(0)
for d in (64, 128, 256):
    for label, b, hq, hkv, n, options in (("causal gqa", 4, 24, 8, 1500, dict(is_causal=True)), ("full", 2, 16, 16, 2048, {}), ("window+alibi", 2, 8, 8, 3000, dict(mask=M.window(700, 0), score=S.alibi(torch.rand(8, device="cuda")))), ("causal long", 1, 16, 16, 8192, dict(is_causal=True))):
        q, do = (torch.randn(b, hq, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(b, hkv, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        def run():
            return torch.autograd.grad(flash_attention(*leaves, deterministic=True, **options), leaves, do)
        first = run(); differ = 0
        for _ in range(100):
            differ += any(not torch.equal(a, c) for a, c in zip(run(), first))
        print(d, label, "differing runs of 100:", differ, flush=True)
