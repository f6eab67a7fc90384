"""Result files: written whole, read back equal, shown."""

import json

import pytest
import torch
from rich.console import Console

from flashtile.bench_mark.result import Result, cell, geometric_mean, markdown_table


def a_result() -> Result:
    result = Result.start("flash_attention", torch.device("cpu"), {"passes": 3}, commit="abc")
    result.rows = [{"provider": "naive", "ms": 1.25, "ok": True}, {"provider": "mock", "ms": None, "reason": "a | b"}]
    return result


def test_round_trip(tmp_path):
    result = a_result()
    path = result.save(tmp_path / "deep" / "result.json")
    assert Result.load(path) == result
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays


def test_what_json_cannot_hold_is_written_as_text(tmp_path):
    result = a_result()
    result.rows = [{"ms": float("nan"), "dtype": torch.bfloat16}]
    loaded = Result.load(result.save(tmp_path / "result.json"))
    assert loaded.rows == [{"ms": "nan", "dtype": "torch.bfloat16"}]


def test_another_format_is_refused(tmp_path):
    path = a_result().save(tmp_path / "result.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        Result.load(path)


def test_a_result_says_where_it_comes_from():
    result = a_result()
    assert result.versions["torch"] == str(torch.__version__)
    for part in (result.device["name"], result.date[:10], "commit abc", f"torch {torch.__version__}"):
        assert part in result.caption()


def test_tables():
    console = Console(record=True, width=120)
    console.print(a_result().table())
    assert "naive" in console.export_text()
    lines = a_result().markdown(["provider", "ms", "reason"]).splitlines()
    assert lines == ["| provider | ms | reason |", "|---|---|---|", "| naive | 1.25 |  |", "| mock |  | a \\| b |"]
    assert markdown_table(["x"], [[12345.6]]).endswith("| 12,346 |")


@pytest.mark.parametrize(
    ("value", "shown"), [(None, ""), (True, "yes"), (3, "3"), (0.0, "0"), (0.00123, "1.23e-03"), (99.95, "100")]
)
def test_cells(value, shown):
    assert cell(value) == shown


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None
