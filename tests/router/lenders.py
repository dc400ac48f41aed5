"""Fake backends that exchange KV with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.base import Description
from backends.fake import FakeBackend
from policies.nouns import Capability


@dataclass
class Lending(FakeBackend):
    """A fake in `kv_group` that lends what it is asked for, or nothing."""

    kv_group: str | None = "8b"
    lends: bool = True
    reports_cache: bool = False
    heirs: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    def describe(self) -> Description:
        return Description(
            self.models, reports_cache=self.reports_cache, capabilities=frozenset(Capability) - {Capability.PINS}
        )

    def hand_over(self, heirs: Sequence[Mapping[str, Any]]) -> None:
        self.heirs.append(heirs)

    def lend(self, tokens: int) -> Mapping[str, Any] | None:
        return {"from": self.name, "tokens": tokens} if self.lends else None
