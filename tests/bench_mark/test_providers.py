"""Providers agree with each other, say what they cannot do, and do not pass the gate when they are wrong."""

import dataclasses

import pytest
import torch

from flashtile.bench_mark import correctness
from flashtile.bench_mark.correctness import Gate
from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import PROVIDERS, Inputs, Prepared, Provider, naive_attention, select

CPU = torch.device("cpu")
CASE = Case("fp32", 1, 2, 40, 16, True)
WORKS_HERE = [
    name for name, p in PROVIDERS.items() if p.unsupported(CASE, CPU, "both") is None and not p.compiled
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["full", "causal"])
def gate(request) -> tuple[Case, Inputs, Gate]:
    case = dataclasses.replace(CASE, causal=request.param)
    inputs = Inputs.random(case, CPU)
    return case, inputs, Gate(case, inputs)


@pytest.mark.parametrize("name", WORKS_HERE)
def test_providers_agree(name, gate):
    case, inputs, judge = gate
    verdict = judge.judge(Prepared(PROVIDERS[name], case, inputs), backward=True)
    assert verdict.reason == ""
    assert verdict.errors.keys() == {"o", "dq", "dk", "dv"}


def test_ours_and_the_plain_ones_run_on_a_cpu():
    assert {"flashtile", "mock", "naive", "sdpa"} <= set(WORKS_HERE)


def test_the_reference_is_that_of_autograd_in_fp64(monkeypatch):
    monkeypatch.setattr(correctness, "_ROWS", 16)  # several blocks of rows, the last one short
    q, k, v, do = (torch.randn(40, 8, dtype=torch.float64) for _ in range(4))
    for causal in (False, True):
        expected, found = correctness.plain(q, k, v, do, causal), correctness.reference(q, k, v, do, causal)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_another_layout_is_read_back(gate):
    case, inputs, judge = gate

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


@pytest.mark.parametrize(
    ("name", "case", "mode", "reason"),
    [
        ("fa2", CASE, "forward", "runs on cuda only"),
        ("mock", dataclasses.replace(CASE, seqlen=1 << 15), "forward", "only up to seqlen"),
        ("flashtile", dataclasses.replace(CASE, head_dim=512), "forward", "head_dim is at most 256"),
        ("naive", dataclasses.replace(CASE, seqlen=1 << 24), "forward", "GiB for score matrices"),
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
