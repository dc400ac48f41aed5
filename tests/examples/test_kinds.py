"""Pools of README.md and of the examples have the kind of their engine: with another, its salt and load are lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backends.kinds import KINDS

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "examples").rglob("*.yaml"))]
POOL = re.compile(r"^\s+([\w-]+):\s*(?:\{|\n\s+)kind: (\w+)", re.MULTILINE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_pool_named_after_an_engine_is_of_that_kind(file: Path) -> None:
    named = {name: kind for name, kind in POOL.findall(file.read_text()) if name in KINDS}
    assert {name: name for name in named} == named
