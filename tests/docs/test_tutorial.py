"""The tutorial, from its empty directory to its end. (It starts routers of its own, so it has a worker to itself.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.reader import Desk, Reader, SharedUp, can_read
from tests.docs.test_pages import LONG


@pytest.mark.skipif(not can_read(), reason="needs bash and curl")
@pytest.mark.parametrize("page", LONG)
@pytest.mark.slow("a quarter of an hour of a reader, with three starts of a router and its shards")
def test_what_the_tutorial_says_can_be_done(page: str, tmp_path: Path) -> None:
    with SharedUp(tmp_path / "up") as up, Desk(tmp_path / "desk") as desk:
        Reader(desk, up).read(blocks_of(ROOT / page))
