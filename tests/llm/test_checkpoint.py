"""What is saved comes back equal, a crash loses nothing, and what does not fit is refused by name."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flashtile.llm import Tokenizer, TransformerLM, load_checkpoint, load_model, save_checkpoint, save_model
from flashtile.llm.atomic import atomic_write
from flashtile.llm.checkpoint import check_config, read_checkpoint
from flashtile.llm.optimizer import make_optimizer
from tests.llm.conftest import QUICK, TINY


def trained(seed=0, steps=2, **changes):
    torch.manual_seed(seed)
    model = TransformerLM.from_config(replace(TINY, **changes))
    optimizer = make_optimizer(model, QUICK)
    for _ in range(steps):
        model(torch.randint(300, (2, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("kind", ["path", "string", "file"])
def test_weights_optimizer_and_iteration_come_back(kind, tmp_path):
    model, optimizer = trained()
    out = {"path": tmp_path / "c.pt", "string": str(tmp_path / "c.pt"), "file": io.BytesIO()}[kind]
    save_checkpoint(model, optimizer, 17, out, extra={"seed": 3})
    if isinstance(out, io.BytesIO):
        out.seek(0)
    other, other_optimizer = trained(seed=5, steps=1)
    assert load_checkpoint(out, other, other_optimizer) == 17
    assert equal(other.state_dict(), model.state_dict())
    assert equal(other_optimizer.state_dict(), optimizer.state_dict())
    if not isinstance(out, io.BytesIO):
        assert read_checkpoint(out)["extra"] == {"seed": 3}
        assert load_checkpoint(out, other) == 17


def test_an_exception_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def crash():
        with atomic_write(path) as file:
            file.write(b"half of the new")
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        crash()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


KILLED_WHILE_SAVING = """
import os, signal, sys, torch
from flashtile.llm import TransformerLM, save_checkpoint
from flashtile.llm.optimizer import make_optimizer
from tests.llm.conftest import QUICK, TINY

real_save = torch.save
def save_half(state, file):
    real_save(state, file)
    file.truncate(file.tell() // 2)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

model = TransformerLM.from_config(TINY)
optimizer = make_optimizer(model, QUICK)
save_checkpoint(model, optimizer, 1, sys.argv[1])
torch.save = save_half
save_checkpoint(model, optimizer, 2, sys.argv[1])
"""


def test_a_kill_while_writing_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, path])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # the half-written file is there, under another name
    assert load_checkpoint(path, TransformerLM.from_config(TINY)) == 1


def test_files_get_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "atomic"):
        pass
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_checkpoint_of_another_config_is_refused_before_anything_changes(tmp_path):
    model, optimizer = trained()
    save_checkpoint(model, optimizer, 1, tmp_path / "c.pt")
    other, _ = trained(d_model=48, steps=0)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    message = (
        r"the checkpoint is of another config: token_embeddings.weight: \(300, 32\) instead of \(300, 48\); "
        r"layers.0.ln1.weight: \(32,\) instead of \(48,\); .* and 17 more"
    )
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "c.pt", other)
    assert equal(other.state_dict(), before)
    deeper, _ = trained(num_layers=3, steps=0)
    with pytest.raises(ValueError, match=r"layers.2.ln1.weight: missing instead of \(32,\)"):
        load_checkpoint(tmp_path / "c.pt", deeper)
    shallower, _ = trained(num_layers=1, steps=0)
    with pytest.raises(ValueError, match=r"layers.1.ln1.weight: \(32,\) instead of nothing"):
        load_checkpoint(tmp_path / "c.pt", shallower)


def test_configs_are_compared_field_by_field_except_attention():
    check_config(TINY.to_dict() | {"attention": "naive"}, TINY)
    with pytest.raises(ValueError, match=r"num_layers is 3, wanted 2; rope_theta is 5, wanted 10000\.0"):
        check_config(TINY.to_dict() | {"num_layers": 3, "rope_theta": 5}, TINY)


def test_missing_damaged_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint at {tmp_path}/none.pt"):
        read_checkpoint(tmp_path / "none.pt")
    model, optimizer = trained()
    save_checkpoint(model, optimizer, 1, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2], "text": b"hello", "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a checkpoint, or a damaged one"):
            read_checkpoint(tmp_path / name)
    torch.save({"weights": 1}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="foreign is not a checkpoint: it lacks 'model'"):
        read_checkpoint(tmp_path / "foreign")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("/tmp/flashtile-must-not-exist",)


def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"model": Malicious(), "optimizer": {}, "iteration": 0}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="not a checkpoint"):
        read_checkpoint(tmp_path / "c.pt")
    assert not os.path.exists("/tmp/flashtile-must-not-exist")


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_model_folders(tie_embeddings, tmp_path):
    model, _ = trained(tie_embeddings=tie_embeddings)
    tokenizer = Tokenizer.train(["some text, some more text"], 270)
    save_model(model, tokenizer, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    loaded, loaded_tokenizer = load_model(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    assert equal(loaded.state_dict(), model.state_dict())
    assert (loaded.lm_head.weight is loaded.token_embeddings.weight) == tie_embeddings
    assert loaded_tokenizer.encode("some text") == tokenizer.encode("some text")
    naive, _ = load_model(tmp_path, attention="naive", dtype=torch.bfloat16)
    assert naive.config.attention == "naive"
    assert naive.lm_head.weight.dtype == torch.bfloat16
    (tmp_path / "whole").mkdir()
    save_model(model, tokenizer, tmp_path / "whole" / "model")
    assert load_model(tmp_path / "whole")[0].config == model.config  # the folder of a run
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "d_model": 48, "num_heads": 4}')
    with pytest.raises(ValueError, match="the checkpoint is of another config"):
        load_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds no trained model: tokenizer.json is missing"):
        load_model(tmp_path)


def test_damaged_and_mixed_model_folders_are_refused_by_name(tmp_path):
    model, _ = trained()
    tokenizer = Tokenizer.train(["some text, some more text"], 270)

    def damaged(name, content):
        save_model(model, tokenizer, tmp_path)
        (tmp_path / name).write_bytes(content)

    damaged("model.safetensors", b"")
    with pytest.raises(ValueError, match=f"{tmp_path}/model.safetensors is damaged"):
        load_model(tmp_path)
    save_model(model, tokenizer, tmp_path)
    damaged("model.safetensors", (tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{tmp_path}/model.safetensors is damaged"):
        load_model(tmp_path)
    for content in (b"{", b"[]", b'{"colour": 3}', b"\xff"):
        damaged("config.json", content)
        with pytest.raises(ValueError, match=f"{tmp_path}/config.json is not the configuration of a model"):
            load_model(tmp_path)
    damaged("tokenizer.json", b"{")
    with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json is not a tokenizer"):
        load_model(tmp_path)
    save_model(model, Tokenizer.train([" ".join(f"word{n} {n * n}" for n in range(999))], 400), tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json is another model's: it has 400 tokens, .* vocab_size of 300"):
        load_model(tmp_path)
