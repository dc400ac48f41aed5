"""Small changes to Python source, each of which a test should notice: the operators of `make mutants`.

Left alone is code that computes nothing: annotations, decorators, assertions, `__repr__`, f-strings, names of types,
and log lines below a warning.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMMUTATIVE = frozenset({"min", "max", "TypeVar", "NewType", "cast", "isinstance"})
"""Functions of which swapped arguments say nothing: the result is the same, or no test passes."""

ONLY_SHOWN = frozenset({"repr", "strict", "exc_info", "stacklevel"})
"""Keyword arguments that change what is shown, or that check what is always true."""

SMALL = 100
"""Whole numbers below this change by one. Others, and fractions, are doubled or halved."""

Place = ast.expr | ast.stmt


@dataclass(frozen=True, slots=True)
class Mutation:
    """Whole lines of `file` (a path in the repository), and those in their place."""

    file: str
    line: int
    kind: str
    removed: str
    added: str
    occurrence: int = 0
    """Number of equal changes before this one in the file."""

    @property
    def key(self) -> str:
        """Names this change. It is the same as long as the changed lines are, wherever in the file they stand."""
        return f"{self.file}\n{self.kind}\n{self.removed}{self.added}{self.occurrence}"

    @property
    def diff(self) -> str:
        """The removed lines behind `-`, the added ones behind `+`."""
        return "\n".join(
            [f"-{line}" for line in self.removed.splitlines()] + [f"+{line}" for line in self.added.splitlines()]
        )

    def rank(self, seed: int) -> bytes:
        """The place of this mutation in the order that the seed draws. Other mutations do not matter."""
        return hashlib.sha256(f"{seed}\n{self.key}".encode()).digest()

    def applied(self, source: str) -> str:
        """The text of the file with this change; `source` is its text without."""
        lines = source.splitlines(keepends=True)
        first, last = self.line - 1, self.line - 1 + len(self.removed.splitlines())
        assert "".join(lines[first:last]) == self.removed
        return "".join((*lines[:first], self.added, *lines[last:]))


def mutations(file: str, source: str) -> list[Mutation]:
    """All mutations of this source, from top to bottom."""
    found: list[Mutation] = []
    seen: Counter[str] = Counter()
    lines = source.splitlines(keepends=True)
    for kind, place, text in _replacements(ast.parse(source)):
        last = place.end_lineno or place.lineno
        # the columns of `ast` count bytes
        before = lines[place.lineno - 1].encode()[: place.col_offset].decode()
        after = lines[last - 1].encode()[place.end_col_offset :].decode()
        removed, added = "".join(lines[place.lineno - 1 : last]), before + text + after
        first = Mutation(file, place.lineno, kind, removed, added)
        found.append(replace(first, occurrence=seen[first.key]))
        seen[first.key] += 1
    return found


def _replacements(tree: ast.AST) -> Iterator[tuple[str, Place, str]]:
    """Kind, place and new text of each mutation below `tree`."""
    for node in _live(tree):
        for kind, operator in OPERATORS.items():
            for place, text in operator(node):
                yield kind, place, text


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` that compute something."""
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_idle(child):
                    yield child
                    yield from _live(child)


def _is_idle(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.FunctionDef(name="__repr__") | ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=name):
            return name in ONLY_SHOWN
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log"), attr="debug" | "info"))):
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() | ast.Subscript()):
            return name.lstrip("_")[:1].isupper() and not name.isupper()
    return False


def _with(node: Place, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.unparse(changed)


def comparison(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """`<` for `<=`, `==` for `!=` and so on, one operator of a chain at a time."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            yield node, _with(node, ops=[*node.ops[:at], COMPARISONS[type(operator)](), *node.ops[at + 1 :]])


def arithmetic(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """`+` for `-`, `*` for `/` and so on, in `+=` too; never between texts."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and (other := ARITHMETIC.get(type(node.op))):
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        texts = [isinstance(side, ast.Constant) and isinstance(side.value, str | bytes) for side in sides]
        if not any(texts) and not any(isinstance(side, ast.JoinedStr) for side in sides):
            yield node, _with(node, op=other())


def boolean(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """`and` for `or`; a condition without its `not`."""
    if isinstance(node, ast.BoolOp):
        yield node, _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"


def constant(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """A number that is larger or smaller; True for False."""
    match node:
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)) if value < SMALL:
            yield node, repr(value + 1)
            if value:
                yield node, repr(value - 1)
        case ast.Constant(value=int(value)):
            yield node, repr(value * 2)
            yield node, repr(value // 2)
        case ast.Constant(value=float(value)):
            yield node, repr(value * 2 or 1.0)
            if value:
                yield node, repr(value / 2)


def condition(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """The opposite condition of `if`, `while`, a conditional expression or a comprehension."""
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if not (isinstance(test, ast.Constant) or (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))):
            yield test, f"(not ({ast.unparse(test)}))"


def statement(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """Nothing in place of a call, of a changed attribute or item, of `raise`, `continue` or `break`."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass"
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"


def returned(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """None in place of what a function returns, if that is another than None and False."""
    if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) not in ("None", "False"):
        yield node, "return None"


def arguments(node: ast.AST) -> Iterable[tuple[Place, str]]:
    """The first two arguments of a call, swapped."""
    if isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) not in COMMUTATIVE:
        first, second, *rest = node.args
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and ast.unparse(first) != ast.unparse(second):
            yield node, _with(node, args=[second, first, *rest])


OPERATORS: dict[str, Callable[[ast.AST], Iterable[tuple[Place, str]]]] = {
    "comparison": comparison,
    "arithmetic": arithmetic,
    "boolean": boolean,
    "constant": constant,
    "condition": condition,
    "statement": statement,
    "returned": returned,
    "arguments": arguments,
}
