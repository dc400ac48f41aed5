"""Every kind of backend with its stage: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.contracts.stages import fake, openai_compatible, shard

STAGES: Mapping[str, Any] = {
    "fake": fake,
    "openai_compatible": openai_compatible,
    "shard": shard,
}
