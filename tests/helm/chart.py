"""Renders the chart as `helm template` does, without helm: values merged and checked, templates run, documents read."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from gotpl.exts.helm import HelmTemplateEngine

CHART = Path(__file__).parents[2] / "helm/pointsman"
RELEASE, NAMESPACE = "prod", "llm"

Values = dict[str, Any]

_DEPTH = 3


class ApiVersions(list[str]):
    """`.Capabilities.APIVersions`, which a chart asks with `Has`."""

    def Has(self, name: str) -> bool:  # noqa: N802 - Helm's word
        return name in self


class Files:
    """`.Files`: the chart's own, by path."""

    def Get(self, name: str) -> str:  # noqa: N802 - Helm's word
        return (CHART / name).read_text()


@dataclass(frozen=True)
class Rendered:
    """The rendered chart: text by template, and every object in it."""

    texts: dict[str, str]
    objects: tuple[dict[str, Any], ...]

    def get(self, kind: str, name: str = "") -> dict[str, Any]:
        """The only object of `kind` with a name that ends with `name`."""
        (found,) = self.all(kind, name)
        return found

    def all(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Every object of `kind` with a name that ends with `name`."""
        return [each for each in self.objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Every object by kind and name."""
        return {f"{each['kind']} {each['metadata']['name']}": each for each in self.objects}


def render(values: Values | None = None) -> Rendered:
    """Raises jsonschema.ValidationError for values that the schema refuses, and what `fail` says as ValueError."""
    merged = with_defaults(values or {})
    jsonschema.validate(merged, schema(), cls=jsonschema.Draft7Validator)
    texts = _engine_of_templates().render(_contexts(merged))
    objects = [each for text in texts.values() for each in yaml.safe_load_all(text) if each]
    return Rendered(texts, tuple(objects))


def changes(before: Rendered, after: Rendered) -> list[str]:
    """Differences, a line each: `+` new, `-` gone, `~` an object that is in both, with the paths that differ."""
    old, new = before.by_name(), after.by_name()
    lines = [f"- {name}" for name in old.keys() - new.keys()] + [f"+ {name}" for name in new.keys() - old.keys()]
    both = ((name, sorted(_differing(old[name], new[name]))) for name in old.keys() & new.keys())
    return sorted([*lines, *(f"~ {name}: {', '.join(paths)}" for name, paths in both if paths)])


def notes(values: Values | None = None) -> str:
    """Helm's output after an installation."""
    context = _contexts(with_defaults(values or {}))
    return _engine_of_templates().render_template("NOTES.txt", next(iter(context.values())))


def with_defaults(values: Values) -> Values:
    """`values` over the chart's own as Helm merges them: mappings key by key, lists and all else whole."""
    return _merged(deepcopy(defaults()), values)


@cache
def defaults() -> Values:
    loaded: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


@cache
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return loaded


def _merged(base: Values, over: Values) -> Values:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merged(base[key], value)
        else:
            base[key] = value
    return base


def _differing(old: Any, new: Any, path: str = "") -> set[str]:
    """Paths at which two documents differ, not deeper than tells what is meant: pods' fields, others' sections."""
    if old == new:
        return set()
    if not (isinstance(old, dict) and isinstance(new, dict)) or path.count(".") >= _DEPTH:
        return {path.removeprefix("spec.template.")}
    keys = old.keys() | new.keys()
    return set().union(*(_differing(old.get(key), new.get(key), f"{path}.{key}".lstrip(".")) for key in keys))


@cache
def _engine_of_templates() -> HelmTemplateEngine:
    files = sorted((CHART / "templates").iterdir())
    return HelmTemplateEngine.from_sources({file.name: file.read_text() for file in files})


def _contexts(values: Values) -> dict[str, dict[str, Any]]:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    shared = {
        "Values": values,
        "Chart": {key[0].upper() + key[1:]: value for key, value in chart.items()},
        "Release": {"Name": RELEASE, "Namespace": NAMESPACE, "Service": "Helm", "IsInstall": True, "Revision": 1},
        "Capabilities": {"KubeVersion": {"Version": "v1.32.0"}, "APIVersions": ApiVersions()},
        "Files": Files(),
    }
    names = (file.name for file in (CHART / "templates").glob("*.yaml"))
    return {name: {**shared, "Template": {"Name": name, "BasePath": "templates"}} for name in sorted(names)}
