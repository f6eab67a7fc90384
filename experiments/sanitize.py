"""A few small calls with every kind of kernel, for compute-sanitizer. `python sanitize.py [backend]`."""
import sys, torch
from flashtile import mask, score, flash_attention, flash_attention_varlen
backend = sys.argv[1] if len(sys.argv) > 1 else None
kw = {} if backend in (None, "auto") else {"backend": backend}
def make(n, m, d, hq=2, hk=1, dtype=torch.bfloat16):
    return (torch.randn(1, hq, n, d, device="cuda", dtype=dtype).requires_grad_(),
            torch.randn(1, hk, m, d, device="cuda", dtype=dtype).requires_grad_(),
            torch.randn(1, hk, m, d, device="cuda", dtype=dtype).requires_grad_())
def go(name, **options):
    for d in (64, 128):
        q, k, v = make(200, 333, d)
        o = flash_attention(q, k, v, **options, **kw)
        torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    torch.cuda.synchronize(); print("ran", name, flush=True)
go("full"); go("causal", is_causal=True); go("window", mask=mask.window(50, 3))
go("document", mask=mask.document(torch.arange(333, device="cuda", dtype=torch.int32) // 70) & mask.causal())
go("softcap+alibi", is_causal=True, score=score.softcap(5.0).then(score.alibi(torch.rand(2, device="cuda"))))
go("sinks", is_causal=True, sinks=torch.zeros(2, device="cuda"))
if backend != "hopper":
    go("dense mask", mask=torch.rand(200, 333, device="cuda") > 0.5)
    go("dropout", dropout_p=0.2)
    b = torch.randn(1, 2, 200, 333, device="cuda", requires_grad=True)
    q, k, v = make(200, 333, 64)
    o = flash_attention(q, k, v, score=score.bias(b), **kw); torch.autograd.grad(o, (q, k, v, b), torch.randn_like(o)); print("ran bias")
cu = torch.tensor([0, 70, 70, 171, 200], dtype=torch.int32, device="cuda")
q, k, v = (torch.randn(210, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (2, 1, 1))
o = flash_attention_varlen(q, k, v, cu, cu, is_causal=True, **kw)
torch.autograd.grad(o, (q, k, v), torch.randn_like(o)); torch.cuda.synchronize(); print("ran packed")
