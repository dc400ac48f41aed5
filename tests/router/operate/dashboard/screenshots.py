"""Takes the pictures of docs/images: `python -m tests.router.operate.dashboard.screenshots [FOLDER [SECONDS]]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.router.operate.dashboard.browser import Page, a_browser, a_page
from tests.router.operate.dashboard.everything import ENDED, SHOWN, Everything, everything
from tests.router.operate.dashboard.scene import PacedBackend, a_crowd, a_running_scene

IMAGES = Path(__file__).parents[4] / "docs/images"
COLUMNS, ROWS = 1720, 1000
PHONE = (390, 844)


async def take(folder: Path, browser: str, busy_s: float) -> None:
    for picture in (at_rest, partial(under_load, busy_s=busy_s)):
        async with a_page(browser, width=COLUMNS, height=ROWS) as page:
            await picture(folder, page)
            print("complaints:", page.complaints)


async def at_rest(folder: Path, page: Page) -> None:
    backends = (*(PacedBackend(f"own-{number}") for number in range(3)), PacedBackend("spot-0", pool="spot"))
    async with a_running_scene(*backends) as router:
        await page.go(f"http://{router.admin}/dashboard")
        await page.until(SHOWN)
        await page.until("!document.querySelector('#no-keys').hidden")
        await page.picture(folder / "dashboard-at-rest.png", last="#detail")


async def under_load(folder: Path, page: Page, *, busy_s: float) -> None:
    with tempfile.TemporaryDirectory() as stores:
        async with everything(Path(stores)) as shown, a_crowd(shown.router):
            await page.go(shown.page)
            await asyncio.sleep(busy_s)
            await shown.open_all(page)
            await of_a_day(folder, page)
            await of_a_failure(folder, page, shown)


async def of_a_day(folder: Path, page: Page) -> None:
    await page.picture(folder / "dashboard-under-load.png", last="#detail")
    await page.picture(folder / "dashboard-tools.png", first="#diagnose-title", last="#filed")
    await page.look(dark=True)
    await page.picture(folder / "dashboard-dark.png", last="#detail")
    await page.look(vision="deuteranopia")
    await page.picture(folder / "dashboard-deuteranopia.png", last="#detail")
    await page.look()
    await page.resize(*PHONE)
    await page.picture(folder / "dashboard-phone.png", last="#kept")
    await page.resize(COLUMNS, ROWS)


async def of_a_failure(folder: Path, page: Page, shown: Everything) -> None:
    shown.backends[1].is_well = False
    shown.router.gateway.cluster.drain("own-2")
    await page.until("/✕ ill/.test(document.querySelector('#backends').innerText)")
    await page.until(ENDED)
    await page.run(f"{ENDED}.click()")
    await page.until("/draining/.test(document.querySelector('#detail .strip').innerText)")
    await page.run("document.querySelectorAll('.scroll').forEach((list) => { list.scrollTop = 0; })")
    await page.picture(folder / "dashboard-dead-backend.png", last="#detail")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    busy_s = float(sys.argv[2]) if len(sys.argv) > 2 else 45.0
    with a_browser() as browser:
        asyncio.run(take(folder, browser, busy_s))


if __name__ == "__main__":
    main()
