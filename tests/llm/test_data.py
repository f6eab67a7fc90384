"""What counts as text, how it becomes tokens once, and which windows training sees."""

import json
import sysconfig

import numpy as np
import pytest
import torch

from flashtile.llm import Tokenizer, get_batch, prepare_data
from flashtile.llm.data import Corpus, find_corpus, windows


def prepare(path, cache, **changes):
    return prepare_data(path, **{"vocab_size": 300, "val_fraction": 0.1, "cache_dir": cache} | changes)


def test_finds_text_and_leaves_out_the_rest(corpus):
    found = find_corpus(corpus)
    assert sorted(p.name for p in found.files) == [f"part_{n:02}.py" for n in range(12)]
    assert found.num_skipped == 2  # the image and the Latin-1 file
    assert found.num_bytes == sum(p.stat().st_size for p in found.files)


def test_order_and_key_depend_on_the_contents_only(corpus, tmp_path):
    for number, path in enumerate(reversed(find_corpus(corpus).files)):
        (tmp_path / f"{number}.md").write_bytes(path.read_bytes())
    (tmp_path / "copy.md").write_bytes((tmp_path / "0.md").read_bytes())
    moved, original = find_corpus(tmp_path), find_corpus(corpus)
    assert moved.key == original.key
    assert [p.read_bytes() for p in moved.files] == [p.read_bytes() for p in original.files]
    (tmp_path / "0.md").write_text("changed")
    assert find_corpus(tmp_path).key != original.key


def test_the_standard_library_is_the_default_corpus():
    corpus = find_corpus()
    names = {p.name for p in corpus.files}
    assert {"ast.py", "argparse.py", "dataclasses.py"} <= names
    folders = {p.relative_to(sysconfig.get_paths()["stdlib"]).parts[:-1] for p in corpus.files}
    assert not any(set(parts) & {"test", "tests", "site-packages"} for parts in folders)
    assert corpus.num_bytes > 5e6


def test_pieces_join_to_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("flashtile.llm.data._PIECE_CHARS", 10)
    texts = ["one\r\ntwo\n" * 9, "no line end", "a\n" * 20 + "tail"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}").write_text(text, newline="")
    corpus = Corpus("x", tuple(tmp_path / str(n) for n in range(3)), "", 0, 0)
    joined, pieces = [""], list(corpus.pieces())
    for text, ends_file in pieces:
        joined[-1] += text
        if ends_file:
            joined.append("")
    assert joined == [*texts, ""]
    assert len(pieces) > 10


def test_tokens_are_the_documents_with_ends_between(corpus, dataset):
    tokens = np.concatenate([dataset.train, dataset.val])
    assert tokens.dtype == np.uint16
    assert len(dataset.val) == round(0.1 * len(tokens))
    end = dataset.tokenizer.end_of_text
    documents = dataset.tokenizer.decode(tokens.tolist()).split(dataset.tokenizer.decode([end]))
    assert documents == [p.read_text() for p in find_corpus(corpus).files] + [""]
    assert (tokens == end).sum() == 12


def test_one_file_is_a_corpus_too(corpus, tmp_path):
    dataset = prepare(corpus / "part_03.py", tmp_path)
    text = dataset.tokenizer.decode([*dataset.train.tolist(), *dataset.val.tolist()[:-1]])
    assert text == (corpus / "part_03.py").read_text()


def test_a_corpus_is_tokenized_once(corpus, tmp_path, monkeypatch):
    said = []
    first = prepare(corpus, tmp_path, say=said.append)
    assert said[0].startswith("Tokenizing")
    assert "12 files" in said[0]
    assert "2 skipped: not UTF-8 text" in said[0]
    monkeypatch.setattr(Tokenizer, "train", None)
    second = prepare(corpus, tmp_path, say=said.append)
    assert said[2].endswith("tokenized earlier.")
    assert second.key == first.key
    assert np.array_equal(second.train, first.train)
    assert second.tokenizer.to_json() == first.tokenizer.to_json()
    meta = json.loads((tmp_path / first.key / "meta.json").read_text())
    assert meta["vocab_size"] == first.tokenizer.vocab_size


def test_another_split_needs_no_new_tokens(corpus, tmp_path):
    a, b = prepare(corpus, tmp_path), prepare(corpus, tmp_path, val_fraction=0.5)
    assert a.key == b.key
    assert abs(len(b.train) - len(b.val)) <= 1


def test_another_vocabulary_or_text_is_another_cache(corpus, tmp_path):
    keys = {prepare(corpus, tmp_path).key, prepare(corpus, tmp_path, vocab_size=290).key}
    keys.add(prepare(corpus / "part_01.py", tmp_path).key)
    assert len(keys) == 3


def test_a_kill_while_tokenizing_leaves_no_cache(corpus, tmp_path, monkeypatch):
    def die(self, texts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tmp_path)
    assert not list(tmp_path.glob("*/tokens.bin")) + list(tmp_path.glob("*/.*.tmp"))
    assert len(prepare(corpus, tmp_path).train) > 1000


def test_large_vocabularies_get_wide_tokens(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "vocab_size", property(lambda self: 70_000))
    dataset = prepare(corpus, tmp_path)
    assert dataset.train.dtype == np.uint32
    assert dataset.train.max() < 300


def test_missing_and_empty_corpora_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"data: there is no file or folder at {tmp_path}/nothing"):
        find_corpus(tmp_path / "nothing")
    with pytest.raises(
        ValueError, match=rf"data: no text found in {tmp_path} \(0 files seen, 0 of them not UTF-8 text\)"
    ):
        find_corpus(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    (tmp_path / "cut").write_bytes("é".encode()[:1])
    with pytest.raises(ValueError, match=r"\(3 files seen, 2 of them not UTF-8 text\)"):
        find_corpus(tmp_path)


def test_targets_are_the_next_tokens():
    x, y = get_batch(np.arange(100, dtype=np.uint16), 32, 7)
    assert x.shape == y.shape == (32, 7)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(7))


def test_every_window_is_drawn_alike():
    starts = torch.cat([get_batch(np.arange(15), 1000, 5)[0][:, 0] for _ in range(10)])
    counts = torch.bincount(starts)
    assert len(counts) == 10  # the last window's targets end with the last token
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


def test_batches_follow_the_generator():
    a, b, c = (get_batch(np.arange(1000), 8, 5, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_reads_memory_maps(tmp_path):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "t.bin")
    x, y = windows(np.memmap(tmp_path / "t.bin", np.uint16, "r"), np.array([0, 44]), 5)
    assert x.tolist() == [[0, 1, 2, 3, 4], [44, 45, 46, 47, 48]]
    assert y[-1, -1] == 49


@pytest.mark.parametrize("context_length", [10, 11])
def test_a_context_longer_than_the_data_is_refused(context_length):
    message = f"the data has 10 tokens, but a sequence of {context_length} and the token after it take"
    with pytest.raises(ValueError, match=message):
        get_batch(np.arange(10), 1, context_length)
    get_batch(np.arange(10), 1, 9)
