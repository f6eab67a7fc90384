"""The texts are true: their Python runs, their links lead somewhere, and they say nothing about somebody's machine."""

import json
import re

import pytest

from tests.doc_links import PAGES, ROOT, line_of, renewed

IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
# Where one person's machine, or the history of the text, would show.
FORBIDDEN = re.compile(
    r"/work/|/root/|/home/\w|/tmp/|file://|index-url|find-links|\bissue #?\d|\bTODO\b", re.IGNORECASE
)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ +(.+?)\s*$", prose(text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)) for title in titles)
    return {title.lower().replace(" ", "-") for title in plain}


def stripped(code: str) -> str:
    return "\n".join(line.strip() for line in code.strip().splitlines())


SOURCES = [stripped(path.read_text()) for path in ROOT.glob("src/**/*.py")]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_run(page, cpu_path, tmp_path, monkeypatch):
    """The ```python blocks of a page run in their order, in one namespace; a block quoted from the source need not."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    for _, language, code in FENCE.findall(page.read_text()):
        if language == "python" and not any(stripped(code) in source for source in SOURCES):
            exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_resolve(page):
    text = page.read_text()
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        line = re.fullmatch(r"L(\d+)(?:-L(\d+))?", anchor)
        if line:
            last = int(line[2] or line[1])
            assert last <= len(target.read_text().splitlines()), f"{page.name} links to {link}, past the end"
        elif anchor and target.suffix == ".md":
            assert anchor in headings(target.read_text()), f"{page.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_into_the_code_point_at_the_line(page):
    text = page.read_text()
    assert text == renewed(text, page.parent), "a line has moved: make format (python -m tests.doc_links) renews them"


def test_a_link_means_a_definition_or_the_only_line_with_its_text():
    source = (
        "N = 3\n@overload\ndef f(x): ...\ndef f(x):\n    y = g(x) * N\n    return y\nclass A:\n    def f2(self): 0\n"
    )
    meant = {"N": 1, "f": 4, "module.f": 4, "f()": 4, "A": 7, "A.f2": 8, "y = g(x)": 5}
    assert {text: line_of(text, source) for text in meant} == meant
    for text in ("h", "x)"):
        with pytest.raises(ValueError, match="names no definition"):
            line_of(text, source)


def test_rates_in_the_derivation_are_the_measured_ones():
    result = json.loads((ROOT / "docs/results/h200_performance24.json").read_text())
    text = " ".join((ROOT / "docs/derivation.md").read_text().split())
    matmul, copy = result["ceilings"]["matmul_bf16_tflops"] * 1e12, result["ceilings"]["copy_gb_per_s"] * 1e9
    fa3 = {
        (row["head_dim"], row["causal"], row["seqlen"]): row["tflops"]
        for row in result["rows"]
        if row["provider"] == "fa3" and row["mode"] == "forward"
    }
    n, d = 8192, 128
    for words in (
        f"{matmul * 1e-12:.0f} TFLOP/s in a large bf16 matmul and {copy * 1e-12:.1f} TB/s",
        f"{4 * n * n * d / matmul * 1e6:.0f} microseconds at {matmul * 1e-12:.0f} TFLOP/s",
        f"= 537 MB, {4 * n * n * 2 / copy * 1e6:.0f} microseconds at {copy * 1e-12:.1f} TB/s",
        f"about **{round(matmul / copy, -1):.0f} operations per byte**",
        f"its forward pass did {fa3[128, False, 16384]:.0f} TFLOP/s at d = 128 and n = 16,384",
        f"up to {max(fa3.values()):.0f} at d = 256",
    ):
        assert words in text, f"the derivation wants: {words}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_nothing_about_somebodys_machine(page):
    found = FORBIDDEN.search(page.read_text())
    assert not found, f"{page.name} contains {found[0]!r}" if found else ""


def test_sources_say_nothing_about_somebodys_machine():
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("src/**/*.json"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        found = re.search(r"/work/|/root/|/home/\w|index-url|find-links", path.read_text())
        assert not found, f"{path.relative_to(ROOT)} contains {found[0]!r}" if found else ""


@pytest.mark.parametrize(("file", "kernels"), [("h200_hopper", "kernels for Hopper"),
                                              ("h200_performance24", "portable kernels")])  # fmt: skip
def test_speed_in_the_readme_is_the_measured_one(file, kernels):
    summary = json.loads((ROOT / f"docs/results/{file}.json").read_text())["summary"]
    text = (ROOT / "README.md").read_text()
    for mode in ("forward", "backward"):
        measured = summary[mode]["flashtile"]
        numbers = (measured[name] for name in ("vs_fa2", "vs_fa2_lowest", "vs_best_peer"))
        row = f"| {kernels}, {mode} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"
        assert row in text, f"the README's table wants the row {row}"
    if file == "h200_hopper":
        assert f"over {measured['measured']} of the 24 shapes" in text
        rows = json.loads((ROOT / f"docs/results/{file}.json").read_text())["rows"]
        ours = [row for row in rows if row["provider"] == "flashtile" and row["mode"] == "forward"]
        slowest = min(ours, key=lambda row: row["vs_best_peer"])
        half = "causal" if slowest["causal"] else "full"
        shape = f"head_dim {slowest['head_dim']}, {half}, {slowest['seqlen']:,} tokens"
        assert f"{shape}: {slowest['vs_best_peer']:.2f}." in " ".join(text.split())


def test_the_language_model_in_the_benchmarks_is_the_measured_one():
    result = json.loads((ROOT / "docs/results/training/h200_gpt2_124m.json").read_text())
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert f"commit {result['commit']}," in text
    for name, run in result["runs"].items():
        loss, apart = run["val"][-1]["val_loss"], run["max_loss_difference"]
        assert f"| `{name}` | {run['tokens_per_second']:,.0f} | {loss:.4f} | {apart:.4f} |" in text


def test_speed_of_the_hopper_kernels_in_the_readme_is_the_measured_one():
    summary = json.loads((ROOT / "docs/results/h200_hopper_backward.json").read_text())["summary"]
    measured = summary["backward"]["flashtile"]
    assert measured["measured"] == 24
    mean, lowest = measured["vs_best_peer"], measured["vs_best_peer_lowest"]
    words = f"{mean:.2f} times as fast as cuDNN's over the same 24 shapes, at least {lowest:.2f} times on each"
    assert words in " ".join((ROOT / "README.md").read_text().split())


def test_commands_in_the_readme_exist():
    pytest.importorskip("tyro")
    from flashtile import cli

    text = (ROOT / "README.md").read_text()
    code = "\n".join(
        [*(block for _, language, block in FENCE.findall(text) if language == "bash"), *INLINE.findall(text)]
    )
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= targets
    assert set(re.findall(r"^flashtile ([a-z]+)", code, re.MULTILINE)) <= {*cli.COMMANDS}
