"""The site: its map leads to every page, and it is built without a warning."""

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

from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"
NAMES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


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


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        assert (tmp_path / "site" / name).with_suffix(".html").exists()
