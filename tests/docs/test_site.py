"""The site: its map leads to every page, it is built without a warning, and its pages have no barriers."""

from __future__ import annotations

import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.accessibility import WIDTHS, barriers, needs_axe
from tests.docs.blocks import ROOT, blocks_of, commands_of
from tests.router.operate.dashboard.browser import PROGRAM, a_browser, a_page

DOCS = ROOT / "docs"
NAMES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
SCHEMES = ("default", "slate")
LOOKED_AT = ("index", "tutorial", "operating", "errors", "usage", "decisions/0041-a-batch-is-a-log-of-answers")
"""Pages with all that pages have: cards, pictures, tables, and code in each language."""

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


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The site's address: opened as files, pages have no search."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    with a_browser() as address:
        yield address


@needs_mkdocs
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    for name in NAMES:
        assert (site / name).with_suffix(".html").exists()


@needs_mkdocs
@needs_axe
@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LOOKED_AT)
async def test_pages_are_without_barriers(served: str, browser: str, name: str, width: str) -> None:
    columns, rows = WIDTHS[width]
    async with a_page(browser, width=columns, height=rows) as page:
        await page.go(f"{served}/{name}.html")
        await page.until("document.readyState === 'complete' && document.querySelector('article h1')")
        await page.until("document.querySelector('[data-md-component=search-query]')")
        assert await page.run("document.documentElement.scrollWidth") <= columns
        for scheme in SCHEMES:
            await page.run(f"document.body.dataset.mdColorScheme = '{scheme}'")
            # colours change slowly
            await page.run("Promise.all(document.getAnimations().map((each) => each.finished)).then(() => true)")
            assert await barriers(page) == ""


# as the theme's button does: it marks the block, and takes the text that is shown then
_COPIED = """[...document.querySelectorAll("article .highlight pre > code")].map((code) => {
  code.setAttribute("data-md-copying", "");
  const text = code.innerText;
  code.removeAttribute("data-md-copying");
  return text.trimEnd();
})"""


@needs_mkdocs
@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("name", ["index", "tutorial", "operating", "rag"])
async def test_what_is_copied_from_a_page_can_be_typed_and_is_what_its_tests_run(
    served: str, browser: str, name: str
) -> None:
    blocks = [block for block in blocks_of(DOCS / f"{name}.md") if block.language in ("sh", "console")]
    async with a_page(browser, width=1280, height=900) as page:
        await page.go(f"{served}/{name}.html")
        await page.until("document.readyState === 'complete' && document.querySelector('article h1')")
        copied = {_words(text) for text in await page.run(_COPIED)}
    for block in blocks:
        typed = "\n".join(command.text for command in commands_of(block))
        assert _words(typed) in copied, f"{block.where}: its copy is none of its commands"


def _words(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
