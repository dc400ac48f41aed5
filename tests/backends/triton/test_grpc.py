"""One generation over gRPC beside a cancellation at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from backends.kserve import inference_pb2 as kserve
from backends.triton.backend import TritonOptions
from backends.triton.grpc import TritonStreams
from backends.triton.inputs import Signature
from tests.backends.parts import a_request


class OneResponse:
    """A channel and its one call: calls `on_response` when a response has come, and nothing follows."""

    def __init__(self, on_response: Callable[[], object]) -> None:
        self.on_response, self.is_cancelled, self._has_come = on_response, False, False

    def unary_unary(self, *_: Any, **__: Any) -> OneResponse:
        return self

    stream_stream = unary_unary

    def __call__(self, **_: Any) -> OneResponse:
        return self

    async def write(self, _: object) -> None:
        pass

    async def read(self) -> bytes:
        if self._has_come:
            await asyncio.Event().wait()
        self._has_come = True
        asyncio.get_running_loop().call_soon(self.on_response)
        response = kserve.ModelStreamInferResponse(infer_response=kserve.ModelInferResponse())
        return response.SerializeToString()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_cancellation_that_comes_just_when_a_response_does_is_not_lost() -> None:
    async def asked() -> None:
        async for _ in streams.stream(a_request(), "m", {}, Signature({}, frozenset()), number="1"):
            pass

    channel = OneResponse(lambda: asking.cancel())
    streams = TritonStreams("t", "a:1", TritonOptions(), is_secure=False)
    streams._channel = channel  # type: ignore[assignment]
    asking = asyncio.create_task(asked())
    done, _ = await asyncio.wait([asking], timeout=5.0)
    assert done
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert channel.is_cancelled
    assert streams.open_requests == 0
