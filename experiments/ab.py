"""Variants of the whole package, copied as flashtile_a, flashtile_b, ... (sed 's/\\bflashtile\\b/flashtile_a/g' over src/flashtile),
in one process, in turn.  TREES="a b" python ab.py run plain,scores,long 64,128 3   (PYTHONPATH: the folder of the copies)"""
import os, sys, time, random, statistics, subprocess, importlib, fcntl, glob
import torch
TREES = os.environ.get("TREES", "a b").split()
def ev(fn, ms=12):
    s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    fn(); s.record(); fn(); e.record(); e.synchronize()
    n = max(5, int(ms / max(s.elapsed_time(e), 1e-3)))
    evs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a, b in evs: a.record(); fn(); b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in evs)
def graphed(fn):
    st = torch.cuda.Stream()
    with torch.cuda.stream(st):
        fn(); fn(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=st): fn()
    torch.cuda.synchronize()
    return g.replay
def make(P, group, d):
    mask, score = (importlib.import_module(f"{P.__name__}.{m}") for m in ("mask", "score"))
    H = 2048 // d
    def inputs(b, n, packed=False):
        torch.manual_seed(0)
        return [torch.randn((n, H, d) if packed else (b, H, n, d), device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    cases = {}
    if group == "plain":
        for n in (512, 2048, 8192):
            for name, c in (("causal", True), ("full", False)): cases[f"{name} {n}"] = (inputs(16384 // n, n), dict(is_causal=c))
    elif group == "scores":
        n = 8192; i = inputs(2, n)
        slopes = 2.0 ** (-8 * torch.arange(1, H + 1, device="cuda").float() / H)
        bias = torch.randn(1, 1, n, n, device="cuda", dtype=torch.bfloat16)
        for name, s in (("causal", None), ("softcap", score.softcap(20.0)), ("alibi", score.alibi(slopes)), ("bias", score.bias(bias))):
            cases[name] = (i, dict(is_causal=True, score=s))
    else:
        n = 16384; i = inputs(1, n)
        cu = torch.arange(0, n + 1, 1024, device="cuda", dtype=torch.int32)
        cases["causal"] = (i, dict(is_causal=True))
        cases["window"] = (i, dict(mask=mask.window(1024, 0)))
        cases["documents"] = (i, dict(mask=mask.document(mask.document_ids(cu, n)) & mask.causal()))
        cases["packed"] = (inputs(1, n, True), dict(cu=cu, is_causal=True))
    out = {}
    for name, (i, o) in cases.items():
        o = dict(o); cu = o.pop("cu", None)
        f = (lambda i=i, o=o: P.flash_attention(*i, **o)) if cu is None else (lambda i=i, o=o, cu=cu: P.flash_attention_varlen(*i, cu, cu, **o))
        y = f(); do = torch.randn_like(y)
        def fwd(f=f):
            with torch.no_grad(): return f()
        out[name] = fwd, (lambda y=y, do=do, i=i: torch.autograd.grad(y, i, do, retain_graph=True))
    return out
def worker(group, d, passes):
    lock = open("/tmp/ab.lock", "a"); made = {t: make(importlib.import_module(f"flashtile_{t}"), group, d) for t in TREES}
    for t in TREES:
        for f, g in made[t].values(): f(); g()
    torch.cuda.synchronize(); open(f"/tmp/ab_ready_{group}_{d}", "w").close(); end = time.time() + 150
    while time.time() < end and len(glob.glob("/tmp/ab_ready_*")) < int(os.environ["AB_N"]): time.sleep(.2)
    rows, names, bad = {}, list(made[TREES[0]]), []
    for name in names:
        first = [made[TREES[0]][name][0](), *made[TREES[0]][name][1]()]
        for t in TREES[1:]:
            for w, p, z in zip("o dq dk dv".split(), first, [made[t][name][0](), *made[t][name][1]()]):
                e = (p.float() - z.float()).abs().max().item() / p.float().abs().max().item()
                if not e < 2e-2: bad.append((name, t, w, e))
        for mode in (0, 1):
            fns = {t: made[t][name][mode] for t in TREES}; T = {}
            graphs = {t: graphed(fns[t]) for t in TREES} if mode == 0 else {}
            fcntl.flock(lock, fcntl.LOCK_EX)
            for _ in range(passes):
                for t in random.sample(TREES, len(TREES)):
                    T.setdefault((t, "e"), []).append(ev(fns[t]))
                    if graphs: T.setdefault((t, "g"), []).append(ev(graphs[t]))
            fcntl.flock(lock, fcntl.LOCK_UN)
            rows[name, mode] = {k: statistics.median(x) for k, x in T.items()}
    for (name, mode), r in rows.items():
        base = rows[names[0], mode]
        print(f"d{d:<4}{'bwd' if mode else 'fwd'} {name:13s}", "  ".join(f"{t}: {r[t, 'e']:.3f} ({r[t, 'e'] / base[t, 'e']:.3f})" + (f" graph {r[t, 'g']:.3f}" if mode == 0 else "") for t in TREES), flush=True)
    print(f"d{d} {group} differences: {bad}", flush=True)
if sys.argv[1] == "worker": worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    groups, dims = sys.argv[2].split(","), sys.argv[3].split(",")
    for f in glob.glob("/tmp/ab_ready_*"): os.unlink(f)
    env = dict(os.environ, AB_N=str(len(groups) * len(dims)))
    ps = [subprocess.Popen([sys.executable, __file__, "worker", g, d, sys.argv[4]], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for d in dims for g in groups]
    for p in ps: print(p.communicate()[0][-4000:], flush=True)
