"""check | time | parts of the Hopper backward kernel on a GPU.

PYTHONPATH=src:. python3 experiments/hopper_backward.py check [--only TEXT] [--processes 12]   many small cases against fp64
PYTHONPATH=src:. python3 experiments/hopper_backward.py time [--dims 64,128] [--variants base,...] [--quick]
PYTHONPATH=src:. python3 experiments/hopper_backward.py parts                                 before / main / after apart
PYTHONPATH=src:. python3 experiments/hopper_backward.py smoke                                  one tiny case, first of all
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import math
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
from unittest import mock

import torch

from flashtile import mask as M
from flashtile import score as S
from flashtile.kernel import launcher
from flashtile.kernel.hopper import backward as B
from flashtile.kernel.hopper import backward_sizes as sizes
from flashtile.kernel.launch import HopperConfig
from flashtile.seqlen import Seqlens

# Proposed rows of the launch table, by largest head_dim.
CONFIGS = {
    64: HopperConfig(128, 128, 2, 2, 240, 24, "queue"),
    128: HopperConfig(64, 128, 2, 2, 240, 24, "queue"),
    256: HopperConfig(64, 64, 2, 2, 240, 24, "queue"),
}
VARIANTS = {  # what is laid over sizes.of()
    "base": {},
    "exp_late": {"exp_first": False},
    "dk_late": {"dk_late": True},
    "dk_now": {"dk_late": False},
    "deterministic": {"deterministic": True},
    "grid": {"queue": False},
    "straight": {"rotated": False},
    "zeroed": {"rotated": False, "zeroed": True},
    "zeroed_rotated": {"zeroed": True},
}


def config_of(d):
    return CONFIGS[next(n for n in CONFIGS if n >= d)]


@contextlib.contextmanager
def variant(deterministic=False, **changes):
    of = sizes.of

    def changed(*args):
        size = of(*args)
        return dataclasses.replace(size, **changes)

    with mock.patch.object(sizes, "of", changed):
        yield


# --- check ------------------------------------------------------------------------------------------------------------


def ids(n, docs, device="cuda"):
    cuts = torch.linspace(0, n, docs + 1).long()
    return torch.bucketize(torch.arange(n), cuts[1:-1], right=True).to(device)


def case(name, d=128, dv=None, sq=200, sk=333, b=2, h=2, hkv=2, mask=None, score=None, dtype=torch.bfloat16,
         layout="bhsd", do="dense", dlse=False, packed=None, used=None, scale=None, variant=None, big=1.0):
    return dict(locals())


def cases():
    causal, full = M.causal(), M.full()
    out = []
    for d in DIMS:
        for m, mname in ((full, "full"), (causal, "causal")):
            for sq, sk in ((64, 64), (128, 128), (200, 333), (333, 200), (1000, 777), (512, 512)):
                out.append(case(f"d{d} {mname} {sq}x{sk}", d=d, sq=sq, sk=sk, mask=m))
        out.append(case(f"d{d} causal fp16", d=d, mask=causal, dtype=torch.float16))
        out.append(case(f"d{d} causal gqa", d=d, mask=causal, h=6, hkv=2, sq=300, sk=300))
        out.append(case(f"d{d} full gqa 1000", d=d, mask=full, h=8, hkv=1, sq=1000, sk=130, b=1))
        out.append(case(f"d{d} causal bshd dlse", d=d, mask=causal, layout="bshd", dlse=True, sq=257, sk=257))
        out.append(case(f"d{d} softcap causal", d=d, mask=causal, score=S.softcap(3.0), sq=257, sk=257))
        out.append(case(f"d{d} packed causal", d=d, mask=causal, packed=([0, 7, 7, 200, 333, 640], [0, 9, 30, 222, 222, 700])))
        out.append(case(f"d{d} packed full gqa used", d=d, mask=full, h=4, hkv=2, packed=([0, 65, 130, 400], [0, 65, 300, 400]),
                        used=([60, 0, 250], [65, 100, 99])))
    d = min(DIMS, key=lambda n: abs(n - 128))
    for sq, sk in ((1, 1), (1, 500), (500, 1), (63, 65), (127, 129), (129, 127), (2, 300), (300, 2), (2000, 2000), (4096, 100)):
        out.append(case(f"d{d} causal {sq}x{sk}", d=d, sq=sq, sk=sk, mask=causal))
        out.append(case(f"d{d} full {sq}x{sk}", d=d, sq=sq, sk=sk, mask=full))
    for width in ODD:
        dd, dv = width if isinstance(width, tuple) else (width, width)
        out.append(case(f"d{dd},{dv} causal", d=dd, dv=dv, mask=causal, sq=300, sk=300))
        out.append(case(f"d{dd},{dv} full bshd gqa", d=dd, dv=dv, mask=full, sq=300, sk=200, h=4, hkv=2, layout="bshd"))
    n = 700
    lengths = torch.tensor([300, 650], dtype=torch.int32, device="cuda")
    blocks = torch.rand(2, 2, 11, 11, device="cuda") < 0.4
    dense = torch.rand(1, 2, n, n, device="cuda") < 0.3
    masks = {
        "window": M.window(100, 0), "window2": M.window(30, 50), "chunked": M.chunked(100), "prefix": M.prefix(lengths) | causal,
        "padding": M.key_padding(lengths) & causal, "document": M.document(ids(n, 5)) & causal, "not": ~causal,
        "blocks": M.block_sparse(blocks, 64, 64), "dense": M.dense(dense), "lists": causal.without_ranges(),
        "window lists": M.window(100, 20).without_ranges(), "shuffled": M.document(torch.randint(0, 4, (n,), device="cuda")),
    }
    for name, m in masks.items():
        out.append(case(f"d{d} mask {name}", d=d, mask=m, sq=n, sk=n))
        out.append(case(f"d64 mask {name}", d=64, mask=m, sq=n, sk=n))
    slopes = torch.tensor([0.5, 0.1], device="cuda")
    scores = {
        "alibi": S.alibi(slopes), "bias": S.bias(torch.randn(1, 2, n, n, device="cuda")),
        "bias row": S.bias(torch.randn(2, 1, 1, n, device="cuda")), "chain": S.alibi(slopes).then(S.softcap(5.0)),
        "table": S.relative_position(torch.randn(32, 2, device="cuda")), "temperature": S.temperature(2.0),
    }
    for name, s in scores.items():
        out.append(case(f"d{d} score {name}", d=d, mask=causal, score=s, sq=n, sk=n))
    for do in ("expanded", "scalar", "transposed", "slice"):
        out.append(case(f"d{d} do {do}", d=d, mask=causal, do=do))
    for layout in ("fused", "expanded", "padded", "reversed"):
        out.append(case(f"d{d} layout {layout}", d=d, mask=causal, layout=layout, sq=260, sk=260))
    out.append(case(f"d{d} scale 0", d=d, mask=causal, scale=0.0))
    out.append(case(f"d{d} scale negative", d=d, mask=causal, scale=-0.3))
    out.append(case(f"d{d} large logits", d=d, mask=causal, big=30.0))
    out.append(case(f"d{d} packed window bias-free", d=d, mask=M.window(50, 20), packed=([0, 300, 301, 900], [0, 200, 333, 800])))
    out.append(case(f"d{d} packed many", d=d, mask=causal, packed=(list(range(0, 641, 10)), list(range(0, 1281, 20)))))
    for name in VARIANTS:
        if name != "base":
            for dd in (64, 128, 256):
                out.append(case(f"variant {name} d{dd}", d=dd, mask=causal, sq=700, sk=700, variant=name))
                out.append(case(f"variant {name} d{dd} full", d=dd, mask=full, sq=333, sk=500, variant=name))
    for dd in (64, 128, 256):
        more = dict(d=dd, variant="deterministic")
        out.append(case(f"deterministic d{dd} long", mask=causal, sq=3000, sk=3000, b=1, h=8, hkv=4, **more))
        out.append(case(f"deterministic d{dd} window", mask=M.window(100, 30), sq=1500, sk=1500, h=8, hkv=8, **more))
        out.append(case(f"many d{dd}", d=dd, mask=causal, b=8, h=16, hkv=16, sq=300, sk=300))  # several works per program
        out.append(case(f"many d{dd} uneven", d=dd, mask=M.window(0, 60), b=8, h=16, hkv=8, sq=190, sk=700))  # and empty ones
        out.append(case(f"deterministic d{dd} packed", mask=causal, h=8, hkv=8, packed=([0, 7, 7, 200, 333, 1640], [0, 9, 30, 222, 222, 1700]), **more))
    more = dict(d=d, variant="deterministic", sq=n, sk=n)
    for name in ("document", "lists", "not", "chunked", "padding"):
        out.append(case(f"deterministic {name}", mask=masks[name], **more))
    return out


DIMS = (64, 128, 96, 192, 256)
ODD = (16, 32, 40, 72, 80, 104, 120, (128, 64), (64, 128), (96, 32), (128, 96), 136, 160, 200,
       248, (192, 128), (256, 64), (64, 256), (32, 192), (128, 256))


def laid_out(t, layout):
    b, h, n, d = t.shape
    if layout == "bshd":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        wide = torch.randn(b, n, 3, h, d, device=t.device).to(t.dtype)
        wide[:, :, 1] = t.transpose(1, 2)
        return wide[:, :, 1].transpose(1, 2)
    if layout == "expanded":
        return t[:, :1].expand(b, h, n, d)
    if layout == "padded":
        wide = torch.full((b, h, n + 3, d + 8), math.nan, device=t.device, dtype=t.dtype)
        wide[:, :, :n, :d] = t
        return wide[:, :, :n, :d]
    if layout == "reversed":
        return t.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    return t


def run_case(c):
    from tests import reference as R

    torch.manual_seed(0)
    dv = c["dv"] or c["d"]
    b, sq, sk, seqlens = c["b"], c["sq"], c["sk"], None
    if c["packed"]:
        cu_q, cu_k = c["packed"]
        b, sq, sk = 1, cu_q[-1] + 40, cu_k[-1] + 70  # rows past the last sequence
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
        seqlens = Seqlens(ints(cu_q), ints(cu_k), *(map(ints, c["used"]) if c["used"] else ()))
    make = lambda h, n, d: torch.randn(b, h, n, d, device="cuda").to(c["dtype"])  # noqa: E731
    q, k, v, do = make(c["h"], sq, c["d"]) * c["big"], make(c["hkv"], sk, c["d"]), make(c["hkv"], sk, dv), make(c["h"], sq, dv)
    if c["packed"]:  # what belongs to no sequence is NaN
        for t, cu, used in ((q, cu_q, 0), (do, cu_q, 0), (k, cu_k, 1), (v, cu_k, 1)):
            lengths = c["used"][used] if c["used"] else [math.inf] * len(cu)
            inside = torch.zeros(t.shape[2], dtype=torch.bool)
            for start, end, length in zip(cu, cu[1:], lengths):
                inside[start : min(end, start + length)] = True
            t[:, :, ~inside.to(t.device)] = math.nan
    q, k, v = (laid_out(t, c["layout"]) for t in (q, k, v))
    if c["do"] == "expanded":
        do = do[:, :, :1].expand(b, c["h"], sq, dv)
    elif c["do"] == "scalar":
        do = do[:1, :1, :1, :1].expand(b, c["h"], sq, dv)
    elif c["do"] == "transposed":
        do = do.transpose(2, 3).contiguous().transpose(2, 3)
    elif c["do"] == "slice":
        do = torch.cat([do, do], 3)[..., 3 : 3 + dv]
    dlse = torch.randn(b, c["h"], sq, device="cuda") if c["dlse"] else None
    scale = c["d"] ** -0.5 if c["scale"] is None else c["scale"]
    options = dict(mask=c["mask"], score=c["score"], softmax_scale=scale, do=do, dlse=dlse, seqlens=seqlens)
    want, plain = R.reference(q, k, v, **options), R.plain(q, k, v, **options)
    o, lse = want.o.cuda().to(q.dtype), want.lse.cuda().float()
    layout = "bshd" if c["layout"] == "bshd" else "bhsd"
    call = lambda: B.backward(  # noqa: E731
        do, q, k, v, laid_out(o, layout), lse, dlse, softmax_scale=scale, mask=c["mask"], score=c["score"], seqlens=seqlens,
        config=config_of(max(c["d"], dv)), **options,
    )  # fmt: skip
    deterministic = c["variant"] == "deterministic"
    options = {"deterministic": deterministic}
    with variant(**VARIANTS[c["variant"] or "base"]):
        grads = call()
        torch.cuda.synchronize()
        again = call()
        torch.cuda.synchronize()
    for name, got, second in zip(("dq", "dk", "dv"), grads, again):
        R.assert_accurate(got.cpu(), getattr(want, name), getattr(plain, name), R.BACKWARD_FACTOR, name)
        if name != "dq" or deterministic:
            assert torch.equal(got, second), f"{name} differs between two runs"
        else:
            R.assert_accurate(second.cpu(), getattr(want, name), getattr(plain, name), R.BACKWARD_FACTOR, "dq again")


def kernel_of(c):
    """Cases of one kernel go to one process, so that none is compiled twice."""
    used = bool(c["used"])
    return (c["d"], c["dv"], c["mask"].name.split("(")[0], c["score"] and c["score"].name, c["dtype"], bool(c["packed"]), used, c["variant"])


def check(args):
    todo = [c for c in cases() if not args.only or args.only in c["name"]]
    if args.worker is None:
        counts = {"ok": 0}

        def follow(p):
            started = "?"
            for line in p.stdout:
                if line.startswith("start "):
                    started = line.strip()
                elif line.startswith("ok "):
                    counts["ok"] += 1
                elif line.strip():
                    print(line.rstrip()[:700], flush=True)
            if p.wait():
                print(f"WORKER ENDED with {p.returncode} in: {started}", flush=True)

        start = time.perf_counter()
        threads = []
        for i in range(args.processes):
            p = subprocess.Popen([sys.executable, "-u", __file__, "check", "--worker", str(i), "--processes", str(args.processes),
                                  "--only", args.only or ""], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            threads.append(threading.Thread(target=follow, args=(p,)))
            threads[-1].start()
        while any(t.is_alive() for t in threads):
            time.sleep(10)
            print(f"{time.perf_counter() - start:.0f} s: {counts['ok']} of {len(todo)} cases passed", flush=True)
        return
    groups = {}
    for c in todo:
        groups.setdefault(kernel_of(c), []).append(c)
    mine = [c for group in list(groups.values())[args.worker :: args.processes] for c in group]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    for c in mine:
        faulthandler.dump_traceback_later(90, exit=True)
        print("start", c["name"], flush=True)
        try:
            run_case(c)
            print("ok", c["name"], flush=True)
        except Exception as error:
            text = str(error).strip().splitlines()
            print("FAIL", c["name"], type(error).__name__, " | ".join(text[:2] + text[-3:])[:600], flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
            if "CUDA" in str(error) or "cuda" in str(error):
                return
        faulthandler.cancel_dump_traceback_later()


# --- time -------------------------------------------------------------------------------------------------------------


def inputs(d, s):
    b, h = 16384 // s, 2048 // d
    return [torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def ours(q, k, v, do, o, lse, causal, changes):
    d = q.shape[-1]
    m = M.causal() if causal else M.full()
    config = config_of(d)
    if "config" in changes:
        changes = dict(changes)
        config = dataclasses.replace(config, **changes.pop("config"))

    def call():
        with variant(**changes):
            return B.backward(do, q, k, v, o, lse, None, softmax_scale=d**-0.5, mask=m, config=config,
                              deterministic=changes.get("deterministic", False))  # fmt: skip

    return call


def forward(q, k, v, causal):
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out[0], out[1].contiguous()


def cudnn(q, k, v, do, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def timing(args):
    from triton.testing import do_bench

    random.seed(0)
    dims = [int(x) for x in args.dims.split(",")]
    names = args.variants.split(",")
    lengths = (1024, 4096) if args.quick else (512, 1024, 2048, 4096, 8192, 16384)
    passes = 2 if args.quick else args.passes
    ratios = {name: [] for name in names}
    lines = []
    for d in dims:
        for causal in (False, True):
            for s in lengths:
                faulthandler.dump_traceback_later(120, exit=True)
                q, k, v, do = inputs(d, s)
                o, lse = forward(q, k, v, causal)
                calls = {name: ours(q, k, v, do, o, lse, causal, VARIANTS[name]) for name in names}
                calls["cudnn"] = cudnn(q, k, v, do, causal)
                want = calls["cudnn"]()
                wrong = {}
                for name in names:
                    errors = [((a.float() - w.float()).norm() / w.float().norm()).item() for a, w in zip(calls[name](), want)]
                    if not max(errors) < 1e-2:
                        wrong[name] = errors
                times = {name: [] for name in calls}
                for _ in range(passes):
                    for name in random.sample(list(calls), len(calls)):
                        times[name].append(do_bench(calls[name], warmup=8, rep=25, return_mode="median"))
                flops = 10 * q.shape[0] * q.shape[1] * s * s * d / (2 if causal else 1)
                rate = {name: flops / statistics.median(t) * 1e-9 for name, t in times.items()}
                for name in names:
                    ratios[name].append(rate[name] / rate["cudnn"])
                line = f"d{d:3d} {'causal' if causal else 'full  '} s{s:6d} cudnn {rate['cudnn']:4.0f} " + " ".join(
                    f"{name} {rate[name]:4.0f} ({ratios[name][-1]:.3f})" for name in names) + (f" WRONG {wrong}" if wrong else "")
                lines.append(line)
                print(line, flush=True)
                del q, k, v, do, o, lse, calls, want
    faulthandler.cancel_dump_traceback_later()
    print("\n" + "\n".join(lines))
    for name, r in ratios.items():
        print(f"{name}: geometric mean over cuDNN {statistics.geometric_mean(r):.3f}, least {min(r):.3f}")


def parts(args):
    """Microseconds of the three kernels apart, and of the host."""
    from triton.testing import do_bench

    run = launcher.run
    for d in (int(x) for x in args.dims.split(",")):
        for causal in (False, True):
            for s in (512, 2048, 8192):
                faulthandler.dump_traceback_later(120, exit=True)
                q, k, v, do = inputs(d, s)
                call = ours(q, k, v, do, *forward(q, k, v, causal), causal, {})
                line = f"d{d} {'causal' if causal else 'full'} s{s}: all {1e3 * do_bench(call, warmup=8, rep=30):.0f} us"
                for part in (B.before_kernel, B.backward_kernel, B.after_kernel):
                    with mock.patch.object(launcher, "run", lambda kernel, *rest: run(kernel, *rest) if kernel is part else None):
                        line += f", {part.fn.__name__} {1e3 * do_bench(call, warmup=8, rep=20):.0f}"
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                grads = call()
                extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
                formula = q.shape[0] * q.shape[1] * s * (4 * d + 8)
                print(line + f"; extra memory {extra / formula:.3f} of the formula", flush=True)
    q, k, v, do = (torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    call = ours(q, k, v, do, *forward(q, k, v, False), False, {})
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(300):
        call()
    print(f"host: {(time.perf_counter() - start) / 300 * 1e6:.1f} us per call")
    faulthandler.cancel_dump_traceback_later()


def smoke(args):
    for c in (case("smoke d128", d=128, sq=64, sk=128, b=1, h=1, hkv=1, mask=M.full()),
              case("smoke d128 more", d=128, sq=300, sk=300, mask=M.causal()),
              case("smoke d64", d=64, sq=300, sk=300, mask=M.causal()),
              case("smoke d256", d=256, sq=300, sk=300, mask=M.causal()),
              case("smoke packed", d=128, mask=M.causal(), packed=([0, 7, 7, 200, 333], [0, 9, 30, 222, 222]))):  # fmt: skip
        faulthandler.dump_traceback_later(40, exit=True)
        print("start", c["name"], flush=True)
        try:
            run_case(c)
            print("ok", c["name"], flush=True)
        except Exception:
            traceback.print_exc(limit=-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("smoke", "check", "time", "parts"))
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--variants", default="base,zeroed,zeroed_rotated,straight,grid,exp_late")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    {"smoke": smoke, "check": check, "time": timing, "parts": parts}[arguments.what](arguments)
