"""Synthetic series of a router, and the alerts that they raise, as `promtool test rules` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.helm.chart import NAMESPACE

OURS = {"namespace": NAMESPACE, "service": "prod-pointsman-router", "pod": "r-0"}
DISTINGUISHED_BY = ("alertname", "severity", "window", "service_class", "pool", "backend", "pod")

Series = dict[str, str]
"""Selector -> values in promtool's notation, one a minute: `0+6x60` begins at 0 and grows by 6 sixty times."""


@dataclass(frozen=True)
class Story:
    """The samples of a Prometheus, and the labels of every alert that fires at `minute`."""

    input: Series
    minute: int
    firing: tuple[dict[str, str], ...] = ()

    def as_file(self, rules: str) -> dict[str, Any]:
        """The input of promtool. ALERTS has every alert, so that an extra one is found as well."""
        samples = [{"labels": f"{{{selector(labels)}}}", "value": 1} for labels in self.firing]
        expression = f'count by ({", ".join(DISTINGUISHED_BY)}) (ALERTS{{alertstate="firing"}})'
        test = {"expr": expression, "eval_time": f"{self.minute}m", "exp_samples": samples}
        inputs = [{"series": name, "values": values} for name, values in self.input.items()]
        return {
            "rule_files": [rules],
            "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": [test]}],
        }


def selector(labels: Mapping[str, str]) -> str:
    """`labels` as PromQL writes them."""
    return ",".join(f'{key}="{value}"' for key, value in labels.items())


def series(name: str, values: str, **labels: str) -> Series:
    """A series of our router."""
    return {f"{name}{{{selector({**OURS, **labels})}}}": values}


def growing(name: str, per_minute: float, minutes: int, **labels: str) -> Series:
    """A counter."""
    return series(name, f"0+{per_minute:g}x{minutes}", **labels)


def histogram(name: str, bounds: Iterable[str], seen: Mapping[str, float], minutes: int, **labels: str) -> Series:
    """A histogram: upper bound of a bucket -> observations a minute in it (`seen`)."""
    made: Series = {}
    for bound in (*bounds, "+Inf"):
        up_to = sum(rate for end, rate in seen.items() if float(end) <= float(bound))
        made |= growing(f"{name}_bucket", up_to, minutes, le=bound, **labels)
    return made | growing(f"{name}_count", sum(seen.values()), minutes, **labels)
