"""`make quick` runs the tests of what changed, and of the modules that import it."""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "router/__init__.py": "",
    "router/call/pipeline.py": "from router.call import dispatch\nimport policies.errors",
    "router/call/dispatch.py": "from policies.errors import Refused",
    "router/call/refusal.py": "",
    "router/start/app.py": "def late():\n    from router.call.pipeline import Pipeline",
    "policies/errors.py": "",
}
TESTS = {
    "tests/router/call/test_pipeline.py",
    "tests/router/call/test_dispatch.py",
    "tests/router/start/test_app.py",
    "tests/policies/test_errors.py",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return import_module("quick")


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (set(), []),
        ({"docs/rag.md"}, ["tests/docs/test_blocks.py", "tests/house/test_documents.py", "tests/house/test_words.py"]),
        ({"constraints.txt"}, ["tests/house/test_pins.py"]),
        ({"router/call/pipeline.py"}, ["tests/router/call/test_pipeline.py", "tests/router/start/test_app.py"]),
        ({"router/call/dispatch.py"}, ["tests/router/call/test_dispatch.py", "tests/router/call/test_pipeline.py"]),
        ({"router/call/refusal.py"}, ["tests/router/call/test_dispatch.py", "tests/router/call/test_pipeline.py"]),
        ({"policies/errors.py"}, sorted(TESTS - {"tests/router/start/test_app.py"})),
        ({"tests/policies/test_errors.py"}, ["tests/policies/test_errors.py"]),
        ({"tests/router/call/parts.py"}, ["tests/router/call/test_dispatch.py", "tests/router/call/test_pipeline.py"]),
        ({"tests/gone/test_gone.py"}, []),
    ],
    ids=lambda value: ", ".join(sorted(value)) or "nothing",
)
def test_a_change_has_its_own_tests_and_those_of_its_importers(
    quick: ModuleType, changed: set[str], tests: list[str]
) -> None:
    assert quick.tests_for(changed, SOURCES, TESTS) == tests


def test_a_module_that_all_others_import_has_its_own_tests_first_and_then_so_many_of_theirs(quick: ModuleType) -> None:
    sources = {"policies/errors.py": "", **{f"router/m{n}.py": "import policies.errors" for n in range(200)}}
    tests = {"tests/policies/test_errors.py", *(f"tests/router/test_m{n}.py" for n in range(200))}
    chosen, more = quick.bounded(quick.tests_for({"policies/errors.py"}, sources, tests), {"policies/errors.py"})
    assert chosen[0] == "tests/policies/test_errors.py"
    assert (len(chosen), len(chosen) + more) == (quick.MOST, 201)


def test_what_always_runs_exists_and_what_is_left_out_too(quick: ModuleType) -> None:
    for place in [*quick.ALWAYS, *chain(*quick.ABOUT.values()), *(f"tests/{folder}" for folder in quick.LEFT_OUT)]:
        assert (ROOT / place).exists()
