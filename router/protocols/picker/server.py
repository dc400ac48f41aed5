"""The endpoint picker's port: Envoy's external processing, and health as the picker protocol requires it.

Source: Gateway API Inference Extension, proposal 004 "Endpoint Picker Protocol" 1.0.0, "Health Checking".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from backends.protobuf import read_in_turns
from policies.errors import ExpectedError
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.picker.call import PickedCall
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.messages import Answer
from router.protocols.picker.phases import OutOfOrder, Phases
from tls.certificates import Certificates
from tls.grpc_about import add_about
from tls.grpc_port import GrpcPort, grpc_server

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"

_MESSAGE_BYTES = 64 << 10
"""Room in a message beside the body, mostly for headers."""

_FOREVER_S = 365 * 86400.0
"""grpc reports a deadline beyond this if the gateway set none."""

QUIET_S = 1.0
"""A gateway that answers its client by itself has the whole answer: the picker leaves when it sends no piece for so
long."""

Context = grpc.aio.ServicerContext[bytes, Any]


class PickerServer:
    """Serves one gateway's picker. `port` is set once it was started. `shared`: other processes listen there too.
    Without `certificates` it speaks plain text."""

    def __init__(
        self, gateway: Gateway, address: str, *, shared: bool = False, certificates: Certificates | None = None
    ) -> None:
        self._gateway, self._address, self.port = gateway, address, 0
        self._shared = shared
        # a buffered body comes in one message; one that is too large must still be read to be rejected with a reason
        most_bytes = 2 * gateway.config.server.max_body_bytes + _MESSAGE_BYTES
        options = (("grpc.max_receive_message_length", most_bytes), ("grpc.so_reuseport", int(shared)))
        self._server = grpc_server(*options)
        self._port = GrpcPort(self._server, certificates)
        # messages are taken as bytes: if grpc parsed them, an invalid one would be an INTERNAL error of ours
        stream = grpc.stream_stream_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Process": stream(self.process, None, Answer.SerializeToString)
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        self._health = add_about(self._server, SERVICE)

    def __repr__(self) -> str:
        return f"<PickerServer {self._address} port {self.port}>"

    async def start(self) -> None:
        """Listen. Raises OSError or RuntimeError if the address is taken."""
        self.port = await self._port.open(self._address, shares_port=self._shared)
        await self.report_health()
        await self._server.start()

    async def report_health(self) -> None:
        """Report to `grpc.health.v1` that the process lives, and whether requests can be placed now."""
        status = health_pb2.HealthCheckResponse
        ready = status.SERVING if self._gateway.is_ready() else status.NOT_SERVING
        for name, now in {LIVENESS: status.SERVING, READINESS: ready, SERVICE: ready, "": ready}.items():
            await self._health.set(name, now)

    async def stop(self, grace_s: float) -> None:
        """Reject new streams at once; end running ones after `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._port.close()

    async def process(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Pick an endpoint for one HTTP request, and follow it to the end of its response."""
        try:
            await _Conversation(self._gateway, context).hold(messages)
        except OutOfOrder as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class _Conversation:
    """One stream: a task that reads the gateway's messages, and one that runs the call in the pipeline."""

    def __init__(self, gateway: Gateway, context: Context) -> None:
        self._gateway, self._context = gateway, context
        self._speaking = asyncio.Lock()
        self._is_answered = False
        """Whether the gateway has got a reply in place of an endpoint: it reads nothing behind that."""
        self._call: asyncio.Task[None] | None = None
        most_bytes = gateway.config.server.max_body_bytes
        self._phases = Phases(self._write, most_bytes=most_bytes, on_early=self._give_up)

    async def hold(self, messages: AsyncIterator[bytes]) -> None:
        """Run until the gateway ends the stream, nothing more can come, or it has got a reply in place of an endpoint.

        Raises OutOfOrder.
        """
        await self._hear(messages, most=1)
        if self._phases.head is None:
            return
        picking = PickedCall(self._phases.head, self._phases, self._gateway, self._say, deadline_s=self._left_s())
        call = self._call = asyncio.create_task(self._serve(picking), name=f"picking {picking.id}")
        hearing = asyncio.create_task(self._hear(messages), name=f"gateway of {picking.id}")
        try:
            await asyncio.wait((call, hearing), return_when=asyncio.FIRST_COMPLETED)
            if call.done() and not call.cancelled():
                call.result()
            if not self._is_answered:
                await hearing
        finally:
            hearing.cancel()
            # a call that has read the whole answer counts it, even if the stream failed
            if not self._phases.pieces.is_ended:
                call.cancel()
            await asyncio.gather(hearing, call, return_exceptions=True)

    async def _hear(self, messages: AsyncIterator[bytes], *, most: int | None = None) -> None:
        """Take `most` messages, or all that can come. Raises OutOfOrder."""
        loop, phases = asyncio.get_running_loop(), self._phases
        try:
            async with asyncio.timeout(None) as patience:
                async for raw in messages:
                    try:
                        message = await read_in_turns(raw, pb.ProcessingRequest())
                    except DecodeError as error:
                        raise OutOfOrder(f"this is not a ProcessingRequest: {error}") from error
                    await phases.take(message)
                    if most is not None or phases.pieces.is_ended:
                        return
                    if phases.response.done() and not phases.is_sent:
                        patience.reschedule(loop.time() + QUIET_S)
        except TimeoutError:
            if not patience.expired():
                raise

    async def _serve(self, call: PickedCall) -> None:
        """Run the call; its refusal goes to the gateway."""
        try:
            if call.asks_for_models:
                await call.tell_models()
            else:
                await serve(call, self._gateway, call, address=call.address)
        except ExpectedError as error:
            await call.fail(error)
        finally:
            self._phases.pieces.leave()

    async def _say(self, answer: Answer) -> None:
        """Write `answer` as a whole: the call may be cancelled at any time, and grpc's stream stands still behind a
        write that was cancelled."""
        writing = asyncio.create_task(self._write(answer))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # grpc may never end the write of a stream that its client has left
            await asyncio.wait((writing,), timeout=QUIET_S)
            writing.cancel()
            raise

    async def _write(self, answer: Answer) -> None:
        # grpc takes one message at a time, and both tasks send some
        async with self._speaking:
            if not self._is_answered:
                self._is_answered = answer.HasField("immediate_response")
                await self._context.write(answer)

    def _give_up(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _left_s(self) -> float | None:
        left_s = self._context.time_remaining()
        return None if left_s is None or left_s > _FOREVER_S else max(0.0, left_s)
