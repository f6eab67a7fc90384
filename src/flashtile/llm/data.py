"""From text on disk to batches of token ids.

A corpus is a text file, a folder of them, or, by default, the sources of Python's standard library, which every
machine has. It is tokenized once into a flat binary file of ids that training reads through a memory map; its folder is
named by the hash of the content, so a changed corpus is never mistaken for the old one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flashtile.llm.atomic import atomic_write
from flashtile.llm.tokenizer import TRAINER_CHARS, Tokenizer

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PIECE_CHARS = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order, and what they are called and hold."""

    name: str
    files: tuple[Path, ...]
    key: str  # hash of the contents in their order
    num_bytes: int
    num_skipped: int  # files that were not UTF-8 text

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield the text in pieces of about a megabyte, cut at line ends, each with whether it ends its file."""
        for path in self.files:
            with path.open(encoding="utf-8", newline="") as file:
                piece = "".join(file.readlines(_PIECE_CHARS))
                while piece:
                    following = "".join(file.readlines(_PIECE_CHARS))
                    yield piece, not following
                    piece = following


def find_corpus(path: Path | str | None = None) -> Corpus:
    """Return the corpus at a file or folder; None means Python's standard library without its tests.

    Files that are not UTF-8 text, hidden files, empty files and copies are left out. The others are ordered by the hash
    of their content: the same on every machine, and the tail of the tokens is a fair sample to validate on.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if no text is there.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = "the Python standard library's sources"
        candidates = [p for p in _walk(root, _NOT_LIBRARY) if p.suffix == ".py"]
    else:
        root = Path(path)
        name = str(root)
        if not root.exists():
            raise FileNotFoundError(f"data: there is no file or folder at {root}")
        candidates = list(_walk(root, set())) if root.is_dir() else [root]
    found: dict[str, tuple[Path, int]] = {}
    skipped = 0
    for candidate in candidates:
        digest, size = _hash_text(candidate)
        if digest is None:
            skipped += 1
        elif size:
            found.setdefault(digest, (candidate, size))  # a second copy of a file would leak into the validation split
    if not found:
        raise ValueError(
            f"data: no text found in {root} ({len(candidates)} files seen, {skipped} of them not UTF-8 text)"
        )
    digests = sorted(found)
    return Corpus(
        name=name,
        files=tuple(found[digest][0] for digest in digests),
        key=hashlib.sha256("".join(digests).encode()).hexdigest(),
        num_bytes=sum(size for _, size in found.values()),
        num_skipped=skipped,
    )


def _walk(root: Path, excluded: set[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in excluded and not s.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _hash_text(path: Path) -> tuple[str | None, int]:
    """Return the SHA-256 and size of a file; no hash if it is not UTF-8 text."""
    digest, size = hashlib.sha256(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        try:
            while block := file.read(_PIECE_CHARS):
                if b"\0" in block:
                    return None, 0
                decoder.decode(block)
                digest.update(block)
                size += len(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return None, 0
    return digest.hexdigest(), size


@dataclass(frozen=True)
class TokenDataset:
    """A tokenized corpus: memory-mapped ids, split into a training head and a validation tail."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    key: str
    name: str


def prepare_data(
    path: Path | str | None,
    *,
    vocab_size: int,
    val_fraction: float,
    cache_dir: Path | str,
    context_length: int = 0,
    say: Callable[[str], None] = lambda message: None,
) -> TokenDataset:
    """Tokenize the corpus at `path` (see `find_corpus`), or open what an earlier call left in `cache_dir`.

    Args:
        path: text file, folder, or None for the standard library.
        vocab_size: most tokens the tokenizer, trained on this corpus, may have.
        val_fraction: share of the tokens, at the end, that is kept for validation.
        cache_dir: gets a folder `<hash>` with `tokens.bin` and `tokenizer.json`; nothing if the text is too short.
        context_length: tokens of the sequences that both parts must have one of, with the token after it.
        say: is told, in sentences, what happens.

    Raises:
        FileNotFoundError, ValueError: as `find_corpus`, `Tokenizer.train` and `check_length` do.
    """
    corpus = find_corpus(path)
    key = token_key(corpus, vocab_size)
    folder = Path(cache_dir, key)
    size = f"{len(corpus.files):,} files, {corpus.num_bytes / 1e6:.1f} MB"
    if corpus.num_skipped:
        size += f", {corpus.num_skipped} skipped: not UTF-8 text"
    if (folder / "meta.json").exists():
        say(f"Reading {corpus.name} ({size}), tokenized earlier.")
    else:
        if context_length:  # a token is a byte or more, and one ends each file
            _check_split(corpus.num_bytes + len(corpus.files), val_fraction, context_length, "at most ")
        say(f"Tokenizing {corpus.name} ({size}).")
        if corpus.num_bytes > TRAINER_CHARS:
            say(f"The tokenizer learns from the first {TRAINER_CHARS / 1e6:.0f} million characters.")
        tokenizer = Tokenizer.train((piece for piece, _ in corpus.pieces()), vocab_size)
        if context_length and corpus.num_bytes <= _PIECE_CHARS:  # few bytes make few tokens: count them first
            counts = map(len, tokenizer.encode_batch([text for text, _ in corpus.pieces()]))
            _check_split(sum(counts) + len(corpus.files), val_fraction, context_length)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer.json")
        _write_tokens(corpus, tokenizer, folder / "tokens.bin")
        with atomic_write(folder / "meta.json") as file:  # last: its presence means that the others are whole
            meta = {"corpus": corpus.name, "sha256": corpus.key, "vocab_size": tokenizer.vocab_size}
            file.write(json.dumps(meta).encode())
    return open_data(folder, val_fraction=val_fraction, say=say)


def token_key(corpus: Corpus, vocab_size: int) -> str:
    """Return the name of the tokens that `prepare_data` makes of a corpus: a hash of all that they depend on."""
    return hashlib.sha256(f"{corpus.key} bpe {vocab_size} {TRAINER_CHARS}".encode()).hexdigest()[:16]


def open_data(
    folder: Path | str, *, val_fraction: float, say: Callable[[str], None] = lambda message: None
) -> TokenDataset:
    """Open a folder of tokens that `prepare_data` has written, without a look at the text they were made of.

    Raises:
        FileNotFoundError: if there is none, or only half of one.
    """
    folder = Path(folder)
    if not (folder / "meta.json").exists():
        raise FileNotFoundError(f"data: there are no tokens in {folder}")
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    tokens = np.memmap(folder / "tokens.bin", dtype=_id_dtype(tokenizer), mode="r")
    split = _split(len(tokens), val_fraction)
    say(f"{tokenizer.vocab_size:,} distinct tokens; {split:,} to train on, {len(tokens) - split:,} to validate on.")
    name = json.loads((folder / "meta.json").read_text())["corpus"]
    return TokenDataset(tokens[:split], tokens[split:], tokenizer, folder.name, name)


def _split(num_tokens: int, val_fraction: float) -> int:
    return num_tokens - max(1, round(num_tokens * val_fraction))


def _check_split(num_tokens: int, val_fraction: float, context_length: int, about: str = "") -> None:
    split = _split(num_tokens, val_fraction)
    _check_length(split, context_length, "the training split", about)
    _check_length(num_tokens - split, context_length, "the validation split", about)


def _id_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def _write_tokens(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> None:
    dtype = _id_dtype(tokenizer)
    with atomic_write(path) as file:
        batch: list[tuple[str, bool]] = []
        chars = 0

        def flush() -> None:
            for ids, (_, ends_file) in zip(tokenizer.encode_batch([text for text, _ in batch]), batch, strict=True):
                if ends_file:
                    ids.append(tokenizer.end_of_text)
                file.write(np.asarray(ids, dtype).tobytes())

        for piece in corpus.pieces():
            batch.append(piece)
            chars += len(piece[0])
            if chars > 4 * _PIECE_CHARS:  # enough to keep all cores busy, little enough to keep memory flat
                flush()
                batch.clear()
                chars = 0
        flush()


def get_batch(
    dataset: np.ndarray,
    batch_size: int,
    context_length: int,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `batch_size` random windows of the tokens and, as targets, the same windows one token later.

    Args:
        dataset: token ids, 1-D; a memory map is read only where the windows are.
        generator: a CPU generator to draw the windows' places from; None is torch's default one.

    Returns:
        inputs and targets, int64 `(batch_size, context_length)` on `device`.

    Raises:
        ValueError: if the data has no window of `context_length + 1` tokens.
    """
    check_length(dataset, context_length)
    starts = torch.randint(len(dataset) - context_length, (batch_size,), generator=generator)
    return windows(dataset, starts.numpy(), context_length, device)


def check_length(dataset: np.ndarray, context_length: int, name: str = "the data") -> None:
    """Raise ValueError unless a window of `context_length` tokens and the token after it exist."""
    _check_length(len(dataset), context_length, name)


def _check_length(num_tokens: int, context_length: int, name: str, about: str = "") -> None:
    if context_length >= num_tokens:
        raise ValueError(
            f"the text is too short: {name} has {about}{num_tokens:,} tokens, but a sequence of {context_length:,} "
            f"and the token after it take {context_length + 1:,}"
        )


def windows(
    dataset: np.ndarray, starts: np.ndarray, context_length: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 `(len(starts), context_length)`, of the windows that begin at `starts`."""
    rows = np.stack([dataset[start : start + context_length + 1] for start in starts]).astype(np.int64)
    tokens = torch.from_numpy(rows)
    if torch.device(device).type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    else:
        tokens = tokens.to(device)
    return tokens[:, :-1], tokens[:, 1:]
