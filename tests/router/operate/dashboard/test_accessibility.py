"""Every panel of the dashboard and every dialog, without barriers, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accessibility import WIDTHS, barriers, needs_axe
from tests.router.operate.dashboard.browser import PROGRAM, a_browser, a_page
from tests.router.operate.dashboard.everything import everything

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium"),
    needs_axe,
]

DIALOGS = ("help", "key-dialog", "revoke", "into-effect")


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    with a_browser() as address:
        yield address


@pytest.mark.parametrize("width", WIDTHS)
async def test_every_panel_and_dialog_is_without_barriers(browser: str, tmp_path: Path, width: str) -> None:
    columns, rows = WIDTHS[width]
    async with everything(tmp_path) as shown, a_page(browser, width=columns, height=rows) as page:
        await page.go(shown.page)
        await shown.open_all(page)
        await page.run("document.querySelector('#versions [aria-label^=edit]').click()")
        await page.until("!document.querySelector('#draft').hidden")
        assert await page.run("document.documentElement.scrollWidth") <= columns
        for dark in (False, True):
            await page.look(dark=dark)
            assert await barriers(page) == ""
            for dialog in DIALOGS:
                await page.run(f"document.querySelector('#{dialog}').showModal()")
                assert await barriers(page) == ""
                await page.run(f"document.querySelector('#{dialog}').close()")


async def test_a_page_with_a_barrier_is_found_out(browser: str) -> None:
    async with a_page(browser) as page:
        await page.run("document.body.innerHTML = '<input>'")
        assert "label: " in await barriers(page)
