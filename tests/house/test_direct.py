"""Connections are made where no variable of the environment can divert them to a proxy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED = {
    "urlopen": (),
    "build_opener": ("router/direct.py",),
    "insecure_channel": ("tls/grpc_client.py",),
    "secure_channel": ("tls/grpc_client.py", "backends/triton/grpc.py"),
}
"""Calls that ask the environment for a proxy -> the files that tell them not to."""

LIBRARIES = ("requests", "httpx", "urllib3")
"""They read the variables unless each client is told not to, so the router has none of its own."""


def places(text: str) -> Iterator[str]:
    """The calls of ALLOWED, the imports of LIBRARIES, and sessions that trust the environment."""
    if not any(word in text for word in (*ALLOWED, *LIBRARIES, "trust_env")):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ALLOWED:
                yield name
            for keyword in node.keywords:
                if keyword.arg == "trust_env" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield "trust_env"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name.split(".")[0] in LIBRARIES)


@pytest.mark.parametrize("folder", ["backends", "http1", "policies", "router", "shards", "tls"])
def test_connections_are_made_where_no_variable_diverts_them(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        where = file.relative_to(ROOT).as_posix()
        for name in places(file.read_text()):
            assert where in ALLOWED.get(name, ()), f"{where} uses {name}: see router/direct.py and tls/grpc_client.py"


@pytest.mark.parametrize(
    "text",
    [
        "import urllib.request\nurllib.request.urlopen('http://x')",
        "import grpc\ngrpc.aio.insecure_channel('x:1')",
        "import aiohttp\naiohttp.ClientSession(trust_env=True)",
        "import requests",
        "from httpx import get",
    ],
)
def test_a_connection_that_a_variable_could_divert_is_seen(text: str) -> None:
    assert list(places(text))
