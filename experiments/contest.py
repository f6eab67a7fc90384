"""Variants of the Hopper forward kernel against one another and the peers: a process each, passes in turn.

PYTHONPATH=src:.:.gpu python3 experiments/contest.py --suite '{"64": "base unseen", "128": "base quick"}' --lengths 512,2048,16384 --out FILE
Compiles and checks (nine problems each) in all processes at once, some 25 s; then the device goes round.
"""
import argparse, fcntl, json, math, os, statistics, subprocess, sys, time, traceback
import torch
import hopper_forward as H
from finals import timed
from flashtile import mask as M


def worker(a):
    name, d = a.name, a.d
    torch.manual_seed(0)
    bad, fns = "", {}
    try:
        if name not in ("cudnn", "fa3"):
            for causal in (True, False):
                if complaints := H.check_variant((name, d, causal)):
                    bad += f"causal={causal}: {complaints[:300]} "
            fns = dict(zip(("function", "config"), H.subject(name, d)))
    except Exception:
        bad = traceback.format_exc(limit=-2)[-400:]
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    lengths = [int(s) for s in a.lengths.split(",")]
    inputs = {s: H.inputs(d, s) for s in lengths} if not bad else {}
    open(f"{a.folder}/ready_{a.number}", "w").close()
    deadline = time.time() + a.wait
    while time.time() < deadline and sum(f.startswith("ready") for f in os.listdir(a.folder)) < a.count:
        time.sleep(0.1)
    if bad:
        print(json.dumps(dict(name=name, d=d, bad=bad)))
        return
    times = {}
    with open(f"{a.folder}/lock", "a") as lock:
        for _ in range(a.passes):
            for s in lengths:
                for causal in (True, False):
                    q, k, v = inputs[s]
                    if name in ("cudnn", "fa3"):
                        fn = H.peers(q, k, v, causal)[name]
                    else:
                        mask = M.causal() if causal else M.full()
                        fn = lambda: fns["function"](q, k, v, softmax_scale=d**-0.5, mask=mask, config=fns["config"])
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    times.setdefault(f"{s},{int(causal)}", []).append(timed(fn, a.ms))
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    time.sleep(0.002)
    print(json.dumps(dict(name=name, d=d, times=times)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--name", default=""); p.add_argument("--d", type=int); p.add_argument("--number"); p.add_argument("--folder"); p.add_argument("--count", type=int)
    p.add_argument("--lengths", default="512,2048,16384"); p.add_argument("--passes", type=int, default=5); p.add_argument("--ms", type=float, default=10)
    p.add_argument("--wait", type=float, default=75); p.add_argument("--suite", default=""); p.add_argument("--out", default="")
    a = p.parse_args()
    if a.name:
        return worker(a)
    import tempfile
    folder, start = tempfile.mkdtemp(), time.monotonic()
    suite = {int(d): ["cudnn", "fa3", *n.split()] for d, n in json.loads(a.suite).items()}
    jobs = [(n, d) for d in suite for n in suite[d]]
    for n, d in jobs:
        if n not in ("cudnn", "fa3"): H.subject(n, d, only_write=True)
    procs = [subprocess.Popen([sys.executable, __file__, "--name", n, "--d", str(d), "--number", str(i), "--folder", folder, "--count", str(len(jobs)), "--lengths", a.lengths,
              "--passes", str(a.passes), "--ms", str(a.ms), "--wait", str(a.wait)], stdout=subprocess.PIPE, text=True) for i, (n, d) in enumerate(jobs)]
    rows = []
    for job, q in zip(jobs, procs):
        out, _ = q.communicate()
        rows += [json.loads(l) for l in out.splitlines() if l.startswith("{")] or [dict(name=job[0], d=job[1], bad=f"exit {q.returncode}")]
    print(f"{len(jobs)} contestants in {time.monotonic() - start:.0f} s")
    if a.out: json.dump(rows, open(a.out, "w"))
    for d in suite:
        rate = {}
        for r in rows:
            if r["d"] != d: continue
            if "bad" in r: print("BAD", d, r["name"], r["bad"][:300]); continue
            rate[r["name"]] = {tuple(map(int, key.split(","))): 4 * 16384 * int(key.split(",")[0]) * 2048 * (0.5 if key.endswith("1") else 1) / statistics.median(t) * 1e-9 for key, t in r["times"].items()}
        shapes = sorted(next(iter(rate.values()), {}), key=lambda x: (x[1], x[0]))
        print(f"d={d:<30}" + " ".join(f"{'causal' if c else 'full':>6}{s:>6}" for s, c in shapes) + "   mean over base; over best peer: mean, least")
        for n, mine in rate.items():
            base = [mine[x] / rate["base"][x] for x in shapes] if "base" in rate else [math.nan]
            best = [mine[x] / max(rate[q][x] for q in ("cudnn", "fa3") if q in rate) for x in shapes]
            print(f"{n:<32}" + " ".join(f"{mine[x]:12.0f}" for x in shapes) + f"   {statistics.geometric_mean(base):.3f} {statistics.geometric_mean(best):.3f} {min(best):.3f}", flush=True)


if __name__ == "__main__":
    main()
