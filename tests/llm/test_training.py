"""The loop learns, weighs every token alike, resumes bit for bit after a kill, and reports what it does."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from rich.console import Console

from flashtile.llm import TransformerLM, cross_entropy, load_model, prepare_data, train
from flashtile.llm.functional import IGNORE_INDEX
from flashtile.llm.metrics import read_history
from flashtile.llm.training import accumulate_gradients, catch_interrupt, evaluate, resolve_device
from tests.llm.conftest import QUICK, TINY


def rows(history):
    """What must be the same in every run: not the speeds."""
    return [{k: row[k] for k in ("step", "loss", "lr", "grad_norm")} for row in history.train], history.val


def gradients(model):
    taken = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return taken


def test_accumulation_weighs_every_token_equally():
    model = TransformerLM.from_config(replace(TINY, context_length=110, attention="sdpa"))
    x, y = torch.randint(300, (2, 1, 110))
    few, many = y.clone(), y.clone()
    few[:, 10:] = IGNORE_INDEX
    many[:, :10] = IGNORE_INDEX
    loss = accumulate_gradients(model, [(x, few), (x, many)])  # 10 and 100 trained tokens
    accumulated = gradients(model)
    whole = cross_entropy(model(x), y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), atol=1e-6, rtol=1e-6)
    for a, b in zip(accumulated, gradients(model), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    mean_of_means = (cross_entropy(model(x), few) + cross_entropy(model(x), many)) / 2
    mean_of_means.backward()
    assert max(float((a - b).abs().max()) for a, b in zip(accumulated, gradients(model), strict=True)) > 1e-3


def test_each_trained_token_gets_one_part_of_the_gradient():
    class Table(torch.nn.Module):  # logits are parameters, so their gradients are the tokens' weights
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.zeros(2, 100, 2))

        def forward(self, index):
            return self.logits[index]

    table = Table()
    batches = []
    for index, trained in enumerate((10, 100)):
        targets = torch.full((100,), IGNORE_INDEX)
        targets[:trained] = 0
        batches.append((torch.tensor(index), targets))
    accumulate_gradients(table, batches)
    assert table.logits.grad is not None
    weights = -2 * table.logits.grad[..., 0]
    torch.testing.assert_close(weights[0, :10], torch.full((10,), 1 / 110))
    torch.testing.assert_close(weights[1], torch.full((100,), 1 / 110))
    assert weights[0, 10:].eq(0).all()


def test_accumulating_nothing_is_refused():
    with pytest.raises((ValueError, RuntimeError)):
        accumulate_gradients(TransformerLM.from_config(TINY), [])


def test_a_batch_in_pieces_trains_like_a_whole_one(dataset, quiet, tmp_path):
    whole = train(TINY, QUICK, tmp_path / "a", data=dataset, console=quiet)
    pieces = train(TINY, replace(QUICK, batch_size=1, grad_accumulation=4), tmp_path / "b", data=dataset, console=quiet)
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-4)


def test_learns_and_leaves_a_model(dataset, quiet, tmp_path):
    config = replace(QUICK, steps=60, tensorboard=True)
    history = train(TINY, config, tmp_path, data=dataset, console=quiet)
    assert len(history.losses) == 60
    assert not history.interrupted
    assert sum(history.losses[-5:]) / 5 < 0.5 * history.losses[0]
    assert history.val_losses[-1] < 0.5 * history.losses[0]
    assert history.val[-1]["val_perplexity"] == pytest.approx(math.exp(history.val_losses[-1]))
    assert [row["step"] for row in history.val] == [*range(4, 60, 4), 60]
    assert (history.median("tokens_per_second") or 0) > 0
    assert history.median("mfu") is None  # a CPU has no entry in the table of peaks
    assert rows(read_history(tmp_path)) == rows(history)
    model, tokenizer = load_model(tmp_path / "model")
    assert tokenizer.to_json() == dataset.tokenizer.to_json()
    assert evaluate(model, dataset.val, 4, 4) == history.val_losses[-1]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(dataset, quiet, tmp_path):
    first, second, other = (
        train(TINY, replace(QUICK, seed=seed), tmp_path / str(n), data=dataset, console=quiet)
        for n, seed in enumerate((0, 0, 1))
    )
    assert rows(first) == rows(second)
    assert first.losses[0] != other.losses[0]


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_attention_settings_learn_alike(attention, dataset, quiet, tmp_path):
    flash = train(TINY, QUICK, tmp_path / "flash", data=dataset, console=quiet)
    other = train(replace(TINY, attention=attention), QUICK, tmp_path / "other", data=dataset, console=quiet)
    assert other.losses == pytest.approx(flash.losses, rel=1e-4)


def test_validation_does_not_disturb_training(dataset, quiet, tmp_path):
    often = train(TINY, replace(QUICK, eval_interval=1), tmp_path / "a", data=dataset, console=quiet)
    rarely = train(TINY, replace(QUICK, eval_interval=99), tmp_path / "b", data=dataset, console=quiet)
    assert rows(often)[0] == rows(rarely)[0]


def test_activation_checkpointing_changes_no_loss(dataset, quiet, tmp_path):
    plain = train(TINY, QUICK, tmp_path / "a", data=dataset, console=quiet)
    config = replace(QUICK, activation_checkpointing=True)
    assert rows(train(TINY, config, tmp_path / "b", data=dataset, console=quiet)) == rows(plain)


def test_bfloat16_autocast_trains_nearly_the_same(dataset, quiet, tmp_path):
    plain = train(TINY, QUICK, tmp_path / "a", data=dataset, console=quiet)
    half = train(TINY, replace(QUICK, dtype="bfloat16"), tmp_path / "b", data=dataset, console=quiet)
    assert half.losses != plain.losses
    assert half.losses == pytest.approx(plain.losses, rel=0.02)


KILLED = """
import os, signal, sys, torch
from rich.console import Console
from flashtile.llm import prepare_data, train
from flashtile.llm.training import Trainer
from tests.llm.conftest import QUICK, TINY

torch.set_num_threads(int(sys.argv[3]))
step = Trainer.train_step
def train_step(self):
    step(self)
    if self.step == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
Trainer.train_step = train_step
train(TINY, QUICK, sys.argv[1], data=sys.argv[2], console=Console(quiet=True))
"""


def test_a_killed_run_resumes_bit_for_bit(corpus, quiet, tmp_path):
    straight = train(TINY, QUICK, tmp_path / "straight", data=corpus, console=quiet)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-c", KILLED, tmp_path / "killed", corpus, threads, "5"]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    lost = read_history(tmp_path / "killed")
    assert lost.train[-1]["step"] == 4  # the log is ahead of the checkpoint of step 3
    (tmp_path / "killed" / ".checkpoint.pt.1.tmp").write_bytes(b"half a checkpoint")
    torch.manual_seed(99)  # nothing may come from the resuming process's own generator
    resumed = train(TINY, QUICK, tmp_path / "killed", data=corpus, resume=True, console=quiet)
    assert rows(resumed) == rows(straight)
    assert rows(read_history(tmp_path / "killed")) == rows(straight)
    assert not list((tmp_path / "killed").glob(".*"))
    for name in ("model/model.safetensors", "model/config.json", "model/tokenizer.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def interrupt_after(monkeypatch, step):
    from flashtile.llm.training import Trainer

    real = Trainer.train_step

    def train_step(self):
        real(self)
        if self.step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "train_step", train_step)


def test_ctrl_c_saves_says_how_to_resume_and_resumes(corpus, quiet, tmp_path, monkeypatch):
    console = Console(record=True, width=200, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    straight = train(TINY, QUICK, tmp_path / "straight", data=corpus, console=quiet)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        stopped = train(TINY, QUICK, tmp_path / "run", data=corpus, console=console)
    assert stopped.interrupted
    assert len(stopped.losses) == 5
    text = console.export_text()
    assert "Stopped after step 5 of 6; the checkpoint is saved." in text
    load_model(tmp_path / "run" / "model")
    resumed = train(TINY, QUICK, tmp_path / "run", data=corpus, resume=True, console=quiet)
    assert rows(resumed) == rows(straight)
    assert not resumed.interrupted


def test_a_second_ctrl_c_interrupts_at_once_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with catch_interrupt() as event:
        signal.raise_signal(signal.SIGINT)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_ctrl_c_breaks_a_save(dataset, quiet, tmp_path, monkeypatch):
    import flashtile.llm.training as module

    def pressed(real):
        def call(*args, **kwargs):
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            return real(*args, **kwargs)

        return call

    for name in ("save_checkpoint", "save_model"):
        monkeypatch.setattr(module, name, pressed(getattr(module, name)))
    history = train(TINY, QUICK, tmp_path, data=dataset, console=quiet)
    assert history.interrupted
    assert len(history.losses) == QUICK.checkpoint_interval
    load_model(tmp_path / "model")


def test_a_second_ctrl_c_before_the_first_save_leaves_the_earlier_run(dataset, quiet, tmp_path, monkeypatch):
    from flashtile.llm.training import Trainer

    train(TINY, QUICK, tmp_path, data=dataset, console=quiet)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def twice(self):
        assert not (tmp_path / "checkpoint.pt").exists()  # a kill now must not leave it to be taken for this run's
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", twice)
        with pytest.raises(KeyboardInterrupt):
            train(replace(TINY, num_layers=1), QUICK, tmp_path, data=dataset, overwrite=True, console=quiet)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    train(TINY, QUICK, tmp_path, data=dataset, overwrite=True, console=quiet)
    assert not (tmp_path / "earlier").exists()


def test_a_longer_run_can_be_resumed_and_changes_are_told(dataset, quiet, tmp_path):
    train(TINY, QUICK, tmp_path, data=dataset, console=quiet)
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    history = train(TINY, replace(QUICK, steps=8), tmp_path, data=dataset, resume=True, console=console)
    assert [row["step"] for row in history.train] == list(range(1, 9))
    assert "Resuming after step 6; steps 6 -> 8." in console.export_text()


def test_a_run_is_not_overwritten_unasked(dataset, quiet, tmp_path):
    first = train(TINY, QUICK, tmp_path, data=dataset, console=quiet)
    with pytest.raises(FileExistsError, match=f"{tmp_path} holds a run already: resume it"):
        train(TINY, QUICK, tmp_path, data=dataset, console=quiet)
    again = train(TINY, QUICK, tmp_path, data=dataset, overwrite=True, console=quiet)
    assert rows(again) == rows(first)


def test_an_earlier_run_comes_back_if_its_successor_fails(dataset, quiet, tmp_path, monkeypatch):
    from flashtile.llm.training import Trainer

    train(TINY, QUICK, tmp_path, data=dataset, console=quiet)

    def fail(self):
        raise OSError("pulled the plug")

    monkeypatch.setattr(Trainer, "train_step", fail)
    with pytest.raises(OSError, match="pulled the plug"):
        train(TINY, QUICK, tmp_path, data=dataset, overwrite=True, console=quiet)
    assert len(read_history(tmp_path).losses) == 6
    assert train(TINY, QUICK, tmp_path, data=dataset, resume=True, console=quiet).losses


def test_resuming_what_does_not_fit_is_refused(corpus, dataset, quiet, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        train(TINY, QUICK, tmp_path, data=dataset, resume=True, console=quiet)
    train(TINY, QUICK, tmp_path, data=dataset, console=quiet)
    with pytest.raises(ValueError, match="the checkpoint is of another config: num_layers is 2, wanted 3"):
        train(replace(TINY, num_layers=3), QUICK, tmp_path, data=dataset, resume=True, console=quiet)
    other = prepare_data(corpus / "part_01.py", vocab_size=300, val_fraction=0.1, cache_dir=tmp_path / "data")
    with pytest.raises(ValueError, match="data: the checkpoint was trained on other data or another tokenizer"):
        train(TINY, QUICK, tmp_path, data=other, resume=True, console=quiet)
    assert len(read_history(tmp_path).losses) == 6  # a refusal changes nothing
    with pytest.raises(ValueError, match=r"steps is 5, but the run in .* is past that: it has done 6"):
        train(TINY, replace(QUICK, steps=5), tmp_path, data=dataset, resume=True, console=quiet)


def test_a_run_goes_on_with_its_own_data(corpus, quiet, tmp_path, monkeypatch):
    text = tmp_path / "text.py"
    text.write_bytes((corpus / "part_01.py").read_bytes() + (corpus / "part_02.py").read_bytes())
    run = tmp_path / "run"
    train(TINY, QUICK, run, data=text, console=quiet)
    files = sorted(run.rglob("*"))
    other = corpus / "part_03.py"
    with pytest.raises(ValueError, match=f"the run in {run} learns from {text}, not {other}; it goes on with its own"):
        train(TINY, QUICK, run, data=other, resume=True, console=quiet)
    assert sorted(run.rglob("*")) == files
    longer = replace(QUICK, steps=8)
    train(TINY, longer, run, data=text, resume=True, console=quiet)
    text.write_text("something else")
    with pytest.raises(ValueError, match=f"learns from {text}, that has changed since"):
        train(TINY, longer, run, data=text, resume=True, console=quiet)
    text.unlink()
    history = train(TINY, replace(QUICK, steps=10), run, resume=True, console=quiet)
    assert len(history.losses) == 10
    for path in (run / "data").rglob("*.*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="the run's tokens are missing from"):
        train(TINY, replace(QUICK, steps=12), run, resume=True, console=quiet)


def test_a_finished_run_says_so(dataset, tmp_path):
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    train(TINY, QUICK, tmp_path, data=dataset, console=Console(quiet=True))
    (tmp_path / "model" / "config.json").unlink()  # as after a kill between the checkpoint and the model
    history = train(TINY, QUICK, tmp_path, data=dataset, resume=True, console=console)
    assert len(history.losses) == 6
    assert not history.interrupted
    assert "has done all of its 6 steps" in console.export_text()
    load_model(tmp_path)


def test_data_that_does_not_fit_is_refused(corpus, dataset, quiet, tmp_path):
    with pytest.raises(FileNotFoundError, match="data: there is no file or folder at no/such/file"):
        train(TINY, QUICK, tmp_path, data="no/such/file", console=quiet)
    with pytest.raises(ValueError, match="the text is too short: the training split has"):
        train(replace(TINY, context_length=100_000), QUICK, tmp_path, data=dataset, console=quiet)
    size = len(dataset.val)
    message = rf"the validation split has {size} tokens, .* take {size + 1}"
    with pytest.raises(ValueError, match=message):
        train(replace(TINY, context_length=size), QUICK, tmp_path, data=dataset, console=quiet)
    with pytest.raises(ValueError, match="vocab_size must hold the tokenizer's 300 tokens, got 299"):
        train(replace(TINY, vocab_size=299), QUICK, tmp_path, data=dataset, console=quiet)


def test_a_loss_that_is_not_finite_stops_the_run(dataset, quiet, tmp_path):
    config = replace(QUICK, max_lr=1e30, warmup_steps=0)
    with pytest.raises(FloatingPointError, match=r"step \d has loss .* a lower max_lr than 1e\+30 may help"):
        train(TINY, config, tmp_path, data=dataset, console=quiet)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert not (math.isfinite(last["loss"]) and math.isfinite(last["grad_norm"]))
    assert not (tmp_path / "checkpoint.pt").exists()


def test_devices_are_named():
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(
        ValueError, match="device must be 'auto' or a torch device such as 'cpu' or 'cuda:0', got 'gpu'"
    ):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device 'cuda:0' was asked for, but torch sees no GPU"):
            resolve_device("cuda:0")


def test_compiled_training_gives_the_same_losses(dataset, quiet, tmp_path, monkeypatch):
    # The real compiler takes a minute on a CPU; the gpu tests run it.
    monkeypatch.setattr(TransformerLM, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    plain = train(TINY, QUICK, tmp_path / "a", data=dataset, console=quiet)
    compiled = train(TINY, replace(QUICK, compile=True), tmp_path / "b", data=dataset, console=quiet)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-3)
    load_model(tmp_path / "b" / "model")  # names are those of the plain model


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_attention_settings_learn_alike_on_the_gpu(attention, compile, dataset, quiet, tmp_path):
    model = replace(TINY, d_model=128, context_length=64)
    # At this rate bf16 on a CPU stays within 0.05 % between settings; ten times the rate amplifies roundings to 1 %.
    config = replace(QUICK, steps=40, device="cuda", compile=compile, max_lr=1e-3, min_lr=1e-4)
    flash = train(model, config, tmp_path / "flash", data=dataset, console=quiet)
    other = train(replace(model, attention=attention), config, tmp_path / "other", data=dataset, console=quiet)
    assert flash.losses[-1] < 0.7 * flash.losses[0]
    assert other.losses == pytest.approx(flash.losses, rel=0.01)
