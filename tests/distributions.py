"""Distributions of one module, installed on the path as pip would leave them."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Installer:
    """Installs distributions with entry points in `group` under `home`; `patch` removes them again."""

    home: Path
    group: str
    patch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.patch.syspath_prepend(self.home)

    def __call__(self, name: str, code: str, entry: str = "extend", *, point: str | None = None) -> None:
        """Install the module `name` with `code`; its entry point, called `point` or like it, is `entry`."""
        info = self.home / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{self.group}]\n{point or name} = {name}:{entry}\n")
        (self.home / f"{name}.py").write_text(textwrap.dedent(code))
        self.patch.delitem(sys.modules, name, raising=False)
