"""Barriers in web pages, found by axe-core: `.ci/axe` fetches it for `make test`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.router.operate.dashboard.browser import Page

AXE = Path(sys.prefix) / "axe.min.js"
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}

needs_axe = pytest.mark.skipif(not AXE.exists(), reason=f"there is no axe-core here: .ci/axe {AXE}")

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
_RUN = """axe.run(document, {{runOnly: {rules}, resultTypes: ["violations"]}}).then(({{violations}}) =>
    violations.flatMap(({{id, help, nodes}}) => nodes.map((node) =>
        `${{id}}: ${{help}}: ${{node.target.join(" ")}}: ` +
        `${{(node.any[0] ?? node.all[0] ?? node.none[0])?.message}}`)))"""


async def barriers(page: Page) -> str:
    """What axe-core finds on `page` against WCAG 2.2 AA and its own best practices, one line for each element."""
    if not await page.run("typeof axe === 'object'"):
        await page.run(AXE.read_text() + "; true")
    return "\n".join(await page.run(_RUN.format(rules=list(RULES))))
