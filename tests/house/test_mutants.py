"""`make mutants`: the changes that it draws, and its report on tests that notice them or do not."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return import_module("mutations")


@pytest.mark.parametrize(
    ("source", "kind", "changed"),
    [
        ("x = a < b <= c", "comparison", ["x = a <= b <= c", "x = a < b < c"]),
        ("x = a is not b", "comparison", ["x = a is b"]),
        ("x = a not in b", "comparison", ["x = a in b"]),
        ("x = (a + b) * c", "arithmetic", ["x = (a + b) / c", "x = (a - b) * c"]),
        ("x += a", "arithmetic", ["x -= a"]),
        ("x = 'é' + a", "arithmetic", []),
        ("x = a and not b", "boolean", ["x = a or not b", "x = a and (b)"]),
        ("x = 0, 7", "constant", ["x = 1, 7", "x = 0, 8", "x = 0, 6"]),
        ("x = 100, 0.5", "constant", ["x = 200, 0.5", "x = 50, 0.5", "x = 100, 1.0", "x = 100, 0.25"]),
        ("x = True", "constant", ["x = False"]),
        ("if é:\n    x()", "condition", ["if (not (é)):\n    x()"]),
        ("x = a if b else c", "condition", ["x = a if (not (b)) else c"]),
        ("x = [a for a in b if c]", "condition", ["x = [a for a in b if (not (c))]"]),
        ("while a:\n    b(\n1)", "statement", ["while a:\n    pass"]),
        ("a.b = c\nd = e", "statement", ["pass\nd = e"]),
        ("for a in b:\n    break", "statement", ["for a in b:\n    pass"]),
        ("def f():\n    return a\n    return None", "returned", ["def f():\n    return None\n    return None"]),
        ("def f():\n    return False", "returned", []),
        ("x = f(a, b, c)", "arguments", ["x = f(b, a, c)"]),
        ("x = max(a, b)", "arguments", []),
        ("x = f(a, a)", "arguments", []),
    ],
)
def test_an_operator_changes_one_piece(operators: ModuleType, source: str, kind: str, changed: list[str]) -> None:
    found = [each for each in operators.mutations("f.py", f"{source}\n") if each.kind == kind]
    assert sorted(each.applied(f"{source}\n").removesuffix("\n") for each in found) == sorted(changed)


def test_code_that_computes_nothing_is_left_alone(operators: ModuleType) -> None:
    source = '''
"""A docstring."""
Pair = tuple[int, 2]
if TYPE_CHECKING:
    x = 1
@decorated(1)
def f(a: Literal[1]) -> Literal[2]:
    assert a == 1
    _log.info("%s", 1)
    print(f"{a + 1}")
    class A:
        def __repr__(self):
            return "a" * 2
'''
    assert [each.removed.strip() for each in operators.mutations("f.py", source)] == ['print(f"{a + 1}")']


def test_a_seed_draws_the_same_changes_of_a_file_that_grew_elsewhere(operators: ModuleType) -> None:
    source = "x = a + b\ny = a + b\nz = f(1, 2)\n"
    before = {each.key: each.rank(3) for each in operators.mutations("f.py", source)}
    after = {each.key: each.rank(3) for each in operators.mutations("f.py", "import w\n" + source)}
    assert before == after
    assert len(set(before.values())) == len(before) == 7
    assert before != {each.key: each.rank(4) for each in operators.mutations("f.py", source)}


def test_changes_that_no_test_can_notice_are_changes_of_the_code(operators: ModuleType) -> None:
    mutants = import_module("mutants")
    for file, removed, added in mutants.equivalent():
        of_file = operators.mutations(file, (ROOT / file).read_text())
        assert (removed, added) in [(each.removed.strip(), each.added.strip()) for each in of_file], (file, removed)


CODE = """
def double(x):
    return x * 2


def untested(x):
    return x - 1
"""

TEST = """
from policies.sums import double


def test_it_doubles():
    assert double(2) == 4
    assert double(3) == 6
"""


def test_what_a_test_notices_is_killed_and_the_rest_is_shown_and_the_tree_stays_as_it_was(tmp_path: Path) -> None:
    files = {"policies/sums.py": CODE, "tests/policies/test_sums.py": TEST, "pytest.ini": "[pytest]"}
    for name, text in (files | {".ci/equivalent.yaml": "[]"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for script in ("mutants.py", "mutations.py"):
        shutil.copy(ROOT / ".ci" / script, tmp_path / ".ci")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    options = ["--seed", "1", "--count", "20", "policies"]
    command = [sys.executable, tmp_path / ".ci/mutants.py", *options]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=200, check=False)
    results = json.loads((tmp_path / "build/mutants/1.json").read_text())
    found = {(result["kind"], result["line"]): result for result in results}
    assert {key: result["status"] for key, result in found.items()} == {
        ("returned", 3): "killed",
        ("arithmetic", 3): "killed",
        ("constant", 3): "killed",
        ("returned", 7): "survived",
        ("arithmetic", 7): "survived",
        ("constant", 7): "survived",
    }, done.stdout + done.stderr
    assert found["arithmetic", 3]["by"] == "tests/policies/test_sums.py::test_it_doubles"
    assert done.returncode == 1
    assert "survived: policies/sums.py:7 (arithmetic)" in done.stdout
    assert "-    return x - 1\n+    return x + 1" in done.stdout
    assert "4 of 8 killed (50.0%)" in done.stdout
    assert (tmp_path / "policies/sums.py").read_text() == CODE
