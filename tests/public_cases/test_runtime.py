"""Compilers, several GPUs, streams, processes and memory."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flashtile import flash_attention, flash_attention_varlen
from flashtile.kernel import hopper
from tests.public_cases.common import HALF, cumulative, everywhere_and_interpreted, leaves, run
from tests.reference import Case

ROOT = Path(__file__).parents[2]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@everywhere_and_interpreted
def test_b43_compiled_results_have_the_strides_of_eager_ones(device, backend):
    """The fake kernel reported other strides than the real one, so that compiled code failed when it ran
    (Comfy-Org/ComfyUI#15044)."""
    torch._dynamo.reset()
    q, k, v, do = (torch.randn(2, 20, 12, 128, device=device).transpose(1, 2) for _ in range(4))
    want = run(q, k, v, do, is_causal=True, backend=backend)

    def call(q, k, v):
        return flash_attention(q, k, v, is_causal=True, return_lse=True, backend=backend)

    q, k, v = leaves(q, k, v)
    o, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    got = (o, lse, *torch.autograd.grad(o, (q, k, v), do))
    for name, ours, theirs in zip(want._fields, got, want, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), name
        assert torch.equal(ours, theirs), name


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("seqlen_q", [1, 130], ids=["decode", "prefill"])
def test_b46_tensors_on_a_gpu_that_is_not_the_current_one(seqlen_q):
    """Tensors on another GPU than the current one gave zeros or a launch error (Dao-AILab/flash-attention#54,
    linkedin/Liger-Kernel#1303)."""
    q, k, _, do, _ = Case(2, 4, 2, seqlen_q, 200, 64, dtype=HALF).tensors()
    results = []
    for device in ("cuda:0", "cuda:1"):
        ours = [t.to(device) for t in (q, k, torch.ones_like(k), do)]
        results.append([t.cpu() for t in run(*ours, is_causal=True)])
        assert torch.cuda.current_device() == 0
        packed_q, packed_k = (t.transpose(1, 2).flatten(0, 1) for t in ours[:2])
        cu_q, cu_k = cumulative([seqlen_q] * 2, device), cumulative([200] * 2, device)
        o = flash_attention_varlen(packed_q, packed_k, torch.ones_like(packed_k), cu_q, cu_k, is_causal=True)
        assert (o == 1).all()
        assert torch.cuda.current_device() == 0
    assert (results[1][0] == 1).all()
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
@two_gpus
def test_b47_the_stream_of_the_tensors_own_gpu():
    """The stream was looked up without a device: that of the default GPU (Dao-AILab/flash-attention#2356)."""
    q, k, v, do, _ = Case(1, 2, 2, 256, 256, 64, dtype=HALF).tensors(device="cuda:1")
    run(q, k, v, do)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        v.fill_(1.0)
        do.zero_()
        torch.cuda.set_device(0)
        assert torch.cuda.current_stream(1) == stream
        got = run(q, k, v, do)
    stream.synchronize()
    torch.testing.assert_close(got.o, torch.ones_like(got.o))
    assert all(torch.count_nonzero(t) == 0 for t in (got.dq, got.dk, got.dv))


def step(seqlen: int, packed: bool) -> float:
    """Run forward and backward once; return the seconds that it took."""
    q, k, v, do, _ = Case(1, 2, 2, seqlen, seqlen, 64, dtype=HALF).tensors(device="cuda")
    q, k, v = leaves(*(t[0].transpose(0, 1) for t in (q, k, v))) if packed else leaves(q, k, v)
    cu = cumulative([seqlen // 3, seqlen - seqlen // 3], "cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    if packed:
        o = flash_attention_varlen(q, k, v, cu, cu, max_seqlen_q=seqlen, max_seqlen_k=seqlen, is_causal=True)
        do = do[0].transpose(0, 1)
    else:
        o = flash_attention(q, k, v, is_causal=True)
    torch.autograd.grad(o, (q, k, v), do)
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_b49_new_lengths_compile_and_tune_nothing(packed, monkeypatch):
    """A value derived from the length in a tuning key tuned anew at every packed length
    (fla-org/flash-linear-attention#1147)."""
    from triton import knobs

    compiled = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **about: compiled.append(about["src"].name))
    lengths = [1000 + 33 * i for i in range(30)]
    counts, first = [], []
    for seqlen in lengths:
        first.append(step(seqlen, packed))
        counts.append(len(compiled))
    assert counts[-1] == counts[3], f"compiled after the first four lengths: {compiled[counts[3] :]}"
    again = sorted(step(seqlen, packed) for seqlen in lengths[4:])
    assert sorted(first[4:])[13] < 5 * again[13]


# How many numbers of its own a kind of problem has: Triton compiles anew for a multiple of 16, so twice for each.
NUMBERS = {"window": 2, "packed, window": 1, "chunked": 1, "padding": 1, "document": 1, "bias by key": 1}


# How many kernels there are, and the most that may come of them in every alignment that strides have.
@pytest.mark.parametrize(
    ("arch", "head_dim", "backend", "kernels", "most"),
    [("sm_90", 64, "triton", 3, 6), ("sm_80", 80, "triton", 3, 9), ("sm_90", 128, "hopper", 4, 4)],
)
def test_b49_lengths_and_options_come_in_few_kinds(arch, head_dim, backend, kernels, most):
    """The same, counted without a GPU and for numbers of masks and scores too (fla-org/flash-linear-attention#1147)."""
    pytest.importorskip("triton")
    if backend == "hopper" and (reason := hopper._other_triton()):
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.public_cases.count_compiles", arch, str(head_dim), backend]
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, counts in json.loads(done.stdout).items():
        assert counts[0] == kernels, name
        assert counts[-1] <= most * 2 ** NUMBERS.get(name, 0), f"{name}: {counts}"


AT_ONCE = """
import sys, time, torch
from flashtile import flash_attention
generator = torch.Generator().manual_seed(0)
q = torch.randn(1, 2, 130, 64, generator=generator).cuda().bfloat16().requires_grad_()
while time.time() < float(sys.argv[1]):
    pass
o = flash_attention(q, q, q, is_causal=True)
o.backward(torch.ones_like(o))
print(o.double().sum().item().hex(), q.grad.double().sum().item().hex())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_b50_processes_that_compile_into_one_cache(rounds, tmp_path):
    """Processes that compiled into one fresh cache together crashed on half-written files
    (triton-lang/triton#11512)."""
    answers = set()
    for i in range(rounds):
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / str(i))}
        command = [sys.executable, "-c", AT_ONCE, str(time.time() + 15)]
        running = [subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                   for _ in range(8)]  # fmt: skip
        for process in running:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-2000:]
            answers.add(out)
    assert len(answers) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b53_steps_keep_no_memory(compiled, packed):
    """A compiled backward pass kept its results alive after the first step (pytorch/pytorch#177869,
    pytorch/pytorch#165407)."""
    torch._dynamo.reset()
    cu = cumulative([100, 156], "cuda")

    def model(projection, x):
        q, k, v = projection(x).view(256, 3, 2, 32).unbind(1)
        if packed:
            return flash_attention_varlen(q, k, v, cu, cu, is_causal=True)
        return flash_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True)

    call = torch.compile(model, fullgraph=True) if compiled else model

    def steps(count):
        projection = torch.nn.Linear(64, 3 * 64, device="cuda", dtype=HALF)
        x = torch.randn(256, 64, device="cuda", dtype=HALF)
        used = []
        for _ in range(count):
            call(projection, x).float().square().mean().backward()
            projection.zero_grad(set_to_none=True)
            used.append(torch.cuda.memory_allocated())
        return used

    steps(3)  # workspaces of libraries are allocated once
    gc.collect()
    baseline = torch.cuda.memory_allocated()
    used = steps(50)
    assert abs(used[49] - used[2]) <= 2**20
    gc.collect()
    assert abs(torch.cuda.memory_allocated() - baseline) <= 2**20
