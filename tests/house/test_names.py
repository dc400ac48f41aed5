"""One meaning for each public class name within a folder, where its files are read together."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "shards", "backends", "router", "simulation", "http1", "tls")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_class_name_has_two_meanings_in_a_folder(package: str) -> None:
    found: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for file in sorted((ROOT / package).rglob("*.py")):
        if "_pb2" not in file.name:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[file.parent, node.name].append(file.name)
    several = {f"{folder.relative_to(ROOT)}: {name}": files for (folder, name), files in found.items() if files[1:]}
    assert not several, f"give one of each another name: {several}"
