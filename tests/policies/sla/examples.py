"""The SLA files of examples/, read with everything that they refer to; profiles are none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from backends.kinds import KINDS
from policies.catalogue import builtin_catalogue
from policies.sla.parse import Parsed, examine
from policies.sla.secrets import Outside

ROOT = Path(__file__).parents[3]
CATALOGUE = replace(builtin_catalogue(), kinds=tuple(KINDS))
"""With the kinds of backends, as the router reads a file."""
NO_SLA = {
    ROOT / "examples/gateway/envoy.yaml",
    ROOT / "examples/compose/compose.yaml",
    *(ROOT / "examples/compose/grafana").rglob("*.yaml"),
    *(ROOT / "examples/capacity").glob("l4-*.yaml"),
}
FILES = sorted(set((ROOT / "examples").rglob("*.yaml")) - NO_SLA)


def outside_of(text: str) -> Outside:
    """A world in which every reference in `text` leads to a key of its own."""
    names = re.findall(r"\$\{env:([A-Z_]+)\}", text)
    environment = {name: f"redis://{name}" if name.endswith("_URL") else f"key of {name}" for name in names}
    return Outside(environment, lambda path: f"key of {path}")


def read(name: str) -> Parsed:
    """The example of this name, such as `saas` or `demo/sla`."""
    text = (ROOT / "examples" / f"{name}.yaml").read_text()
    return examine(text, source=f"{name}.yaml", outside=outside_of(text))
