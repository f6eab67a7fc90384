"""The only clock of the benchmarks, and the formulas for the work that attention has to do.

Rules (docs/benchmarks.md has the reasons):
* device work is timed by CUDA events; the L2 cache is overwritten before every sample, so that no provider reads its
  inputs from the cache; on a CPU the host clock is used;
* providers take turns in shuffled order over several passes, because a chip's clock drifts by up to 10 % in a run;
* the number reported is the median of all samples; the spread is that of the passes' medians.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

DETERMINISTIC = "deterministic"  # the backward pass with gradients that are the same bit for bit in every run
MODES = ("forward", "backward", "both", DETERMINISTIC)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_FORWARD_MATMULS, _BACKWARD_MATMULS = 2, 5  # q k^T, p v; and q k^T again, p^T do, do v^T, ds k, ds^T q


@dataclass(frozen=True)
class Case:
    """One shape to be measured: self-attention on ``(batch, heads, seqlen, head_dim)``.

    k and v have ``heads_kv`` heads (0: as many as q). With a window a query sees that many keys up to its own position.
    """

    dtype: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    heads_kv: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.heads_kv and self.heads % self.heads_kv:
            raise ValueError(f"heads is {self.heads}, which is no multiple of heads_kv, {self.heads_kv}")
        if self.window and not self.causal:
            raise ValueError(f"a window of {self.window} keys is causal, but causal is False")

    @property
    def group(self) -> int:
        """How many heads of q share one of k and v."""
        return self.heads // (self.heads_kv or self.heads)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seqlen, self.head_dim

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads // self.group, self.seqlen, self.head_dim

    @property
    def visible_pairs(self) -> float:
        """Pairs of a query and a key that it sees, per head: all, half of them when causal, with a window exactly."""
        if self.window:
            window = min(self.window, self.seqlen)
            return window * self.seqlen - window * (window - 1) / 2  # the first rows see fewer
        return self.seqlen**2 * (0.5 if self.causal else 1.0)

    def __str__(self) -> str:
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.group > 1 else "")
        return f"{self.dtype} b{self.batch} {heads} s{self.seqlen} d{self.head_dim} {mask}"


def attention_flops(case: Case, mode: str) -> float:
    """Count floating-point operations: forward ``4 b h s s d``, halved when causal; backward 2.5 times that.

    With a window ``s s`` is the number of visible pairs.

    Only matrix products count, two operations per multiply-add; the backward pass recomputes ``q k^T`` and so has five
    products to the forward pass's two. This is the convention of the FlashAttention papers.
    """
    matmuls = {
        "forward": _FORWARD_MATMULS,
        "backward": _BACKWARD_MATMULS,
        "both": _FORWARD_MATMULS + _BACKWARD_MATMULS,
        DETERMINISTIC: _BACKWARD_MATMULS,
    }[mode]
    return matmuls * 2.0 * case.batch * case.heads * case.visible_pairs * case.head_dim


def attention_bytes(case: Case, mode: str) -> int:
    """Count the fewest bytes of device memory to be moved: every input read once, every output written once."""
    q, kv = (math.prod(shape) * case.torch_dtype.itemsize for shape in (case.shape, case.shape_kv))
    lse = 4 * case.batch * case.heads * case.seqlen
    forward = 2 * q + 2 * kv + lse  # q, k, v -> o, lse
    backward = 4 * q + 4 * kv + lse  # q, k, v, o, do, lse -> dq, dk, dv
    return {"forward": forward, "backward": backward, "both": forward + backward, DETERMINISTIC: backward}[mode]


def attention_extra_bytes(case: Case, mode: str) -> int:
    """Return the memory that O(n) attention needs above inputs and outputs: one fp32 per row.

    Forward: the log-sum-exp. Backward: ``delta = rowsum(do * o)``. Both: o, lse and delta.
    """
    row = 4 * case.batch * case.heads * case.seqlen
    output = case.batch * case.heads * case.seqlen * case.head_dim * case.torch_dtype.itemsize
    return {"forward": row, "backward": row, "both": output + 2 * row, DETERMINISTIC: row}[mode]


class Timing(NamedTuple):
    """What the clock saw of one call, in milliseconds; ``spread`` is (max - min) / median of the passes' medians."""

    median_ms: float
    min_ms: float
    spread: float
    samples: int


@dataclass
class Timed:
    """A call to be timed; ``context`` is entered once around each run of samples, outside the clock."""

    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass
class Clock:
    """Times several calls against each other, taking turns.

    ``turn`` is entered around each pass: a lock, where several processes share the device.
    """

    device: torch.device
    passes: int = 5
    ms_per_pass: float = 30.0
    max_samples: int = 200
    seed: int = 0
    turn: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    _flush: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ValueError(f"passes is {self.passes}; at least 1 is needed")
        if self.device.type == "cuda":
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self._flush = torch.ones(max(2 * l2, 64 << 20) // 4, dtype=torch.int32, device=self.device)
        self._random = random.Random(self.seed)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def samples(self, timed: Timed, count: int) -> list[float]:
        """Return the milliseconds of ``count`` calls, one by one."""
        call = timed.call
        with timed.context():
            if self._flush is None:
                times = []
                for _ in range(count):
                    start = time.perf_counter()
                    call()
                    times.append((time.perf_counter() - start) * 1e3)
                return times
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for start, end in events:
                self._flush.zero_()
                start.record()
                call()
                end.record()
            self.synchronize()
            return [start.elapsed_time(end) for start, end in events]

    def time(self, calls: Mapping[str, Timed]) -> tuple[dict[str, Timing], dict[str, str]]:
        """Time the calls and return ``(timings, failures)``, a failure being a name with its reason."""
        failures: dict[str, str] = {}
        counts: dict[str, int] = {}
        with self.turn():
            for name, timed in calls.items():
                first, reason = attempt(lambda timed=timed: self._pilot(timed))
                if first is None:
                    failures[name] = reason
                else:
                    counts[name] = max(1, min(self.max_samples, round(self.ms_per_pass / max(first, 1e-4))))
        seen: dict[str, list[list[float]]] = {name: [] for name in counts}
        for _ in range(self.passes):
            with self.turn():
                for name in self._random.sample(sorted(counts), len(counts)):
                    if name in failures:
                        continue
                    # A turn's first samples run at the clock that the last turn left: not kept, if calls are short.
                    drop = 2 if counts[name] > 2 else 0
                    got, reason = attempt(lambda name=name, n=drop: self.samples(calls[name], counts[name] + n)[n:])
                    if got is None:
                        failures[name] = reason
                    else:
                        seen[name].append(got)
        return {name: _timing(passes) for name, passes in seen.items() if name not in failures}, failures

    def _pilot(self, timed: Timed) -> float:
        first = self.samples(timed, 1)[0]
        return first if first > 20 * self.ms_per_pass else min(self.samples(timed, 3))


def _timing(passes: Sequence[Sequence[float]]) -> Timing:
    every = [sample for samples in passes for sample in samples]
    medians = [statistics.median(samples) for samples in passes]
    median = statistics.median(every)
    return Timing(median, min(every), (max(medians) - min(medians)) / median, len(every))


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return ``(call(), "")``, or ``(None, reason)`` if it raised: a provider's failure is a row of the table.

    Every Exception counts, since a foreign kernel may raise any; KeyboardInterrupt passes through.
    """
    try:
        return call(), ""
    except Exception as error:
        # One line, without folders: a result file says nothing about somebody's machine.
        text = re.sub(r"(?<![\w:/])/(?:[^\s/]+/)+", "", " ".join(str(error).split()))
        reason = f"{type(error).__name__}: {text[:300]}"
    # The traceback is gone by now, and with it the tensors that its frames held.
    with contextlib.suppress(RuntimeError):  # after an illegal access every call fails, this one too
        release()
    return None, reason


def release() -> None:
    """Give cached device memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_extra_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak memory of a call above what was there before it and above what it returns, in bytes."""
    if device.type != "cuda":
        return _peak_extra_bytes_cpu(call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return max(0, peak - tensor_bytes(result))


def _peak_extra_bytes_cpu(call: Callable[[], Any]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
        returned = tensor_bytes(result)
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return max(0, peak - returned)


def tensor_bytes(result: Any) -> int:
    """Return the bytes of a tensor, or of the tensors in a tuple or list."""
    if isinstance(result, torch.Tensor):
        return result.numel() * result.element_size()
    if isinstance(result, (tuple, list)):
        return sum(tensor_bytes(item) for item in result)
    return 0


def matmul_tflops(clock: Clock, dtype: torch.dtype = torch.bfloat16, n: int | None = None) -> float:
    """Measure the rate of a square matrix product on random data: the ceiling for this device, now."""
    n = n or (8192 if clock.device.type == "cuda" else 512)
    a, b = (torch.randn(n, n, device=clock.device, dtype=dtype) for _ in range(2))
    timings, failures = clock.time({"matmul": Timed(lambda: a @ b)})
    if failures:
        raise RuntimeError(f"the {n} x {n} matrix product failed: {failures['matmul']}")
    return 2.0 * n**3 / timings["matmul"].median_ms * 1e-9


def copy_gb_per_s(clock: Clock) -> float:
    """Measure the rate of a large copy, bytes read plus bytes written, in GB/s."""
    count = (1 << 30) if clock.device.type == "cuda" else (1 << 24)
    source = torch.ones(count // 4, device=clock.device)
    target = torch.empty_like(source)
    timings, failures = clock.time({"copy": Timed(lambda: target.copy_(source))})
    if failures:
        raise RuntimeError(f"the copy of {count} bytes failed: {failures['copy']}")
    return 2.0 * count / timings["copy"].median_ms * 1e-6


def host_microseconds(call: Callable[[], Any], device: torch.device, calls: int = 500, passes: int = 5) -> float:
    """Return the host's microseconds per call: the median over passes of back-to-back calls, one wait at the end.

    Meaningful only where the device's own time is the shorter one, so give it a tiny problem.
    """
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for _ in range(min(10, calls)):
        call()
    synchronize()
    per_call = []
    for _ in range(passes):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        per_call.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(per_call)


def cuda_graph_of(call: Callable[[], Any], warm_ups: int = 3) -> torch.cuda.CUDAGraph:
    """Capture a call into a CUDA graph, after warm-up on a side stream as PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
