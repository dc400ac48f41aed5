"""Usage at the admin port, where the file has a place for it."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from policies.sla.usage import UsageSettings
from router.operate.usage.database import UsageDatabase
from tests.router.operate.dashboard.scene import PacedBackend, a_running_scene, a_scene
from tests.router.operate.dashboard.test_routes import Operator, an_operator
from tests.router.operate.usage.focus import mistakes


@asynccontextmanager
async def a_router_that_keeps_usage(folder: Path, currency: str | None = "USD") -> AsyncIterator[Operator]:
    config = a_scene()
    config = replace(
        config,
        usage=UsageSettings(str(folder / "usage.sqlite"), str(folder / "journal")),
        prices=replace(config.prices, currency=currency),
    )
    async with a_running_scene(PacedBackend("own-0"), config=config) as router, aiohttp.ClientSession() as http:
        yield Operator(router, http)


async def test_usage_outlives_the_router(tmp_path: Path) -> None:
    for _ in range(2):
        async with a_router_that_keeps_usage(tmp_path) as operator:
            await operator.ask("acme", words=100)
            await operator.ask("nobody", words=10)
    async with a_router_that_keeps_usage(tmp_path) as operator:
        status, reply = await operator.get("/admin/usage?by=tenant")
        assert status == 200
        assert [(row["tenant"], row["requests"], row["completion_tokens"]) for row in reply["usage"]] == [
            ("acme", 2, 16),
            ("everyone", 2, 16),
        ]
        [acme] = (await operator.get("/admin/usage?by=tenant&tenant=acme"))[1]["usage"]
        priced = acme["prompt_tokens"] - acme["cached_tokens"] + 0.1 * acme["cached_tokens"] + 4 * 16
        assert acme["cost"] == pytest.approx(priced / 1e6)
        assert acme["currency"] == "USD"


async def test_what_ended_before_the_question_is_in_the_answer(tmp_path: Path) -> None:
    async with a_router_that_keeps_usage(tmp_path) as operator:
        for number in range(1, 4):
            await operator.ask("acme", words=10)
            [row] = (await operator.get("/admin/usage"))[1]["usage"]
            assert (row["tenant"], row["model"], row["requests"]) == ("acme", "tiny", number)


async def test_usage_is_a_sheet_and_an_export_for_finops(tmp_path: Path) -> None:
    async with a_router_that_keeps_usage(tmp_path) as operator:
        await operator.ask("acme", words=10)
        [row] = csv.DictReader(io.StringIO((await operator.get("/admin/usage.csv?by=day,pool,kind"))[1]))
        [charge] = csv.DictReader(io.StringIO((await operator.get("/admin/usage.focus.csv"))[1]))
    assert (row["pool"], row["kind"], row["requests"], row["currency"]) == ("own", "fake", "1", "USD")
    assert mistakes(charge) == []
    assert (charge["SubAccountId"], charge["ProviderName"], charge["PublisherName"]) == ("acme", "own", "fake")


async def test_a_question_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with a_router_that_keeps_usage(tmp_path) as operator:
        status, reply = await operator.get("/admin/usage?by=tennant")
        assert (status, reply["error"]["param"], reply["error"]["hint"]) == (400, "by", "did you mean 'tenant'?")


async def test_without_a_currency_there_is_no_export(tmp_path: Path) -> None:
    async with a_router_that_keeps_usage(tmp_path, currency=None) as operator:
        await operator.ask("acme", words=10)
        status, reply = await operator.get("/admin/usage.focus.csv")
        assert (status, "FOCUS needs a currency" in reply["error"]["message"]) == (400, True)
    async with an_operator() as operator:
        status, reply = await operator.get("/admin/usage.focus.csv")
        assert (status, reply["error"]["hint"]) == (400, "write usage: {store: usage.sqlite}")


async def test_a_database_that_is_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_router_that_keeps_usage(tmp_path) as operator:
        await operator.ask("acme", words=10)

        def away(*_: object, **__: object) -> None:
            raise ConnectionError("away")

        with monkeypatch.context() as patched:
            patched.setattr(UsageDatabase, "sums", away)
            status, reply = await operator.get("/admin/usage")
        assert (status, "the database of usage is away" in reply["error"]["message"]) == (503, True)
        assert (await operator.get("/admin/usage"))[0] == 200
