"""Providers agree with each other, say what they cannot do, and do not pass the gate when they are wrong."""

import contextlib
import dataclasses
import functools
import sys
import types
from typing import Any

import pytest
import torch

from flashtile.bench_mark import correctness
from flashtile.bench_mark.correctness import Gate, varying
from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import (
    PROVIDERS,
    Inputs,
    Prepared,
    Provider,
    _flex_mask,
    deterministic_algorithms,
    naive_attention,
    select,
)

CPU = torch.device("cpu")
CASE = Case("fp32", 1, 2, 40, 16, True)
CASES = {
    "full": dataclasses.replace(CASE, causal=False),
    "causal": CASE,
    "grouped": Case("fp32", 2, 4, 40, 16, True, heads_kv=2),
    "window": dataclasses.replace(CASE, window=7),
    "grouped window": Case("fp32", 2, 2, 40, 16, True, heads_kv=1, window=7),
}
WORKS_HERE = [
    (name, label) for name, p in PROVIDERS.items() for label, case in CASES.items()
    if p.unsupported(case, CPU, "both") is None and not p.compiled
]  # fmt: skip


@functools.cache
def gate(label: str) -> tuple[Case, Inputs, Gate]:
    case = CASES[label]
    inputs = Inputs.random(case, CPU)
    return case, inputs, Gate(case, inputs)


@pytest.mark.parametrize(("name", "label"), WORKS_HERE)
def test_providers_agree(name, label, cpu_path):
    case, inputs, judge = gate(label)
    verdict = judge.judge(Prepared(PROVIDERS[name], case, inputs), backward=True)
    assert verdict.reason == ""
    assert verdict.errors.keys() == {"o", "dq", "dk", "dv"}


def test_ours_and_the_plain_ones_run_on_a_cpu():
    served = {name: {label for n, label in WORKS_HERE if n == name} for name in ("flashtile", "mock", "naive", "sdpa")}
    assert served["flashtile"] == set(CASES)
    assert served["mock"] == served["sdpa"] == {"full", "causal", "grouped"}
    assert served["naive"] == {"full", "causal", "window"}


def test_the_reference_is_that_of_autograd_in_fp64(monkeypatch):
    monkeypatch.setattr(correctness, "_ROWS", 16)  # several blocks of rows, the last one short
    q, do = torch.randn(2, 3, 40, 8, dtype=torch.float64)  # three heads that share one of k and v
    k, v = torch.randn(2, 40, 8, dtype=torch.float64)
    for causal, window in ((False, 0), (True, 0), (True, 7), (True, 17), (True, 50)):
        rule: Any = {"causal": causal, "window": window}
        expected, found = correctness.plain(q, k, v, do, **rule), correctness.reference(q, k, v, do, **rule)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
        for part in (correctness.plain, correctness.reference):
            rows = part(q[:, 20:33], k, v, do[:, 20:33], **rule, first=20)
            torch.testing.assert_close(rows["o"], expected["o"][:, 20:33], rtol=1e-12, atol=1e-12)


def test_a_window_is_that_of_a_boolean_mask():
    case, inputs, judge = gate("window")
    behind = torch.arange(40)[:, None] - torch.arange(40)
    seen = (behind >= 0) & (behind < 7)
    o = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=seen)
    torch.testing.assert_close(torch.stack([e["o"][0] for e in judge.expected]), o[0].double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(_flex_mask(case.window)(0, 0, torch.arange(40)[:, None], torch.arange(40)), seen)


@pytest.mark.parametrize("label", CASES)
def test_fa3_gets_the_window_that_it_counts_without_the_own_position(label, monkeypatch):
    case, inputs, _ = gate(label)

    def flash_attn_func(q, k, v, causal, window_size):
        assert window_size == ((case.window - 1, 0) if case.window else (-1, -1))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(case.group, 1) for t in (k, v))
        return naive_attention(q, k, v, causal, window_size[0] + 1).transpose(1, 2), None

    interface = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", interface)
    verdict = Gate(case, inputs, backward=False).judge(Prepared(PROVIDERS["fa3"], case, inputs), backward=False)
    assert verdict.reason == ""


def test_another_layout_is_read_back():
    case, inputs, judge = gate("causal")

    def attention(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return naive_attention(q, k, v, case.causal).transpose(1, 2)

    provider = Provider("other", "other", lambda case: attention, layout="bshd")
    assert judge.judge(Prepared(provider, case, inputs), backward=True).reason == ""


PLANTED = {
    "a scale": (lambda q, k, v: naive_attention(q * 1.01, k, v, True), "is off by"),
    "no mask": (lambda q, k, v: naive_attention(q, k, v, False), "o is off by"),
    "a row that is never written": (
        lambda q, k, v: torch.where(
            torch.arange(40)[:, None] == 39, torch.empty(40, 1).fill_(float("nan")), naive_attention(q, k, v, True)
        ),
        "o holds NaN",
    ),
    "a gradient": (lambda q, k, v: naive_attention(q, k, v.detach() + 0.5 * (v - v.detach()), True), "dv is off by"),
    "a shape": (lambda q, k, v: naive_attention(q, k, v, True)[:, :, :-1], "o has shape"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_the_gate_catches(mistake):
    attention, reason = PLANTED[mistake]
    inputs = Inputs.random(CASE, CPU)
    prepared = Prepared(Provider("planted", "planted", lambda case: attention), CASE, inputs)
    backward = mistake != "a shape"
    assert reason in Gate(CASE, inputs).judge(prepared, backward).reason


def test_long_cases_are_checked_on_some_heads():
    case = Case("fp32", 2, 8, 32, 8, False)
    heads = Gate(case, Inputs.random(case, CPU), most_scores=4 * 32**2).heads
    assert len(heads) == 4
    assert (heads[0], heads[-1]) == (0, 15)


def test_long_forward_passes_are_checked_on_some_rows():
    case = Case("fp32", 1, 4, 1000, 8, True, heads_kv=2, window=100)
    inputs = Inputs.random(case, CPU)
    part, whole = Gate(case, inputs, 4 * 512 * 1000, backward=False), Gate(case, inputs)
    assert part.heads == whole.heads == [0, 1]
    assert part.blocks == [slice(0, 256), slice(768, 1000)]
    for some, every in zip(part.expected, whole.expected, strict=True):
        assert some.keys() == {"o"}
        rows = torch.cat([every["o"][:, block] for block in part.blocks], dim=1)
        torch.testing.assert_close(some["o"], rows, rtol=1e-12, atol=1e-12)

    def spoils(row):
        def attention(q, k, v):
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            o = naive_attention(q, k, v, True, 100)
            o[:, -1, row] += 1e-3
            return o

        return Prepared(Provider("spoils", "spoils", lambda case: attention), case, inputs)

    assert part.judge(spoils(slice(0, 0)), backward=False).reason == ""
    assert "o is off by" in part.judge(spoils(999), backward=False).reason
    assert part.judge(spoils(500), backward=False).reason == ""  # what a sample does not see
    assert "o is off by" in whole.judge(spoils(500), backward=False).reason


def test_inputs_that_plain_attention_cannot_serve_set_no_limit():
    case = dataclasses.replace(CASE, dtype="fp16")
    with pytest.raises(OverflowError, match="plain attention in fp16 overflows"):
        Gate(case, Inputs.random(case, CPU, heavy=True))


def test_gradients_that_vary_are_found():
    def attention(q, k, v):
        q = q.view_as(q)
        if q.requires_grad:
            q.register_hook(lambda dq: dq + 1e-7 * torch.rand_like(dq))
        return naive_attention(q, k, v, True)

    inputs = Inputs.random(CASE, CPU)
    prepared = Prepared(Provider("varies", "varies", lambda case: attention), CASE, inputs)
    assert Gate(CASE, inputs).judge(prepared, backward=True).reason == ""
    assert varying(prepared) == "dq differ from run to run"
    assert varying(Prepared(PROVIDERS["sdpa"], CASE, inputs)) == ""


def test_deterministic_mode_ends_where_it_began():
    memory: Any = torch.utils.deterministic

    def state():
        return torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory

    before = state()
    with contextlib.suppress(KeyError), deterministic_algorithms():
        assert state() == (2, False)
        raise KeyError
    assert state() == before


def test_providers_with_deterministic_gradients_differ_in_what_they_declare(monkeypatch):
    asked = []
    monkeypatch.setattr("flashtile.attention.flash_attention", lambda *_, **options: asked.append(options))
    for provider in (PROVIDERS["flashtile"], PROVIDERS["flashtile"].with_deterministic_gradients()):
        provider.build(CASE)(*torch.zeros(3, 1))
    assert [options["deterministic"] for options in asked] == [False, True]
    with PROVIDERS["fa2"].with_deterministic_gradients().context():
        assert torch.get_deterministic_debug_mode() == 2


def test_heavy_inputs_have_a_few_large_channels():
    normal, heavy = (Inputs.random(CASES["grouped"], CPU, heavy=heavy) for heavy in (False, True))
    factors = [(getattr(heavy, name) / getattr(normal, name)).round() for name in ("q", "k", "v")]
    channels = [{*torch.nonzero((f == 100).all(dim=(0, 1, 2))).flatten().tolist()} for f in factors]
    assert len(channels[0]) == 4
    assert channels[0] == channels[1] == channels[2]
    assert all(int((f == 100).sum()) == 4 * f[..., 0].numel() for f in factors)
    assert torch.equal(heavy.do, normal.do)


@pytest.mark.parametrize(
    ("name", "case", "mode", "reason"),
    [
        ("fa2", CASE, "forward", "runs on cuda only"),
        ("mock", dataclasses.replace(CASE, seqlen=1 << 15), "forward", "only up to seqlen"),
        ("flashtile", dataclasses.replace(CASE, head_dim=512), "forward", "head_dim is at most 256"),
        ("naive", dataclasses.replace(CASE, seqlen=1 << 24), "forward", "GiB for score matrices"),
        ("naive", CASES["grouped"], "forward", "as many heads of k and v as of q"),
        ("sdpa", CASES["window"], "forward", "no sliding window"),
        ("sdpa", CASE, "deterministic", "no deterministic backward pass"),
    ],
)
def test_what_is_not_supported_has_a_reason(name, case, mode, reason):
    assert reason in PROVIDERS[name].unsupported(case, CPU, mode)


def test_a_forward_only_provider_says_so():
    provider = dataclasses.replace(PROVIDERS["naive"], backward=False)
    assert provider.unsupported(CASE, CPU, "forward") is None
    assert provider.unsupported(CASE, CPU, "backward") == "forward only"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown provider fa9"):
        select(("fa9",))
