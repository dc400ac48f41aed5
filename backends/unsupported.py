"""Sampling that an engine does not know is refused by name, not left out in silence. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from policies.errors import InvalidRequest
from policies.nouns import Sampling

_CLIENTS_NAMES = {"min_new_tokens": "min_tokens", "choices": "n", "top_logprobs": "logprobs"}
_USUAL = Sampling()


def refuse_unsupported(sampling: Sampling, knows: Collection[str], engine: str) -> None:
    """Return if all that is out of the ordinary in `sampling` is in `knows`, names of its fields.

    Raises InvalidRequest that names the first field that `engine` does not know.
    """
    for field in fields(Sampling):
        if field.name not in knows and getattr(sampling, field.name) != getattr(_USUAL, field.name):
            name = _CLIENTS_NAMES.get(field.name, field.name)
            raise InvalidRequest(f"{engine} does not know `{name}`", hint=f"leave `{name}` out", param=name)
