"""Byte-level byte-pair encoding: any text becomes tokens and comes back unchanged."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

from flashtile.llm.atomic import atomic_write

END_OF_TEXT = "<|endoftext|>"
"""The token between documents. In a text these characters are ordinary characters."""

TRAINER_CHARS = 20_000_000
"""The trainer reads this much of the corpus at most: merges found in a large sample barely change with more."""

_MIN_VOCAB = 257  # every byte, and the end of text


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    # Byte-level BPE writes each byte as one printable character (GPT-2's table): printable Latin-1 bytes stand for
    # themselves, the others for the characters from 256 on. This is the way back.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Tokenizer:
    """A trained vocabulary: `encode` text to token ids, `decode` them to the same text."""

    def __init__(self, backend: HFTokenizer) -> None:
        """Wrap a Hugging Face byte-level BPE; `Tokenizer.train` and `Tokenizer.load` make one."""
        backend.encode_special_tokens = True  # a text that spells <|endoftext|> must not end itself
        self._backend = backend
        symbols = _byte_of_symbol()
        self._bytes = [b""] * backend.get_vocab_size()
        for token, index in backend.get_vocab().items():
            self._bytes[index] = token.encode() if token == END_OF_TEXT else bytes(symbols[symbol] for symbol in token)
        end = backend.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"the tokenizer has no {END_OF_TEXT} token")
        self.end_of_text: int = end

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, max_chars: int = TRAINER_CHARS) -> Tokenizer:
        """Learn up to `vocab_size` tokens from the first `max_chars` characters of the texts.

        A small corpus may support fewer tokens. The result depends on the texts and their order only.

        Raises:
            ValueError: if `vocab_size` cannot hold the 256 bytes and the end of text.
        """
        if vocab_size < _MIN_VOCAB:
            raise ValueError(
                f"vocab_size must be at least {_MIN_VOCAB} (256 bytes and {END_OF_TEXT}), got {vocab_size}"
            )
        backend = HFTokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_take_chars(texts, max_chars), trainer)
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; ValueError if it has no UTF-8 form (a lone surrogate)."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, computed on all cores."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"text must be valid Unicode: {error}") from None
        return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; they need not be whole characters."""
        return self._bytes[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        return b"".join(self._bytes[index] for index in token_ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return the vocabulary and merges in Hugging Face's `tokenizer.json` form."""
        return self._backend.to_str(pretty=False)

    def save(self, path: Path | str) -> None:
        """Write `tokenizer.json`, atomically."""
        with atomic_write(path) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read what `save` wrote; FileNotFoundError if there is no such file, ValueError if it is something else."""
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there is no tokenizer at {path}")
        try:
            return cls(HFTokenizer.from_file(str(path)))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer, or a damaged one: {error}") from error


def _take_chars(texts: Iterable[str], max_chars: int) -> Iterator[str]:
    for text in texts:
        yield text[:max_chars]
        max_chars -= len(text)
        if max_chars <= 0:
            return
