import ast
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "policies").rglob("*.py"))
IMPURE = {"time", "os", "socket", "asyncio", "threading", "logging", "secrets", "uuid", "pathlib"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_policies_have_no_clock_no_network_and_no_files(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & IMPURE
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in IMPURE
        elif isinstance(node, ast.Attribute):
            assert node.attr not in {"now", "utcnow", "today"} or not isinstance(node.value, ast.Name | ast.Attribute)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input"}
