"""The command line: help, errors, exit statuses, and each command once for real."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from flashtile import cli, doctor

SIZES = {"vocab-size": 300, "context-length": 16, "d-model": 16, "num-layers": 1, "num-heads": 2, "batch-size": 2}
INTERVALS = {"log-interval": 1, "eval-interval": 100, "eval-sequences": 2}
TINY = [text for name, value in (SIZES | INTERVALS).items() for text in (f"--{name}", str(value))]
TINY += ["--no-tensorboard", "--device", "cpu"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    path.write_text("\n".join(f"{i} times {i} is {i * i}, and {i} plus {i} is {i + i}." for i in range(400)))
    return path


def run(*args: object) -> int:
    return cli.main([str(arg) for arg in args])


def exit_status(*args: object) -> object:
    with pytest.raises(SystemExit) as caught:
        run(*args)
    return caught.value.code


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS)], ids=" ".join)
def test_help_has_examples(command, capsys):
    assert exit_status(*command, "--help") == 0
    out = capsys.readouterr().out
    assert f"  flashtile {' '.join(command)}" in out.split("Examples:")[1]


def test_no_command_shows_the_commands_and_the_flags(capsys):
    assert exit_status() == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert all(f"--{flag}" in out.split(" options ")[1] for flag in cli.FLAGS)


def test_train_help_reads_right(capsys):
    assert exit_status("train", "--help") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert re.search("--tensorboard, --no-tensorboard [^-]*Whether to write TensorBoard events", words)


def test_help_imports_nothing_heavy():
    code = """
import sys
from flashtile.cli import main
try:
    main(["--help"])
except SystemExit:
    print([name for name in ("torch", "numpy", "triton", "matplotlib", "flashtile.llm") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.splitlines()[-1] == "[]"


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("flashtile 0.")


@pytest.mark.parametrize(
    "args",
    [
        "exlain",
        "explain --backend foo",
        "explain --no-such-option 3",
        "explain --heads many",
        "bench nothing",
        "train --dtype float",
    ],
)
def test_mistyped(args, capsys):
    assert exit_status(*args.split()) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("explain --heads 3 --heads-kv 2", "q has 3 heads, but wants a multiple of the 2 heads"),
        ("explain --head-dim 1000", "head_dim 1000"),
        ("bench flash-attention --seq-len 16 0", "--seq-len is 0, but wants 1 or more"),
        ("bench flash-attention --window -1", "--window is -1, but wants 0 or more"),
        ("explain --seqlen -1", "--seqlen is -1, but wants 0 or more"),
        ("explain --head-dim -3", "--head-dim is -3, but wants 1 or more"),
        ("explain --head-dim-v 0", "--head-dim-v is 0, but wants 1 or more"),
        ("compare flash flash --preset demo --out-dir {tmp}", "each once, got flash, flash"),
        (
            "compare --out-dir {tmp}/c",
            "--preset is gpt2-124m, but wants a GPU, and torch finds none; here `--preset demo`",
        ),
        ("train --data no/such/file --out-dir {tmp}", "no/such/file"),
        ("train --resume --out-dir {tmp}", "flashtile: there is no checkpoint"),
        ("generate --model {tmp}/none", "holds no trained model"),
        ("generate --temperature -1", "flashtile: --temperature is -1.0, but wants 0 or more"),
        ("demo --steps 0 --out-dir {tmp}", "flashtile: --steps is 0, but wants 1 or more"),
        ("train --steps 0", "flashtile: --steps is 0, but wants 1 or more"),
        ("train --d-model 128", "flashtile: --num-heads is 6, but wants a divisor of --d-model, which is 128"),
        ("train --min-lr 1", "flashtile: --min-lr is 1.0, but wants a value from 0 to --max-lr, which is 0.003"),
        ("train --d-model 18", "flashtile: --d-model / --num-heads is 18 / 6 = 3, but rotary embeddings want an even"),
        ("demo --resume --out-dir {tmp}", "there is no checkpoint"),
        ("demo --data {tmp}/short.txt --out-dir {tmp}", "the text is too short: the training split has"),
    ],
)
def test_errors_are_one_line(args, message, capsys, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("a few words")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(*args.format(tmp=tmp_path).split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("flashtile: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("train --device cuda", "device 'cuda' was asked for, but torch sees no GPU"),
        (
            "train --attention flash_triton",
            "flashtile: --attention is flash_triton, but backend 'triton' serves GPU tensors",
        ),
        (
            "compare naive flash_triton --preset demo",
            "flashtile: attention is flash_triton, but backend 'triton' serves",
        ),
        ("train --data {tmp}/short.txt", "the training split has at most 5 tokens"),
        ("train --data {tmp}/repeats.txt", "the validation split has "),
        ("compare naive --preset demo --data {tmp}/short.txt", "the training split has at most 5 tokens"),
        (
            "train --d-model 600 --num-heads 2",
            "--d-model / --num-heads is 300, but attention 'flash' trains heads of 256",
        ),
        ("train --vocab-size 3", "vocab_size must be at least"),
    ],
)
def test_what_cannot_run_leaves_nothing_behind(args, message, cpu_path, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "repeats.txt").write_text("again " * 2000)
    data = () if "--data" in args else ("--data", tmp_path / "repeats.txt")
    assert run(*args.format(tmp=tmp_path).split(), *data, "--out-dir", tmp_path / "new" / "run") == 2
    told = capsys.readouterr()
    assert message in told.err
    assert ("Tokenizing" in told.out) == ("repeats" in args or "vocab" in args)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", ["fp32", "float32"])
def test_both_spellings_of_a_type(dtype, capsys, corpus, tmp_path):
    assert run("explain", "--device", "cpu", "--dtype", dtype) == 0
    assert "float32 on cpu" in capsys.readouterr().out
    options = ("--steps", 1, f"--dtype={dtype}", *TINY)
    assert run("train", "--data", corpus, "--attention", "naive", "--out-dir", tmp_path / "run", *options) == 0
    assert "cpu, float32, " in capsys.readouterr().out
    where = ("--out", tmp_path / "o.json", "--device", "cpu")
    assert run("bench", "overhead", "--dtype", dtype, "--calls", 1, "--passes", 1, "--providers", "sdpa", *where,
               "--no-first-call") == 0  # fmt: skip


def test_only_the_types_of_options_are_spelt_anew():
    args = ["--dtype", "float32", "bfloat16", "--data", "float32", "--dtype=auto"]
    short = {long: short for short, long in cli.DTYPES.items()}
    assert cli._spelt(args, short) == ["--dtype", "fp32", "bf16", "--data", "float32", "--dtype=auto"]


def test_traceback_on_request():
    with pytest.raises(ValueError, match="temperature"):
        run("--traceback", "generate", "--temperature", -1)


def test_interrupt(monkeypatch, capsys):
    def interrupted(console):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "report", interrupted)
    assert run("doctor") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("demo", "tyro"),
        *((name, "torch") for name in ("demo", "train", "generate", "compare", "explain", "doctor", "bench atten")),
        *((name, "torch.utils.tensorboard") for name in ("demo", "train")),
    ],
)
def test_ctrl_c_while_packages_are_imported_ends_the_process_quietly(command, package):
    """They catch whatever is raised within their imports, as here."""
    code = f"""
import signal, sys, time
class Swallows:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            try:
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                print("swallowed")
sys.meta_path.insert(0, Swallows())
from flashtile.cli import main
sys.exit(main({command.split()!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_ctrl_c_after_the_last_one_does_not_spoil_the_end(monkeypatch):
    set_to = []
    monkeypatch.setattr(cli.signal, "signal", lambda *args: set_to.append(args))
    assert cli._ended(cli.INTERRUPTED, by_the_shell=False) == cli.INTERRUPTED
    assert not set_to
    assert cli._ended(cli.INTERRUPTED, by_the_shell=True) == cli.INTERRUPTED
    assert set_to == [(signal.SIGINT, signal.SIG_IGN)]


def test_after_the_imports_ctrl_c_is_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError), cli.loading():
        raise ImportError
    assert signal.getsignal(signal.SIGINT) is before
    try:
        mine = signal.signal(signal.SIGINT, lambda *args: None) and signal.getsignal(signal.SIGINT)
        with cli.loading():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


class TestExplain:
    def test_a_gpu_that_is_not_here(self, capsys):
        assert run("explain", "--device", "sm_90", "--heads", 32, "--heads-kv", 8, "--head-dim", 128, "--causal") == 0
        out = capsys.readouterr().out
        assert "served by     hopper" in out
        assert "q (1, 32, 1024, 128), k (1, 8, 1024, 128), v (1, 8, 1024, 128), bfloat16 on sm_90, causal" in out

    def test_cpu(self, cpu_path, capsys):
        assert (
            run("explain", "--device", "cpu", "--seqlen", 3, "--seqlen-k", 5, "--head-dim-v", 8, "--dtype", "fp64") == 0
        )
        out = capsys.readouterr().out
        assert "v (1, 8, 5, 8), float64 on cpu" in out
        assert "served by     cpu" in out
        assert "not chosen    triton" in out

    def test_a_gpu_is_not_called_a_cpu(self, capsys):
        assert run("explain", "--device", "sm_90") == 0
        assert "not chosen    cpu: serves CPU tensors only; these lie on cuda\n" in capsys.readouterr().out

    def test_the_status_tells_whether_it_is_served(self, cpu_path, capsys):
        assert run("explain", "--device", "CPU", "--backend", "triton") == 1
        assert "not served" in capsys.readouterr().out
        assert run("explain", "--device", "CPU") == 0  # no architecture of that name
        assert "served by     cpu" in capsys.readouterr().out

    def test_the_columns_stand_below_each_other(self, cpu_path, capsys):
        for size in ("--head-dim=64", "--head-dim=512"):
            for device in ("sm_90", "gfx942", "cpu"):
                assert run("explain", "--device", device, size) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {re.split(r"(?<! ) {2,}|(?<=dkdv) ", line)[0] for line in lines} >= {"forward", "backward", "request"}
        assert all(line[13] == " " and line[14] != " " for line in lines)

    def test_says_what_has_no_gradients(self, capsys):
        assert run("explain", "--device", "sm_90", "--head-dim", 512) == 0
        assert "backward by   none: head_dim 512 is above 256" in capsys.readouterr().out
        assert run("explain", "--device", "sm_90", "--head-dim", 256) == 0
        assert "none" not in capsys.readouterr().out

    def test_names_the_architectures(self, capsys):
        for device in ("foo", "sm_20", "interpreter"):
            assert run("explain", "--device", device) == 2
            err = capsys.readouterr().err
            assert f"--device is {device}, but wants auto, cpu, cuda or one of gfx90a, " in err
            assert "sm_90" in err
            assert "interpreter" not in err.split("but wants")[1]

    def test_knows_the_backends(self):
        from typing import get_args, get_type_hints

        from flashtile.kernel import backend

        assert get_args(get_args(get_type_hints(cli.explain)["backend"])[0]) == backend.NAMES


class TestDoctor:
    def test_finds_this_machine_well(self, cpu_path, capsys):
        assert run("doctor") == 0
        out = capsys.readouterr().out
        assert out.count(" ok") >= 4
        assert "wrong" not in out

    def test_finds_what_is_wrong(self, monkeypatch, capsys):
        wrong = doctor.Check(
            "cpu", "cpu", "fp32", False, dict.fromkeys(doctor.FACTORS, 1.0), dict.fromkeys(doctor.FACTORS, 0.1)
        )
        failed = doctor.Check("cuda", "triton", "bf16", True, {}, {}, "RuntimeError: no luck")
        nan = doctor.Check("cpu", "cpu", "fp32", True, dict.fromkeys(doctor.FACTORS, float("nan")), wrong.limits)
        assert not any(check.passed for check in (wrong, failed, nan))
        monkeypatch.setattr(doctor, "self_checks", lambda: iter([wrong, failed, nan]))
        assert run("doctor") == 1
        out = capsys.readouterr().out
        assert ">999%" in out
        assert "triton on cuda: RuntimeError: no luck" in out

    @pytest.mark.parametrize("where", ["triton", "hopper"])
    def test_the_verdict_is_seen_at_80_columns(self, where):
        small = dict.fromkeys(doctor.FACTORS, 1.23e-05)
        good = doctor.Check("cuda", where, "bf16", True, small, dict.fromkeys(doctor.FACTORS, 1.0))
        bad = replace(good, errors=dict.fromkeys(doctor.FACTORS, 1234.5))
        failed = replace(good, errors={}, failure="RuntimeError: no luck")
        mixed = replace(good, backward="triton")
        out = io.StringIO()
        Console(width=80, file=out).print(doctor.table_of([good, bad, failed, mixed]))
        lines = [line for line in out.getvalue().splitlines() if "bf16" in line]
        assert "…" not in out.getvalue()
        shown = [line for line in lines if f"{where} on cuda" in line]
        assert [line.split()[-1] for line in shown] == ["ok", "wrong", "failed"], lines
        assert sum(line.split()[-1] == "ok" for line in lines) == 2  # a longer name folds, in its own column

    def test_every_backend_that_could_be_chosen_is_checked(self, monkeypatch):
        """As on a Hopper GPU: there fp16 and bf16 have two backends."""
        served = {("cuda", name) for name in ("hopper", "triton")} | {("cpu", "cpu")}

        def select(problem, name):
            if (problem, name) not in served:
                raise ValueError("no")

        monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(doctor, "_problem", lambda device, dtype: device)
        monkeypatch.setattr(doctor.dispatch, "select", select)
        monkeypatch.setattr(doctor, "self_check", lambda device, name, dtype, is_causal: (device, name))
        assert set(doctor.self_checks()) == served
        served -= {("cuda", "hopper"), ("cuda", "triton")}
        assert ("cuda", "triton") in set(doctor.self_checks())  # nothing serves it: the check is there, and fails

    def test_says_why_a_hopper_gpu_has_the_portable_kernels(self, monkeypatch):
        monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(doctor.launch, "arch_of", lambda device: "sm_90")
        monkeypatch.setattr(doctor.dispatch, "has_triton", lambda: True)
        monkeypatch.setattr(doctor, "_problem", lambda device, dtype: None)
        monkeypatch.setattr(doctor.hopper, "refusal", lambda problem, which: "wants another Triton")
        assert any("backend 'hopper' wants another Triton" in text for text in doctor.advices())

    @pytest.mark.parametrize(
        ("torch_wants", "cure"),
        [
            (["numpy", "triton==3.6.0; platform_system == 'Linux'"], "To use them: pip install triton==3.6.0"),
            (None, "To use them: pip install triton==3.6.0"),
            (["triton==3.7.1"], "To use them, install a torch that wants Triton 3.6; this one wants 3.7.1"),
        ],
    )
    def test_says_how_a_hopper_gpu_gets_its_kernels(self, torch_wants, cure, monkeypatch):
        monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(doctor.launch, "arch_of", lambda device: "sm_90")
        monkeypatch.setattr(doctor.dispatch, "has_triton", lambda: True)
        request = doctor.dispatch.Problem("cuda", "sm_90", doctor.torch.bfloat16, 2, 4, 2, 100, 133, 64, 64, False)
        monkeypatch.setattr(doctor, "_problem", lambda device, dtype: request)
        versions = {"triton": "3.7.1"}
        monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: versions[name])
        monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: torch_wants)
        doctor.hopper._other_triton.cache_clear()
        try:
            (told,) = [text for text in doctor.advices() if "Gluon" in text]
            assert "in the Gluon of Triton 3.6, whose interface still moves; installed is 3.7.1" in told
            assert told.split("3.7.1. ", 1)[1].startswith(cure)
            versions["triton"] = "3.6.0"
            doctor.hopper._other_triton.cache_clear()
            assert not any("Gluon" in text for text in doctor.advices())
        finally:
            doctor.hopper._other_triton.cache_clear()

    def test_a_hopper_gpu_without_triton(self, monkeypatch):
        monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(doctor.launch, "arch_of", lambda device: "sm_90")
        monkeypatch.setattr(doctor.dispatch, "has_triton", lambda: False)
        assert any("Triton is not installed" in text for text in doctor.advices())

    def test_the_interpreters_kernels_are_checked_too(self, monkeypatch):
        monkeypatch.setattr(doctor, "self_check", lambda device, name, dtype, is_causal: (device, name, dtype))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        doctor.dispatch.select.cache_clear()
        float32 = doctor.torch.float32
        expected = {("cpu", "cpu", float32), ("cpu", "cpu", doctor.torch.bfloat16)}
        if doctor.dispatch.has_triton():
            expected.add(("cpu", "triton", float32))
        checks: Any = doctor.self_checks()
        assert {check for check in checks if check[0] == "cpu"} == expected

    def test_reports_an_exception(self, monkeypatch):
        def broken(*args, **kwargs):
            raise OSError("no compiler\nmore")

        monkeypatch.setattr(doctor, "flash_attention", broken)
        check = doctor.self_check("cpu", "cpu", doctor.torch.float32, True)
        assert check.failure == "OSError: no compiler"


def test_presets_are_those_of_the_llm():
    from typing import get_args, get_type_hints

    from flashtile.llm.config import PRESETS

    assert get_args(get_type_hints(cli.TrainOptions)["preset"]) == tuple(PRESETS)


@pytest.mark.parametrize("kind", cli.BENCHMARKS)
def test_benchmarks_are_there(kind, capsys):
    assert exit_status("bench", kind, "--help") == 0
    told = capsys.readouterr().out
    assert f"usage: flashtile bench {kind}" in told
    assert f"Examples:\n  flashtile bench {kind}" in told
    assert "python -m" not in told
    assert "(default: )" not in " ".join(told.split())
    assert kind in cli._description(cli.bench).split("Examples")[0]


def test_compare(cpu_path, corpus, tmp_path, capsys):
    """Two settings on two cores, from the same weights: the same losses, to rounding."""
    out = tmp_path / "compared"
    assert run("compare", "flash", "naive", "--preset", "demo", "--steps", 2, "--data", corpus, "--out-dir", out) == 0
    result = json.loads((out / "comparison.json").read_text())
    assert set(result["runs"]) == {"flash", "naive"}
    assert result["runs"]["naive"]["max_loss_difference"] < 1e-3
    told = capsys.readouterr().out
    assert "tokens/s" in told
    assert told.count("at most") == 1  # of the second from the first
    assert run("compare", "flash", "naive", "--preset", "demo", "--steps", 2, "--data", corpus, "--out-dir", out) == 2
    assert "holds a comparison: start afresh (--overwrite)" in capsys.readouterr().err


def test_train_resume_generate(cpu_path, corpus, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("train", "--data", corpus, "--out-dir", out, "--steps", 3, "--warmup-steps", 1, *TINY) == 0
    told = capsys.readouterr().out
    assert f"The model is in {out / 'model'}" in told
    words = shlex.split(told.splitlines()[-1])
    assert run(*words[words.index("generate") :], "--max-new-tokens", 2) == 0  # the line it prints does go on
    assert run("train", "--data", corpus, "--out-dir", out, *TINY) == 2  # a run is there already
    assert "go on with it (--resume) or start afresh (--overwrite)" in capsys.readouterr().err
    # The shape and the data are the saved run's, not the preset's.
    assert run("train", "--out-dir", out, "--resume", "--steps", 5) == 0
    told = capsys.readouterr().out
    assert "Resuming after step 3" in told
    assert f"Going on with {corpus}" in told
    assert run("train", "--out-dir", out, "--resume") == 0
    assert "has done all of its 5 steps" in capsys.readouterr().out
    assert run("train", "--out-dir", out, "--resume", "--steps", 3) == 2
    assert "steps is 3, but the run in" in capsys.readouterr().err
    args = ("generate", "7 times", "--model", out / "model", "--max-new-tokens", 12, "--seed", 1, "--device", "cpu")
    assert run(*args) == 0
    first = capsys.readouterr().out
    assert first.startswith("7 times")
    assert run(*args) == 0
    assert capsys.readouterr().out == first
    args = ("generate", "7 times", "--model", out, *args[4:])  # the run's folder will do
    assert run(*args) == 0
    assert capsys.readouterr().out == first


def test_demo(cpu_path, corpus, tmp_path, capsys, monkeypatch):
    from flashtile.llm.config import PRESETS

    model, training = PRESETS["demo"]
    small = replace(model, vocab_size=300, d_model=24, num_layers=1, context_length=32)
    monkeypatch.setitem(PRESETS, "demo", (small, replace(training, tensorboard=False)))
    for _ in range(2):  # works twice in a row
        assert run("demo", "--data", corpus, "--out-dir", tmp_path / "demo", "--steps", 2, "--prompt", "3 times") == 0
        out = capsys.readouterr().out
        assert "3 times" in out
        assert (tmp_path / "demo" / "loss.png").stat().st_size > 1000


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_stopped_demo_is_finished_by_the_command_it_prints(cpu_path, corpus, tmp_path, capsys, monkeypatch):
    from flashtile.llm.config import PRESETS
    from flashtile.llm.training import Trainer

    model, training = PRESETS["demo"]
    small = replace(model, vocab_size=300, d_model=24, num_layers=1, context_length=32)
    monkeypatch.setitem(PRESETS, "demo", (small, replace(training, tensorboard=False)))
    out = tmp_path / "a folder"
    assert run("demo", "--data", corpus, "--out-dir", out, "--steps", 2) == 0
    with monkeypatch.context() as patch:
        real = Trainer.train_step
        patch.setattr(Trainer, "train_step", lambda self: (real(self), signal.raise_signal(signal.SIGINT)))
        args = ("--data", corpus, "--out-dir", out, "--steps", 4, "--attention", "naive", "--prompt", "3 times")
        assert run("demo", *args) == cli.INTERRUPTED
    assert not (out / "loss.png").exists()  # that of the first run shows another one
    line = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(line)
    assert os.path.exists(shutil.which(words[0]) or words[0])
    command = words[words.index("demo") :]
    assert command == ["demo", "--resume", "--out-dir", str(out), "--prompt", "3 times"]
    assert run(*command) == 0
    told = capsys.readouterr().out
    assert "Resuming after step 1" in told
    assert "attention 'naive'" in told
    assert "3 times" in told.split("What it writes")[1]
    assert (out / "loss.png").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_saves_and_exits_130(presses, corpus, tmp_path):
    out = tmp_path / "run"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "flashtile.cli", "train", "--data", corpus, "--out-dir", out, *TINY]
    command += ["--steps", "1000000"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "training did not start"
            time.sleep(0.1)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert presses > 1 or (out / "checkpoint.pt").exists()
