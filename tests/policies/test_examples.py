from pathlib import Path

import pytest

from policies.parse import parse

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_example_is_sound(file: Path) -> None:
    environment = {"RAG_KEY": "a", "VLLM_KEY": "b"}
    config = parse(file.read_text(), source=str(file), environment=environment, read_file=lambda path: f"key of {path}")
    assert config.rules
    assert config.pools


def test_the_examples_are_there() -> None:
    assert {"single.yaml", "two-tenants.yaml", "mixed.yaml"} <= {file.name for file in FILES}
