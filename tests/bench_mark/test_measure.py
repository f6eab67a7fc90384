"""The formulas agree with a counter, and the clock does what it says."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashtile.bench_mark import measure
from flashtile.bench_mark.measure import Case, Clock, Timed
from flashtile.bench_mark.providers import naive_attention

CPU = torch.device("cpu")


def case(**changes) -> Case:
    return Case(**({"dtype": "fp32", "batch": 2, "heads": 3, "seqlen": 32, "head_dim": 8, "causal": False} | changes))


def test_flops_agree_with_the_counter():
    q, k, v = (torch.randn(case().shape, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as forward:
        o = naive_attention(q, k, v, False)
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    assert forward.get_total_flops() == measure.attention_flops(case(), "forward")
    # Plain PyTorch keeps p, so it saves the fifth product, the second q k^T.
    assert backward.get_total_flops() * 5 / 4 == measure.attention_flops(case(), "backward")


def test_flops_of_modes():
    full, causal = case(), case(causal=True)
    assert measure.attention_flops(full, "backward") == 2.5 * measure.attention_flops(full, "forward")
    assert measure.attention_flops(full, "both") == 3.5 * measure.attention_flops(full, "forward")
    for mode in measure.MODES:
        assert measure.attention_flops(full, mode) == 2 * measure.attention_flops(causal, mode)


@pytest.mark.parametrize("window", [1, 5, 32, 40])
def test_flops_of_a_window_are_those_of_its_visible_pairs(window):
    behind = torch.arange(32)[:, None] - torch.arange(32)
    pairs = int(((behind >= 0) & (behind < window)).sum())
    windowed = case(causal=True, window=window)
    assert measure.attention_flops(windowed, "forward") == measure.attention_flops(case(), "forward") * pairs / 32**2
    assert measure.attention_bytes(windowed, "forward") == measure.attention_bytes(case(), "forward")


def test_grouped_heads_cost_less_memory_and_no_less_work():
    grouped, tensor, row = case(heads=6, heads_kv=2), 2 * 32 * 8 * 4, 2 * 6 * 32 * 4
    assert (grouped.group, grouped.shape_kv) == (3, (2, 2, 32, 8))
    assert measure.attention_flops(grouped, "both") == measure.attention_flops(case(heads=6), "both")
    assert measure.attention_bytes(grouped, "forward") == (6 + 2 + 2 + 6) * tensor + row
    assert measure.attention_bytes(grouped, "deterministic") == (4 * 6 + 4 * 2) * tensor + row


def test_a_case_says_what_it_is():
    assert str(case(heads=6, heads_kv=2, causal=True, window=4)) == "fp32 b2 h6/2 s32 d8 window 4"
    with pytest.raises(ValueError, match="no multiple of heads_kv, 2"):
        case(heads_kv=2)
    with pytest.raises(ValueError, match="causal is False"):
        case(window=4)


def test_bytes_are_those_of_the_tensors():
    tensor, row = 2 * 3 * 32 * 8 * 4, 2 * 3 * 32 * 4
    assert measure.attention_bytes(case(), "forward") == 4 * tensor + row
    assert measure.attention_bytes(case(), "backward") == 8 * tensor + row
    assert measure.attention_extra_bytes(case(), "backward") == row


def test_peak_memory_counts_what_lies_between():
    x = torch.randn(256, 256)
    extra = measure.peak_extra_bytes(lambda: (x + 1) * 2, CPU)
    assert x.nbytes <= extra < 1.1 * x.nbytes


def test_clock_takes_turns_and_keeps_failures_apart():
    order = []

    def fails():
        raise ValueError("no such\n  kernel in /some/where/file.py: 3 / 4")

    clock = Clock(CPU, passes=8, ms_per_pass=0.001, seed=3)
    calls = {name: Timed(lambda name=name: order.append(name)) for name in "ab"} | {"c": Timed(fails)}
    timings, failures = clock.time(calls)
    assert failures == {"c": "ValueError: no such kernel in file.py: 3 / 4"}
    assert timings.keys() == {"a", "b"}
    for timing in timings.values():
        assert 0 < timing.min_ms <= timing.median_ms
        assert timing.samples >= 8
    turns = [name for name, _ in itertools.groupby(order)]
    assert len(turns) < 2 * (1 + 8)  # shuffled: some turn ends a pass and begins the next one too


def test_the_clock_of_a_gpu(monkeypatch):
    """The path of CUDA events, on events that count the calls between them."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(calls)

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(CPU, passes=2, ms_per_pass=3.0, _flush=torch.ones(4))
    timings, failures = clock.time({"a": Timed(lambda: calls.append("a"))})
    assert not failures
    assert timings["a"] == measure.Timing(median_ms=1.0, min_ms=1.0, spread=0.0, samples=6)


def test_an_interrupt_is_no_failure():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.attempt(interrupted)


def test_rates_and_host_time_are_positive():
    clock = Clock(CPU, passes=1, ms_per_pass=1)
    assert measure.matmul_tflops(clock, torch.float32, n=64) > 0
    assert measure.copy_gb_per_s(clock) > 0
    assert measure.host_microseconds(lambda: None, CPU, calls=10, passes=2) > 0


def test_a_clock_needs_a_pass():
    with pytest.raises(ValueError, match="passes is 0"):
        Clock(CPU, passes=0)
