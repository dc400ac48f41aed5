from __future__ import annotations

from dataclasses import replace

import pytest

from shards.kv.fingerprint import KvFacts

FACTS = KvFacts("m", "digest", "bfloat16", (("bfloat16", (28, 2, 8, 64, 128)),))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights": "others"},
        {"dtype": "float32"},
        {"layout": (("int8", (28, 2, 8, 64, 128)), ("float32", (28, 2, 8, 64)))},
        {"layout": (("bfloat16", (27, 2, 8, 64, 128)),)},
        {"numerics": "deterministic"},
        {"tensor_parallel": (0, 2)},
        {"tensor_parallel": (1, 2)},
    ],
    ids=str,
)
def test_every_fact_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert len(FACTS.fingerprint()) == 32
    assert replace(FACTS, **change).fingerprint() != FACTS.fingerprint() == replace(FACTS).fingerprint()
