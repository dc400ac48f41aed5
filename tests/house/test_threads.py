"""What threads must not do at the same time is done when modules are imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# batches, keys, usage, the decision log and the audit log read in threads
READ_BY_THREADS = ("router/batches", "router/shared", "router/operate")

PLAIN = {"str", "int", "float", "bool", "bytes", "dict", "list", "Any"}
"""Types that msgspec knows without looking at a class."""


def test_structs_that_threads_read_have_decoders_from_the_import_on() -> None:
    """msgspec 0.22 works out the fields of a struct when it is first decoded. If a second thread decodes it meanwhile,
    the process ends with a segmentation fault, as it did in a router that was restarted in the middle of a batch.
    """
    late = [place for folder in READ_BY_THREADS for file in (ROOT / folder).rglob("*.py") for place in _late(file)]
    assert not late, "make a msgspec.json.Decoder of it beside the class"


def _late(file: Path) -> Iterator[str]:
    """Where functions of `file` decode a struct by its type, or make a decoder."""
    for function in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            typed = [each.value for each in call.keywords if each.arg == "type"]
            is_typed = call.func.attr == "decode" and any(_names(each) - PLAIN for each in typed)
            if is_typed or (call.func.attr == "Decoder" and _names(call.func) == {"msgspec"}):
                yield f"{file.relative_to(ROOT)}:{call.lineno}"


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
