"""The dashboard as a person meets it: in a real browser, with eyes of several kinds and without a mouse."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import policies.roles
from policies.errors import BackendFailed
from policies.keys import hash_of
from policies.roles import OperatorRole
from policies.rules import Rule
from policies.split import Split
from tests.router.operate.admin.test_usage import a_router_that_keeps_usage
from tests.router.operate.dashboard.browser import PROGRAM, Page, a_browser, a_page
from tests.router.operate.dashboard.everything import everything
from tests.router.operate.dashboard.scene import PacedBackend, a_document, keep
from tests.router.operate.dashboard.test_routes import ADMIN, HASHES, Operator, an_operator

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium")

SHOWN = "document.documentElement.dataset.shown"
FOCUSED = "document.activeElement"


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    with a_browser() as address:
        yield address


@asynccontextmanager
async def a_dashboard(browser: str, *backends: PacedBackend, **server: Any) -> AsyncIterator[tuple[Operator, Page]]:
    """The page open in the browser; nothing of it may have complained at the end."""
    async with an_operator(*backends, **server) as operator, a_page(browser) as page:
        await page.go(f"http://{operator.router.admin}/dashboard")
        yield operator, page
        assert not page.complaints


def rows(selector: str) -> str:
    return f"document.querySelectorAll('{selector} tbody tr')"


async def test_what_happens_is_shown_within_a_second_or_two(browser: str) -> None:
    async with a_dashboard(browser, PacedBackend("own-0")) as (operator, page):
        await page.until(SHOWN)
        assert "Nothing was asked yet." in await page.text("#decisions")
        await operator.ask("acme")
        await page.until(f"{rows('#stream')}.length === 1")
        await page.until(f"/finished/.test({rows('#stream')}[0].innerText)")
        shown = await page.text("#stream tbody")
        assert all(word in shown for word in ("acme", "interactive", "own-0", "✓ finished", "is the only candidate."))
        assert "✓ kept" in await page.text("#classes")
        assert "100 %" in await page.text("#tenants")
        assert "✓ well" in await page.text("#backends")


async def test_prefixes_that_are_kept_are_shown_with_where_they_stay(browser: str) -> None:
    async with a_dashboard(browser, PacedBackend("own-0"), PacedBackend("own-1", blocks=8)) as (operator, page):
        await page.until(SHOWN)
        assert await page.run("document.querySelector('#kept').hidden")
        await keep(operator.router, operator.http, "acme", a_document(1, 200), shards=3, ttl="2h")
        await page.until("!document.querySelector('#kept').hidden")
        shown = await page.text("#prefixes tbody")
        assert all(word in shown for word in ("acme", "◐ partial", "none of 2 backends", "2 of 3 backends", "120 min"))
        assert "own-0" in shown
        assert "128 of 192 pinned" in shown
        for prefix in operator.router.gateway.prefixes.of():
            await operator.router.gateway.prefixes.drop(prefix.tenant, prefix.id)
        await page.until("document.querySelector('#kept').hidden")


async def test_pools_that_share_requests_are_shown_with_what_they_lost(browser: str) -> None:
    async with a_dashboard(browser, PacedBackend("own-0"), PacedBackend("new-0", pool="new")) as (operator, page):
        await page.until(SHOWN)
        assert await page.run("document.querySelector('#shared').hidden")
        gateway = operator.router.gateway
        split = Split((("own", 0.9), ("new", 0.1)))
        rule = Rule("interactive", pools=("own", "new"), split=split)
        gateway.splits.follow((rule,))
        await page.until("!document.querySelector('#shared').hidden")
        shown = await page.text("#splits tbody")
        assert all(word in shown for word in ("rule 1", "own", "90 %", "10 %", "✓ in force"))
        for _ in range(3):
            gateway.splits.ended(rule, "new", "failed", gateway.config.classes["interactive"])
        await page.until("/rolled back/.test(document.querySelector('#splits').innerText)")
        shown = await page.text("#splits tbody")
        assert all(word in shown for word in ("100 %", "0 %", "✕ rolled back", "3 of 3 requests failed"))


async def test_a_decision_is_found_and_opened_with_the_keyboard_alone(browser: str) -> None:
    async with a_dashboard(browser) as (operator, page):
        for tenant in ("acme", "labs", "acme"):
            await operator.ask(tenant)
        await page.until(f"{rows('#stream')}.length === 3")
        await page.press("/")
        await page.type("acme -labs")
        await page.until(f"{rows('#stream')}.length === 2")
        await page.press("Escape")
        await page.press("j")
        await page.until("/Where its prefix lives now/.test(document.querySelector('#detail').innerText)")
        first = await page.run(f"{FOCUSED}.dataset.key")
        await page.press("ArrowDown")
        await page.until(f"{FOCUSED}.dataset.key !== '{first}' && {FOCUSED}.ariaSelected === 'true'")
        await page.until("document.querySelector('#detail .strip')")
        assert "3 of 3" not in await page.text("#detail")
        assert "192 of 192 tokens" in await page.text("#detail .strip")
        assert "marginal_cost" in await page.text("#detail table")


async def test_a_list_that_is_held_still_does_not_move(browser: str) -> None:
    async with a_dashboard(browser) as (operator, page):
        await operator.ask()
        await page.until(f"{rows('#stream')}.length === 1")
        await page.press("p")
        await page.until("document.querySelector('#pause').ariaPressed === 'true'")
        await operator.ask()
        await page.until("/finished 2/.test(document.querySelector('#classes').innerText)")
        assert await page.run(f"{rows('#stream')}.length") == 1
        await page.press("p")
        await page.until(f"{rows('#stream')}.length === 2")


async def test_a_backend_is_drained_weighed_and_dies_before_ones_eyes(browser: str) -> None:
    backends = [PacedBackend("own-0"), PacedBackend("own-1")]
    async with a_dashboard(browser, *backends) as (operator, page):
        await page.until(SHOWN)
        await page.run("document.querySelector('[aria-label=\"drain own-1\"]').click()")
        await page.until("/◐ draining/.test(document.querySelector('#backends').innerText)")
        assert [backend.draining for backend in (await operator.snapshot()).backends] == [False, True]
        await page.run("document.querySelector('[aria-label=\"undrain own-1\"]').click()")
        await page.until("!/draining/.test(document.querySelector('#backends').innerText)")
        await page.run("document.querySelector('[aria-label=\"weight of own-0\"]').focus()")
        await page.run(f"{FOCUSED}.select()")
        await page.type("3")
        await page.press("Enter")
        while (await operator.snapshot()).backends[0].weight != 3:
            await page.until(SHOWN)
        backends[1].is_well = False
        await page.until("/✕ ill/.test(document.querySelector('#backends').innerText)")
        await page.until("/✕ 1 of 2/.test(document.querySelector('#tiles').innerText)")


async def test_a_router_without_a_log_says_how_to_have_a_diagnosis(browser: str) -> None:
    async with a_dashboard(browser) as (_, page):
        await page.until(SHOWN)
        await page.press("d")
        await page.until("/✕ .*server.decision_log/.test(document.querySelector('#diagnosed').innerText)")
        # the browser itself notes an answer of 400
        assert [complaint for complaint in page.complaints if "400" not in complaint] == []
        page.complaints.clear()


async def test_a_request_is_explained(browser: str) -> None:
    async with a_dashboard(browser) as (_, page):
        await page.until("document.querySelector('#explain select[name=tenant]').options.length === 4")
        await page.press("e")
        await page.until(f"{FOCUSED}.name === 'prompt_tokens'")
        await page.run(f"{FOCUSED}.select()")
        await page.type("2k")
        await page.press("Enter")
        await page.until("document.querySelector('#explained table')")
        explained = await page.text("#explained")
        assert "rule 1 no: tenant is acme, not archive" in explained
        assert "long-rag, rank 1" in explained
        await page.run("document.querySelector('[name=prompt_tokens]').value = 'many'")
        await page.run("document.querySelector('#explain').requestSubmit()")
        await page.until("/✕ prompt_tokens/.test(document.querySelector('#explained').innerText)")
        # the browser itself notes an answer of 400
        assert [complaint for complaint in page.complaints if "400" not in complaint] == []
        page.complaints.clear()


async def test_backends_that_were_left_out_have_the_reason_in_words(browser: str) -> None:
    async with a_dashboard(browser, PacedBackend("own-0"), PacedBackend("own-1")) as (operator, page):
        await operator.call("PATCH", "/admin/backends/own-1", {"draining": True})
        await operator.ask()
        await page.until(f"{rows('#stream')}.length === 1")
        await page.run(f"{rows('#stream')}[0].click()")
        await page.until("/own-1\\s*not well, or draining/.test(document.querySelector('#detail').innerText)")
        await page.run("document.querySelector('#explain').requestSubmit()")
        await page.until("/own-1: not well, or draining/.test(document.querySelector('#explained').innerText)")


async def test_the_key_is_asked_for_once_and_not_kept_longer_than_the_tab(browser: str) -> None:
    async with a_dashboard(browser, admin_key_hashes=HASHES) as (_, page):
        for key in ("wrong", ADMIN):
            await page.until("document.querySelector('#key-dialog').open && document.activeElement.id === 'key'")
            await page.type(key)
            await page.press("Enter")
            await page.until("!document.querySelector('#key-dialog').open || /not known/.test(document.body.innerText)")
        await page.until(SHOWN)
        assert await page.run("sessionStorage.getItem('pointsman-admin-key')") == ADMIN
        assert await page.run("JSON.stringify(localStorage)") == '{"pointsman-theme":"system"}'
        assert [complaint for complaint in page.complaints if "401" not in complaint] == []
        page.complaints.clear()


async def test_budgets_are_shown_with_what_is_used_of_them(browser: str) -> None:
    async with a_dashboard(browser) as (operator, page):
        await operator.ask()
        await page.until("!document.querySelector('#budgeted').hidden")
        shown = await page.text("#budgets tbody")
        assert all(word in shown for word in ("acme", "tenant", "40,000,000 units of cost", "a day", "0 %", "in "))


async def test_a_key_is_issued_shown_once_and_revoked(browser: str, tmp_path: Path) -> None:
    async with a_dashboard(browser, keys_file=str(tmp_path / "keys.jsonl")) as (operator, page):
        await page.until("document.querySelector('#keys-tenant').options.length === 5")
        assert await page.run("document.querySelector('#issue button').disabled")
        await choose(page, "labs")
        await page.until(f"{rows('#keys')}.length === 1 && /in the SLA file/.test({rows('#keys')}[0].innerText)")
        await page.run("document.querySelector('#issue [name=name]').focus()")
        await page.type("<b>ci</b>")
        await page.press("Enter")
        await page.until(f"!document.querySelector('#new-key').hidden && {FOCUSED}.id === 'new-key-text'")
        [issued] = operator.router.gateway.keys.of("labs")
        key = await page.run("document.querySelector('#new-key-text').value")
        assert hash_of(key) == issued.sha256
        await page.until(f"{rows('#keys')}.length === 2")
        assert "<b>ci</b>" in await page.text("#keys tbody")
        await page.run("document.querySelector('#put-away').click()")
        assert key not in await page.run(
            "[...document.querySelectorAll('input')].map((one) => one.value).join() + document.body.innerHTML"
        )
        await page.run(f"document.querySelector('[aria-label=\"revoke {issued.id}\"]').click()")
        await page.until("document.querySelector('#revoke').open")
        # what has the focus at first harms nothing
        await page.press("Enter")
        await page.until("!document.querySelector('#revoke').open")
        assert operator.router.gateway.keys.of("labs") == [issued]
        await page.run(f"document.querySelector('[aria-label=\"revoke {issued.id}\"]').click()")
        await page.run("document.querySelector('#revoke [value=revoke]').click()")
        await page.until(f"{rows('#keys')}.length === 1")
        assert operator.router.gateway.keys.of("labs") == []


async def test_a_key_that_is_rotated_names_its_successor(browser: str, tmp_path: Path) -> None:
    async with a_dashboard(browser, keys_file=str(tmp_path / "keys.jsonl")) as (operator, page):
        made = await operator.router.gateway.keys.issue("labs", name="ci", lives_s=None, limits=None)
        await page.until("document.querySelector('#keys-tenant').options.length === 5")
        await choose(page, "labs")
        await page.until(f"document.querySelector('[aria-label=\"rotate {made.kept.id}\"]')")
        await page.run(f"document.querySelector('[aria-label=\"rotate {made.kept.id}\"]').click()")
        await page.until(f"{rows('#keys')}.length === 3")
        [old] = [key for key in operator.router.gateway.keys.of("labs") if key.id == made.kept.id]
        assert f"replaced by {old.replaced_by}" in await page.text("#keys tbody")
        await choose(page, "acme")
        assert await page.run("document.querySelector('#new-key-text').value") == ""


async def choose(page: Page, tenant: str) -> None:
    """Choose the tenant whose keys are shown."""
    await page.run(f"document.querySelector('#keys-tenant').value = '{tenant}'")
    await page.run("document.querySelector('#keys-tenant').dispatchEvent(new Event('change'))")


async def test_usage_is_shown_by_tenant_and_by_day(browser: str, tmp_path: Path) -> None:
    async with a_router_that_keeps_usage(tmp_path) as operator, a_page(browser) as page:
        await operator.ask("acme", words=40)
        await operator.ask("labs", words=10)
        await page.go(f"http://{operator.router.admin}/dashboard")
        await page.until(SHOWN)
        await page.run("document.querySelector('#show-usage').click()")
        await page.until("document.querySelectorAll('#used table').length === 2")
        assert "of all routers" in await page.text("#used-note")
        by_tenant, by_day = await page.run("[...document.querySelectorAll('#used tbody')].map((one) => one.innerText)")
        assert ["acme" in by_tenant, "labs" in by_tenant, "USD" in by_tenant] == [True] * 3
        assert f"{datetime.now(UTC):%Y-%m-%d}" in by_day
        assert not page.complaints


async def test_usage_of_a_router_without_a_database_is_that_since_its_start(browser: str) -> None:
    async with a_dashboard(browser) as (operator, page):
        await operator.ask("acme")
        await page.until(SHOWN)
        await page.run("document.querySelector('#show-usage').click()")
        await page.until("document.querySelectorAll('#used table').length === 1")
        assert "since it started" in await page.text("#used-note")
        assert "units of cost" in await page.text("#used")


async def test_a_viewer_is_offered_no_changes(browser: str) -> None:
    [digest] = HASHES
    viewer = {digest: policies.roles.Operator("vera", OperatorRole.VIEWER)}
    async with a_dashboard(browser, admin_key_hashes=HASHES, operators=viewer) as (_, page):
        await page.until("document.querySelector('#key-dialog').open && document.activeElement.id === 'key'")
        await page.type(ADMIN)
        await page.press("Enter")
        await page.until(SHOWN)
        assert "viewer" in await page.text("#state")
        controls = "[...document.querySelectorAll('#backends button, #backends .weight')]"
        assert await page.run(f"{controls}.length > 1 && {controls}.every((control) => control.disabled)")
        assert await page.run("document.querySelector('#keyed').hidden")
        page.complaints.clear()


async def test_a_router_that_goes_away_leaves_its_last_word_and_a_warning(browser: str) -> None:
    async with an_operator() as operator, a_page(browser) as page:
        await page.go(f"http://{operator.router.admin}/dashboard")
        await page.until(SHOWN)
        await operator.router.__aexit__()
        await page.until("/does not answer/.test(document.querySelector('#trouble').innerText)")
        assert "✓ well" in await page.text("#backends")


EVIL = {
    "an image": "<img src=x onerror=document.title='owned'>",
    "a script": "<script>document.title='owned'</script>",
    "an attribute": '" onmouseover="document.title=\'owned\'" x="',
    "an address": "javascript:document.title='owned'",
    "a template": "${document.title='owned'} {{constructor.constructor('document.title=1')()}}",
    "a picture": "<svg onload=document.title='owned'><style>*{display:none}</style></svg>",
    "an escape code": "a\x1b]0;owned\x07\x1b[2Jb\x9b31mc",
    "text that runs backwards": "own-0\u202e0-tops\u2066x\u200f\u061c",
    "lines": "a\u2028b\u2029c\x00d",
}
NOT_SEEN = r"/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/"


class _Sick(PacedBackend):
    """Answers probes until it is told to fail with a text."""

    reason: str | None = None

    async def probe(self) -> None:
        if self.reason is not None:
            raise BackendFailed(self.reason)
        await super().probe()


@pytest.mark.parametrize("evil", EVIL)
async def test_names_and_errors_from_outside_are_text_that_is_seen_and_nothing_else(browser: str, evil: str) -> None:
    text = EVIL[evil]
    sick = _Sick(f"own@{text}:80")
    async with a_dashboard(browser, PacedBackend("own-0", pool=text), sick) as (operator, page):
        sick.reason = f"its engine says {text}"
        await operator.ask()
        await page.until(f"{rows('#stream')}.length === 1")
        await page.until("/its engine says/.test(document.querySelector('#backends').innerText)")
        await page.run(f"{rows('#stream')}[0].click()")
        await page.until("document.querySelector('#detail .strip')")
        await page.run("document.querySelector('#explain').requestSubmit()")
        await page.until("document.querySelector('#explained table')")
        assert await page.run(f"!{NOT_SEEN}.test(document.body.innerText)"), await page.text("body")
        assert seen(text) in await page.text("#backends")
        assert await page.run("document.title") == "Pointsman"
        made = (
            "document.querySelectorAll('main img, main script, main style, [onload], [onerror], [onmouseover]').length"
        )
        assert await page.run(made) == 0
        page.complaints.clear()


def seen(text: str) -> str:
    """`text` as the page writes it: what would act is written out."""
    return re.sub(NOT_SEEN.strip("/"), lambda found: f"\\u{{{ord(found[0]):x}}}", text)


CONTRASTS = """
(() => {
  const light = (color) => {
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = color.match(/[\\d.]+/g).map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const shown = (name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(--${name})`;
    const color = getComputedStyle(probe).color;
    probe.remove();
    return light(color);
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = {};
  for (const ground of ["panel", "page", "chosen"]) for (const ink of ["ink", "dim", "good", "bad"]) {
    found[`${ink} on ${ground}`] = ratio(shown(ink), shown(ground));
  }
  found["submit"] = ratio(shown("panel"), shown("good"));
  return found;
})()
"""


async def test_every_text_can_be_read_in_both_schemes(browser: str) -> None:
    """WCAG 2.2, 1.4.3: at least 4.5 to 1."""
    async with a_dashboard(browser) as (_, page):
        await page.until(SHOWN)
        for dark in (False, True):
            await page.look(dark=dark)
            ratios = await page.run(CONTRASTS)
            assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


async def test_the_theme_can_be_chosen_and_stays(browser: str) -> None:
    async with a_dashboard(browser) as (_, page):
        await page.until(SHOWN)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await page.run(ground)
        await page.press("t")
        await page.press("t")
        await page.until(f"{ground} !== '{light}'")
        dark = await page.run(ground)
        await page.run("location.reload()")
        await page.until(f"{SHOWN} && {ground} === '{dark}'")
        await page.press("t")
        await page.until(f"{ground} === '{light}'")


async def test_everything_that_can_be_used_has_a_name(browser: str) -> None:
    nameless = """[...document.querySelectorAll("button, input, select, table, section")].filter((one) =>
        !one.labels?.length && !one.ariaLabel && !one.getAttribute("aria-labelledby") && !one.innerText?.trim()
    ).map((one) => one.outerHTML)"""
    async with a_dashboard(browser) as (_, page):
        await page.until(SHOWN)
        assert await page.run(nameless) == []


async def test_the_page_is_never_wider_than_its_window(browser: str) -> None:
    async with a_dashboard(browser) as (operator, page):
        await operator.ask()
        await page.until(f"{rows('#stream')}.length === 1")
        for width in (390, 800, 1280, 1920):
            await page.resize(width, 900)
            assert await page.run("document.documentElement.scrollWidth") <= width


async def test_no_table_is_cut_off_on_a_laptop(browser: str) -> None:
    cut = """[...document.querySelectorAll(".panel")].filter((one) => one.scrollWidth > one.clientWidth + 1)
        .map((one) => one.innerText)"""
    async with a_dashboard(browser) as (operator, page):
        await operator.ask()
        await page.until(f"{rows('#stream')}.length === 1")
        for width in (1280, 1440, 1600, 1920):
            await page.resize(width, 900)
            assert await page.run(cut) == []


DRAFT = "document.querySelector('#draft-text')"


async def test_a_draft_is_compared_applied_and_rolled_back(browser: str, tmp_path: Path) -> None:
    async with everything(tmp_path) as shown, a_page(browser) as page:
        gateway = shown.router.gateway
        before = gateway.config.version
        await page.go(shown.page)
        await page.until(f"{rows('#versions')}.length === 3")
        await page.run(f"document.querySelector('[aria-label=\"edit {before}\"]').click()")
        await page.until(f"{DRAFT}.value.includes('weight: 9') && {FOCUSED}.id === 'draft-text'")
        await page.run(f"{DRAFT}.value = {DRAFT}.value.replace('weight: 9', 'wait: 9')")
        await page.run("document.querySelector('#draft').requestSubmit()")
        await page.until("/✕ draft .* has 1 mistake/.test(document.querySelector('#compared').innerText)")
        assert "there is no 'wait' here" in await page.text("#compared")
        assert await page.run("!document.querySelector('#compared button')")
        await page.run(f"{DRAFT}.value = {DRAFT}.value.replace('wait: 9', 'weight: 7')")
        await page.run("document.querySelector('#draft').requestSubmit()")
        await page.until("/is sound/.test(document.querySelector('#compared').innerText)")
        compared = await page.text("#compared")
        assert "classes.interactive.weight: 9 -> 7" in compared
        assert re.search(r"0 of \d+ would be decided differently", compared)
        await page.run("document.querySelector('#compared button').click()")
        # what has the focus at first changes nothing
        await page.press("Enter")
        await page.until("!document.querySelector('#into-effect').open")
        assert gateway.config.version == before
        await page.run("document.querySelector('#compared button').click()")
        await page.run("document.querySelector('#into-effect [value=write]').click()")
        await page.until("/✓ version .* is in effect/.test(document.querySelector('#file-done').innerText)")
        assert gateway.config.classes["interactive"].weight == 7
        assert "weight: 7" in shown.file.read_text()
        await page.until(f"document.querySelector('[aria-label=\"roll back {before}\"]')")
        await page.run(f"document.querySelector('[aria-label=\"roll back {before}\"]').click()")
        await page.run("document.querySelector('#into-effect [value=write]').click()")
        await page.until(f"/✓ version {before} is in effect/.test(document.querySelector('#file-done').innerText)")
        assert gateway.config.version == before
        assert not page.complaints


async def test_a_draft_of_a_file_that_has_changed_is_not_applied(browser: str, tmp_path: Path) -> None:
    async with everything(tmp_path) as shown, a_page(browser) as page:
        await page.go(shown.page)
        await page.until(f"{rows('#versions')}.length === 3")
        await page.run("document.querySelector('#versions [aria-label^=compare]').click()")
        await page.until("document.querySelector('#compared button')")
        shown.file.write_text(shown.file.read_text().replace("weight: 9", "weight: 5"))
        await page.run("document.querySelector('#compared button').click()")
        await page.run("document.querySelector('#into-effect [value=write]').click()")
        await page.until("/✕ .*compare again/.test(document.querySelector('#file-trouble').innerText)")
        assert "weight: 5" in shown.file.read_text()
        # the browser itself notes an answer of 409
        assert [complaint for complaint in page.complaints if "409" not in complaint] == []


async def test_a_viewer_does_not_see_the_file_nor_does_a_router_without_one_show_it(browser: str) -> None:
    async with a_dashboard(browser) as (_, page):
        await page.until(SHOWN)
        await page.until("!document.querySelector('#budgeted').hidden")
        assert await page.run("document.querySelector('#filed').hidden")


async def test_every_button_is_in_sight_on_a_phone(browser: str, tmp_path: Path) -> None:
    hidden = """[...document.querySelectorAll("button")].filter((one) => {
        const { left, right, width } = one.getBoundingClientRect();
        return width && (left < 0 || right > innerWidth);
    }).map((one) => one.ariaLabel ?? one.innerText)"""
    async with everything(tmp_path) as shown, a_page(browser, width=390, height=844) as page:
        await page.go(shown.page)
        await shown.open_all(page)
        assert await page.run(hidden) == []
        labels = await page.run(
            "[...document.querySelectorAll('#keys tbody tr')[0].cells].map((one) => one.dataset.label)"
        )
        # buttons name themselves
        assert labels == ["key", "team", "issued", "valid until", "last used here", "limits", ""]
