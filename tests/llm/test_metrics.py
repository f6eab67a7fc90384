"""The FLOP count against torch's counter, the table of peaks, and a log that survives kills."""

import json
from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from flashtile.llm import History, ModelConfig, TransformerLM, cross_entropy
from flashtile.llm.data import windows
from flashtile.llm.metrics import MetricLog, flops_per_token, peak_flops, read_history


@pytest.mark.parametrize("num_heads_kv", [None, 1])
def test_flops_are_those_that_torch_counts(num_heads_kv, dataset):
    config = ModelConfig(300, 64, 32, 2, 4, num_heads_kv, attention="naive")
    model = TransformerLM.from_config(config)
    x, y = windows(dataset.train, [0, 64, 128], 64)  # pyright: ignore[reportArgumentType]
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x), y).backward()
    # The dense module computes the half of the scores that causality discards too.
    discarded = 6 * config.num_layers * config.context_length * config.d_model
    assert counter.get_total_flops() == (flops_per_token(config) + discarded) * x.numel()


def test_mfu_of_gpt2_is_about_six_flops_per_parameter():
    config = ModelConfig(50_304, 1024, 768, 12, 12, tie_embeddings=True)
    parameters = TransformerLM.from_config(config, device="meta").num_parameters()
    assert 1.0 < flops_per_token(config) / (6 * parameters) < 1.1
    longer = replace(config, context_length=2048)
    assert flops_per_token(longer) - flops_per_token(config) == 6 * 12 * 1024 * 768


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("cpu", None),
        ("Some GPU", None),
    ],
)
def test_peaks_are_found_by_name(name, peak):
    assert peak_flops(name) == peak


def test_a_log_goes_on_where_the_checkpoint_was(tmp_path):
    log = MetricLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1 / step})
    log.write({"step": 3, "val_loss": 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    assert read_history(tmp_path).losses == [1, 1 / 2, 1 / 3]
    log = MetricLog(tmp_path, resume_step=2)
    assert log.history.losses == [1, 1 / 2]
    assert log.history.val == []
    log.write({"step": 3, "loss": 0.25})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1), (2, 1 / 2), (3, 0.25)]


def test_a_fresh_log_forgets_the_old_one(tmp_path):
    log = MetricLog(tmp_path, tensorboard=True)
    log.write({"step": 1, "loss": 2.0})
    log.close()
    MetricLog(tmp_path).close()
    assert read_history(tmp_path) == History()
    assert not (tmp_path / "tensorboard").exists()
    assert read_history(tmp_path / "nowhere") == History()


def test_medians_skip_the_first_half():
    history = History(train=[{"step": n, "tokens_per_second": speed} for n, speed in enumerate([1, 1, 1, 9, 7, 8])])
    assert history.median("tokens_per_second") == 8
    assert history.median("mfu") is None
