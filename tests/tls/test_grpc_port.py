"""What every gRPC port allows: pings of its clients, and none of too many."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from tls.grpc_port import grpc_server

ROOT = Path(__file__).parents[2]
PINGING = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


async def silent(_: bytes, __: Any) -> bytes:
    await asyncio.sleep(5.5)
    return b"done"


async def asked_with_pings(*options: tuple[str, int]) -> bytes | str:
    """What a client that pings each second gets from a port with `options`: its answer, or why there is none."""
    server = grpc_server(*options)
    handler = grpc.unary_unary_rpc_method_handler(silent)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Wait": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=PINGING) as channel:
            answer: bytes = await channel.unary_unary("/a.Service/Wait")(b"")
            return answer
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    finally:
        await server.stop(0)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_client_may_ping_as_often_as_the_port_allows_while_it_waits_and_a_flood_ends_its_connection() -> None:
    allowed = ("grpc.http2.min_ping_interval_without_data_ms", 500)
    assert await asyncio.gather(asked_with_pings(allowed), asked_with_pings()) == [b"done", "Too many pings"]


def test_every_port_of_ours_allows_pings() -> None:
    folders = ("router", "shards", "backends", "simulation", "tls")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    makers = {
        file.relative_to(ROOT).as_posix()
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "grpc.aio.server"
    }
    assert makers == {"tls/grpc_port.py"}
