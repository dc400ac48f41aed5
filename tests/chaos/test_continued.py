"""Shards are killed (SIGKILL) while they stream: no client notices, and each answer is charged once."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.continued import rounds


async def test_streams_of_a_killed_shard_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    outcome = await rounds(tmp_path, cut=2, at_once=8, seed=5)
    assert not outcome.wrong, outcome.examples
    assert outcome.cut >= 2
    assert outcome.charged == outcome.shown_tokens
