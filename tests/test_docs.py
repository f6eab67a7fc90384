"""The texts are true: their Python runs, their links lead somewhere, and they say nothing about somebody's machine."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
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
def test_nothing_about_somebodys_machine(page):
    found = FORBIDDEN.search(page.read_text())
    assert not found, f"{page.name} contains {found[0]!r}" if found else ""


def test_sources_say_nothing_about_somebodys_machine():
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("src/**/*.json"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        found = re.search(r"/work/|/root/|/home/\w|index-url|find-links", path.read_text())
        assert not found, f"{path.relative_to(ROOT)} contains {found[0]!r}" if found else ""


def test_speed_in_the_readme_is_the_measured_one():
    summary = json.loads((ROOT / "docs/results/h200_performance24.json").read_text())["summary"]
    for mode in ("forward", "backward"):
        measured = summary[mode]["flashtile"]
        numbers = (measured[name] for name in ("vs_fa2", "vs_fa2_lowest", "vs_best_peer"))
        row = f"| {mode} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"
        assert row in (ROOT / "README.md").read_text(), f"the README's table wants the row {row}"


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
