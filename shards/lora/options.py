"""Options of a shard's adapters. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_ADAPTERS = 1024
"""Adapters that one shard knows: routers receive all their names."""

MOST_NAME_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Adapters that a shard serves: `named` folders by name, and every folder in `folder` with an adapter, by its name.

    `folder` is looked through again every `look_s`, so adapters can come, change and go while the shard runs. Adapters
    are loaded when a request names them: at most `most` of them in at most `most_bytes` of memory. On a GPU each has
    room for ranks up to `most_rank`; CPUs take any rank.
    """

    named: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    most: int = 8
    most_bytes: int = 2**30
    most_rank: int = 16
    look_s: float = 5.0

    @property
    def is_used(self) -> bool:
        """Whether the shard serves adapters."""
        return bool(self.named) or self.folder is not None


def named_folders(pairs: list[str]) -> dict[str, Path]:
    """The folders of adapters by name, from NAME=DIR. Raises ValueError."""
    found: dict[str, Path] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not (name and folder):
            raise ValueError(f"--lora is '{pair}'; it must be NAME=DIR, such as sql=./adapters/sql")
        if name in found:
            raise ValueError(f"--lora names '{name}' twice")
        found[name] = Path(folder)
    return found


def name_objection(name: str) -> str | None:
    """The reason why `name` cannot be the name of an adapter; None if it can."""
    if not name.isprintable() or len(name) > MOST_NAME_CHARACTERS:
        return f"it must have at most {MOST_NAME_CHARACTERS} characters, all printable"
    return None
