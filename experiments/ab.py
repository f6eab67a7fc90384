import json, os, subprocess, sys
runs = {"old": [], "new": []}
for i in range(3):
    for name, path in (("old", "experiments/old/src"), ("new", "src"))[:: 1 if i % 2 == 0 else -1]:
        env = dict(os.environ, PYTHONPATH=f"{path}")
        done = subprocess.run([sys.executable, "experiments/ab_time.py", "triton"], env=env, capture_output=True, text=True)
        if done.returncode: print(name, done.stderr[-1500:]); continue
        runs[name].append(json.loads(done.stdout.splitlines()[-1]))
med = lambda xs: sorted(xs)[len(xs)//2]
for key in runs["old"][0]:
    a, b = (med([r[key] for r in runs[n]]) for n in ("old", "new"))
    print(f"{key:24s} before {a:7.3f} ms  now {b:7.3f} ms  ratio {b/a:.3f}")
json.dump(runs, open(os.path.join(os.environ.get("OUT", "."), "ab.json"), "w"))
