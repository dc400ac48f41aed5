"""Every command, file and program on the pages is run, or says why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, Block, PageError, blocks_of, name_of
from tests.docs.reader import Desk, Reader, SharedUp, can_read

LONG = ("docs/tutorial.md",)
"""Pages that start routers of their own; test_tutorial.py reads them, on another worker."""


def blocks_that_are_not_run() -> Iterator[Block]:
    for page in PAGES:
        try:
            yield from (block for block in blocks_of(page) if block.mark.not_run)
        except PageError:
            continue  # the page's own test says it


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedUp]:
    with SharedUp(tmp_path_factory.mktemp("up")) as up:
        yield up


@pytest.mark.skipif(not can_read(), reason="needs bash and curl")
@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in LONG], ids=name_of)
def test_what_the_page_says_can_be_done(page: Path, up: SharedUp, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    with Desk(tmp_path) as desk:
        Reader(desk, up).read(blocks)


@pytest.mark.parametrize("block", list(blocks_that_are_not_run()), ids=lambda block: block.where)
def test_blocks_that_are_not_run_are_listed_here(block: Block) -> None:
    pytest.skip(f"{block.mark.not_run}")
