"""Fake backends that exchange KV with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    def describe(self) -> Description:
        return Description(
            self.models, reports_cache=self.reports_cache, capabilities=frozenset(Capability) - {Capability.PINS}
        )

    def lend(self, tokens: int) -> Mapping[str, Any] | None:
        return {"from": self.name, "tokens": tokens} if self.lends else None
