"""The gRPC server: `pointsman.v1.Inference`, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from policies.errors import ExpectedError, Unassigned, Unauthenticated
from policies.explain import Explanation
from policies.nouns import Delta, Tenant, Usage
from policies.quota.budget import Standing
from router.ask import Ask
from router.call.bodies import PROTOBUF, Held
from router.call.caller import CallerGone, Placement
from router.call.edges import outer_edge
from router.call.gateway import Gateway
from router.call.identify import key_in
from router.call.pipeline import serve
from router.call.tracing import w3c_headers
from router.protocols.counting import count_tokens
from router.protocols.dialect import Answer, rate_limit_headers, usage_sum
from router.protocols.explanations import as_header
from router.protocols.grpc.messages import (
    answer_of,
    ask_of,
    counted_ask,
    placement_of,
    read_message,
    reply_of,
    usage_of,
)
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.status import retry_after, status_of
from router.protocols.strangers import Strangers, address_of_peer
from router.text.token_ids import count
from router.text.turns import once
from tls.certificates import Certificates
from tls.grpc_about import add_about
from tls.grpc_port import GrpcPort, grpc_server

SERVICE = "pointsman.v1.Inference"

_FOREVER_S = 365 * 86400.0
"""grpc reports a deadline beyond this if the client set none."""

_ID_COST = 64
"""Bytes of memory for each token id of a prompt."""

WRITE_S = 60.0
"""How long a client may read nothing, as over HTTP: it holds the request's place at the backend meanwhile."""

MOST_STATUS_BYTES = 2048
"""Most bytes of a status's message, and of the hint beside it.

A client refuses trailing metadata of more than 16 KiB, and now and then that of more than 8 KiB: it then gets
RESOURCE_EXHAUSTED instead of the status. Source: `GRPC_ARG_ABSOLUTE_MAX_METADATA_SIZE` in grpc's channel_arg_names.h.
"""

Context = grpc.aio.ServicerContext[bytes, Any]


class GrpcServer:
    """Serves one gateway over gRPC. `port` is set once it was started. `shared`: other processes listen there too.
    `strangers` are counted with those of other ports. Without `certificates` it speaks plain text."""

    def __init__(
        self,
        gateway: Gateway,
        address: str,
        *,
        strangers: Strangers,
        shared: bool = False,
        certificates: Certificates | None = None,
    ) -> None:
        self._gateway, self._address, self.port = gateway, address, 0
        self._shared = shared
        most_bytes = gateway.config.server.max_body_bytes
        options = (("grpc.max_receive_message_length", most_bytes), ("grpc.so_reuseport", int(shared)))
        self._server = grpc_server(*options)
        self._port = GrpcPort(self._server, certificates)
        inference = Inference(gateway, strangers)
        self._server.add_generic_rpc_handlers((inference.handlers(),))
        self._health = add_about(self._server, SERVICE)

    def __repr__(self) -> str:
        return f"<GrpcServer {self._address} port {self.port}>"

    async def start(self) -> None:
        """Listen. Raises OSError or RuntimeError if the address is taken."""
        self.port = await self._port.open(self._address, shares_port=self._shared)
        await self.report_health()
        await self._server.start()

    async def report_health(self) -> None:
        """Report to `grpc.health.v1` whether the router is ready now."""
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self._gateway.is_ready() else status.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, now)

    async def stop(self, grace_s: float) -> None:
        """Reject new calls at once; end running ones after `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._port.close()


class Inference:
    """The methods of `pointsman.v1.Inference`. They take bytes, so that an invalid message is a client error."""

    def __init__(self, gateway: Gateway, strangers: Strangers) -> None:
        self._gateway, self._strangers = gateway, strangers

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods by name. If grpc parsed requests, an invalid one would be an INTERNAL error of the server."""
        stream, single = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": stream(self.generate, None, _serialize),
            "Complete": single(self.complete, None, _serialize),
            "CountTokens": single(self.count_tokens, None, _serialize),
            "ListModels": single(self.list_models, None, _serialize),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, raw: bytes, context: Context) -> None:
        """Stream an answer."""
        async with self._edge(context):
            caller = _Streaming(raw, context, self._gateway)
            await serve(caller, self._gateway, address=address_of_peer(context.peer()))

    async def complete(self, raw: bytes, context: Context) -> Message | None:
        """Answer whole."""
        async with self._edge(context):
            caller = _Collecting(raw, context, self._gateway)
            await serve(caller, self._gateway, address=address_of_peer(context.peer()))
            return caller.reply()
        return None

    async def count_tokens(self, raw: bytes, context: Context) -> Message | None:
        """Count the tokens of a prompt, chat template included."""
        async with self._edge(context):
            tenant, gateway, config = await self._tenant(context), self._gateway, self._gateway.config
            with Held(gateway.bodies, tenant.name) as held:
                message = await held.parse(raw, lambda raw: read_message(raw, pb.CountTokensRequest()), PROTOBUF)
                message.model = gateway.models.meant(message.model, tenant.name, config)
                ask = await held.run(once(lambda: counted_ask(message, config.aliases)))
                counted = await count_tokens(ask, tenant, config, gateway.models, gateway.prompts)
                return pb.CountTokensReply(tokens=counted)
        return None

    async def list_models(self, raw: bytes, context: Context) -> Message | None:
        """The models that the client may use."""
        async with self._edge(context):
            tenant = await self._tenant(context)
            read_message(raw, pb.ListModelsRequest())
            models = self._gateway.models.of(tenant, self._gateway.config).values()
            listed = [
                pb.ListModelsReply.Model(
                    id=model.name, context_tokens=model.context_tokens or 0, backends=model.backends
                )
                for model in models
            ]
            return pb.ListModelsReply(models=listed)
        return None

    async def _tenant(self, context: Context) -> Tenant:
        address = address_of_peer(context.peer())
        key = key_in(_metadata(context))
        return (await self._gateway.identities.identified(key, self._gateway.config, address)).tenant

    def _is_known(self, context: Context) -> bool:
        gateway = self._gateway
        try:
            gateway.identities.of(key_in(_metadata(context)), gateway.config)
        except ExpectedError:
            return False
        return True

    @asynccontextmanager
    async def _edge(self, context: Context) -> AsyncIterator[None]:
        """End a failed call with a status and trailing metadata, one of an address that sends too many without a known
        key at once.
        """
        most = self._gateway.config.server.stranger_requests
        address = "" if most is None else address_of_peer(context.peer())
        try:
            with outer_edge(self._gateway.observer):
                if most is not None and self._strangers.is_over(address, most) and not self._is_known(context):
                    raise self._strangers.refusal(address)
                yield
        except ExpectedError as error:
            if most is not None and isinstance(error, Unauthenticated | Unassigned):
                self._strangers.count(address, most)
            why = tuple(context.trailing_metadata() or ())
            await abort(context, status_of(error).grpc, error.public_message, (*why, *_trailing(error)))
        except CallerGone:
            await abort(context, grpc.StatusCode.CANCELLED, "the client has gone")


async def abort(context: Context, status: grpc.StatusCode, message: str, trailing: Any = ()) -> None:
    """End a call with a status. One that ended by itself meanwhile, at its deadline, takes none."""
    try:
        await context.abort(status, _short(message), trailing)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


class _GrpcCaller:
    """Common part of streaming and collecting callers."""

    def __init__(self, raw: bytes, context: Context, gateway: Gateway) -> None:
        self._raw, self._context, self._gateway = raw, context, gateway
        self._metadata = _metadata(context)
        self.id, self.key, self.trace = next(gateway.ids), key_in(self._metadata), w3c_headers(self._metadata)
        self._placement: Placement | None = None

    def explain(self, index: int, explanation: Explanation) -> None:  # noqa: ARG002 - a call has one prompt
        """Add the explanation to the trailing metadata."""
        self._trail("pointsman-decision", as_header(explanation))

    def limited(self, standing: Standing) -> None:
        """Add what is left of the tenant's limits to the trailing metadata, under the names of the HTTP headers."""
        for name, value in rate_limit_headers(standing).items():
            self._trail(name, value)

    def _trail(self, name: str, value: str) -> None:
        others = tuple(pair for pair in self._context.trailing_metadata() or () if pair[0] != name)
        self._context.set_trailing_metadata((*others, (name, value)))

    async def read(self, held: Held) -> Ask:
        """The message, parsed."""
        message = await held.parse(self._raw, lambda raw: read_message(raw, pb.GenerateRequest()), PROTOBUF)
        if message.token_ids:
            await held.take(count(message.token_ids) * _ID_COST, "the prompt", "send fewer token ids")
        message.model = self._gateway.models.meant(message.model, held.tenant, self._gateway.config)
        left_s = self._context.time_remaining()
        deadline_s = None if left_s is None or left_s > _FOREVER_S else max(0.0, left_s)
        aliases = self._gateway.config.aliases
        return await held.run(once(lambda: ask_of(message, self._metadata, deadline_s, aliases)))


class _Streaming(_GrpcCaller):
    """Writes each piece as a GenerateReply; the first carries the Placement."""

    def __init__(self, raw: bytes, context: Context, gateway: Gateway) -> None:
        super().__init__(raw, context, gateway)
        self._seen = False

    def place(self, index: int, placement: Placement) -> None:  # noqa: ARG002 - a call has one prompt
        """Keep the placement for the first reply."""
        self._placement = placement

    async def write(self, index: int, delta: Delta) -> None:  # noqa: ARG002
        """Send one piece; waits while the client reads slowly."""
        if delta.computed_tokens is not None:
            # progress comes without the Placement: another backend may still be tried
            prompt_tokens = self._placement.request.prompt_tokens if self._placement else 0
            progress = pb.Progress(
                computed_tokens=delta.computed_tokens, prompt_tokens=prompt_tokens, expected_s=delta.expected_s
            )
            await self._send(pb.GenerateReply(progress=progress))
            return
        reply = reply_of(delta, delta.choice)
        if not self._seen and self._placement is not None:
            reply.placement.CopyFrom(placement_of(self._placement))
        self._seen = True
        await self._send(reply)

    async def _send(self, reply: pb.GenerateReply) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await self._context.write(reply)
        except (grpc.aio.InternalError, grpc.aio.UsageError, TimeoutError) as error:
            # grpc has no error of its own for a client that left in the midst of a write
            raise CallerGone from error

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        """Whether a piece was sent."""
        return self._seen


class _Collecting(_GrpcCaller):
    """Collects the answer for one CompleteReply."""

    def __init__(self, raw: bytes, context: Context, gateway: Gateway) -> None:
        super().__init__(raw, context, gateway)
        self._answers: list[Answer] = []
        self._usages: list[Usage] = []

    def place(self, index: int, placement: Placement) -> None:  # noqa: ARG002
        """Collect anew: the prompt goes to another backend."""
        self._placement = placement
        self._answers = [Answer() for _ in range(placement.request.sampling.choices)]

    def write(self, index: int, delta: Delta) -> None:  # noqa: ARG002
        """Collect one piece."""
        self._answers[delta.choice].add(delta)
        if delta.usage is not None:
            self._usages.append(delta.usage)

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        """False until the end."""
        return False

    def reply(self) -> pb.CompleteReply:
        """All of it."""
        placement = None if self._placement is None else placement_of(self._placement)
        answers = [answer_of(answer) for answer in self._answers]
        return pb.CompleteReply(answers=answers, usage=usage_of(usage_sum(self._usages)), placement=placement)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _short(message: str) -> str:
    """As much of `message` as fits into a status: gRPC writes `%`, and each byte that is not printable ASCII, as three
    bytes.
    """
    size = 0
    for at, octet in enumerate(octets := message.encode("utf-8", "replace")):
        size += 1 if 0x20 <= octet < 0x7F and octet != ord("%") else 3
        if size > MOST_STATUS_BYTES:
            return f"{octets[:at].decode('utf-8', 'ignore')}..."
    return message


def _trailing(error: ExpectedError) -> Iterable[tuple[str, str]]:
    yield "pointsman-code", error.code
    # gRPC's metadata is ASCII
    hint = error.public_hint.encode("ascii", "backslashreplace")
    yield "pointsman-hint", hint[:MOST_STATUS_BYTES].decode()
    if (after := retry_after(error)) is not None:
        yield "retry-after", after
