"""Times of score variants on an H200, ratio to plain causal: python scores_ab.py (PYTHONPATH=src:.). One process, interleaved."""
import statistics, sys
import torch
from flashtile import mask, score
from flashtile.kernel import launch
from flashtile.kernel.hopper import forward as F, backward as B
H = launch.HopperConfig
TWO64 = H(128, 128, 2, 2, 240, 24, "queue"); B64 = lambda m: H(m, 128, 2, 2, 240, 24, "queue")
def median(call, n=15):
    for _ in range(3): call()
    out = []
    for _ in range(n):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); call(); b.record(); b.synchronize(); out.append(a.elapsed_time(b))
    return statistics.median(out)
for d in (64, 128):
    L, heads = 8192, 2048 // d; b = 2
    q, k, v, do = (torch.randn(b, heads, L, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    SC = {"plain": None, "softcap": score.softcap(30.0), "alibi": score.alibi(2.0 ** -torch.arange(1, heads + 1, device="cuda").float().clamp(max=8)),
          "temperature": score.temperature(2.0), "bias": score.bias(torch.randn(1, 1, L, L, device="cuda", dtype=torch.bfloat16)),
          "bias of keys": score.bias(torch.randn(1, heads, 1, L, device="cuda", dtype=torch.bfloat16))}
    base = {}
    for name, sc in SC.items():
        rules = {"softmax_scale": d ** -0.5, "mask": mask.causal(), "score": sc}
        o, lse = F.forward(q, k, v, **rules)
        for label, c in [("table", None)] + ([("two consumers", TWO64)] if d == 64 else []):
            t = median(lambda: F.forward(q, k, v, config=c, **rules)); base.setdefault("f", t)
            print(f"d{d} forward  {name:12s} {label:14s} {t:.3f} ms  {t / base['f']:.3f}", flush=True)
        for label, c in [("table", None)] + ([("64 queries", B64(64))] if d == 64 else []):
            t = median(lambda: B.backward(do, q, k, v, o, lse, None, config=c, **rules)); base.setdefault("b", t)
            print(f"d{d} backward {name:12s} {label:14s} {t:.3f} ms  {t / base['b']:.3f}", flush=True)
