"""docs/gateway-api.md: its values make the InferencePool that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import render
from tests.helm.value_sets import VALUE_SETS

PAGE = (Path(__file__).parents[2] / "docs/gateway-api.md").read_text()


def test_the_values_of_the_page_make_the_pool_that_it_shows() -> None:
    values, shown = blocks()
    made = render({**VALUE_SETS["no shards of its own"], **values}).get("InferencePool")
    del made["metadata"]["labels"]
    assert made == shown


def blocks() -> list[Any]:
    """The page's YAML that this test checks."""
    marked = re.findall(rf"<!-- checked by: tests/helm/{Path(__file__).name} -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    return [yaml.safe_load(text) for text in marked]
