from __future__ import annotations

from pathlib import Path

import pytest

from shards.shortage import NotEnoughMemory, memory_for, refuse_beyond, usable_bytes


@pytest.mark.parametrize(("limit", "usable"), [("4096", 4096), ("max", None), (str(2**60), None), ("", None)])
def test_a_containers_limit_bounds_the_memory(tmp_path: Path, limit: str, usable: int | None) -> None:
    file = tmp_path / "memory.max"
    file.write_text(limit)
    assert usable_bytes(file) == (usable or usable_bytes(tmp_path / "missing"))


def test_more_than_there_can_ever_be_is_refused_before_the_system_promises_it() -> None:
    refuse_beyond(2**30, 2**30)
    with pytest.raises(NotEnoughMemory, match=r"1.5 GiB of KV are configured, but .* 1 GiB of usable memory"):
        refuse_beyond(2**30, 3 * 2**29)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_what_ran_out_of_memory_is_named(error: Exception) -> None:
    with (
        pytest.raises(NotEnoughMemory, match=r"no memory for the cat \(get a smaller one\)"),
        memory_for("the cat", hint="get a smaller one"),
    ):
        raise error


def test_what_is_no_lack_of_memory_is_not_called_one() -> None:
    with pytest.raises(RuntimeError, match="no kernel"), memory_for("the cat", hint=""):
        raise RuntimeError("no kernel")
