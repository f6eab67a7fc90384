"""The Hopper forward kernel on a GPU: `check` it against fp64, `time` it beside cuDNN and fa3-fwd.

PYTHONPATH=src:. python3 experiments/hopper_forward.py check [--quick] | time [--quick] | experiments
"""

import argparse
import faulthandler
import itertools
import math
import random
import statistics
import subprocess
import sys
import traceback

import torch

import forward_variants2
from flashtile import mask as M
from flashtile import score as S
from flashtile.kernel.launch import HopperConfig
from flashtile.seqlen import Seqlens, Where

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    from flashtile.kernel.hopper.forward import forward
else:  # to try this script itself
    from flashtile.kernel import flash_attention_cpu

    def forward(*tensors, config=None, **rules):
        return flash_attention_cpu.forward(*tensors, **rules)


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


REGISTERS = {2: (240, 24), 3: (160, 32)}


def config(consumers, block_n, stages=2, schedule="queue", registers=None):
    return HopperConfig(64 * consumers, block_n, consumers, stages, *(registers or REGISTERS[consumers]), schedule)


CONFIGS = {64: config(3, 128), 96: config(2, 128), 128: config(2, 128), 192: config(2, 64), 256: config(2, 64)}
WIDE = config(2, 128)  # for (192, 128)


def default_config(d, dv):
    if (d, dv) == (192, 128):
        return WIDE
    return next(c for widest, c in CONFIGS.items() if max(d, dv) <= widest)


# --- check ------------------------------------------------------------------------------------------------------------


def dense(q, k, v, scale, mask, score=None, sinks=None):
    """(o, lse) in fp64, one (batch, head) at a time."""
    b, hq, sq, _ = q.shape
    hkv, sk = k.shape[1], k.shape[2]
    o = q.new_zeros(b, hq, sq, v.shape[3], dtype=torch.float64)
    lse = q.new_full((b, hq, sq), -math.inf, dtype=torch.float64)
    q_idx = torch.arange(sq, device=q.device)[:, None]
    k_idx = torch.arange(sk, device=q.device)[None, :]
    for i, h in itertools.product(range(b), range(hq)):
        s = q[i, h].double() @ k[i, h // (hq // hkv)].double().T * scale
        where = Where(i, h, sq, sk)
        if score is not None:
            s = score.forward(where, q_idx, k_idx, s, score.args)
        if sk:
            visible = mask.predicate(where, q_idx, k_idx, mask.args)
            s = s.masked_fill(~visible.expand_as(s), -math.inf)
        l = torch.logsumexp(s, -1) if sk else lse[i, h]
        if sinks is not None:
            l = torch.logaddexp(l, sinks[h].double())
        p = torch.exp(s - torch.where(l == -math.inf, 0.0, l)[:, None])
        # rows beyond the keys may hold NaN in v; p is 0 only for what is masked
        o[i, h] = torch.nan_to_num(p, nan=0.0) @ v[i, h // (hq // hkv)].double()
        lse[i, h] = l
    return o, lse


def cases():
    bf, fp = torch.bfloat16, torch.float16
    base = dict(b=2, hq=4, hkv=4, sq=512, sk=512, d=128, dv=None, dtype=bf, mask=M.causal())

    def case(name, **kw):
        return name, {**base, **kw}

    for d in (64, 128, 256, 96, 192):
        yield case(f"d{d} causal", d=d)
        yield case(f"d{d} full", d=d, mask=M.full())
        yield case(f"d{d} causal odd 333x451", d=d, sq=333, sk=451)
        yield case(f"d{d} causal long", d=d, b=1, hq=9, hkv=3, sq=2305, sk=2305)
        yield case(f"d{d} full odd", d=d, mask=M.full(), sq=77, sk=1000)
    yield case("d192,128", d=192, dv=128)
    yield case("d192,128 full odd", d=192, dv=128, mask=M.full(), sq=200, sk=301)
    for d in (8, 40, 72, 80, 104, 136, 248):
        yield case(f"d{d}", d=d, sq=300, sk=300)
    yield case("d64,128", d=64, dv=128, sq=300)
    yield case("d128,64", d=128, dv=64, sq=300)
    for n in (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 257):
        yield case(f"length {n}", sq=n, sk=n)
        yield case(f"d64 length {n}", d=64, sq=n, sk=n)
        yield case(f"full 100x{n}", sq=100, sk=n, mask=M.full())
    yield case("no keys", sk=0)
    yield case("no keys sinks", sk=0, sinks=True)
    yield case("more queries than keys (empty rows)", sq=700, sk=130)
    yield case("more keys than queries", sq=130, sk=700)
    yield case("one query", sq=1, sk=4000, hq=8, hkv=2)
    yield case("fp16", dtype=fp)
    yield case("fp16 d64", dtype=fp, d=64)
    yield case("fp16 d256", dtype=fp, d=256)
    yield case("gqa 8/2", hq=8, hkv=2)
    yield case("mqa 6/1 d64", hq=6, hkv=1, d=64)
    yield case("many heads", b=3, hq=50, hkv=50, sq=130, sk=130)
    yield case("sinks", sinks=True)
    yield case("sinks d64 full", sinks=True, d=64, mask=M.full())
    for layout in ("bnhd", "packed_qkv", "expanded", "sliced"):
        yield case(f"layout {layout}", layout=layout)
    yield case("negative scale", scale=-0.1)
    yield case("zero scale", scale=0.0)
    for d in (64, 128, 256):
        yield case(f"d{d} nan", d=d, nan=True)
        yield case(f"d{d} nan full", d=d, nan=True, mask=M.full(), sq=300, sk=400)
        yield case(f"d{d} negative logits", d=d, negative=True, factor=3.0)
        yield case(f"d{d} negative logits full", d=d, negative=True, mask=M.full(), sq=300, sk=400)
    yield case("large logits", factor=30.0)
    yield case("huge logits", factor=3000.0, loose=True)
    masks = dict(
        top_left=M.causal(align="top_left"),
        window=M.window(100, 0),
        window2=M.window(30, 70),
        chunked=M.chunked(100) & M.causal(),
        prefix=M.prefix([100, 37]) | M.causal(),
        padding=M.key_padding([300, 0]) & M.causal(),
        not_window=~M.window(50, 50),
    )
    for name, mask in masks.items():
        yield case(f"mask {name}", mask=mask, sq=400, sk=460)
        yield case(f"mask {name} d64", mask=mask, d=64)
    yield case("mask document", mask="document")
    yield case("mask document d64", mask="document", d=64)
    yield case("mask dense", mask="dense", sq=300, sk=400)
    yield case("mask block_sparse", mask="block", sq=512, sk=512)
    yield case("mask block_sparse d64", mask="block", sq=512, sk=512, d=64)
    yield case("window far left (empty tiles)", mask=M.window(10, 0), sq=900, sk=300)
    for score in ("softcap", "alibi", "temperature", "bias"):
        yield case(f"score {score}", score=score, sq=300, sk=333)
        yield case(f"score {score} full d64", score=score, mask=M.full(), d=64, sq=300, sk=333)
    for name, lens_q, lens_k in (
        ("ragged", [1, 300, 0, 128, 57], [1, 300, 20, 128, 257]), ("empties", [0, 0, 5, 200], [7, 0, 0, 333]),
        ("short", [3] * 40, [2] * 40), ("long", [1000, 24], [1000, 24]),
    ):  # fmt: skip
        for d in (64, 128, 256):
            yield case(f"packed {name} d{d}", packed=(lens_q, lens_k), d=d)
        yield case(f"packed {name} full", packed=(lens_q, lens_k), mask=M.full())
    yield case("packed used", packed=([100, 200, 300], [100, 200, 300]), used=([100, 150, 0], [50, 200, 300]))
    yield case("packed window", packed=([100, 200, 300], [100, 200, 300]), mask=M.window(40, 0))
    yield case("packed gqa sinks", packed=([100, 200, 300], [100, 250, 300]), hq=8, hkv=2, sinks=True)
    yield case("packed softcap", packed=([100, 200, 300], [100, 250, 300]), score="softcap")
    yield case("packed all empty", packed=([100, 20], [0, 0]))
    yield case("packed d192,128", packed=([100, 200, 300], [100, 200, 300]), d=192, dv=128)
    yield case("packed d96", packed=([100, 200, 300], [100, 200, 300]), d=96)
    for name in ("grid", "static"):
        yield case(f"schedule {name}", schedule=name, sq=1000, sk=1000, hq=40, hkv=40)
        yield case(f"schedule {name} d64", schedule=name, d=64, sq=300, sk=300, hq=40, hkv=40)


def tensors(c):
    torch.manual_seed(0)
    b, hq, hkv, sq, sk, d, dv, dtype = (c[x] for x in ("b", "hq", "hkv", "sq", "sk", "d", "dv", "dtype"))
    dv = dv or d
    make = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)  # noqa: E731
    layout = c.get("layout")
    if layout == "bnhd":
        q, k, v = make(b, sq, hq, d), make(b, sk, hkv, d), make(b, sk, hkv, dv)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    elif layout == "packed_qkv":
        q, k, v = make(b, sq, 3, hq, d).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    elif layout == "expanded":
        q, k, v = make(b, hq, sq, d), make(1, hkv, sk, d).expand(b, -1, -1, -1), make(b, 1, sk, dv).expand(-1, hkv, -1, -1)
    elif layout == "sliced":
        q, k, v = make(b, hq, sq + 9, d + 32)[:, :, 5:-4, 8:-24], make(b, hkv, 2 * sk, d)[:, :, ::2], make(b, hkv, sk, dv + 8)[..., 8:]
    else:
        q, k, v = make(b, hq, sq, d), make(b, hkv, sk, d), make(b, hkv, sk, dv)
    if c.get("negative"):  # all logits are: the integers' maxima take the other way
        q, k = -q.abs(), k.abs()
    return q * c.get("factor", 1.0) if "factor" in c else q, k, v


VARIANT = ""  # what `check` checks instead of the product


def checked(d):
    return variant(VARIANT) if VARIANT else forward


def run_nan(c):
    """A NaN in a query makes its row NaN, one in a key the rows that see it, and nothing else."""
    q, k, v = tensors(c)
    cfg, function = c.get("config") or default_config(c["d"], c["dv"] or c["d"]), c.get("function") or checked(c["d"])
    run = lambda q, k: function(q, k, v, softmax_scale=c["d"] ** -0.5, mask=c["mask"], config=cfg)  # noqa: E731
    clean, clean_lse = run(q, k)
    bad = torch.zeros(q.shape[:3], dtype=torch.bool, device=DEVICE)
    q, k = q.clone(), k.clone()
    row, key = q.shape[2] // 2, k.shape[2] // 3
    q[0, 0, row, 3] = math.nan
    q[0, 0, 0] = -math.nan
    bad[0, 0, row] = bad[0, 0, 0] = True
    k[0, 1, key, 5] = math.nan
    heads = q.shape[1] // k.shape[1]
    rows = torch.arange(q.shape[2], device=DEVICE)[:, None]
    where = Where(0, 0, q.shape[2], k.shape[2])
    sees = c["mask"].predicate(where, rows, torch.full_like(rows, key), c["mask"].args)
    bad[0, heads : 2 * heads] |= (sees if torch.is_tensor(sees) else torch.full_like(rows, bool(sees), dtype=torch.bool)).expand_as(rows)[:, 0]
    o, lse = run(q, k)
    synchronize()
    complaints = []
    if not (o[bad].isnan().all() and lse[bad].isnan().all()):
        complaints.append(f"not NaN: {(~o[bad].isnan()).sum().item()} in o, {(~lse[bad].isnan()).sum().item()} in lse, of {bad.sum().item()} rows")
    close = lambda a, b: torch.allclose(a[~bad].float(), b[~bad].float(), atol=1e-2, rtol=1e-2)  # noqa: E731
    if not (close(o, clean) and close(lse, clean_lse)):
        complaints.append(f"rows without NaN differ: {o[~bad].isnan().sum().item()} NaN in o")
    return complaints


def run_case(c):
    """Return a list of complaints."""
    if c.get("nan"):
        return run_nan(c)
    if "packed" in c:
        return run_packed(c)
    q, k, v = tensors(c)
    b, hq, sq, d = q.shape
    sk, dv = v.shape[2:]
    mask, score = c["mask"], c.get("score")
    if mask == "document":
        mask = M.document(torch.randint(0, 4, (b, sk), device=DEVICE).sort(dim=1).values) & M.causal()
    elif mask == "dense":
        mask = M.dense(torch.rand(b, 1, sq, sk, device=DEVICE) > 0.9)
    elif mask == "block":
        mask = M.block_sparse(torch.rand(1, hq, -(-sq // 64), -(-sk // 128), device=DEVICE) > 0.6, 64, 128)
    mask = mask.to(DEVICE)
    score = {
        None: lambda: None, "softcap": lambda: S.softcap(3.0), "temperature": lambda: S.temperature(0.5),
        "alibi": lambda: S.alibi(torch.rand(hq, device=DEVICE)),
        "bias": lambda: S.bias(torch.randn(b, hq, sq, sk, device=DEVICE)),
    }[score]()  # fmt: skip
    sinks = torch.randn(hq, device=DEVICE) if c.get("sinks") else None
    scale = c.get("scale", d**-0.5)
    return compare(c, q, k, v, scale, mask, score, sinks, d, dv)


def compare(c, q, k, v, scale, mask, score, sinks, d, dv):
    cfg = c.get("config") or default_config(d, dv)
    forward = c.get("function") or checked(d)
    if "schedule" in c:
        cfg = HopperConfig(**{**vars(cfg), "schedule": c["schedule"]})
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    o, lse = forward(q, k, v, softmax_scale=scale, mask=mask, score=score, sinks=sinks, config=cfg)
    o2, lse2 = forward(q, k, v, softmax_scale=scale, mask=mask, score=score, sinks=sinks, config=cfg)
    torch.use_deterministic_algorithms(False)
    synchronize()
    complaints = []
    if not (torch.equal(o, o2) and torch.equal(lse, lse2)):
        complaints.append("two runs differ")
    ref, ref_lse = dense(q, k, v, scale, mask, score, sinks)
    return complaints + errors(o, lse, ref, ref_lse, q.dtype, c.get("loose", False))


def errors(o, lse, ref, ref_lse, dtype, loose=False):
    complaints = []
    if o.isnan().any() or lse.isnan().any():
        complaints.append(f"NaN: {o.isnan().sum().item()} in o, {lse.isnan().sum().item()} in lse")
    if not torch.equal(lse == -math.inf, ref_lse == -math.inf):
        complaints.append("empty rows differ")
    finite = ref_lse != -math.inf
    if finite.any():
        gap = ((lse.double() - ref_lse).abs() / (1 + ref_lse.abs()))[finite].max().item()
        if not gap < (1e-4 if loose else 2e-5):
            complaints.append(f"lse off by {gap:.1e}")
    error = ((o.double() - ref).norm() / (ref.norm() + 1e-30)).item()
    worst = (o.double() - ref).abs().max().item()
    bound = {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype] * (30 if loose else 1)
    if not error < bound and ref.norm() > 0:
        complaints.append(f"o off by {error:.1e} (norm), {worst:.1e} (largest)")
    if ref.norm() == 0 and o.double().norm() > 0:
        complaints.append("o is not zero")
    return complaints


def run_packed(c):
    torch.manual_seed(0)
    lens_q, lens_k = c["packed"]
    hq, hkv, d, dtype = (c[x] for x in ("hq", "hkv", "d", "dtype"))
    dv = c["dv"] or d
    extra = 7  # rows that belong to no sequence
    total_q, total_k = sum(lens_q) + extra, sum(lens_k) + extra
    q, k, v = (torch.randn(1, h, n, w, device=DEVICE).to(dtype) for h, n, w in ((hq, total_q, d), (hkv, total_k, d), (hkv, total_k, dv)))
    cum = lambda lens: torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)  # noqa: E731
    cu_q, cu_k = cum(lens_q), cum(lens_k)
    used_q, used_k = c.get("used", (lens_q, lens_k))
    seqlens = Seqlens(cu_q, cu_k)
    if "used" in c:
        seqlens = Seqlens(cu_q, cu_k, *(torch.tensor(u, dtype=torch.int32, device=DEVICE) for u in (used_q, used_k)))
    # what lies outside of the sequences is NaN
    for t, cu, used in ((q, cu_q, used_q), (k, cu_k, used_k), (v, cu_k, used_k)):
        outside = torch.ones(t.shape[2], dtype=torch.bool, device=DEVICE)
        for i, n in enumerate(used):
            outside[cu[i] : cu[i] + n] = False
        t[:, :, outside] = math.nan
    score = S.softcap(3.0) if c.get("score") else None
    sinks = torch.randn(hq, device=DEVICE) if c.get("sinks") else None
    cfg, forward = default_config(d, dv), checked(d)
    scale = d**-0.5
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    o, lse = forward(q, k, v, softmax_scale=scale, mask=c["mask"], score=score, sinks=sinks, seqlens=seqlens, config=cfg)
    torch.use_deterministic_algorithms(False)
    synchronize()
    ref = torch.zeros(o.shape, dtype=torch.float64, device=DEVICE)
    ref_lse = torch.full(lse.shape, -math.inf, dtype=torch.float64, device=DEVICE)
    for i, (n, m) in enumerate(zip(used_q, used_k, strict=True)):
        a, z = int(cu_q[i]), int(cu_k[i])
        if n:
            ref[:, :, a : a + n], ref_lse[:, :, a : a + n] = dense(q[:, :, a : a + n], k[:, :, z : z + m], v[:, :, z : z + m], scale, c["mask"], score, sinks)
    # Sequences are neighbours: another one's NaN must not leak, nor rows be written twice.
    complaints = errors(o, lse, ref, ref_lse, dtype)
    return complaints


def check(args):
    global VARIANT
    VARIANT = args.variant
    if VARIANT:
        variant(VARIANT, only_write=True)
    todo = list(cases())
    if args.quick:
        todo = [x for x in todo if x[0] in ("d128 causal", "d128 full", "d64 causal", "d64 full", "d128 causal odd 333x451",
                                            "d64 causal odd 333x451", "length 1", "d64 length 257")]  # fmt: skip
    if args.part is None:
        if args.jobs > 1:
            command = [sys.executable, __file__, "check", "--variant", VARIANT, *(["--quick"] if args.quick else []), "--jobs", str(args.jobs)]
            parts = [subprocess.Popen([*command, "--part", str(i)]) for i in range(args.jobs)]
            codes = [p.wait() for p in parts]
            print(f"== {len(todo)} cases in {args.jobs} processes, {sum(c != 0 for c in codes)} processes with failures")
            return
        args.part, args.jobs = 0, 1
    failed = 0
    mine = todo[args.part :: args.jobs]
    for name, c in mine:
        faulthandler.dump_traceback_later(90, exit=True)
        print(f"[{args.part}] {name} ...", file=sys.stderr, flush=True)
        try:
            complaints = run_case(c)
        except Exception as error:
            root = error
            while root.__cause__ is not None:
                root = root.__cause__
            complaints = [f"{type(root).__name__}: {str(root)[:300]}"]
            if args.trace:
                traceback.print_exc()
            if "CUDA" in str(root) or "illegal" in str(root):
                print(f"FAIL {name}: {complaints}; the context is lost", flush=True)
                failed += 1
                break
        if complaints:
            failed += 1
            print(f"FAIL {name}: {'; '.join(complaints)}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"[{args.part}] {len(mine) - failed} of {len(mine)} right", flush=True)
    sys.exit(failed > 0)


# --- time -------------------------------------------------------------------------------------------------------------

SHAPES = [(d, causal, s) for d in (64, 128, 256) for causal in (False, True) for s in (512, 1024, 2048, 4096, 8192, 16384)]
CHOSEN = {512, 2048, 8192, 16384}  # the 24 of the target


def subjects(names):
    """Name -> (head_dim -> config), or a variant that serves some head dims only."""
    every = {
        "n2": {64: config(2, 128), 128: config(2, 128), 256: config(2, 64)},
        "n3": {64: config(3, 128), 128: config(3, 64)},
        "n2s": {d: config(2, n, 2, "static") for d, n in ((64, 128), (128, 128), (256, 64))},
        "n3s": {64: config(3, 128, 2, "static")},
        "n2g": {d: config(2, n, 2, "grid") for d, n in ((64, 128), (128, 128), (256, 64))},
        "n2st3": {64: config(2, 128, 3), 128: config(2, 64, 4)},
        "n3st3": {64: config(3, 128, 3)},
        "n2b64": {64: config(2, 64, 4), 128: config(2, 64, 3)},
        "n3b64": {64: config(3, 64, 3)},
    }
    return {n: every[n] for n in names}


# --- experiments: the kernel with a few lines changed, each as modules of its own --------------------------------------

EXPERIMENTS = {
    "base": {},
    "q1": {"sizes": [("for q in (2, 1)", "for q in (1,)")]},
    "section16": {"schedule": [("32 * 2**20", "16 * 2**20")]},
    "section64": {"schedule": [("32 * 2**20", "64 * 2**20")]},
}


def variant(name, only_write=False):
    """Return ``forward`` of the kernel with the changes of an experiment; see also forward_variants2."""
    import importlib
    import pathlib
    import tempfile

    known = name in EXPERIMENTS
    changes = EXPERIMENTS[name] if known else {}
    if known and not changes:
        return forward
    import flashtile.kernel.hopper as package

    folder = pathlib.Path(tempfile.gettempdir(), "flashtile_experiments")
    folder.mkdir(exist_ok=True)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    modules = {"forward": "forward", "parts": "forward_parts", "sizes": "forward_sizes", "schedule": "schedule"}
    texts = {short: pathlib.Path(package.__path__[0], f"{module}.py").read_text() for short, module in modules.items()}
    if not known:
        options = set(name.split("+"))
        texts = forward_variants2.apply(options - EXPERIMENTS.keys(), texts)
        for option in options & EXPERIMENTS.keys():
            changes = {**changes, **EXPERIMENTS[option]}
        name = "x_" + name.replace("+", "_")
    for short, module in modules.items():
        text = texts[short]
        for old, new in changes.get(short, ()):
            assert old in text, (name, old)
            text = text.replace(old, new)
        for other in modules.values():
            text = text.replace(f"from flashtile.kernel.hopper.{other} import", f"from {name}_{other} import")
        text = text.replace("from flashtile.kernel.hopper import barriers, forward_parts, rows, schedule",
                            f"from flashtile.kernel.hopper import barriers, rows\nimport {name}_forward_parts as forward_parts, {name}_schedule as schedule")  # fmt: skip
        target = folder / f"{name}_{module}.py"
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
    return None if only_write else importlib.import_module(f"{name}_forward").forward


CONFIG_OF = {
    "n2": {64: config(2, 128)}, "n3": {128: config(3, 64)}, "static": {d: config(*c, 2, "static") for d, c in ((64, (3, 128)), (128, (2, 128)), (256, (2, 64)))},
    "grid": {d: config(*c, 2, "grid") for d, c in ((64, (3, 128)), (128, (2, 128)), (256, (2, 64)))},
    "st3": {64: config(3, 128, 3)},
}  # fmt: skip
# What to try at each head_dim; "base" is the product as it stands.
SUITE = {
    64: "base own unseen quick unseen+quick early draw1 skipif noskip fmax hot64 base+n2 hot64+n2",
    128: "base quick ahead edgemax early draw1 fmax noopaq",
    256: "base own unseen quick unseen+quick early draw1 fmax noskip",
}


def subject(name, d, only_write=False):
    """Return (function, configuration) of a variant, whose name may end with one of CONFIG_OF."""
    options = name.split("+")
    cfg = next((CONFIG_OF[o][d] for o in options if o in CONFIG_OF), CONFIGS[d])
    options = [o for o in options if o not in CONFIG_OF]
    return variant("+".join(options), only_write), cfg


def check_variant(job):
    """Compile a variant and check it; return complaints. In a worker."""
    name, d, causal = job
    faulthandler.dump_traceback_later(60, exit=True)
    function, cfg = subject(name, d)
    base = dict(b=2, hq=4, hkv=4, sq=512, sk=512, d=d, dv=None, dtype=torch.bfloat16, mask=M.causal() if causal else M.full())
    base |= dict(function=function, config=cfg)
    kinds = [{}, dict(sq=333, sk=451), dict(b=1, hq=9, hkv=3, sq=2305, sk=2305), dict(sq=700, sk=130), dict(b=3, hq=50, hkv=50, sq=130, sk=130),
             dict(factor=30.0), dict(factor=3000.0, loose=True), dict(sq=1, sk=4000), dict(sq=100, sk=1), dict(negative=True),
             dict(nan=True)]  # fmt: skip
    complaints = []
    for kind in kinds:
        try:
            found = run_case({**base, **kind})
        except Exception as problem:
            root = problem
            while root.__cause__ is not None:
                root = root.__cause__
            return f"{kind}: {type(root).__name__} {str(root)[:200]}"
        complaints += [f"{kind}: {x}" for x in found]
    faulthandler.cancel_dump_traceback_later()
    return "; ".join(complaints)


def experiments(args):
    """Compile and check in many processes, then time beside the peers. A variant that fails is not timed."""
    import time

    from flashtile.bench_mark.compile_ahead import Pool

    start = time.monotonic()
    dims = [int(d) for d in args.dims.split(",")] if args.dims else [128, 256, 64]
    names = {d: SUITE[d].split() if args.subjects == "n2,n3" else args.subjects.split(",") for d in dims}
    lengths = [int(s) for s in args.lengths.split(",")]
    jobs = [(n, d, causal) for d in dims for causal in (True, False) for n in names[d]]
    for n, d, _ in jobs:
        subject(n, d, only_write=True)
    bad = {}
    with Pool(args.jobs if args.jobs != 8 else None) as pool:
        for job, result in zip(jobs, pool.run(check_variant, jobs, args.compile_seconds), strict=True):
            if result != "":
                bad[job] = result or "not done in time"
    print(f"{len(jobs)} variants compiled and checked in {time.monotonic() - start:.0f} s, {len(bad)} bad", flush=True)
    for job, result in bad.items():
        print(f"BAD {job}: {result[:300]}", flush=True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    shapes = [(d, causal, s) for d in dims for causal in (False, True) for s in lengths]
    rates, clocks = {}, {}
    for d, causal, s in shapes:
        if time.monotonic() - start > args.seconds:
            print(f"no time left for {d} {causal} {s}")
            continue
        faulthandler.dump_traceback_later(60, exit=True)
        print(f"{d} {causal} {s} ...", file=sys.stderr, flush=True)
        q, k, v = inputs(d, s)
        mask = M.causal() if causal else M.full()
        fns = peers(q, k, v, causal)
        for n in names[d]:
            if (n, d, causal) not in bad:
                function, cfg = subject(n, d)
                fns[n] = lambda f=function, c=cfg: f(q, k, v, softmax_scale=d**-0.5, mask=mask, config=c)
        times = {n: [] for n in fns}
        for _ in range(args.passes):
            for n in random.sample(list(fns), len(fns)):
                times[n].append(timed(fns[n], args.ms))
        flops = 4 * 16384 * s * 2048 * (0.5 if causal else 1)
        rates[d, causal, s] = rate = {n: flops / statistics.median(t) * 1e-9 for n, t in times.items()}
        if s == max(lengths) and not causal and not args.no_clocks:
            ours = sorted((n for n in rate if n not in ("cudnn", "fa3", names[d][0])), key=rate.get, reverse=True)[:2]
            for n in ("cudnn", "fa3", names[d][0], *ours):
                if n in rate:
                    clocks[d, causal, n] = clock_and_power(fns[n], flops)
    faulthandler.cancel_dump_traceback_later()
    for (d, causal, n), text in clocks.items():
        print(f"{d:<4} {'causal' if causal else 'full':<7} {n:<26} {text}")
    print(f"{torch.cuda.get_device_name()}, TFLOP/s, median of {args.passes} shuffled passes; in brackets the ratio to base (or to the first)")
    for d in dims:
        mine = [x for x in shapes if x[0] == d and x in rates]
        print(f"d={d:<24} " + " ".join(f"{'causal' if c else 'full':>7}{s:>6}" for _, c, s in mine) + "   mean ratio; of the best peer: mean, least")
        for n in ["cudnn", "fa3", *names[d]]:
            first = names[d][0]
            ratios = [rates[x][n] / rates[x][first] for x in mine if n in rates[x] and first in rates[x]]
            best = [max(rates[x].get(p, 0.0) for p in ("cudnn", "fa3")) for x in mine]
            level = [rates[x][n] / b for x, b in zip(mine, best, strict=True) if n in rates[x] and b]
            cells = " ".join(f"{rates[x][n]:6.0f}({rates[x][n] / rates[x].get(first, math.nan):.3f})" if n in rates[x] else " " * 13 for x in mine)
            if ratios:
                print(f"{n:<26} {cells}   {math.exp(statistics.mean(map(math.log, ratios))):.3f} {math.exp(statistics.mean(map(math.log, level))):.3f} {min(level):.3f}", flush=True)


def clock_and_power(fn, flops):
    """Return what 0.6 s of ``fn`` in a row run at: whether a kernel waits for the clock or for itself."""
    ms = timed(fn, 5)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = max(10, int(400 / ms))
    start.record()
    for _ in range(count):
        fn()
    end.record()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        clock, power = (float(x) for x in subprocess.run(query, capture_output=True, text=True, check=True, timeout=5).stdout.splitlines()[0].split(","))
    except Exception as problem:
        return f"no clock: {problem}"
    busy = not end.query()
    end.synchronize()
    rate = flops * count / start.elapsed_time(end) * 1e-9
    share = rate * 1e12 / (132 * 4096 * clock * 1e6)
    return f"{rate:5.0f} TFLOP/s in a row at {clock:.0f} MHz, {power:.0f} W: the tensor cores {share:.0%} busy{'' if busy else ' (asked too late)'}"


def peers(q, k, v, causal):
    """Return the other implementations that there are, as functions."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def cudnn():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(q, k, v, is_causal=causal)

    fns = {"cudnn": cudnn}
    try:
        import fa3_fwd_interface as fa3

        q2, k2, v2 = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        fns["fa3"] = lambda: fa3.flash_attn_func(q2, k2, v2, causal=causal)
    except ImportError:
        pass
    return fns


def timed(fn, ms=60):
    import triton

    return triton.testing.do_bench(fn, warmup=ms, rep=ms, return_mode="median")


def inputs(d, s):
    b, h = 16384 // s, 2048 // d
    return tuple(torch.randn(b, h, s, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))


def warm(args):
    """Compile one variant: run at one shape."""
    name, d, causal = args.only.split(",")
    f, cfg = forward, None
    if name in EXPERIMENTS:
        f, cfg = variant(name), CONFIGS[int(d)]
    q, k, v = (t[:, :, :512] for t in inputs(int(d), 512))
    mask = M.causal() if causal == "True" else M.full()
    f(q, k, v, softmax_scale=0.1, mask=mask, config=cfg or subjects([name])[name][int(d)])
    synchronize()


def time_all(args):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    try:
        import fa3_fwd_interface as fa3
    except ImportError:
        fa3 = None
    names = args.subjects.split(",")
    todo = [x for x in SHAPES if (x[2] in CHOSEN or args.all) and (not args.dims or str(x[0]) in args.dims.split(","))]
    if args.quick:
        todo = [x for x in todo if x[2] in (512, 8192)]
    kinds = {(n, d, c) for n, table in subjects(names).items() for d, c, _ in todo if d in table}
    parts = [subprocess.Popen([sys.executable, __file__, "warm", "--only", ",".join(map(str, kind))]) for kind in kinds]
    for p in parts:
        p.wait()
    random.seed(0)
    rows = []
    for d, causal, s in todo:
        faulthandler.dump_traceback_later(60, exit=True)
        print(f"{d} {causal} {s} ...", file=sys.stderr, flush=True)
        q, k, v = inputs(d, s)
        mask = M.causal() if causal else M.full()
        fns = {}

        def cudnn():
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return sdpa(q, k, v, is_causal=causal)

        for n, table in subjects(names).items():
            if d in table:
                fns[n] = lambda c=table[d]: forward(q, k, v, softmax_scale=d**-0.5, mask=mask, config=c)
        fns["cudnn"] = cudnn
        if fa3:
            q2, k2, v2 = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            fns["fa3"] = lambda: fa3.flash_attn_func(q2, k2, v2, causal=causal)
        good, bad = cudnn().float(), {}
        for n in list(fns):
            if n in ("cudnn", "fa3"):
                continue
            try:
                o = fns[n]()[0].float()
                error = ((o - good).norm() / good.norm()).item()
                if not error < 5e-3:
                    bad[n] = f"{error:.1e}"
            except Exception as problem:
                bad[n] = f"{type(problem).__name__} {str(problem)[:200]}"
                del fns[n]
        times = {n: [] for n in fns}
        for _ in range(args.passes):
            for n in random.sample(list(fns), len(fns)):
                times[n].append(timed(fns[n], args.ms))
        flops = 4 * 16384 * s * 2048 * (0.5 if causal else 1)
        rate = {n: flops / statistics.median(t) * 1e-9 for n, t in times.items()}
        rows.append((d, causal, s, rate, bad))
    faulthandler.cancel_dump_traceback_later()
    columns = [*names, "cudnn", *(["fa3"] if fa3 else [])]
    print(f"{torch.cuda.get_device_name()}, TFLOP/s, median of {args.passes} shuffled passes; best of ours / best peer last")
    print("d    causal s      " + " ".join(f"{c:>7}" for c in columns) + "   ratio")
    ratios = []
    for d, causal, s, rate, bad in rows:
        ours = max((rate[n] for n in names if n in rate), default=0.0)
        peer = max(rate[n] for n in ("cudnn", "fa3") if n in rate)
        ratios.append(ours / peer if ours else math.nan)
        print(f"{d:<4} {causal!s:<6} {s:<6} " + " ".join(f"{rate.get(c, math.nan):7.0f}" for c in columns) + f"   {ratios[-1]:.3f} {bad or ''}")
    good = [r for r in ratios if r == r and r > 0]
    print(f"geometric mean of the best of ours over the best peer: {math.exp(statistics.mean(map(math.log, good))):.3f}, least {min(good):.3f}")
    for n in names:
        mine = [r[3][n] / max(r[3][x] for x in ("cudnn", "fa3") if x in r[3]) for r in rows if n in r[3]]
        if mine:
            print(f"  {n}: geometric mean {math.exp(statistics.mean(map(math.log, mine))):.3f} over {len(mine)} shapes, least {min(mine):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "time", "warm", "experiments"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", type=int)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--dims", default="")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--ms", type=int, default=40)
    parser.add_argument("--subjects", default="n2,n3")
    parser.add_argument("--variant", default="", help="check: this one of forward_variants2 instead of the product")
    parser.add_argument("--lengths", default="2048,16384")
    parser.add_argument("--no-clocks", action="store_true")
    parser.add_argument("--compile-seconds", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=95, help="begin no further shape after so many")
    options = parser.parse_args()
    {"check": check, "time": time_all, "warm": warm, "experiments": experiments}[options.what](options)
