"""A model as clients see it, whichever backends serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.base import Backend, Description


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it. `context_tokens` is the longest of its backends; None if none tells."""

    name: str
    pools: frozenset[str]
    backends: int
    context_tokens: int | None
    vocabulary: int | None
    speaks_tokens: bool
    """At least one of its backends takes token ids."""
    assets: Mapping[str, bytes] = field(repr=False)
    root: str | None = None
    """Where the checkpoint lies, as an engine tells it: a path on its machine, or a name of the Hugging Face Hub."""


class Report(NamedTuple):
    """What one backend reports of itself: its description, and the files that it brings along."""

    backend: Backend
    description: Description
    assets: Mapping[str, bytes]


def served_model(name: str, serving: Sequence[Report]) -> ServedModel:
    """The model `name` by the reports of the backends that are `serving` it."""
    contexts = [
        report.description.context_tokens for report in serving if report.description.context_tokens is not None
    ]
    sizes = [report.description.vocabulary for report in serving if report.description.vocabulary is not None]
    assets = (report.assets for report in serving if report.description.speaks_tokens)
    return ServedModel(
        name=name,
        pools=frozenset(report.backend.pool for report in serving),
        backends=len(serving),
        context_tokens=max(contexts, default=None),
        vocabulary=min(sizes, default=None),
        speaks_tokens=any(report.description.speaks_tokens for report in serving),
        assets=next((files for files in assets if "tokenizer.json" in files), {}),
        root=next((root for report in serving if (root := report.description.roots.get(name))), None),
    )
