"""The rules of the house (docs/architecture.md), read off the source."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flashtile"

# A part may import from its own layer and the layers above it in this list.
LAYERS = (
    {"constant"},
    {"mask", "score", "seqlen", "dropout"},
    {"kernel", "dispatch"},  # dispatch chooses among the kernels' backends; kernel/autograd.py asks it
    {"ops"},
    {"attention", "statistics"},
    {"flashtile"},  # the package's own names
    {"llm", "integrations", "parallel", "doctor"},
    {"bench_mark"},
    {"cli", "__main__"},
)
LONGEST_FILE = 550


class Import(NamedTuple):
    importer: str
    target: str
    line: int
    at_top: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imports_of(name: str) -> list[Import]:
    """What module ``name`` imports from flashtile, anywhere in it, as names of modules."""
    tree = ast.parse(MODULES[name].read_text())
    top = {id(node) for node in ast.walk(tree) if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            top -= {id(node) for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write the full name"
            module = node.module or ""
            targets = [f"{module}.{a.name}" if f"{module}.{a.name}" in MODULES else module for a in node.names]
        else:
            continue
        found += [
            Import(name, target, node.lineno, id(node) in top)
            for target in targets
            if target.split(".")[0] == "flashtile"
        ]
    return found


IMPORTS = [found for name in MODULES for found in imports_of(name)]


def part(module: str) -> str:
    """The part of the house that a module belongs to: ``flashtile.kernel.tile`` -> ``kernel``."""
    return module.split(".")[1] if "." in module else module


def layer(module: str) -> int:
    levels = [level for level, parts in enumerate(LAYERS) if part(module) in parts]
    assert levels, f"{module} has no place in LAYERS; see docs/architecture.md"
    return levels[0]


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_one_way(name):
    backward = [f"line {i.line}: {i.target}" for i in IMPORTS if i.importer == name and layer(i.target) > layer(name)]
    assert not backward, f"{name} imports from a layer above it: {', '.join(backward)}"


def test_no_import_cycles():
    graph = {name: {i.target for i in IMPORTS if i.importer == name and i.at_top} for name in MODULES}
    graph["flashtile"] = set()  # running __init__ first is every import's business
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_benchmarks_are_imported_by_the_command_line_only_and_late():
    for found in IMPORTS:
        if part(found.target) == "bench_mark" and part(found.importer) != "bench_mark":
            where = f"{found.importer}:{found.line} imports {found.target}"
            assert part(found.importer) == "cli", f"{where}; only cli may"
            assert not found.at_top, f"{where} when it is imported; import it in the command that needs it"


def test_command_line_parsers_stay_at_the_edge():
    for name, path in MODULES.items():
        if part(name) in ("cli", "bench_mark"):
            continue
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert not names & {"argparse", "tyro"}, f"{name} parses a command line; that is cli.py's work"


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_files_are_short(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST_FILE}
    assert not long, f"more than {LONGEST_FILE} lines; does each do two jobs? {long}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flashtile", "triton einx matplotlib tyro rich tokenizers tensorboard flashtile.llm flashtile.bench_mark"),
        ("flashtile.llm", "triton einx tyro flashtile.bench_mark"),
        ("flashtile.cli", "torch triton einx matplotlib flashtile.bench_mark"),
    ],
)
def test_imports_are_light(module, absent):
    if module not in MODULES:
        pytest.skip(f"there is no {module}")
    if module == "flashtile.cli":
        pytest.importorskip("tyro")
    code = f"import sys, {module}; print(*(name for name in {absent.split()} if name in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.split() == [], f"import {module} pulls in {out.stdout}"
