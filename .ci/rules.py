"""Write the recorded series and the alerts for Prometheus alone, from the chart and an SLA file. Needs no Helm.

usage: VENV/bin/python .ci/rules.py [FILE] > rules.yml (default: examples/compose/sla.yaml)

The scraper gives each router the labels namespace="compose" and service="router", as examples/compose/prometheus.yml
does. examples/compose/rules.yml is what this writes for the file beside it.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helm.chart import NAMESPACE, RELEASE, render  # noqa: E402

FILE = ROOT / "examples/compose/sla.yaml"
HEAD = """\
# Alerts, and what the dashboards show and a router does not count itself, for a Prometheus without Kubernetes. For
# a file of your own: `python .ci/rules.py FILE > rules.yml` in a clone with the development tools, or replace the
# targets of classes (le=) below. The labels namespace and service are those of prometheus.yml.
"""


def rules_of(file: Path) -> dict[str, Any]:
    """The groups of rules for the SLA file, as Prometheus reads them."""
    sla = yaml.safe_load(file.read_text())
    sla.pop("server", None)  # the chart has ports of its own
    values = {"sla": yaml.safe_dump(sla, sort_keys=False), "shards": [], "monitoring": {"rules": {"enabled": True}}}
    groups = render(values).get("PrometheusRule")["spec"]["groups"]
    text = yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000)
    renamed = {
        f'namespace="{NAMESPACE}"': 'namespace="compose"',
        f"namespace: {NAMESPACE}": "namespace: compose",
        f"{RELEASE}-pointsman-router": "router",
        f"{RELEASE}-pointsman.": "pointsman.",
    }
    for name, here in renamed.items():
        text = text.replace(name, here)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def main(file: Path) -> None:
    """Print the rules."""
    print(HEAD + yaml.safe_dump(rules_of(file), sort_keys=False, width=120), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
