"""A model as clients see it, whichever backends serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.base import Backend, Description, as_text_reader


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it. `context_tokens` is the longest of its backends, `shortest_context_tokens` the
    shortest; None if none tells.
    """

    name: str
    pools: frozenset[str]
    backends: int
    context_tokens: int | None
    shortest_context_tokens: int | None
    vocabulary: int | None
    speaks_tokens: bool
    """At least one of its backends takes token ids."""
    speaks_text: bool
    """At least one of its backends reads text itself."""
    assets: Mapping[str, bytes] = field(repr=False)
    readers: tuple[str, ...] = ()
    """Its backends that make tokens of text for others (TextReader)."""
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
        shortest_context_tokens=min(contexts, default=None),
        vocabulary=min(sizes, default=None),
        speaks_tokens=any(report.description.speaks_tokens for report in serving),
        speaks_text=not all(report.description.speaks_tokens for report in serving),
        assets=next((files for files in assets if "tokenizer.json" in files), {}),
        readers=tuple(report.backend.name for report in serving if as_text_reader(report.backend) is not None),
        root=next((root for report in serving if (root := report.description.roots.get(name))), None),
    )


class Models:
    """The models that are served, by what each backend reported when it was last noted.

    A call asks for its model each time, so nothing is computed again until a report changes.
    """

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self.found: dict[str, ServedModel] = {}
        """The models that were asked for since a report changed: changed here alone."""

    def __repr__(self) -> str:
        return f"<Models of {len(self._reports)} backends>"

    def note(self, backend: Backend) -> None:
        """Remember what `backend` reports now."""
        description = backend.describe()
        if description is None:
            self.forget(backend.name)
            return
        report = Report(backend, description, backend.assets() if description.speaks_tokens else {})
        if self._reports.get(backend.name) != report:
            self._reports[backend.name] = report
            self.found.clear()

    def forget(self, name: str) -> None:
        """The backend `name` is gone, or was not reached."""
        if self._reports.pop(name, None) is not None:
            self.found.clear()

    def names(self) -> set[str]:
        """The names of all models."""
        return {name for report in self._reports.values() for name in report.description.models}

    def find(self, name: str) -> ServedModel | None:
        """The model `name`; None if no backend reported it."""
        if name not in self.found:
            serving = [report for report in self._reports.values() if name in report.description.models]
            if not serving:
                # any client may ask for any name
                return None
            self.found[name] = served_model(name, serving)
        return self.found[name]
