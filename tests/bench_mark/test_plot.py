"""Tables and figures from a synthetic result."""

import pytest
import torch

from flashtile.bench_mark import bench_mark_flash_attention as bench
from flashtile.bench_mark import plot
from flashtile.bench_mark.bench_mark_llama import ratios
from flashtile.bench_mark.measure import Case
from flashtile.bench_mark.providers import PROVIDERS, select
from flashtile.bench_mark.result import Result

PAGE = f"# Title\n\nprose\n\n{plot.BEGIN}\nold\n{plot.END}\nend\n"


@pytest.fixture
def attention_result() -> Result:
    result = Result.start("flash_attention", torch.device("cpu"), {}, commit="abc")
    result.ceilings = {"matmul_bf16_tflops": 3.0}
    for seqlen in (512, 2048):
        case = Case("bf16", 1, 2, seqlen, 64, False)
        rows = []
        for speed, provider in enumerate(select(("flashtile", "fa2", "fa3")), 1):
            for mode in ("forward", "backward"):
                row = bench._row(provider, case, mode)
                if provider.name == "fa3" and mode == "backward":
                    row.update(status="unsupported", reason="forward only")
                else:
                    row.update(status="ok", ms=6.0 / speed, tflops=float(speed), peak_mib=0.25)
                rows.append(row)
        bench.add_ratios(rows)
        result.rows += rows
    result.rows.append({**result.rows[0], "provider": "cudnn", "status": "wrong", "reason": "o is off by 1"})
    result.summary = bench.summary_of(result.rows)
    return result


def test_the_page_is_rewritten_between_its_markers(tmp_path, attention_result):
    docs = tmp_path / "docs"
    attention_result.save(docs / "results" / "device.json")
    (docs / "benchmarks.md").write_text(PAGE)
    plot.run(plot.Options(docs=docs / "benchmarks.md"))
    page = (docs / "benchmarks.md").read_text()
    assert page.startswith("# Title\n\nprose\n")
    assert page.endswith(f"{plot.END}\nend\n")
    assert "old" not in page
    assert "| forward | **flashtile** | 2/2 | 1 | 0.333 | 0.5 | 0.5 | 0.333 | 0.333 |" in page
    assert "| 64 | no | 512 | 1 | 2 | 0.5 | 0.5 | 0.25 |" in page  # backward: no column for fa3
    assert "o is off by 1" in page
    assert "not complete" in page
    for name in ("device_forward", "device_backward", "device_ratios"):
        figure = docs / "results" / f"{name}.png"
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert f"![{name}](results/{name}.png)" in page
    again = page
    plot.run(plot.Options(docs=docs / "benchmarks.md"))
    assert (docs / "benchmarks.md").read_text() == again


def test_no_results_no_numbers(tmp_path):
    (tmp_path / "benchmarks.md").write_text(PAGE)
    plot.run(plot.Options(docs=tmp_path / "benchmarks.md"))
    assert plot.NOTHING in (tmp_path / "benchmarks.md").read_text()


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="must hold"):
        plot.rewrite("no markers", [])


def test_llama_shows_the_published_figures(tmp_path):
    result = Result.start("llama", torch.device("cpu"), {}, commit="abc")
    for attention, ms in (("naive", 8.0), ("flash", 2.0)):
        result.rows.append({"level": "attention", "attention": attention, "mode": "both", "ms": ms, "heads": 2,
                            "peak_mib": 10 * ms, "total_mib": 100 + 10 * ms, "head_dim": 8, "seqlen": 16})  # fmt: skip
    result.summary = {"published": {"time": 3.4, "memory": 6.0}, "ratios": ratios(result.rows)}
    text = plot.section(result.save(tmp_path / "llama.json"), tmp_path / "page.md", None)
    assert "| attention both | 4 | 1.5 | 4 |" in text
    assert "| published, to beat | 3.4 | 6 |" in text
    assert (tmp_path / "llama.png").exists()


def test_other_benchmarks_get_their_rows_as_a_table(tmp_path):
    result = Result.start("overhead", torch.device("cpu"), {}, commit="abc")
    result.rows = [{"what": "eager", "microseconds": 12.5}, {"what": "graph", "microseconds": 2.5}]
    text = plot.section(result.save(tmp_path / "overhead.json"), tmp_path / "page.md", None)
    assert "| eager | 12.5 |" in text


def test_ratios_can_be_read_off(tmp_path, attention_result, monkeypatch):
    """Several labelled ticks on every panel, none without a label, and markers that new providers do not move."""
    figures = []
    monkeypatch.setattr(plot, "_finish", lambda figure, result, title, path: figures.append(figure) or path)
    plot.plot_ratios(attention_result, tmp_path / "ratios.png")
    for axis in figures[0].axes:
        figures[0].canvas.draw()
        labels = [label.get_text() for label in axis.get_yticklabels()]
        assert len(labels) >= 3
        assert "1x" in labels
        assert all(labels)
        assert not list(axis.yaxis.get_minorticklocs())
    assert set(plot.MARKERS) | {"flashtile"} == set(PROVIDERS) == set(plot.COLOURS) - {"flash"}
    assert len(set(plot.MARKERS.values())) == len(plot.MARKERS)
