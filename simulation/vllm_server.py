"""A simulated engine behind vLLM's HTTP API, metrics and cache events, on a clock that may pass faster than the wall's.

Any router that speaks to vLLM can be put in front of it: `benchmarks/placement_http.py` does that. Prompts are read a
byte a token, and a chat is the contents of its messages in a row; `write_tokenizer` writes the files of that tokenizer.
An answer has as many tokens as the request allows, each of them the letter `a`. Requests with several choices, tools or
log-probabilities are refused.

Steps are computed in leaps (`simulation.engine.LEAP_S`), so a chunk of a stream may have several tokens, as vLLM's has
when its client reads slowly.

Source: vLLM's documentation ("OpenAI-Compatible Server", "Production Metrics"), and a vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.nouns import CacheChange, Cause, Submission
from shards.sched.limits import Refusal
from simulation.driver import Driver, Unread
from simulation.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from simulation.speed import Machine

_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_END = b"\xff" * 8
_KEPT_MESSAGES = 10_000
_MOST_BODY_BYTES = 64 << 20
_USUAL_ANSWER = 16


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one engine on loopback: HTTP, cache events, and their replay."""

    http: int
    events: int
    replay: int


class PacedClock:
    """Seconds of the simulation: `pace` for each second of the running event loop, from now on."""

    def __init__(self, pace: float) -> None:
        self.pace, self._began_s = pace, asyncio.get_running_loop().time()

    def __call__(self) -> float:
        """Now, in seconds of the simulation."""
        return (asyncio.get_running_loop().time() - self._began_s) * self.pace

    def loop_s(self, at_s: float) -> float:
        """The event loop's time at second `at_s` of the simulation."""
        return self._began_s + at_s / self.pace


class _Text(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Text] = ""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """The fields of a request that the engine reads; chats have messages, texts a prompt."""

    model: str
    messages: list[_Message] | None = None
    prompt: str | list[int] = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    n: int | None = None
    tools: list[msgspec.Raw] | None = None
    logprobs: bool | int | None = None

    def token_ids(self) -> bytes:
        """Its prompt, little-endian uint32."""
        if isinstance(self.prompt, list):
            return np.array(self.prompt, dtype="<u4").tobytes()
        text = self.prompt if self.messages is None else "".join(message.text for message in self.messages)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype("<u4").tobytes()

    @property
    def new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or _USUAL_ANSWER

    @property
    def unsupported(self) -> str | None:
        """A field that the engine cannot simulate."""
        fields = {"n": (self.n or 1) > 1, "tools": bool(self.tools), "logprobs": bool(self.logprobs)}
        return next((name for name, is_there in fields.items() if is_there), None)


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None]


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Publisher:
    """Publishes cache events over ZeroMQ, and repeats them on request. `close` it."""

    def __init__(self, ports: Ports) -> None:
        self._context = zmq.asyncio.Context()
        self._pub: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self._pub.bind(f"tcp://127.0.0.1:{ports.events}")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://127.0.0.1:{ports.replay}")
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_MESSAGES)
        self._count = 0
        self._replaying = asyncio.create_task(self._replay())

    def publish(self, events: Sequence[_Stored | _Removed]) -> None:
        """Send one batch."""
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._sent.append((self._count.to_bytes(8, "big"), payload))
        self._count += 1
        self._pub.send_multipart([b"kv-events", *self._sent[-1]])

    async def close(self) -> None:
        """Close the sockets."""
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)
        self._pub.close()

    async def _replay(self) -> None:
        while True:
            identity, _, start = await self._router.recv_multipart()
            for number, payload in tuple(self._sent):
                if number >= start:
                    await self._router.send_multipart([identity, b"", number, payload])
            await self._router.send_multipart([identity, b"", _END, b""])


class VLLMServer:
    """One engine on `machine` that serves `model` at `ports` of loopback; `clock` is the simulation's."""

    def __init__(self, machine: Machine, ports: Ports, *, model: str, clock: PacedClock) -> None:
        self.engine = SimulatedEngine(machine, model=model)
        self.driver = Driver(self.engine, clock=clock, on_step=self._publish, loop_s=clock.loop_s)
        self._machine, self._ports, self._model = machine, ports, model
        self._publisher = Publisher(ports)
        self._numbers = 0

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        gets: dict[str, Callable[[], object]] = {
            "/health": dict,
            "/version": lambda: {"version": "0.32.0"},
            "/v1/models": self._models,
            "/kv_event_sources": self._event_sources,
            "/work": lambda: asdict(self.engine.work),
        }
        app.add_routes([web.get(path, _answering(answer)) for path, answer in gets.items()])
        app.add_routes([web.get("/metrics", self._metrics), web.post("/tokenize", self._tokenize)])
        app.add_routes([web.post(f"/v1/{path}", self._complete) for path in ("chat/completions", "completions")])
        return app

    async def close(self) -> None:
        """Stop its steps and its events."""
        self.driver.close()
        await self._publisher.close()

    def _models(self) -> dict[str, Any]:
        card = {"id": self._model, "object": "model", "created": 1, "owned_by": "vllm", "root": self._model}
        return {"object": "list", "data": [card | {"max_model_len": self._machine.context_tokens}]}

    def _event_sources(self) -> dict[str, Any]:
        at = {"endpoint": f"tcp://*:{self._ports.events}", "replay_endpoint": f"tcp://*:{self._ports.replay}"}
        return {"0": {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events", **at}}

    async def _metrics(self, _: web.Request) -> web.Response:
        load, work = self.engine.load(), self.engine.work
        labels = f'{{engine="0",model_name="{self._model}"}}'
        sizes = f'{{block_size="{BLOCK_TOKENS}",engine="0",num_gpu_blocks="{load.blocks_total}"}}'
        lines = (
            f"vllm:num_requests_running{labels} {float(load.running)}",
            f"vllm:num_requests_waiting{labels} {float(load.waiting)}",
            f"vllm:kv_cache_usage_perc{labels} {1 - load.blocks_free / load.blocks_total}",
            f"vllm:prefix_cache_queries_total{labels} {float(work.prompt_tokens + work.cached_tokens)}",
            f"vllm:prefix_cache_hits_total{labels} {float(work.cached_tokens)}",
            f"vllm:num_preemptions_total{labels} {float(work.preemptions)}",
            f"vllm:cache_config_info{sizes} 1.0",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            token_ids = _BODIES.decode(await request.read()).token_ids()
        except msgspec.DecodeError as error:
            return _refused(400, str(error))
        tokens = np.frombuffer(token_ids, dtype="<u4").tolist()
        return web.json_response(
            {"count": len(tokens), "max_model_len": self._machine.context_tokens, "tokens": tokens}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = _BODIES.decode(await request.read())
        except msgspec.DecodeError as error:
            return _refused(400, str(error))
        if body.model != self._model:
            return _refused(404, f"The model `{body.model}` does not exist.")
        if body.unsupported is not None:
            return _refused(400, f"A simulated engine has no `{body.unsupported}`.")
        token_ids = body.token_ids()
        self._numbers += 1
        number = self._numbers
        submission = Submission(number, len(token_ids) // TOKEN_BYTES, body.new_tokens, domain=body.cache_salt or "")
        inbox = self.driver.submit(submission, token_ids, new_tokens=body.new_tokens)
        if isinstance(inbox, Refusal):
            return self._refused(inbox, submission)
        answer = _Answer(body, number, submission.prompt_tokens)
        try:
            return await (self._streamed(request, answer, inbox) if body.stream else self._whole(answer, inbox))
        finally:
            self.driver.leave(number)

    def _refused(self, refusal: Refusal, submission: Submission) -> web.Response:
        if refusal.cause is Cause.CONTEXT:
            most = f"This model's maximum context length is {self._machine.context_tokens} tokens"
            asked = submission.prompt_tokens + submission.max_new_tokens
            return _refused(400, f"{most}. However, your request has {asked} tokens with its answer.")
        return _refused(503 if refusal.cause is Cause.OVERLOADED else 400, refusal.message)

    async def _streamed(self, request: web.Request, answer: _Answer, inbox: Unread) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        drew = await inbox.take()
        await reply.prepare(request)
        drawn, begins = drew.tokens, answer.opening()
        while not drew.is_last:
            await reply.write(begins + answer.chunk(drew.tokens))
            drew, begins = await inbox.take(), b""
            drawn += drew.tokens
        await reply.write(begins + answer.chunk(drew.tokens, is_last=True) + answer.closing(drawn, drew.cached))
        return reply

    async def _whole(self, answer: _Answer, inbox: Unread) -> web.Response:
        drew = await inbox.take()
        drawn = drew.tokens
        while not drew.is_last:
            drew = await inbox.take()
            drawn += drew.tokens
        return web.json_response(answer.whole(drawn, drew.cached))

    def _publish(self) -> None:
        events = list(self._events())
        if events:
            self._publisher.publish(events)

    def _events(self) -> Iterator[_Stored | _Removed]:
        for event in self.engine.drain_events():
            if event.change is CacheChange.EVICTED:
                yield _Removed(list(event.keys), "GPU")
            else:
                yield from self._stored(event.keys)

    def _stored(self, keys: Sequence[int]) -> Iterator[_Stored]:
        """Each run of blocks that continue one another."""
        run: _Stored | None = None
        for block in filter(None, map(self.engine.stored_block, keys)):
            if run is None or run.block_hashes[-1] != block.parent:
                if run is not None:
                    yield run
                run = _Stored([], block.parent, [], BLOCK_TOKENS, None, "GPU", None, [])
            # the salt is part of the first block's hash alone
            run.extra_keys.append([block.domain] if block.domain and block.parent is None else None)
            run.block_hashes.append(block.key)
            run.token_ids += np.frombuffer(block.token_ids, dtype="<u4").tolist()
        if run is not None:
            yield run


class _Answer:
    """Renders the answer to `body`."""

    def __init__(self, body: _Body, number: int, prompt_tokens: int) -> None:
        self._is_chat, self._prompt_tokens = body.messages is not None, prompt_tokens
        self._tells_usage = body.stream_options is not None and body.stream_options.include_usage
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{number}", "object": kind, "created": int(time.time()), "model": body.model}
        kind = f"{kind}.chunk" if self._is_chat else kind
        start = json.dumps(self._head | {"object": kind})[:-1]
        self._start = f'data: {start}, "choices": ['.encode()

    def opening(self) -> bytes:
        """The chunk in front of a chat's first token."""
        if not self._is_chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._start + json.dumps(choice).encode() + b"]}\n\n"

    def chunk(self, tokens: int, *, is_last: bool = False) -> bytes:
        """A chunk with so many tokens."""
        text = "a" * tokens
        content = f'"delta": {{"content": "{text}"}}' if self._is_chat else f'"text": "{text}"'
        finish = '"length"' if is_last else "null"
        return self._start + f'{{"index": 0, {content}, "logprobs": null, "finish_reason": {finish}}}]}}\n\n'.encode()

    def closing(self, drawn: int, cached: int) -> bytes:
        """The usage if the request asks for it, and the end of the stream."""
        if not self._tells_usage:
            return b"data: [DONE]\n\n"
        usage = json.dumps(self._usage(drawn, cached)).encode()
        return self._start + b'], "usage": ' + usage + b"}\n\ndata: [DONE]\n\n"

    def whole(self, drawn: int, cached: int) -> dict[str, Any]:
        """The answer in one piece."""
        text = "a" * drawn
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return self._head | {"choices": [choice], "usage": self._usage(drawn, cached)}

    def _usage(self, drawn: int, cached: int) -> dict[str, Any]:
        total = self._prompt_tokens + drawn
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": drawn, "total_tokens": total}
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}


@asynccontextmanager
async def vllm_servers(
    machines: Sequence[Machine], ports: Sequence[Ports], *, model: str, pace: float
) -> AsyncIterator[list[VLLMServer]]:
    """A server for each machine, all on one clock and serving."""
    clock = PacedClock(pace)
    servers = [VLLMServer(*both, model=model, clock=clock) for both in zip(machines, ports, strict=True)]
    runners = []
    try:
        for server, at in zip(servers, ports, strict=True):
            runners.append(web.AppRunner(server.app(), access_log=None, handler_cancellation=True))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", at.http).start()
        yield servers
    finally:
        for runner in runners:
            await runner.cleanup()
        for server in servers:
            await server.close()


def write_tokenizer(folder: Path) -> None:
    """Write the engines' tokenizer and chat template into `folder`, as a checkpoint has them."""
    tokenizer = Tokenizer(models.BPE(vocab=_letters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies -> the byte."""
    itself = {byte for byte in range(256) if chr(byte).isprintable() and not chr(byte).isspace()}
    others = (byte for byte in range(256) if byte not in itself)
    return {chr(byte): byte for byte in itself} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _answering(answer: Callable[[], object]) -> Callable[[web.Request], Any]:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(answer())

    return handler


def _refused(status: int, message: str) -> web.Response:
    kind = {404: "NotFoundError", 503: "ServiceUnavailableError"}.get(status, "BadRequestError")
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


_BODIES = msgspec.json.Decoder(_Body)
