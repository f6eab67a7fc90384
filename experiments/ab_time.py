"""Times plain attention of whichever flashtile is on PYTHONPATH: prints JSON."""
import json, sys, torch, inspect
import flashtile
from flashtile.attention import flash_attention
kw = {"backend": "triton"} if "triton" in sys.argv else {}
out = {}
def clock(f, n=30, rounds=5):
    for _ in range(5): f()
    times = []
    for _ in range(rounds):
        s, e = torch.cuda.Event(True), torch.cuda.Event(True)
        s.record()
        for _ in range(n): f()
        e.record(); torch.cuda.synchronize(); times.append(s.elapsed_time(e) / n)
    return sorted(times)[len(times) // 2]
for d in (64, 128):
    for causal in (True, False):
        q, k, v, do = (torch.randn(2, 2048 // d, 8192, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        with torch.no_grad():
            out[f"fwd d{d} causal={causal}"] = clock(lambda: flash_attention(q, k, v, is_causal=causal, **kw))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        o = flash_attention(*leaves, is_causal=causal, **kw)
        out[f"bwd d{d} causal={causal}"] = clock(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), n=15)
print(json.dumps(out))
