"""Aliases: names for models with request changes. A body is changed before it is parsed, so everything counts it as if
the client had sent it so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that stands for `model`. Members of a body: `defaults` where the client sent none, `force` in place of
    what it sent, those in `remove` left out; by their names in OpenAI's chats. `system` is a text in front of the
    client's own system prompt.
    """

    name: str
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    force: Mapping[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    system: str | None = None
