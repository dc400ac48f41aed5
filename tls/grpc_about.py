"""What each port of a gRPC server tells about itself: health, and the services by reflection.

Both come from gRPC's packages, which lack `List` of health, reflection's version 1 and the names of methods. Sources:
grpc-proto, `grpc/health/v1/health.proto`, `grpc/reflection/v1/reflection.proto` (the messages of v1alpha's).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest as Asked
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse as Told

_VERSION_1 = "grpc.reflection.v1.ServerReflection"


class PortHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """The health of each service of one port, which `set` changes."""

    def __init__(self) -> None:
        super().__init__()
        self._names = {""}

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        """From now on `service` has this `status`."""
        self._names.add(service)
        await super().set(service, status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:  # noqa: ARG002, N802 - gRPC calls it so
        """The health of all services."""
        each = {name: await self.Check(health_pb2.HealthCheckRequest(service=name), context) for name in self._names}
        return health_pb2.HealthListResponse(statuses=each)


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """The services of one port, in both versions."""

    async def ServerReflectionInfo(self, request_iterator: AsyncIterable[Asked], context: Any) -> AsyncIterator[Told]:  # noqa: N802 - gRPC calls it so
        """One answer for each question."""
        async for asked in request_iterator:
            async for told in super().ServerReflectionInfo(_one(_of_a_file(asked)), context):
                told.original_request.CopyFrom(asked)
                yield told


def add_about(server: grpc.aio.Server, *services: str) -> PortHealth:
    """Serve health and reflection of `services` at `server`; what changes the health."""
    told = PortHealth()
    health_pb2_grpc.add_HealthServicer_to_server(told, server)
    reflected = Reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME, _VERSION_1))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, server)
    info = grpc.stream_stream_rpc_method_handler(
        reflected.ServerReflectionInfo, Asked.FromString, Told.SerializeToString
    )
    handler = grpc.method_handlers_generic_handler(_VERSION_1, {"ServerReflectionInfo": info})
    server.add_generic_rpc_handlers((handler,))
    return told


def _of_a_file(asked: Asked) -> Asked:
    """`asked`; if it names a method, or another part of a symbol, the file of that."""
    if not asked.HasField("file_containing_symbol"):
        return asked
    pool, name = descriptor_pool.Default(), asked.file_containing_symbol
    for find in (pool.FindMethodByName, pool.FindFieldByName, pool.FindOneofByName):
        with suppress(KeyError):
            found: Any = find(name)
            of = found.containing_service if find == pool.FindMethodByName else found.containing_type
            return Asked(host=asked.host, file_by_filename=of.file.name)
    return asked


async def _one(asked: Asked) -> AsyncIterator[Asked]:
    yield asked
