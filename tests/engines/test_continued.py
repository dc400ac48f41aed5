"""A stream of a real vLLM that is cut goes on at another one, and reads as if nothing had happened."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from shards.bundled import NAME
from shards.bundled.documents import prompt
from tests.chaos.continued import continued
from tests.chaos.wire import State, a_wire
from tests.engines.routed import KEY, Client, a_document, a_router
from tests.shards.attached import eventually

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

AT_LEAST = 10
"""Pieces of an answer that is cut: the end of a shorter one may be under way by then, and then there is no rest."""


@dataclass
class Stream:
    """A stream as its client got it."""

    text: str = ""
    ids: set[str] = field(default_factory=set)
    roles: list[str] = field(default_factory=list)
    usage: list[tuple[int, int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    pieces: int = 0


async def read(
    client: Client, path: str, body: dict[str, Any], *, cut_after: int | None = None, cut: Any = None
) -> Stream:
    """The stream; after so many pieces of text, `cut` is called with the name of its backend."""
    answer = Stream()
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.http.post(client.url + path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            answer.lines.append(line)
            if line == b"data: [DONE]\n":
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            answer.ids.add(chunk["id"])
            if chunk.get("usage"):
                answer.usage.append((chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]))
            for choice in chunk["choices"]:
                delta = choice.get("delta") or {"content": choice.get("text")}
                answer.roles += [delta["role"]] if delta.get("role") else []
                answer.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                if delta.get("content"):
                    answer.text += delta["content"]
                    answer.pieces += 1
                    if answer.pieces == cut_after:
                        cut(reply.headers["x-pointsman-backend"])
    return answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_cut_stream_goes_on_at_the_other_engine_with_the_same_text(engines: Engines, path: str) -> None:
    a, b = engines.vllm("a", "b")
    async with AsyncExitStack() as stack:
        wires = {f"engines-{at}": await stack.enter_async_context(a_wire(each.port)) for at, each in enumerate((a, b))}
        urls = [f"http://127.0.0.1:{wire.port}" for wire in wires.values()]
        health = {"probe_timeout": "20s", "suspect_after": "30s"}
        pool = {"kind": "vllm", "at": urls, "model": NAME, "health": health}
        client, router = await stack.enter_async_context(a_router(pool))
        cluster = router.gateway.cluster

        def cut(name: str) -> None:
            wires[name].spoil(State.RESET)

        for wire in wires.values():
            # so that a stream takes longer than the cut
            wire.delay_s, wire.piece_bytes = 0.003, 250
        were_cut = 0
        for number in range(14):
            for wire in wires.values():
                wire.spoil(State.DRIBBLE)
            about = a_document(number, 300)
            question = prompt(about.text, about.questions[number % len(about.questions)].question)
            asked = (
                {"messages": [{"role": "user", "content": question}]}
                if "chat" in path
                else {"prompt": f"<|bos|><|user|>{question}<|end|><|assistant|>"}
            )
            greedy = {"model": NAME, "max_tokens": 40, "temperature": 0}
            body = {**greedy, **asked, "stream": True, "stream_options": {"include_usage": True}}
            whole = await read(client, path, body)
            if whole.pieces < AT_LEAST:
                continue
            before = continued(router)
            rest = await read(client, path, body, cut_after=1 + number % 4, cut=cut)
            were_cut += continued(router) - before
            assert rest.text == whole.text
            assert (len(rest.ids), rest.roles) == (1, whole.roles)
            assert rest.finish_reasons == whole.finish_reasons
            assert len(rest.usage) == 1
            assert rest.usage[0] == pytest.approx(whole.usage[0], abs=1)
            assert rest.lines[-1] == b"data: [DONE]\n"
            for wire in wires.values():
                wire.mend()
            await eventually(lambda: not any(map(cluster.trouble, cluster.names())), within_s=60)
        # a stream may have come to its end before the cut
        assert were_cut >= 6
        router.check()
