"""The site: its map leads to every page, it is built without a warning, and its front page has no barriers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.accessibility import WIDTHS, barriers, needs_axe
from tests.docs.blocks import ROOT
from tests.router.operate.dashboard.browser import PROGRAM, a_browser, a_page

DOCS = ROOT / "docs"
NAMES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
SCHEMES = ("default", "slate")
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`")


def pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(part)


def test_every_page_is_in_the_navigation_once_and_nothing_else_is() -> None:
    assert sorted(pages_in(SITE["nav"])) == NAMES, "`nav` in mkdocs.yml names every page under docs/, once"


def test_the_map_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (DOCS / "index.md").read_text()))
    assert linked == set(NAMES) - {"index.md"}, "docs/index.md links to every page, by what readers need"


@pytest.mark.parametrize("name", NAMES)
def test_no_page_leads_out_of_the_site(name: str) -> None:
    page = DOCS / name
    out = [
        link
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / link).resolve().is_relative_to(DOCS)
    ]
    assert not out, f"{name} links to {out}, which the site does not have: name the file instead"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@needs_mkdocs
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    for name in NAMES:
        assert (site / name).with_suffix(".html").exists()


@needs_mkdocs
@needs_axe
@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", WIDTHS)
async def test_the_front_page_is_without_barriers(site: Path, width: str) -> None:
    columns, rows = WIDTHS[width]
    with a_browser() as browser:
        async with a_page(browser, width=columns, height=rows) as page:
            await page.go(f"file://{site}/index.html")
            await page.until("document.readyState === 'complete' && document.querySelector('article h1')")
            assert await page.run("document.documentElement.scrollWidth") <= columns
            for scheme in SCHEMES:
                await page.run(f"document.body.dataset.mdColorScheme = '{scheme}'")
                # colours change slowly
                await page.run("Promise.all(document.getAnimations().map((each) => each.finished)).then(() => true)")
                assert await barriers(page) == ""
