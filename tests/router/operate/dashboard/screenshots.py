"""Takes the pictures of docs/images: `python -m tests.router.operate.dashboard.screenshots [FOLDER]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp

from policies.learning.cost import Latency
from tests.router.operate.dashboard.browser import a_browser, a_page
from tests.router.operate.dashboard.scene import PacedBackend, a_crowd, a_document, a_running_scene, keep

LONG = "[...document.querySelectorAll('#stream tbody tr')].find((row) => /long-rag.*finished/s.test(row.innerText))"
IMAGES = Path(__file__).parents[4] / "docs/images"


async def take(folder: Path, browser: str, busy_s: float) -> None:
    slow = Latency(fixed_s=0.03, token_s=6e-4, step_s=0.02)
    backends = [
        PacedBackend("own-0"),
        PacedBackend("own-1"),
        PacedBackend("own-2"),
        PacedBackend("spot-0", pool="spot", latency=slow),
    ]
    async with a_running_scene(*backends) as router, a_page(browser, width=1720, height=1000) as page:
        await page.go(f"http://{router.admin}/dashboard")
        await page.until("document.documentElement.dataset.shown")
        await page.picture(folder / "dashboard-at-rest.png")
        async with aiohttp.ClientSession() as http:
            await keep(router, http, "acme", a_document(0, 1700), shards=2, ttl="8h")
            await keep(router, http, "labs", a_document(10, 1250), shards=4, ttl="45m")
        async with a_crowd(router, times=2):
            await asyncio.sleep(busy_s)
            await page.until(LONG)
            await page.run(f"{LONG}.click()")
            await page.until("document.querySelector('#detail .strip')")
            await page.run("document.querySelector('#explain').requestSubmit()")
            await page.until("document.querySelector('#explained table')")
            await page.picture(folder / "dashboard-under-load.png")
            await page.look(dark=True)
            await page.picture(folder / "dashboard-dark.png")
            await page.look(vision="deuteranopia")
            await page.picture(folder / "dashboard-deuteranopia.png")
            await page.look()
            backends[1].is_well = False
            router.gateway.cluster.drain("own-2")
            await asyncio.sleep(min(8.0, busy_s))
            await page.until(LONG)
            await page.run(f"{LONG}.click()")
            await page.until("/draining/.test(document.querySelector('#detail .strip').innerText)")
            await page.run("document.querySelector('.scroll').scrollTop = 0")
            await page.picture(folder / "dashboard-dead-backend.png")
        print("complaints:", page.complaints)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    busy_s = float(sys.argv[2]) if len(sys.argv) > 2 else 45.0
    with a_browser() as browser:
        asyncio.run(take(folder, browser, busy_s))


if __name__ == "__main__":
    main()
