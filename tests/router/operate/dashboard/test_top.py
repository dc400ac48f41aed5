"""The terminal's view of what the dashboard shows."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from policies.errors import BackendFailed, InvalidRequest
from router.operate.admin_port import KEY_VARIABLE, AdminPort
from router.operate.dashboard.nouns import Budget
from router.operate.dashboard.top import OperatorsPort, frame
from router.start.cli import app
from tests.router.operate.dashboard.scene import PacedBackend
from tests.router.operate.dashboard.test_routes import ADMIN, HASHES, an_operator


def one_frame(address: Any, **environment: str) -> Result:
    return CliRunner().invoke(app, ["top", "--once", "--admin", str(address)], env={"COLUMNS": "200", **environment})


async def test_one_frame_shows_classes_tenants_backends_and_decisions() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        operator.router.gateway.cluster.weigh("own-0", 2.5)
        await operator.ask()
        done = await asyncio.to_thread(one_frame, operator.router.admin)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("Pointsman ✓ ready")
    (chat,) = (line for line in lines if line.startswith("interactive"))
    assert "p95 250 ms ✓" in chat
    assert "✓ 1 finished" in chat
    (tenant,) = (line for line in lines if line.startswith("acme"))
    assert "100%" in tenant
    (backend,) = (line for line in lines if line.startswith("own-0"))
    assert "✓ well" in backend
    assert " 2.5 " in backend
    assert lines[-1].split()[1:3] == ["acme", "interactive"]
    assert lines[-1].endswith("is the only candidate.")


async def test_what_is_not_reported_or_estimated_is_shown_as_such() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        await operator.ask()
        snapshot, (decision,) = await asyncio.to_thread(OperatorsPort(AdminPort(str(operator.router.admin), None)).read)
    silent = replace(snapshot, backends=tuple(replace(backend, hit_share=None) for backend in snapshot.backends))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(frame(silent, [replace(decision, likely_prompt_tokens=(1, 9))], lines=30, width=200))
    lines = captured.get().splitlines()
    assert [line for line in lines if line.startswith("own-0") and "not reported" in line]
    assert f" ~{decision.prompt_tokens}" in lines[-1]


async def test_a_router_with_keys_is_asked_with_the_one_in_the_environment() -> None:
    async with an_operator(admin_key_hashes=HASHES) as operator:
        done = await asyncio.to_thread(one_frame, operator.router.admin)
        assert isinstance(done.exception, InvalidRequest)
        assert "this needs an admin key" in str(done.exception)
        assert KEY_VARIABLE in str(done.exception)
        assert (await asyncio.to_thread(one_frame, operator.router.admin, **{KEY_VARIABLE: ADMIN})).exit_code == 0


def test_a_refused_connection_is_reported() -> None:
    done = one_frame("127.0.0.1:1")
    assert isinstance(done.exception, BackendFailed)
    assert "no reply from http://127.0.0.1:1: Connection refused (" in str(done.exception)


async def test_the_clients_port_is_not_taken_for_the_operators() -> None:
    async with an_operator() as operator:
        done = await asyncio.to_thread(one_frame, operator.router.http)
        assert f"http://{operator.router.http} is not an admin port (`pointsman up`" in str(done.exception)


async def test_the_dashboards_address_will_do_too() -> None:
    async with an_operator() as operator:
        assert (await asyncio.to_thread(one_frame, f"http://{operator.router.admin}/dashboard")).exit_code == 0


async def test_decisions_are_followed_from_frame_to_frame() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        source = OperatorsPort(AdminPort(f"http://{operator.router.admin}/", None))
        await operator.ask()
        assert len((await asyncio.to_thread(source.read))[1]) == 1
        await operator.ask()
        snapshot, decisions = await asyncio.to_thread(source.read)
        assert [decision.number for decision in decisions] == [2, 1]
        assert [decision.number for decision in snapshot.decisions] == [2]
        assert [decision.number for decision in (await asyncio.to_thread(source.read))[1]] == [2, 1]


@pytest.mark.parametrize("columns", [80, 200])
async def test_a_frame_fits_its_terminal(columns: int) -> None:
    async with an_operator() as operator:
        for _ in range(12):
            await operator.ask("labs", words=5)
        snapshot, decisions = await asyncio.to_thread(OperatorsPort(AdminPort(str(operator.router.admin), None)).read)
    console = Console(width=columns)
    with console.capture() as captured:
        console.print(frame(snapshot, decisions, lines=30, width=columns))
    lines = captured.get().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("Pointsman ✓ ready")
    assert ("waiting" in lines[0], "file" in lines[0]) == (True, columns == 200)
    assert not lines[1].strip()
    # what a terminal has no room for is left out, and what is shown can be read: only reasons are cut
    heads = [line for line in lines if line.startswith(("class", "tenant", "backend", "at "))]
    assert len(heads) >= 3
    assert not [line for line in heads if "…" in line]
    assert not [line for line in lines if "…" in line and not line.endswith("…")]


@pytest.mark.parametrize(
    ("table", "order"),
    [
        ("class", ["p99", "TPOT p50", "TTFT p50", "ended", "TPOT p95", "target", "late", "TTFT p95", "waiting"]),
        ("tenant", ["weight", "spent", "cost/min", "entitled", "cached", "running", "waiting", "share", "left"]),
        ("backend", ["weight", "wait", "KV in use", "of", "hit rate", "waiting", "ended", "running"]),
    ],
)
async def test_the_narrower_a_terminal_the_fewer_columns_it_shows(table: str, order: list[str]) -> None:
    async with an_operator() as operator:
        await operator.ask("labs", words=5)
        snapshot, decisions = await asyncio.to_thread(OperatorsPort(AdminPort(str(operator.router.admin), None)).read)
    shown: dict[str, int] = {}
    for width in range(10, 200):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(frame(snapshot, decisions, lines=60, width=width))
        for line in captured.get().splitlines():
            if line.startswith(f"{table} "):
                shown = {name: width for name in re.split(r"  +", line.strip()) if name not in shown} | shown
    # the column that needs the widest terminal is the first that a narrower one leaves out
    assert [name for name in sorted(shown, key=lambda name: -shown[name]) if name in order] == order


async def test_money_is_shown_as_money_where_the_file_has_a_currency() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        snapshot, _ = await asyncio.to_thread(OperatorsPort(AdminPort(str(operator.router.admin), None)).read)
    (tenant, *others) = snapshot.tenants
    paid = replace(
        tenant,
        cost_minute=12_345.0,
        cost=12_345_678.0,
        currency="USD",
        budgets={"cost": Budget(50_000_000, 37_654_322, "37.65 USD"), "tokens": Budget(1000, 400, "400 tokens")},
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(frame(replace(snapshot, tenants=(paid, *others)), [], lines=30, width=200))
    (line,) = (line for line in captured.get().splitlines() if line.startswith("acme"))
    assert "0.012 USD" in line
    assert "12.35 USD" in line
    assert "37.65 USD, 400 tokens" in line


@pytest.mark.parametrize("width", [40, 80, 200])
async def test_a_long_reason_takes_one_line_and_leaves_the_tables_as_they_are(width: int) -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        snapshot, _ = await asyncio.to_thread(OperatorsPort(AdminPort(str(operator.router.admin), None)).read)

    def lines_with(trouble: str) -> list[str]:
        ill = replace(snapshot.backends[0], state="ill", trouble=trouble, trouble_s=5.0)
        console = Console(width=width)
        with console.capture() as captured:
            console.print(frame(replace(snapshot, backends=(ill,)), [], lines=30, width=width))
        return captured.get().splitlines()

    short, long = lines_with("gone"), lines_with("a reason with many words " * 40)
    assert len(short) == len(long)
    assert [line for line, other in zip(short, long, strict=True) if line != other and "✕ own-0 for" not in line] == []
    assert max(map(len, long)) <= width
