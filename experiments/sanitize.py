"""A few small calls with every kind of Hopper kernel, for compute-sanitizer."""
import sys, torch
from flashtile import mask, score, flash_attention, flash_attention_varlen
kw = {"backend": "hopper"}
dims = [int(x) for x in sys.argv[1].split(",")] if len(sys.argv) > 1 else [64, 128, 256]
def make(n, m, d, hq=2, hk=1, dtype=torch.bfloat16):
    return tuple(torch.randn(1, h, l, d, device="cuda", dtype=dtype).requires_grad_() for h, l in ((hq, n), (hk, m), (hk, m)))
def go(name, **options):
    for d in dims:
        q, k, v = make(200, 333, d)
        o = flash_attention(q, k, v, **options, **kw)
        torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    torch.cuda.synchronize(); print("ran", name, flush=True)
go("causal", is_causal=True)
if "more" in sys.argv:
    go("deterministic", is_causal=True, deterministic=True)
    go("document", mask=mask.document(torch.arange(333, device="cuda", dtype=torch.int32) // 70) & mask.causal())
    go("softcap+alibi", is_causal=True, score=score.softcap(5.0).then(score.alibi(torch.rand(2, device="cuda"))), sinks=torch.zeros(2, device="cuda"))
cu = torch.tensor([0, 70, 70, 171, 200], dtype=torch.int32, device="cuda")
q, k, v = (torch.randn(210, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (2, 1, 1))
o = flash_attention_varlen(q, k, v, cu, cu, is_causal=True, **kw)
torch.autograd.grad(o, (q, k, v), torch.randn_like(o)); torch.cuda.synchronize(); print("ran packed")
