"""What a gRPC port tells about itself: health of all services, reflection in both versions, every name of a symbol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.protocols.grpc.v1 import inference_pb2
from tls.grpc_about import Asked, PortHealth, Told, add_about

SERVICE = "pointsman.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
VERSIONS = ("v1", "v1alpha")
KNOWN = [
    SERVICE,
    f"{SERVICE}.Generate",
    f"{SERVICE}.CountTokens",
    inference_pb2.GenerateRequest.DESCRIPTOR.full_name,
    f"{inference_pb2.GenerateRequest.DESCRIPTOR.full_name}.model",
    "grpc.health.v1.Health.List",
]
UNKNOWN = [f"{SERVICE}.Nothing", "pointsman.v1.Nothing", "", ".", "Generate"]


@asynccontextmanager
async def a_port() -> AsyncIterator[tuple[grpc.aio.Channel, PortHealth]]:
    server = grpc.aio.server()
    health = add_about(server, SERVICE)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, health
    finally:
        await server.stop(0)


async def told(channel: grpc.aio.Channel, version: str, asked: Asked) -> Told:
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = channel.stream_stream(path, Asked.SerializeToString, Told.FromString)([asked])
    (answer,) = [each async for each in call]
    return answer


async def test_health_lists_each_service_as_it_is_checked() -> None:
    async with a_port() as (channel, health):
        await health.set("", SERVING)
        await health.set(SERVICE, NOT_SERVING)
        stub = health_pb2_grpc.HealthStub(channel)
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: each.status for name, each in listed.items()} == {"": SERVING, SERVICE: NOT_SERVING}
        for name, each in listed.items():
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == each.status
        await health.enter_graceful_shutdown()
        last = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {each.status for each in last.values()} == {NOT_SERVING}


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_finds_the_file_of_every_symbol(version: str) -> None:
    async with a_port() as (channel, _):
        for name in KNOWN:
            answer = await told(channel, version, Asked(file_containing_symbol=name))
            files = answer.file_descriptor_response.file_descriptor_proto
            assert files, name
            packages = {descriptor_pb2.FileDescriptorProto.FromString(each).package for each in files}
            assert any(name.startswith(package) for package in packages)
            assert answer.original_request.file_containing_symbol == name
        for name in UNKNOWN:
            answer = await told(channel, version, Asked(file_containing_symbol=name))
            assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0], name


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_lists_the_services_and_itself_in_both_versions(version: str) -> None:
    async with a_port() as (channel, _):
        listed = await told(channel, version, Asked(list_services=""))
        names = {service.name for service in listed.list_services_response.service}
        reflections = {f"grpc.reflection.{each}.ServerReflection" for each in VERSIONS}
        assert names == {SERVICE, "grpc.health.v1.Health", *reflections}
