"""Which gradients of the wide backward kernel differ from run to run, where and by how much."""
import sys, torch
from flashtile import mask as M
from flashtile.kernel.hopper import backward as B, forward as F
name, d = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
def go(label, b, hq, hkv, sq, sk, mask, det, n):
    q, do = (torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(b, hkv, sk, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    o, lse = F.forward(q, k, v, softmax_scale=d**-0.5, mask=mask)
    call = lambda: B.backward(do, q, k, v, o, lse, None, softmax_scale=d**-0.5, mask=mask, deterministic=det)
    first = call(); torch.cuda.synchronize()
    out = []
    for i in range(n):
        for t, (a, w) in enumerate(zip(call(), first)):
            if t == 0 and not det: continue
            if not torch.equal(a, w):
                diff = (a.double() - w.double()).abs()
                where = (diff > 0).nonzero()
                nan = int(a.isnan().sum())
                cols = sorted({int(c) // 32 for c in where[:, 3].unique()})
                rows = where[:, 2].unique()
                out.append((i, "dq dk dv".split()[t], len(where), f"{diff.max().item():.2e} of {w.double().abs().max().item():.1e}", f"nan {nan}", "boxes", cols, "rows", rows[:3].tolist(), rows[-3:].tolist(), len(rows), "tiles", sorted({(int(x[0]), int(x[1]), int(x[2]) // 64) for x in where})[:4]))
    print(name, d, label, "det" if det else "base", f"{len(out)} of {n * 3} differ", flush=True)
    for x in out[:6]: print("   ", x, flush=True)
full, causal = M.full(), M.causal()
go("1000x777 full", 2, 4, 2, 1000, 777, full, False, 150)
go("1500 causal gqa", 4, 24, 8, 1500, 1500, causal, False, 25)
go("300x260 causal", 2, 4, 2, 300, 260, causal, True, 100)
go("1500 full one head each", 4, 8, 8, 1500, 1500, full, True, 25)
go("1500 causal gqa", 4, 24, 8, 1500, 1500, causal, True, 15)
