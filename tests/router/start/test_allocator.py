"""Freed memory stays with the process, so that its pages are mapped once and not for each large prompt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.start import allocator

MEASURED = """
import resource
from router.start.allocator import keep_freed_memory
{settings}
def faults():
    for _ in range(50):
        bodies = [bytes(2**20) for _ in range(8)]
        del bodies
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(-faults() + faults())
"""


def faults(settings: str) -> int:
    """Pages that a process maps while it makes and drops eight megabytes, fifty times."""
    done = subprocess.run([sys.executable, "-c", MEASURED.format(settings=settings)], capture_output=True, check=True)
    return int(done.stdout)


def test_large_objects_reuse_the_pages_of_those_before_them() -> None:
    # that is 400 MB, 100,000 pages
    assert faults("assert keep_freed_memory()") < 1000
    assert faults("") > 10_000


def test_a_c_library_without_the_settings_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not allocator.keep_freed_memory()
