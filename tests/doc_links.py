"""Links from the pages into the source, to the very line: `python -m tests.doc_links` renews their numbers.

A link whose text is code, [`name`](../src/.../file.py#L12), means the line of that file that defines the name; where
the text is no name, the one line that holds this text. The tests fail when a number is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
CODE_LINK = re.compile(r"(\[`([^`\n]+)`\]\(([^)#\s]+\.py))(?:#L\d+)?\)")


def line_of(text: str, source: str) -> int:
    """Return the number of the line that a link of this text means; ValueError if there is none, or more than one."""
    name = text.removesuffix("()").split(".")[-1] if re.fullmatch(r"[\w.]+(\(\))?", text) else ""
    defines = re.compile(rf"\s*(?:def|class) {re.escape(name)}\b|{re.escape(name)}\b[^=]*=[^=]")
    lines = source.splitlines()
    found = [number for number, line in enumerate(lines, 1) if name and defines.match(line)]
    if found:
        return found[-1]  # the last one: overloads stand above what they overload
    found = [number for number, line in enumerate(lines, 1) if text in line]
    if len(found) != 1:
        raise ValueError(f"{text!r} names no definition, and is in {len(found)} lines")
    return found[0]


def renewed(text: str, folder: Path) -> str:
    """Return a page's text with the numbers as they are now; links whose text is a file's name keep none."""

    def renew(link: re.Match[str]) -> str:
        beginning, text, path = link.groups()
        if text.endswith((".py", "/")):
            return f"{beginning})"
        try:
            return f"{beginning}#L{line_of(text, (folder / path).resolve().read_text())})"
        except ValueError as error:
            raise ValueError(f"the link {link[0]}: {error}") from error

    return CODE_LINK.sub(renew, text)


def main() -> None:
    """Renew the numbers of every page."""
    for page in PAGES:
        old = page.read_text()
        new = renewed(old, page.parent)
        if new != old:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)}: line numbers renewed")


if __name__ == "__main__":
    main()
