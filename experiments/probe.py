"""Kernel times (profiler) of variants of masks. probe.py D"""
import sys, time, os, fcntl, glob, statistics
import torch
from torch.profiler import profile, ProfilerActivity
from flashtile import flash_attention, flash_attention_varlen, mask
from flashtile.mask.value import Mask
d = int(sys.argv[1]); H = 2048 // d; n = 16384
from flashtile.mask import gather, select
def causal_predicate(where, q_idx, k_idx, args):
    return k_idx <= q_idx
def one_load_predicate(where, q_idx, k_idx, args):
    start = gather(args[0], q_idx, 16384)
    return (k_idx <= q_idx) & (k_idx >= start)
def aligned_key_range(where, q_lo, q_hi, args):
    return q_lo // 1024 * 1024, q_lo // 1024 * 1024, q_lo + 1, q_hi
def aligned_query_range(where, k_lo, k_hi, args):
    return k_lo, k_hi - 1, k_lo // 1024 * 1024 + 1024, k_lo // 1024 * 1024 + 1024
def all_full_key_range(where, q_lo, q_hi, args):
    return q_lo // 1024 * 1024, q_lo // 1024 * 1024, q_hi, q_hi
def all_full_query_range(where, k_lo, k_hi, args):
    return k_lo, k_lo, k_lo // 1024 * 1024 + 1024, k_lo // 1024 * 1024 + 1024
def inputs(packed=False):
    torch.manual_seed(0)
    return [torch.randn((n, H, d) if packed else (1, H, n, d), device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
cu = torch.arange(0, n + 1, 1024, device="cuda", dtype=torch.int32)
starts = (torch.arange(n, device="cuda", dtype=torch.int32) // 1024 * 1024).int()
doc = mask.document(mask.document_ids(cu, n)) & mask.causal()
masks = {
    "causal": mask.causal(),
    "window": mask.window(1024, 0),
    "documents": doc,
    "doc ranges, causal predicate": Mask("a", mask.Mask.of(causal_predicate).predicate, doc.key_range, doc.query_range, doc.args),
    "aligned ranges, causal": Mask.of(causal_predicate, (), aligned_key_range, aligned_query_range),
    "aligned ranges, one load": Mask.of(one_load_predicate, (starts,), aligned_key_range, aligned_query_range),
    "aligned, no mask at all": Mask.of(causal_predicate, (1,), all_full_key_range, all_full_query_range),
}
calls = {}
for name, m in masks.items():
    q, k, v = inputs()
    calls[name] = (lambda q=q, k=k, v=v, m=m: flash_attention(q, k, v, mask=m)), (q, k, v)
q, k, v = inputs(True)
calls["packed"] = (lambda q=q, k=k, v=v: flash_attention_varlen(q, k, v, cu, cu, is_causal=True)), (q, k, v)
q2, k2, v2 = inputs(True)
calls["packed full"] = (lambda q=q2, k=k2, v=v2: flash_attention_varlen(q, k, v, cu, cu)), (q2, k2, v2)
q3, k3, v3 = [torch.randn((16, H, 1024, d), device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
calls["dense batch 16 x 1024 causal"] = (lambda q=q3, k=k3, v=v3: flash_attention(q, k, v, is_causal=True)), (q3, k3, v3)
fns = {}
for name, (f, i) in calls.items():
    try:
        y = f(); do = torch.randn_like(y)
        torch.autograd.grad(y, i, do, retain_graph=True); torch.cuda.synchronize()
        fns[name] = (f, i, y, do)
    except Exception as e: print("BAD", name, str(e)[:200])
open(f"/tmp/probe_ready_{d}", "w").close()
end = time.time() + 100
while time.time() < end and len(glob.glob("/tmp/probe_ready_*")) < 2: time.sleep(.1)
lock = open("/tmp/probe.lock", "a"); fcntl.flock(lock, fcntl.LOCK_EX)
for name, (f, i, y, do) in fns.items():
    for _ in range(3): f(); torch.autograd.grad(y, i, do, retain_graph=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(8):
            with torch.no_grad(): f()
        for _ in range(8): torch.autograd.grad(y, i, do, retain_graph=True)
        torch.cuda.synchronize()
    t = {}
    for e in prof.events():
        if e.device_type.name == "CUDA": t.setdefault(e.name, []).append(e.device_time)
    print(f"d{d} {name:32s}", "  ".join(f"{k[:24]} {statistics.median(x):.0f}us x{len(x)}" for k, x in t.items() if len(x) >= 8), flush=True)
fcntl.flock(lock, fcntl.LOCK_UN)
