"""The pictures of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.operate.dashboard.browser import PROGRAM, a_browser, a_page

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")

PAGE = """document.body.innerHTML = `<header style="background: blue; height: 40px; position: {}; top: 0"></header>
    <main style="height: 3000px"></main><footer style="height: 40px">the end</footer>`"""


async def test_what_sticks_to_the_top_of_a_window_is_at_the_top_of_its_picture(tmp_path: Path) -> None:
    with a_browser() as browser:
        async with a_page(browser, width=400, height=300) as page:
            for position in ("sticky", "static"):
                await page.run(PAGE.format(position))
                await page.run("scrollTo(0, 1500)")
                await page.picture(tmp_path / f"{position}.png")
            assert await page.run("innerHeight") == 300
    assert (tmp_path / "sticky.png").read_bytes() == (tmp_path / "static.png").read_bytes()
