"""Any text comes back unchanged, special characters are only characters, and files are whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtile.llm import Tokenizer
from flashtile.llm.tokenizer import END_OF_TEXT

TEXT = "def area(width, height):\n    return width * height\n\n" * 50


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 280)


@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\r\n\t\0",
        "  two  spaces  ",
        "naïve Ångström 漢字 🇨🇭 👩‍👩‍👧",
        "e\u0301 \ufeff\u200b",
        END_OF_TEXT,
        "x" * 10_000,
    ],
    ids=ascii,
)
def test_awkward_texts_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_learns_to_use_fewer_tokens_than_bytes(tokenizer):
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2


def test_a_text_cannot_end_itself(tokenizer):
    assert tokenizer.end_of_text not in tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_tokens_have_bytes(tokenizer):
    ids = tokenizer.encode("é漢")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é漢".encode()
    assert tokenizer.decode(ids[:1]) == "\ufffd"  # half a character


def test_batches_are_encoded_like_single_texts(tokenizer):
    assert tokenizer.encode_batch(["def", "", "é"]) == [tokenizer.encode(t) for t in ("def", "", "é")]


def test_saves_and_loads(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = f"def width: {END_OF_TEXT} ünïcode"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_training_is_deterministic_and_reads_no_more_than_told():
    assert Tokenizer.train([TEXT], 280).to_json() == Tokenizer.train([TEXT], 280).to_json()
    half = len(TEXT) // 2
    whole = Tokenizer.train([TEXT[:half], TEXT[half:] + "zzzz" * 1000], 300, max_chars=half)
    assert whole.to_json() == Tokenizer.train([TEXT[:half]], 300).to_json()


def test_a_small_corpus_supports_a_small_vocabulary():
    assert Tokenizer.train(["ab"], 5000).vocab_size <= 258


def test_refuses():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257 .*, got 256"):
        Tokenizer.train([TEXT], 256)
    with pytest.raises(ValueError, match=r"text must be valid Unicode: .*surrogate"):
        Tokenizer.train([TEXT], 260).encode("\ud800")
