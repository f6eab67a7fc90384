"""The text of a user's mask and score functions: what kernels would take differently is rewritten, or refused.

Functions run as Python on numbers and tensors, and are compiled from their text for kernels. Two things would not mean
the same there: ``//`` and ``%`` floor in Python and truncate in Triton, so ``floored`` makes calls of them; and what
asks a tensor for one truth value (``and``, ``or``, ``not``, ``if``, ``a < b < c``, ``max``), which fails in Python and
may compile to something else, so ``refuse`` names it and says what to write.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import linecache
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any

from flashtile.seqlen import ON_DEVICE, WHEN_COMPILED, floor_divide, floor_remainder

# What a value is to such a function: where it stands, something that may be a tensor, or a number (or a table).
WHERE, TENSOR, NUMBER = "where", "tensor", "number"
_NOT_VARYING = frozenset({"shape", "ndim", "dtype", "device", "seqlen_q", "seqlen_k"})
_IN_KERNELS = frozenset({"float", "getattr", "hasattr", "int", "isinstance", "len", "max", "min", "print", "range"})
_HELPERS = {
    ast.FloorDiv: ("flashtile_floor_divide", floor_divide, rb"//"),
    ast.Mod: ("flashtile_floor_remainder", floor_remainder, rb"%"),
}
_number = itertools.count()


def is_own(fn: Callable) -> bool:
    """Return whether a function is one of the library itself (or of Triton), which needs no second look."""
    return (getattr(fn, "__module__", None) or "").split(".")[0] in ("flashtile", "triton")


def parsed(fn: types.FunctionType) -> tuple[str, int, ast.FunctionDef] | None:
    """Return the text of a function, its first line's number, and its syntax tree; None where there is no text."""
    try:
        lines, first = inspect.getsourcelines(fn)
        text = textwrap.dedent("".join(lines))
        (tree,) = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return (text, max(first, 1), tree) if isinstance(tree, ast.FunctionDef) else None


# --- // and % ---------------------------------------------------------------------------------------------------------


def floored(fn: types.FunctionType) -> types.FunctionType:
    """Return ``fn`` with calls in place of ``//`` and ``%``, for kernels; ``fn`` itself if it has none.

    Lines keep their numbers, and the new text is where ``inspect`` looks for it, under a file name of its own.
    """
    found = parsed(fn)
    if found is None:
        return fn
    text, first, tree = found
    source = text.encode()
    edits = _edits(source, tree)
    if not edits:
        return fn
    lines = "\n" * (first - 1) + _edited(source, edits).decode()
    filename = f"{fn.__code__.co_filename}.floored{next(_number)}"
    module = ast.parse(lines)
    module.body[0].decorator_list = []  # pyright: ignore[reportAttributeAccessIssue]
    compiled = compile(module, filename, "exec", dont_inherit=True)
    code = next(c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == tree.name)
    linecache.cache[filename] = (len(lines), None, lines.splitlines(keepends=True), filename)
    scope = fn.__globals__ | {name: helper for name, helper, _ in _HELPERS.values()}
    made = types.FunctionType(code, scope, fn.__name__, fn.__defaults__)
    made.__qualname__, made.__annotations__ = fn.__qualname__, dict(fn.__annotations__)
    return made


def _edits(source: bytes, tree: ast.FunctionDef) -> list[tuple[int, int, bytes]]:
    """Return (offset, bytes to leave out, bytes to put there) for every ``//`` and ``%``, outer ones first."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    edits = []
    for node in itertools.chain.from_iterable(ast.walk(statement) for statement in tree.body):
        helper = _HELPERS.get(type(getattr(node, "op", None)))  # pyright: ignore[reportArgumentType]
        if helper is None:
            continue
        name, _, sign = helper[0].encode(), *helper[1:]
        (start, end), operand = span(node), node.target if isinstance(node, ast.AugAssign) else node.left  # pyright: ignore
        after = span(operand)[1]
        # Between an operand and the sign stand parentheses, white space and comments alone.
        between = re.compile(rb"(?:[\s\\)]|#[^\n]*)*(" + sign + rb"=?)").match(source, after)
        if between is None:
            raise AssertionError(f"no {sign.decode()} after {ast.unparse(operand)}")
        at, length = between.start(1), len(between[1])
        if isinstance(node, ast.AugAssign):
            edits.append((at, length, b"= " + name + b"(" + source[start:after] + b","))
        else:
            edits += [(start, 0, name + b"("), (at, length, b",")]
        edits.append((end, 0, b")"))
    return edits


def _edited(source: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    parts, done = [], 0
    for offset, length, put in sorted(edits, key=lambda edit: edit[0]):
        parts += [source[done:offset], put]
        done = offset + length
    return b"".join([*parts, source[done:]])


# --- what has no one truth value --------------------------------------------------------------------------------------


@functools.cache
def refuse(name: str, fn: types.FunctionType, kinds: tuple[str, ...]) -> None:
    """Raise TypeError if ``fn``, whose parameters are of these kinds, cannot mean the same on the CPU and in kernels.

    ``name`` is the argument that the function was given for.
    """
    _Reader(name, {}).returned(fn, kinds)


class _Reader:
    """Follows kinds of values through a function and those that it calls."""

    def __init__(self, name: str, known: dict[tuple, str]) -> None:
        self.name = name
        self.known = known

    def returned(self, fn: types.FunctionType, kinds: tuple[str, ...]) -> str:
        """Return the kind of what ``fn`` returns, having read it."""
        key = fn, kinds
        if key not in self.known:
            self.known[key] = NUMBER  # of a function that calls itself
            found = parsed(fn)
            if found is None:
                return TENSOR if TENSOR in kinds or WHERE in kinds else NUMBER
            self.known[key] = _Body(self, fn, found, kinds).result
        return self.known[key]


class _Body(ast.NodeVisitor):
    """One function's body: ``visit`` of an expression returns its kind."""

    def __init__(self, reader: _Reader, fn: types.FunctionType, found: tuple, kinds: tuple[str, ...]) -> None:
        _, self.first, tree = found
        self.reader, self.fn, self.result = reader, fn, NUMBER
        self.kinds = dict(zip((arg.arg for arg in tree.args.args), kinds, strict=False))
        for _ in range(2):  # what a loop assigns at its end it may read at its start
            for statement in tree.body:
                self.visit(statement)

    def wrong(self, node: Any, wanted: str) -> TypeError:
        name, line = f"{self.reader.name} {self.fn.__name__}", self.first + node.lineno - 1
        return TypeError(f"{name} has `{ast.unparse(node)}` (line {line}), but wants {wanted}")

    def generic_visit(self, node: ast.AST) -> str:
        kinds = [self.visit(child) for child in ast.iter_child_nodes(node)]
        return TENSOR if TENSOR in kinds else NUMBER

    def visit_Name(self, node: ast.Name) -> str:
        return self.kinds.get(node.id, NUMBER)

    def visit_Attribute(self, node: ast.Attribute) -> str:
        kind = self.visit(node.value)
        return NUMBER if node.attr in _NOT_VARYING or kind == NUMBER else TENSOR

    def visit_Subscript(self, node: ast.Subscript) -> str:
        return NUMBER if self.visit(node.value) == NUMBER else TENSOR

    def visit_Assign(self, node: ast.Assign) -> str:
        kind = self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value, kind)
        return NUMBER

    def assign(self, target: ast.AST, value: ast.AST | None, kind: str) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            for one, given in itertools.zip_longest(target.elts, values[: len(target.elts)]):
                self.assign(one, given, kind if given is None else self.visit(given))
        elif isinstance(target, ast.Name) and self.kinds.get(target.id) != TENSOR:
            self.kinds[target.id] = kind

    def visit_AugAssign(self, node: ast.AugAssign) -> str:
        kinds = self.visit(node.target), self.visit(node.value)
        self.assign(node.target, None, TENSOR if TENSOR in kinds else NUMBER)
        return NUMBER

    def visit_Return(self, node: ast.Return) -> str:
        if node.value is not None and self.visit(node.value) != NUMBER:
            self.result = TENSOR
        return NUMBER

    def visit_BoolOp(self, node: ast.BoolOp) -> str:
        if TENSOR in [self.visit(value) for value in node.values]:
            word, sign = ("and", " & ") if isinstance(node.op, ast.And) else ("or", " | ")
            written = sign.join(f"({ast.unparse(value)})" for value in node.values)
            raise self.wrong(node, f"`{written}`: `{word}` asks tensors for one truth value")
        return NUMBER

    def visit_UnaryOp(self, node: ast.UnaryOp) -> str:
        kind = self.visit(node.operand)
        if isinstance(node.op, ast.Not) and kind == TENSOR:
            written = f"`~({ast.unparse(node.operand)})`"
            raise self.wrong(node, f"{written}: `not` asks tensors for one truth value")
        if isinstance(node.op, ast.Invert) and kind == NUMBER and _is_truth(node.operand):
            # ~True is -2 in Python, and False in a kernel.
            raise self.wrong(node, f"`not ({ast.unparse(node.operand)})`: it is one number here, and ~True is -2")
        return kind

    def visit_Compare(self, node: ast.Compare) -> str:
        kinds = [self.visit(value) for value in (node.left, *node.comparators)]
        if len(node.ops) > 1:
            values = [node.left, *node.comparators]
            pairs = (ast.Compare(a, [op], [b]) for a, op, b in zip(values, node.ops, values[1:], strict=False))
            written = " & ".join(f"({ast.unparse(pair)})" for pair in pairs)
            raise self.wrong(node, f"`{written}`: kernels compare two values at a time")
        return TENSOR if TENSOR in kinds and not isinstance(node.ops[0], (ast.Is, ast.IsNot)) else NUMBER

    def visit_IfExp(self, node: ast.IfExp) -> str:
        if self.visit(node.test) == TENSOR:
            parts = ", ".join(ast.unparse(part) for part in (node.test, node.body, node.orelse))
            raise self.wrong(node, f"`select({parts})`: `if` asks tensors for one truth value")
        return TENSOR if TENSOR in (self.visit(node.body), self.visit(node.orelse)) else NUMBER

    def visit_If(self, node: ast.If) -> str:
        if self.visit(node.test) == TENSOR:
            raise self.wrong(
                node.test, "no `if` on it, which asks tensors for one truth value: select(condition, a, b)"
            )
        return self.statements(*node.body, *node.orelse)

    def statements(self, *nodes: ast.AST) -> str:
        for node in nodes:
            self.visit(node)
        return NUMBER

    def visit_Call(self, node: ast.Call) -> str:
        kinds = [self.visit(arg) for arg in node.args] + [self.visit(word.value) for word in node.keywords]
        varies = TENSOR if TENSOR in kinds or WHERE in kinds else NUMBER
        if not isinstance(node.func, ast.Name):
            return TENSOR if TENSOR in (self.visit(node.func), varies) else NUMBER
        called = self.fn.__globals__.get(node.func.id)
        if called is None:
            self.builtin(node, node.func.id, varies)
        called = getattr(called, "fn", called)  # what triton.jit was applied to
        if called in WHEN_COMPILED:
            return NUMBER
        if isinstance(called, types.FunctionType) and called not in ON_DEVICE and not is_own(called):
            return varies if node.keywords else self.reader.returned(called, tuple(kinds))
        return varies

    def builtin(self, node: ast.Call, name: str, varies: str) -> None:
        if not hasattr(builtins, name) or (isinstance(getattr(builtins, name), type) and name not in ("bool",)):
            return
        args = [ast.unparse(arg) for arg in node.args]
        if name == "abs" and len(args) == 1:
            written = f"select({args[0]} < 0, -({args[0]}), {args[0]})"
            raise self.wrong(node, f"`{written}`: kernels have no `abs` (flashtile.score has `absolute`)")
        if name in ("max", "min") and varies == TENSOR:
            sign = ">" if name == "max" else "<"
            written = f"select({args[0]} {sign} {args[1]}, {args[0]}, {args[1]})" if len(args) == 2 else "select"
            raise self.wrong(node, f"`{written}`: `{name}` asks tensors for one truth value")
        if name not in _IN_KERNELS:
            raise self.wrong(node, f"no `{name}`, which kernels do not have")


def _is_truth(node: ast.AST) -> bool:
    """Return whether an expression is a comparison, or made of comparisons."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor)) and _is_truth(node.left)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not) or (isinstance(node.op, ast.Invert) and _is_truth(node.operand))
    return isinstance(node, (ast.Compare, ast.BoolOp))
