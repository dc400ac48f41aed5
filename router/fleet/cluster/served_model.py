"""A model as clients see it, whichever backends serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


def served_model(name: str, serving: Sequence[tuple[Backend, Description]]) -> ServedModel:
    """The model `name` as the backends say that are `serving` it."""
    contexts = [description.context_tokens for _, description in serving if description.context_tokens is not None]
    sizes = [description.vocabulary for _, description in serving if description.vocabulary is not None]
    assets = (backend.assets() for backend, description in serving if description.speaks_tokens)
    return ServedModel(
        name=name,
        pools=frozenset(backend.pool for backend, _ in serving),
        backends=len(serving),
        context_tokens=max(contexts, default=None),
        vocabulary=min(sizes, default=None),
        speaks_tokens=any(description.speaks_tokens for _, description in serving),
        assets=next((files for files in assets if "tokenizer.json" in files), {}),
        root=next((root for _, description in serving if (root := description.roots.get(name))), None),
    )
