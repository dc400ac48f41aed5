"""Plugins: parts for policies and kinds of backends from other installed distributions, found by entry points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from backends.kinds import kind_names
from policies.catalogue import Catalogue, builtin_catalogue
from policies.compose import Policy
from policies.errors import ConfigError
from policies.part import Part

GROUP = "pointsman.policies"
"""Each entry point is a callable that takes a Catalogue and returns it with parts added."""


def installed_catalogue(points: Iterable[EntryPoint] | None = None) -> Catalogue:
    """Pointsman's own parts and those that the entry points of `GROUP` add, in the order of their names.

    Kinds of backends from other distributions are named in it, and not loaded.

    Raises ConfigError that names the distribution if an entry point cannot be loaded, fails, or removes a part.
    """
    catalogue = builtin_catalogue()
    found = entry_points(group=GROUP) if points is None else points
    for point in sorted(found, key=lambda point: (point.name, point.value)):
        catalogue = _extended(catalogue, point)
    return replace(catalogue, kinds=kind_names())


def _extended(catalogue: Catalogue, point: EntryPoint) -> Catalogue:
    try:
        after = point.load()(catalogue)
    except Exception as error:
        # third-party code may raise anything
        raise _refused(point, f"{type(error).__name__}: {error}") from error
    if not isinstance(after, Catalogue):
        raise _refused(point, f"it returned a {type(after).__name__}, not a Catalogue")
    for kind in (each.name for each in fields(Catalogue) if each.name != "kinds"):
        _check(getattr(catalogue, kind), getattr(after, kind), kind, point)
    return after


def _check(before: Mapping[str, Any], after: Mapping[str, Any], kind: str, point: EntryPoint) -> None:
    """Raise ConfigError if an existing part was removed or replaced, or a new part has the wrong type."""
    wanted = Policy if kind == "policies" else Part
    for name, part in before.items():
        if after.get(name) is not part:
            raise _refused(point, f"it removes or replaces '{name}' of {kind}; give its own part another name")
    for name, part in after.items():
        if not isinstance(part, wanted):
            raise _refused(point, f"'{name}' of {kind} is a {type(part).__name__}, not a {wanted.__name__}")


def _refused(point: EntryPoint, reason: str) -> ConfigError:
    where = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
    message = f"the policies '{point.name}' of {where} cannot be used: {reason}"
    return ConfigError(message, hint=f"fix or uninstall {point.dist.name}" if point.dist else "")
