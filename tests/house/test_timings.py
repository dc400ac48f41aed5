"""No test asserts how long something took: that depends on what else the machine does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CLOCKS = frozenset(
    f"{clock}{unit}"
    for clock in ("monotonic", "perf_counter", "process_time", "thread_time", "time")
    for unit in ("", "_ns")
)
"""Functions of the module `time` whose differences are durations."""

VIRTUAL = ("run_virtually", "VirtualTimeLoop")
"""Where one of these is used, `loop.time()` is a clock that the test itself moves."""


@dataclass
class Timings:
    """The names of a module that hold times and durations of real clocks. Names are told apart by their text alone."""

    tree: ast.Module
    has_real_loops: bool
    times: set[str] = field(default_factory=set)
    durations: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._clocks = {
            alias.asname or alias.name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module == "time"
            for alias in node.names
            if alias.name in CLOCKS
        }
        known = -1
        # a name may be used above the line that says what it is, so until nothing is added
        while known != (known := len(self.times) + len(self.durations)):
            for node in ast.walk(self.tree):
                self._learn(node)

    def asserted(self) -> Iterator[int]:
        """The lines of asserts that compare a duration."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assert) and any(
                isinstance(each, ast.Compare) and self._is_duration(each) for each in ast.walk(node.test)
            ):
                yield node.lineno

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._holds(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._holds(target, value)
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                self._holds(target, value)
            case ast.comprehension(target=target, iter=value):
                self._holds(target, value)
            case ast.Call(func=ast.Attribute(value=holder, attr="append" | "add" | "extend"), args=[value]):
                self._holds(holder, value)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                results = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
                if any(map(self._is_duration, results)):
                    self.durations |= {f"{name}()", f".{name}()"}

    def _holds(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case (ast.Tuple(elts=targets), ast.Tuple(elts=values)) if len(targets) == len(values):
                for each, its in zip(targets, values, strict=True):
                    self._holds(each, its)
            case _ if self._is_duration(value):
                self.durations |= _held_by(target)
            case _ if self._is_time(value):
                self.times |= _held_by(target)

    def _is_time(self, node: ast.expr) -> bool:
        return bool(_used(node) & self.times) or any(map(self._reads_a_clock, ast.walk(node)))

    def _is_duration(self, node: ast.expr) -> bool:
        return bool(_used(node) & self.durations) or any(
            isinstance(each, ast.BinOp)
            and isinstance(each.op, ast.Sub)
            and self._is_time(each.left)
            and self._is_time(each.right)
            for each in ast.walk(node)
        )

    def _reads_a_clock(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name in self._clocks
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name)):
                return name in CLOCKS
            case ast.Call(func=ast.Attribute(attr="time"), args=[]):
                return self.has_real_loops
            case _:
                return False


def _held_by(target: ast.expr) -> set[str]:
    match target:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(attr=name):
            return {f".{name}"}
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            return set[str]().union(*map(_held_by, targets))
        case ast.Starred(value=value) | ast.Subscript(value=value):
            return _held_by(value)
        case _:
            return set()


def _used(node: ast.AST) -> set[str]:
    found = set()
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Name(id=name)):
                found.add(f"{name}()")
            case ast.Call(func=ast.Attribute(attr=name)):
                found.add(f".{name}()")
            case ast.Name(id=name):
                found.add(name)
            case ast.Attribute(attr=name):
                found.add(f".{name}")
    return found


def timed(source: str) -> list[int]:
    """The lines of a module of tests that assert how long something took."""
    if "time" not in source:
        return []
    return sorted(Timings(ast.parse(source), not any(word in source for word in VIRTUAL)).asserted())


def test_no_test_asserts_how_long_something_took() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for line in timed(file.read_text())
    ]
    assert not found, "count what is done, use a clock of the test, or a limit so long that only a defect meets it"


@pytest.mark.parametrize(
    "source",
    [
        "began = time.monotonic()\nrun()\nassert time.monotonic() - began < 5",
        "began_s = time.process_time()\ntook_s = time.process_time() - began_s\nassert 1 < took_s",
        "from time import perf_counter as now\na, b = now(), 2\nassert run(b) < 9 * (now() - a)",
        "def ask():\n    began = time.time()\n    return 1, time.time() - began\nassert max(s for _, s in [ask()]) < 2",
        "loop = asyncio.get_running_loop()\nbegan = loop.time()\nassert loop.time() - began >= 0.9",
        "took = []\nfor _ in x:\n    at = time.time_ns()\n    took.append(time.time_ns() - at)\nassert max(took) < 3",
        "self.at = time.monotonic()\nassert approx(time.monotonic() - self.at) == 3.0",
    ],
)
def test_an_assert_of_a_duration_is_found(source: str) -> None:
    assert timed(source) == [source.count("\n") + 1]


@pytest.mark.parametrize(
    "source",
    [
        "deadline = time.monotonic() + 5\nwhile busy():\n    assert time.monotonic() < deadline, 'it never ends'",
        "began = clock()\nassert clock() - began == 5",
        "def test():\n    at = loop.time()\n    wait()\n    assert loop.time() - at == 5\nrun_virtually(test())",
        "began = time.monotonic()\nprint(time.monotonic() - began)",
        "assert record.time - 5 < 3",
    ],
)
def test_a_limit_of_a_wait_and_a_clock_of_the_test_are_none(source: str) -> None:
    assert timed(source) == []
