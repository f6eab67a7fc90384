"""The command line: thin commands, each of which calls a public function.

A command is a function whose annotated arguments tyro turns into flags and whose docstring is its ``--help``, up to the
line ``Args:``. Everything heavy is imported inside the command that needs it, so that ``flashtile --help`` is instant.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union


@contextmanager
def loading() -> Iterator[None]:
    """Have Ctrl-C end the process at once while the block imports: packages may swallow a KeyboardInterrupt, or crash.

    A handler that somebody has set stays.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


with loading():
    import tyro

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
BENCHMARKS = {
    "flash-attention": ("bench_mark_flash_attention", "flash_attention against its peers: time, TFLOP/s, memory"),
    "atten": ("bench_mark_atten", "the plain attention modules of flashtile.llm, eager and compiled: the baseline"),
    "features": ("bench_mark_features", "what masks, scores and options cost, against FlexAttention"),
    "llama": ("bench_mark_llama", "a LLaMA-7B-shaped attention layer and block at 2,048 tokens"),
    "overhead": ("bench_mark_overhead", "microseconds per call at a tiny shape"),
    "tune": ("tune_launch", "find block sizes for this GPU and write the launch table"),
    "plot": ("plot", "the tables and pictures of docs/benchmarks.md from the result files in docs/results"),
}
INTERRUPTED = 130  # the exit status by which shells know Ctrl-C


def demo(
    out_dir: Path = Path("runs/demo"),
    data: Path | None = None,
    steps: int | None = None,
    attention: Literal["flash", "naive", "sdpa"] | None = None,
    prompt: tyro.conf.DisallowNone[str | None] = None,
    resume: bool = False,
) -> int:
    """Train a small language model in about two minutes, plot its loss, and sample from it.

    Examples:
      flashtile demo
      flashtile demo --resume                           (finish one that Ctrl-C has stopped)
      flashtile demo --data notes/ --prompt "Dear"      (any text file, or a folder of them)
      flashtile demo --steps 50 --attention naive

    Args:
        out_dir: Gets the model, its loss plot and the metrics; a second run starts afresh in it.
        data: Text file or folder to learn; None means the Python standard library's sources.
        steps: Optimizer steps; None means the preset's.
        attention: Who computes attention: flashtile, the readable dense module, or torch; None means flashtile.
        prompt: Beginning of the sample; None means that of a Python function.
        resume: Go on with the demonstration in out_dir, with its own data and options, and finish it.
    """
    _share_the_cores()
    with loading():
        from flashtile.llm.demo import PROMPT, run_demo
        from flashtile.llm.training import preload

        preload()

    prompt = PROMPT if prompt is None else prompt
    history = run_demo(out_dir, attention=attention, steps=steps, data=data, prompt=prompt, resume=resume)
    return INTERRUPTED if history.interrupted else 0


@dataclass
class TrainOptions:
    """What the other options' defaults depend on, and where a run takes place."""

    preset: Literal["demo", "gpt2-124m"] = "demo"
    """Where the defaults of the model's and the training's options come from."""
    data: Path | None = None
    """Text file or folder to learn; None means the Python standard library's sources, or a resumed run's own data."""
    out_dir: Path = Path("runs/train")
    """Gets the model, the checkpoint and the metrics."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with the run in out_dir, with its own data, and the options it was started with unless others are given."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Start afresh although out_dir holds a run."""


def train(args: Sequence[str]) -> int:
    """Train a language model, or go on with a run that was stopped. Ctrl-C saves a checkpoint first.

    Examples:
      flashtile train --data book.txt --out-dir runs/book --steps 2000 --d-model 256
      flashtile train --resume --out-dir runs/book
      flashtile train --preset gpt2-124m --compile --attention sdpa
    """
    _share_the_cores()
    with loading():
        from flashtile.llm import training
        from flashtile.llm.checkpoint import saved_configs
        from flashtile.llm.config import PRESETS, ModelConfig, TrainingConfig
        from flashtile.llm.shell import flashtile

        if not {"-h", "--help"} & set(args):
            training.preload()

    without_help = [arg for arg in args if arg not in ("-h", "--help")]
    known, _ = tyro.cli(TrainOptions, args=without_help, config=_STYLE, return_unknown_args=True, add_help=False)
    model, schedule = PRESETS[known.preset]
    if known.resume and len(without_help) == len(args):
        model, schedule = saved_configs(known.out_dir)
    # Their checks come later: within tyro they end in its own words.
    unchecked = [make_dataclass(c.__name__, [], bases=(c,), namespace={"__post_init__": lambda self: None}, frozen=True)
                 for c in (ModelConfig, TrainingConfig)]  # fmt: skip
    everything = make_dataclass(
        "Options",
        [
            (name, Annotated[c, tyro.conf.OmitArgPrefixes], field(default=c(**values.to_dict())))
            for name, c, values in zip(("model", "training"), unchecked, (model, schedule), strict=True)
        ],
        bases=(TrainOptions,),
    )
    chosen = _parse(everything, "train", _description(train), _spelt(args, DTYPES), config=())
    try:
        history = training.train(
            ModelConfig(**chosen.model.to_dict()),
            TrainingConfig(**chosen.training.to_dict()),
            chosen.out_dir,
            data=chosen.data,
            resume=chosen.resume,
            overwrite=chosen.overwrite,
        )
    except training.RunExistsError as error:
        raise FileExistsError(
            f"{chosen.out_dir} holds a run: go on with it (--resume) or start afresh (--overwrite)"
        ) from error
    if history.interrupted:
        print(f"Go on with:\n    {flashtile('train', '--resume', '--out-dir', chosen.out_dir)}")
    else:
        lies = Path(chosen.out_dir, "model")
        print(f"The model is in {lies}. See what it writes:\n    {flashtile('generate', '--model', lies)}")
    return INTERRUPTED if history.interrupted else 0


def generate(
    prompt: tyro.conf.Positional[tyro.conf.DisallowNone[str | None]] = None,
    /,
    model: Path = Path("runs/demo/model"),
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    device: str = "auto",
    attention: Literal["flash", "naive", "sdpa"] | None = None,
) -> None:
    """Continue a text with a trained model, printing it as it is made.

    Examples:
      flashtile generate "class Stack:"
      flashtile generate "import " --temperature 0.5 --top-k 40 --seed 1
      flashtile generate "def main(" --model runs/book/model --stop "\\n\\n"

    Args:
        prompt: Beginning of the text; None means that of a Python function.
        model: Folder that `flashtile train` or `flashtile demo` wrote.
        max_new_tokens: Most tokens to add.
        temperature: Logits are divided by this; 0 always takes the likeliest token.
        top_k: Draw from the k likeliest tokens only.
        top_p: Draw from the fewest likeliest tokens whose probabilities reach this sum.
        seed: The same seed gives the same text.
        stop: Strings that end the text; \\n means a new line.
        device: Torch device, or "auto": the GPU if there is one.
        attention: Who computes attention; None means as in training.
    """
    with loading():
        from flashtile.llm import SamplingConfig, load_model, stream
        from flashtile.llm.demo import PROMPT
        from flashtile.llm.shell import flashtile
        from flashtile.llm.training import resolve_device

    prompt = PROMPT if prompt is None else prompt
    stop = tuple(text.replace("\\n", "\n") for text in stop)
    sampling = SamplingConfig(max_new_tokens, temperature, top_k, top_p, seed, stop)
    try:
        lm, tokenizer = load_model(model, resolve_device(device), attention=attention)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; `{flashtile('demo')}` makes one in two minutes") from error
    print(prompt, end="", flush=True)
    for piece in stream(lm, tokenizer, prompt, sampling):
        print(piece, end="", flush=True)
    print()


def compare(
    settings: tyro.conf.Positional[tuple[Literal["flash", "flash_triton", "naive", "sdpa"], ...]] = (
        "flash",
        "naive",
        "sdpa",
    ),
    /,
    out_dir: Path = Path("runs/compare"),
    preset: Literal["demo", "gpt2-124m"] = "gpt2-124m",
    steps: int | None = None,
    data: Path | None = None,
    context: int | None = None,
    compile: bool = False,
    overwrite: bool = False,
    commit: str = "",
) -> None:
    """Train one model per attention setting, from the same weights on the same batches, and compare loss and speed.

    Examples:
      flashtile compare                                     (GPT-2 124M; wants a GPU)
      flashtile compare flash naive --preset demo --steps 50
      flashtile compare flash sdpa --context 8192 --compile

    Args:
        settings: Who computes attention: flashtile, its portable GPU kernels, the readable dense module, torch.
        out_dir: Gets comparison.json, its plot, and a folder per run.
        preset: Model and training configuration.
        steps: Optimizer steps; None means the preset's.
        data: Text file or folder to learn; None means the Python standard library's sources.
        context: Tokens per sequence, of as many fewer sequences per step; None means the preset's.
        compile: Run the models through torch.compile.
        overwrite: Start afresh although out_dir holds a comparison.
        commit: Commit to write into the result where the source tree has no git.
    """
    _share_the_cores()
    with loading():
        from dataclasses import replace

        import torch

        from flashtile.llm.config import PRESETS
        from flashtile.llm.experiment import compare_attention
        from flashtile.llm.training import RunExistsError, preload

        preload()

    if preset != "demo" and not torch.cuda.is_available():
        raise ValueError(
            f"--preset is {preset}, but wants a GPU, and torch finds none; here `--preset demo` runs, a small model"
        )
    model, training = PRESETS[preset]
    training = replace(training, compile=compile, steps=training.steps if steps is None else steps)
    if context is not None:
        if context < 1:
            raise ValueError(f"context is {context}, but wants 1 token per sequence at least")
        tokens = training.batch_size * model.context_length
        training = replace(training, batch_size=max(1, tokens // context))
        model = replace(model, context_length=context)
    try:
        compare_attention(settings, model, training, out_dir, data=data, overwrite=overwrite, commit=commit)
    except RunExistsError as error:
        raise FileExistsError(
            f"{out_dir} holds a comparison: start afresh (--overwrite) or choose another --out-dir"
        ) from error


def explain(
    batch: int = 1,
    heads: int = 8,
    heads_kv: int | None = None,
    seqlen: int = 1024,
    seqlen_k: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: Literal["fp16", "bf16", "fp32", "fp64"] = "bf16",
    causal: bool = False,
    device: str = "auto",
    backend: Literal["hopper", "triton", "cpu"] | None = None,
) -> int:
    """Say which kernel serves a shape, with which tiles, and why no other one does.

    The exit status is 1 if none does.

    Examples:
      flashtile explain --seqlen 4096 --head-dim 128 --causal
      flashtile explain --heads 32 --heads-kv 8 --device sm_90     (a GPU that need not be here)
      flashtile explain --dtype fp64 --device cpu --backend triton

    Args:
        batch: Number of sequences.
        heads: Query heads.
        heads_kv: Key/value heads; None means as many as query heads.
        seqlen: Queries per sequence.
        seqlen_k: Keys per sequence; None means as many as queries.
        head_dim: Width of queries and keys.
        head_dim_v: Width of values; None means head_dim.
        dtype: Element type.
        causal: Whether a query sees only keys up to its own place.
        device: "cpu", "cuda", an architecture such as sm_90 or gfx942, or "auto": the GPU if there is one.
        backend: Ask for this backend, and learn whether it can.
    """
    with loading():
        import torch

        from flashtile import dispatch
        from flashtile.kernel import check, launch

    element = getattr(torch, DTYPES[dtype])
    heads_kv, seqlen_k, head_dim_v = (
        default if given is None else given
        for given, default in ((heads_kv, heads), (seqlen_k, seqlen), (head_dim_v, head_dim))
    )
    shapes = (
        (batch, heads, seqlen, head_dim),
        (batch, heads_kv, seqlen_k, head_dim),
        (batch, heads_kv, seqlen_k, head_dim_v),
    )
    for name, size, least in (
        ("batch", batch, 0),
        ("heads", heads, 0),
        ("heads-kv", heads_kv, 0),
        ("seqlen", seqlen, 0),
        ("seqlen-k", seqlen_k, 0),
        ("head-dim", head_dim, 1),
        ("head-dim-v", head_dim_v, 1),
    ):
        if size < least:
            raise ValueError(f"--{name} is {size}, but wants {least} or more")
    check.attention_inputs(*(torch.empty(shape, dtype=element, device="meta") for shape in shapes))
    device = device.lower()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no GPU; name the architecture instead, for example sm_90")
    if kind in ("cpu", "cuda"):
        arch = "cpu" if kind == "cpu" else launch.arch_of(torch.device(device))
    else:
        kind, arch = "cuda", device
        known = sorted(({key[0] for key in launch.table()} | set(launch.SAME_ROWS)) - {"interpreter"})
        if arch not in known:
            raise ValueError(f"--device is {device}, but wants auto, cpu, cuda or one of {', '.join(known)}")
    problem = dispatch.Problem(
        kind, arch, element, batch, heads, heads_kv, seqlen, seqlen_k, head_dim, head_dim_v, causal
    )
    print(dispatch.explain(problem, backend=backend))
    try:
        dispatch.select(problem, backend)
    except (ValueError, TypeError, ImportError, NotImplementedError):  # what explain has just told
        return 1
    return 0


def doctor() -> int:
    """Say what works on this machine, check it with numbers, and tell what to do about the rest.

    The exit status is 1 if a self-check fails.

    Examples:
      flashtile doctor
      TRITON_INTERPRET=1 flashtile doctor      (the GPU's kernels too, in Triton's interpreter)
    """
    with loading():
        from rich.console import Console

        from flashtile.doctor import report

    return 0 if report(Console()) else 1


def bench(args: Sequence[str]) -> None:
    """Measure attention (flash-attention, atten, features, llama, overhead), tune, plot; each has its own --help.

    Examples:
      flashtile bench flash-attention --head-dim 64 128 --seq-len 1024 4096
      flashtile bench llama --help
    """
    kind, rest = _choose("flashtile bench", {n: text for n, (_, text) in BENCHMARKS.items()}, args, _description(bench))
    # The script reads its own options; this is the name that its help shows.
    sys.argv[0] = f"flashtile bench {kind}"
    rest = _spelt(rest, {long: short for short, long in DTYPES.items()})
    with loading():
        script = importlib.import_module(f"flashtile.bench_mark.{BENCHMARKS[kind][0]}")
    script.main(rest)


COMMANDS: dict[str, Callable[..., int | None]] = {
    "demo": demo,
    "train": train,
    "generate": generate,
    "compare": compare,
    "bench": bench,
    "explain": explain,
    "doctor": doctor,
}
FLAGS = {
    "version": "Print the version, and do nothing else.",
    "traceback": "After an error, show where it came from: flashtile --traceback COMMAND ...",
}
_READ_THEIR_ARGUMENTS = (train, bench)  # the others' arguments are read off their signatures
_STYLE = (tyro.conf.FlagCreatePairsOff,)


def main(argv: Sequence[str] | None = None) -> int:
    """flashtile: exact attention in pure Python.

    Examples:
      flashtile demo                                train a small language model, then sample from it
      flashtile generate "class Stack:"             continue a text with that model
      flashtile explain --seqlen 4096 --causal      which kernel serves a shape, and why
      flashtile doctor                              what works on this machine

    Each command has its own --help.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        from flashtile import __version__

        print(f"flashtile {__version__}")
        return 0
    traceback = args[:1] == ["--traceback"]
    summaries = {name: _description(command).split("\n")[0] for name, command in COMMANDS.items()}
    try:
        name, rest = _choose("flashtile", summaries, args[traceback:], _description(main), FLAGS)
        command = COMMANDS[name]
        if command is explain:
            rest = _spelt(rest, {long: short for short, long in DTYPES.items()})
        status = (
            command(rest) if command in _READ_THEIR_ARGUMENTS else _parse(command, name, _description(command), rest)
        )
    except KeyboardInterrupt:
        print("\nflashtile: interrupted", file=sys.stderr)
        return _ended(INTERRUPTED, argv is None)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, ArithmeticError, OSError, ImportError, NotImplementedError) as error:
        if traceback:
            raise
        print(f"flashtile: {_with_flags(str(error), args)}", file=sys.stderr)
        return 2
    return _ended(status or 0, argv is None)


def _ended(status: int, by_the_shell: bool) -> int:
    """Return the exit status; after Ctrl-C one more has nothing to stop, and must not spoil the end of the process."""
    if status == INTERRUPTED and by_the_shell:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _with_flags(message: str, args: Sequence[str]) -> str:
    """Return an error's message with options called as they are typed: `--d-model` where a function says `d_model`."""
    command = next((COMMANDS[arg] for arg in args[:2] if arg in COMMANDS), main)
    options = inspect.signature(command).parameters
    first = re.match(r"[a-z]\w*(?= is .*, but )", message)
    if first and (command in _READ_THEIR_ARGUMENTS or first[0] in options):
        message = _flag(first[0]) + message[first.end() :]
    if command is train:  # whose options are the fields that its errors speak of
        names = r"(?<![\w/.'-])[a-z]\w*_\w+(?= is | / |, which is |$)"
        message = re.sub(names, lambda name: _flag(name[0]), message)
    return message


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spelt(args: Sequence[str], spelling: Mapping[str, str]) -> list[str]:
    """Return the arguments with the values of --dtype spelt as the command does: fp32 and float32 are the same."""
    found, after = [], False
    for arg in args:
        name, equals, value = arg.partition("=")
        if arg.startswith("-"):
            after = name in ("--dtype", "--dtypes")
            found.append(f"{name}={spelling.get(value, value)}" if after and equals else arg)
        else:
            found.append(spelling.get(arg, arg) if after else arg)
    return found


def _parse(target: Callable[..., Any], name: str, description: str, args: Sequence[str], config: Any = _STYLE) -> Any:
    return tyro.cli(target, prog=f"flashtile {name}", description=description, args=args, config=config)


def _choose(
    prog: str, summaries: dict[str, str], args: Sequence[str], description: str, flags: Mapping[str, str] | None = None
) -> tuple[str, list[str]]:
    """Split the arguments into a subcommand and what follows; without a valid one, print help or the error and exit."""
    if args and args[0] in summaries:
        return args[0], list(args[1:])
    # Stubs instead of the commands, whose arguments would take heavy imports to describe.
    stubs = tuple(
        Annotated[make_dataclass("Stub", []), tyro.conf.subcommand(name, description=summary)]
        for name, summary in summaries.items()
    )
    hints = {name: tyro.conf.arg(help=text, help_behavior_hint="") for name, text in (flags or {}).items()}
    options = [(name, Annotated[bool, hint], field(default=False)) for name, hint in hints.items()]
    everything = make_dataclass("Options", [("command", Annotated[Union[stubs], tyro.conf.arg(name="")]), *options])  # noqa: UP007
    config = (*_STYLE, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    tyro.cli(everything, prog=prog, description=description, args=args or ["--help"], config=config)
    raise AssertionError("unreachable: tyro exits without a valid subcommand")


def _share_the_cores() -> None:
    """Have OpenMP's threads sleep, not spin, while they wait; it reads this when torch is loaded.

    One other busy process on two cores took the demo from 9,000 to 500 tokens/s: threads spun while the one they waited
    for was not running. Sleeping costs 15 % on an idle machine and holds up on a busy one (7,600 and 4,800 tokens/s).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _description(command: Callable[..., Any]) -> str:
    """The docstring up to ``Args:``, as it is written."""
    return (inspect.getdoc(command) or "").split("\nArgs:")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
