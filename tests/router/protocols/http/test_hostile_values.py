"""No number, word or text that a query, a form, a header or a JSON body gives makes the router fail: it says what is
wrong, or takes it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import pytest

from policies.sla.usage import UsageSettings
from router.start.app import Router
from tests.router.batches.parts import a_batch_config
from tests.router.call.test_warming import a_keeper
from tests.router.parts import KEY, MODEL

DIGITS = [
    "0" * 5000 + "1",
    "000000001" + "0" * 5000,
    "9" * 5000,
    "1" * 400,
    "²²",
    "٣٣",
    "１２",
    "1_000",
    "+1",
    "-1",
    " 1",
    "1 ",
    "1.5",
    "1e3",
    "0x10",
]
WORDS = [
    "",
    "nan",
    "inf",
    "-Infinity",
    "true",
    "null",
    "[]",
    "{}",
    "a\0b",
    "a\nb",
    "../../x",
    "%s%n",
    "é",
    "\U0001f600",
]
TEXTS = [*DIGITS, *WORDS, "a" * 3000]
TOKENS = [
    *(json.dumps(text) for text in (*DIGITS[:7], *WORDS)),
    *("null", "true", "0", "-1", "1.5", "1e308", "-0.0", "1e-320", "18446744073709551616", "9" * 400, "[]", "{}"),
    *(
        "[[]]",
        "[null]",
        "[1e308]",
        '{"":null}',
        r'"\ud800"',
        r'"a\udfffb"',
        r'"\u0000"',
        r'["\ud83d"]',
        r'{"\ud800":1}',
    ),
    *("1e400", "NaN", "Infinity", "-", "01", '"', "[" * 200 + "]" * 200),
]
"""JSON as it is written; the last ones are none."""

MOST = 300
"""Cases of one test: all of them take a minute."""

T = TypeVar("T")

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SAMPLING = {
    "model": MODEL,
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "n": 1,
    "stop": ["x"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"1": 1},
    "stream": False,
    "user": "u",
    "priority": 1,
    "ignore_eos": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "min_tokens": 1,
    "stop_token_ids": [1],
}
CLAUDE = {
    "model": MODEL,
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "temperature": 0.5,
    "top_k": 3,
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
BODIES: dict[str, Any] = {
    "POST /v1/chat/completions": {
        **SAMPLING,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"a": 1},
        "documents": [{"id": "d", "text": "t"}],
    },
    "POST /v1/completions": {
        **SAMPLING,
        "prompt": ["say", "it"],
        "echo": False,
        "logprobs": 1,
        "best_of": 1,
        "suffix": "s",
    },
    "POST /v1/responses": {
        "model": MODEL,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "instructions": "i",
        "max_output_tokens": 16,
        "temperature": 0.5,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "top_logprobs": 1,
    },
    "POST /v1/messages": CLAUDE,
    "POST /v1/messages/count_tokens": CLAUDE,
    "POST /v1/embeddings": {
        "model": MODEL,
        "input": ["a", "b"],
        "dimensions": 8,
        "encoding_format": "float",
        "user": "u",
    },
    "POST /v1/rerank": {"model": MODEL, "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    "POST /tokenize": {"model": MODEL, "prompt": "hello", "add_special_tokens": True},
    "POST /detokenize": {"model": MODEL, "tokens": [1, 2]},
    "POST /v1/prefixes": {"model": MODEL, "messages": MESSAGES[:1], "ttl": "30m"},
    "PUT /v1/document_sets/a": {
        "documents": [{"id": "d", "title": "t", "text": "x"}],
        "model": MODEL,
        "shards": 1,
        "ttl": 60,
    },
    "PATCH /v1/document_sets/a": {"ttl": 60},
    "POST /v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "POST /v1/messages/batches": {"requests": [{"custom_id": "a", "params": CLAUDE}]},
}
OPERATORS: dict[str, Any] = {
    "POST /admin/tenants/acme/keys": {
        "name": "k",
        "ttl": "1h",
        "team": "t",
        "limits": {"concurrent": 1, "requests": 5},
    },
    "POST /admin/explain": {
        "prompt_tokens": 5,
        "max_new_tokens": "16k",
        "tenant": "acme",
        "model": MODEL,
        "priority": "p",
        "session": "s",
        "headers": {"a": "b"},
        "metadata": {"a": "b"},
        "held_tokens": {"b0": 5},
        "running": {"b0": 1},
        "facts": {"a": 1},
    },
    "PATCH /admin/backends/b0": {"state": "drained", "weight": 1},
}
QUERIES = {
    "/v1/files": ["limit", "after", "order", "purpose"],
    "/v1/batches": ["limit", "after"],
    "/v1/messages/batches": ["limit", "before_id", "after_id"],
    "/v1/models": ["limit", "after_id", "before_id"],
    "/v1/document_sets": ["limit"],
    "/admin/audit": ["limit", "before", "from", "to", "event"],
    "/admin/usage": ["by", "from", "to", "tenant", "limit", "step", "days"],
    "/admin/usage.csv": ["by", "from", "to", "tenant"],
    "/admin/usage.focus.csv": ["from", "to"],
    "/admin/budgets": ["by"],
    "/admin/snapshot": ["since"],
    "/admin/config/history": ["limit"],
}
PATHS = [
    "/v1/files/{}",
    "/v1/files/{}/content",
    "/v1/batches/{}",
    "/v1/messages/batches/{}/results",
    "/v1/models/{}",
    "/v1/prefixes/{}",
    "/v1/document_sets/{}",
    "/admin/decisions/{}",
    "/admin/config/history/{}",
    "/admin/tenants/{}/keys",
]
HEADERS = [
    *(
        "x-request-id",
        "traceparent",
        "tracestate",
        "user-agent",
        "anthropic-version",
        "anthropic-beta",
        "x-forwarded-for",
    ),
    *("x-forwarded-proto", "openai-organization", "idempotency-key", "x-stainless-timeout", "x-pointsman-priority"),
    *(
        "x-pointsman-session",
        "x-pointsman-explain",
        "x-pointsman-tags",
        "x-end-user",
        "accept",
        "origin",
        "content-type",
    ),
    *("x-slo-ttft-ms", "x-gateway-inference-objective", "baggage", "forwarded", "x-api-key", "prefer", "range"),
]
HEADER_VALUES = [
    *(text.encode() for text in TEXTS if not set(text) & set("\0\n")),
    *(
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"a=b;c",
        b",,,,",
        b'"',
        b"{",
        b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
        b"1" * 60_000,
    ),
]


@asynccontextmanager
async def a_whole_router(folder: Path) -> AsyncIterator[tuple[Router, aiohttp.ClientSession]]:
    config = a_batch_config(folder)
    config = replace(
        config,
        server=replace(config.server, admin="127.0.0.1:0", keys_file=str(folder / "keys")),
        usage=UsageSettings(str(folder / "usage.sqlite"), str(folder / "journal")),
    )
    made = a_keeper("b0", pins=True)
    async with Router(config, backends=lambda _: [made]) as router, aiohttp.ClientSession() as http:
        assert await router.wait_until_reached(5)
        yield router, http


def changed(body: Any) -> Iterator[str]:
    """`body` as JSON with each of its values, or names, replaced by each of TOKENS in turn."""
    mark = "\ue000"  # of private use
    for place in places(body):
        holed = copy.deepcopy(body)
        inner = holed
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = mark
        text = json.dumps(holed, ensure_ascii=False)
        for token in TOKENS:
            yield text.replace(f'"{mark}"', token)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value is inside of `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield (*at, name)
        yield from places(inner, (*at, name))


def some(cases: Iterable[T]) -> list[T]:
    """MOST of `cases`, the same each time."""
    every = list(cases)
    return random.Random(9).sample(every, min(MOST, len(every)))


async def statuses_of(http: aiohttp.ClientSession, base: str, call: str, bodies: list[str]) -> dict[str, int]:
    (method, path), headers = call.split(" "), {"authorization": f"Bearer {KEY}"}
    found: dict[str, int] = {}
    for body in bodies:
        async with http.request(method, base + path, data=body.encode(), headers=headers) as reply:
            await reply.read()
            found[body] = reply.status
    return found


def broken(found: dict[str, int]) -> dict[str, int]:
    """What the router failed at."""
    return {what[:300]: status for what, status in found.items() if status == 500}


@pytest.mark.parametrize("call", [*BODIES, *OPERATORS])
async def test_no_value_in_a_body_makes_the_router_fail(call: str, tmp_path: Path, caplog: Any) -> None:
    async with a_whole_router(tmp_path) as (router, http):
        base = f"http://{router.admin}" if call in OPERATORS else router.http_url
        body = {**BODIES, **OPERATORS}[call]
        found = await statuses_of(http, base, call, some(changed(body)))
        assert broken(found) == {}
        assert set(found.values()) & {400, 422}
    assert "the router made a mistake" not in caplog.text


async def test_no_value_in_a_query_or_a_path_makes_the_router_fail(tmp_path: Path) -> None:
    async with a_whole_router(tmp_path) as (router, http):
        targets = [
            *(
                f"{path}?{urlencode({name: text})}"
                for path, names in QUERIES.items()
                for name in names
                for text in TEXTS
            ),
            *(
                f"{path}?{name}={raw}"
                for path, names in QUERIES.items()
                for name in names
                for raw in ("%ff", "%ed%a0%80")
            ),
            *(path.format(quote(text, safe="")) for path in PATHS for text in TEXTS),
            *(path.format(raw) for path in PATHS for raw in ("%ff", "%ed%a0%80", "%00", "%2e%2e%2f", "%")),
        ]
        found = {}
        for target in some(targets):
            base = f"http://{router.admin}" if target.startswith("/admin") else router.http_url
            url = aiohttp.client.URL(base + target, encoded=True)
            async with http.get(url, headers={"authorization": f"Bearer {KEY}"}) as reply:
                found[target] = reply.status
        assert broken(found) == {}


async def test_a_limit_that_is_no_number_is_refused(tmp_path: Path) -> None:
    async with a_whole_router(tmp_path) as (router, http):
        for path, limit in product(
            ["/v1/files", "/v1/batches", "/v1/messages/batches"],
            ["0" * 5000 + "1", "000000001" + "0" * 5000, "9" * 5000, "²", "٣", "1_0", "+1", "-1", "", "1.0", "0"],
        ):
            url = f"{router.http_url}{path}?{urlencode({'limit': limit})}"
            async with http.get(url, headers={"authorization": f"Bearer {KEY}"}) as reply:
                assert (reply.status, "limit" in await reply.text()) == (400, True)


async def test_no_field_of_a_form_makes_the_router_fail(tmp_path: Path) -> None:
    async with a_whole_router(tmp_path) as (router, http):
        found = {}
        for name in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            for text in TEXTS:
                form = aiohttp.FormData({"purpose": "batch", "expires_after[anchor]": "created_at", name: text})
                form.add_field("file", b"{}", filename="a.jsonl")
                headers = {"authorization": f"Bearer {KEY}"}
                async with http.post(f"{router.http_url}/v1/files", data=form, headers=headers) as reply:
                    found[f"{name}={text}"] = reply.status
        assert broken(found) == {}
        assert found["expires_after[seconds]=²²"] == 400


async def test_no_header_makes_the_router_fail(tmp_path: Path) -> None:
    body, found = json.dumps({"model": MODEL, "messages": MESSAGES[:1], "max_tokens": 3}).encode(), dict[str, int]()
    batch = b'{"requests":[{"custom_id":"a","params":%b}]}' % body
    paths = {"/v1/chat/completions": body, "/v1/messages": body, "/v1/messages/batches": batch}
    async with a_whole_router(tmp_path) as (router, _):
        host, _, port = router.http_url.removeprefix("http://").rpartition(":")
        for path, name, value in some(product(paths, HEADERS, HEADER_VALUES)):
            sent = paths[path]
            lines = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n{name}: "
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(lines.encode() + value + b"\r\nContent-Length: %d\r\n\r\n%b" % (len(sent), sent))
            answer = await reader.read()
            writer.close()
            found[f"{path} {name}: {value!r}"] = int(answer.split()[1])
        assert broken(found) == {}
        assert set(found.values()) >= {200, 400}


async def test_a_header_that_is_no_utf8_is_quoted_and_kept_as_text(tmp_path: Path) -> None:
    body = json.dumps({"requests": [{"custom_id": "a", "params": CLAUDE}]}).encode()
    async with a_whole_router(tmp_path) as (router, _):
        host, _, port = router.http_url.removeprefix("http://").rpartition(":")
        for name in (b"anthropic-version", b"anthropic-beta"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = b"POST /v1/messages/batches HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer %b\r\n"
            writer.write(head % KEY.encode() + name + b": \xff\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            answer = await reader.read()
            writer.close()
            assert answer.split()[1] == (b"400" if name.endswith(b"version") else b"200"), answer


async def answers_to(address: str, head: bytes, body: bytes = b"") -> int:
    """The status of the answer to these bytes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"\r\nConnection: close\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def posted(path: str, *lines: bytes) -> bytes:
    """The head of a call of a tenant."""
    return b"\r\n".join(
        [b"POST %b HTTP/1.1" % path.encode(), b"Host: a", b"Authorization: Bearer " + KEY.encode(), *lines]
    )


BROKEN_CHUNKS = {
    "more trailers than a head has fields": b"1\r\n{\r\n0\r\n" + b"A: b\r\n" * 300 + b"\r\n",
    "a trailer that never ends": b"1\r\n{\r\n0\r\nA: " + b"b" * 200_000,
    "a size of zeros": b"0" * 200_000,
    "an extension that never ends": b"1;a=" + b"x" * 200_000,
}


@pytest.mark.parametrize("path", [*BODIES, "POST /v1/files"])
async def test_a_body_in_chunks_with_too_much_beside_it_is_refused_by_each_call(path: str, tmp_path: Path) -> None:
    method, path = path.split(" ")
    form = b"Content-Type: multipart/form-data; boundary=BB"
    async with a_whole_router(tmp_path) as (router, _):
        head = posted(path, form, b"Transfer-Encoding: chunked").replace(b"POST", method.encode(), 1)
        found = {
            name: await answers_to(router.http_url.removeprefix("http://"), head, body)
            for name, body in BROKEN_CHUNKS.items()
        }
        assert set(found.values()) <= {400, 431}, found


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=é\U0001f600",
        "\U0001f600/form-data; boundary=x",
        "multipart/form-data; boundary=" + "x" * 300,
        "multipart/form-data; boundary*" + "9" * 5000 + "=x",
        'multipart/form-data; boundary="',
        "multipart/form-data; boundary=",
    ],
)
async def test_a_form_that_is_announced_in_an_odd_way_is_refused(content_type: str, tmp_path: Path) -> None:
    async with a_whole_router(tmp_path) as (router, _):
        head = posted("/v1/files", b"Content-Type: " + content_type.encode(), b"Content-Length: 2")
        assert await answers_to(router.http_url.removeprefix("http://"), head, b"{}") == 400


@pytest.mark.parametrize("token", [b"\xff\xfe", "é".encode(), b"!!!!", b"A", b"/////w=="])
async def test_a_password_that_is_no_text_is_no_key(token: bytes, tmp_path: Path) -> None:
    head = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Basic " + token
    async with a_whole_router(tmp_path) as (router, _):
        assert await answers_to(router.http_url.removeprefix("http://"), head % b"/v1/models") == 401
        assert await answers_to(str(router.admin), head % b"/admin/usage") in {200, 401}


@pytest.mark.parametrize("team", [[], {}, 1, True, "\ud800"])
async def test_a_team_that_is_no_name_is_refused(team: object, tmp_path: Path) -> None:
    async with a_whole_router(tmp_path) as (router, http):
        found = await statuses_of(
            http, f"http://{router.admin}", "POST /admin/tenants/acme/keys", [json.dumps({"team": team})]
        )
        assert list(found.values()) == [400]
