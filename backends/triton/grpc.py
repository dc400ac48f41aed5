"""Generations over Triton's ModelStreamInfer: one call each, so that closing it cancels that one alone.

Source: KServe v2 inference protocol, gRPC; Triton's docs/user_guide/decoupled_models.md and request_cancellation.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from backends.http.exchange import HttpOptions
from backends.http.own_keys import OwnKeys
from backends.kserve import inference_pb2 as kserve
from backends.protobuf import read_in_turns
from backends.triton.answer import TritonText, heard_of, is_final, triton_error
from backends.triton.inputs import Signature
from policies.errors import BackendErred, BackendFailed, BackendRefused, DeadlineExceeded, ExpectedError, Unreached
from policies.nouns import Delta, Request
from tls.errors import TlsError
from tls.grpc_client import DIRECT, open_channel

_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class TritonStreams:
    """The channel to one Triton at `address` (host:port), made when it is first needed. `name` is the backend's."""

    def __init__(self, name: str, address: str, options: Any, *, is_secure: bool) -> None:
        self.name, self.address = name, address
        self.open_requests = 0
        self._options: HttpOptions = options
        self._own_keys = OwnKeys(options.headers, options.key, options.of_file)
        self._is_cumulative, self._is_secure = bool(options.cumulative), is_secure
        self._channel: grpc.aio.Channel | None = None
        self._opening = asyncio.Lock()
        self._calls: set[Any] = set()

    def __repr__(self) -> str:
        return f"<TritonStreams of {self.name} at {self.address}: {self.open_requests} requests>"

    async def close(self) -> None:
        """Cancel every call and let go of the channel."""
        channel, self._channel = self._channel, None
        for call in tuple(self._calls):
            call.cancel()
        if channel is not None:
            await channel.close()

    async def stream(
        self, request: Request, model: str, inputs: Mapping[str, Any], signature: Signature, *, number: str
    ) -> AsyncGenerator[Delta]:
        """The Deltas of one generation; closing the iterator cancels it.

        Raises BackendFailed, BackendRefused, DeadlineExceeded, and the error in an error message.
        """
        text = TritonText(request, is_cumulative=self._is_cumulative)
        # responses are taken as bytes: grpc would parse one of any size at once
        ask: Any = (await self._connected()).stream_stream(_METHOD, kserve.ModelInferRequest.SerializeToString)
        self.open_requests += 1
        call = ask(metadata=self._metadata(), timeout=request.deadline_s)
        self._calls.add(call)
        try:
            await call.write(infer_request(model, inputs, signature, number))
            while True:
                # before Python 3.12 wait_for loses a cancellation that comes just when the response does
                async with asyncio.timeout(self._options.idle_s):
                    raw = await call.read()
                if raw is grpc.aio.EOF:
                    raise BackendErred(f"{self.name} ended its stream before its final response")
                response = await read_in_turns(raw, kserve.ModelStreamInferResponse())
                if response.error_message:
                    raise triton_error(self.name, response.error_message)
                inferred = response.infer_response
                for delta in heard_of(self.name, text, inferred):
                    yield delta
                if is_final(inferred):
                    break
            for delta in text.finish():
                yield delta
        except DecodeError as error:
            raise BackendErred(f"{self.name} answered nonsense: {error}") from error
        except TimeoutError as error:
            raise BackendErred(f"{self.name} was silent for {self._options.idle_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except ExpectedError as error:
            self._own_keys.hide_in(error)
            raise
        except asyncio.CancelledError as error:
            # a channel that is closed cancels its calls; a cancellation of ours goes on
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise BackendFailed(f"{self.name} was closed") from error
        finally:
            call.cancel()
            self._calls.discard(call)
            self.open_requests -= 1

    async def _connected(self) -> grpc.aio.Channel:
        async with self._opening:
            if self._channel is None:
                sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", 64 << 20)]
                if self._is_secure and self._options.tls is None:
                    credentials = grpc.ssl_channel_credentials()
                    self._channel = grpc.aio.secure_channel(self.address, credentials, options=[*DIRECT, *sizes])
                else:
                    try:
                        self._channel = await open_channel(
                            self.address, self._options.tls if self._is_secure else None, sizes
                        )
                    except TlsError as error:
                        raise Unreached(f"{self.name} cannot be reached: {error}") from error
            return self._channel

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        key = (("authorization", f"Bearer {self._options.key}"),) if self._options.key else ()
        return (*((name.lower(), value) for name, value in self._options.headers.items()), *key)

    def _failure(self, error: grpc.aio.AioRpcError) -> Exception:
        code, reason = error.code(), self._own_keys.hidden(f"{error.code().name}: {error.details()}")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{self.name} could not finish before the deadline")
        if code in _REFUSED:
            # as over HTTP: a wrong key is the pool's error, a forbidden request the client's
            kind = BackendFailed if code == grpc.StatusCode.UNAUTHENTICATED else BackendRefused
            return kind(f"{self.name} does not let the router in: {reason}", hint="is the pool's key right?")
        return BackendFailed(f"{self.name} cannot be reached: {reason}", hint=f"is {self.address} up?")


def infer_request(model: str, inputs: Mapping[str, Any], signature: Signature, number: str) -> kserve.ModelInferRequest:
    """`inputs` as tensors of one batch row, with a request for a marked last response."""
    request = kserve.ModelInferRequest(model_name=model, id=number)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        datatype = signature.inputs.get(name, "BYTES")
        tensor = request.inputs.add(
            name=name, datatype=datatype, shape=[*([1] if signature.is_batched else []), len(values)]
        )
        plain = [item.encode() if isinstance(item, str) else item for item in values]
        getattr(tensor.contents, _CONTENTS[datatype]).extend(plain)
    return request
