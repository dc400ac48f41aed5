"""Real models, loaded once for all tests: by transformers, and by us. `make models` fetches them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.model import Model
from tests.models.real import SMOLLM2, folder_of, tokenizer_of, truth_of
from tests.models.truth import Truth


def _folder(name: str) -> Path:
    folder = folder_of(name)
    if folder is None:
        pytest.skip("there are no real models: `make models` fetches them")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct."""
    return _folder(SMOLLM2)


@pytest.fixture(scope="session")
def truth(smollm2: Path) -> Truth:
    """SmolLM2 in transformers, in float32."""
    return truth_of(smollm2)


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Model:
    """SmolLM2 as our engine computes it, in float32. Engines use it one after the other."""
    return Model.load(smollm2, dtype="float32")


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> object:
    """transformers' tokenizer of SmolLM2."""
    return tokenizer_of(smollm2)
