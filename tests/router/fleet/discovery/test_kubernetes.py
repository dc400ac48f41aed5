"""EndpointSlices, listed and watched from a stand-in that speaks the API's own format over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from policies.sla.sources import KubernetesService
from router.fleet.discovery.kubernetes import KubernetesAccess, KubernetesSource
from router.fleet.discovery.source import Addresses, SourceFailed
from tests.standins.kubernetes import KubernetesApi, a_kubernetes_api, a_slice

HERE = KubernetesService("default", "llm", "http")


def answers(api: KubernetesApi, at: KubernetesService = HERE, token: Path | None = None) -> Any:
    found: AsyncGenerator[Addresses] = KubernetesSource(at, KubernetesAccess(api.url, token)).addresses()
    return aclosing(found)


async def next_of(found: AsyncGenerator[Addresses]) -> Addresses:
    async with asyncio.timeout(5):
        return await anext(found)


async def test_ready_endpoints_of_all_slices_are_listed_and_what_changes_is_heard() -> None:
    async with a_kubernetes_api(a_slice("x", "10.0.0.1", "10.0.0.2"), a_slice("y", "10.0.0.3")) as api:
        async with answers(api) as found:
            assert await next_of(found) == {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}
            api.put(a_slice("x", "10.0.0.1"))
            assert await next_of(found) == {"10.0.0.1:8000", "10.0.0.3:8000"}
            api.delete("y")
            assert await next_of(found) == {"10.0.0.1:8000"}
            api.put(a_slice("z", "fd00::1", kind="IPv6"))
            assert await next_of(found) == {"10.0.0.1:8000", "[fd00::1]:8000"}
        assert api.lists == 1
        assert api.queries[0] == {"labelSelector": "kubernetes.io/service-name=llm"}
        assert api.queries[1]["watch"] == "1"
        assert api.queries[1]["resourceVersion"] == "100"


async def test_a_pod_of_a_dual_stack_service_is_one_backend() -> None:
    def of_pods(name: str, kind: str, **addresses: str) -> dict[str, Any]:
        found = a_slice(name, *addresses.values(), kind=kind)
        for pod, end in zip(addresses, found["endpoints"], strict=True):
            end["targetRef"] = {"kind": "Pod", "namespace": "default", "name": pod, "uid": f"uid-of-{pod}"}
        return found

    six = of_pods("six", "IPv6", a="fd00::1", b="fd00::2", c="fd00::3")
    four = of_pods("four", "IPv4", a="10.0.0.1", b="10.0.0.2")
    async with a_kubernetes_api(four, six) as api, answers(api) as found:
        assert await next_of(found) == {"10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:8000"}
        # its other address does not take its place while it goes
        four["endpoints"][1]["conditions"] = {"ready": False}
        api.put(four)
        assert await next_of(found) == {"10.0.0.1:8000", "[fd00::3]:8000"}


async def test_a_watch_that_ends_goes_on_from_where_it_was_also_after_bookmarks() -> None:
    async with a_kubernetes_api(a_slice("x", "10.0.0.1")) as api, answers(api) as found:
        await next_of(found)
        waiting = asyncio.create_task(next_of(found))
        await api.watched(1)
        api.tell("BOOKMARK", {"kind": "EndpointSlice"})
        api.end_watches()
        await api.watched(2)
        api.put(a_slice("y", "10.0.0.2"))
        assert await waiting == {"10.0.0.1:8000", "10.0.0.2:8000"}
        assert (api.lists, api.watches) == (1, [100, 101])


async def test_after_410_gone_everything_is_listed_anew() -> None:
    async with a_kubernetes_api(a_slice("x", "10.0.0.1"), oldest=200) as api, answers(api) as found:
        await next_of(found)
        # no watch is open at this moment, and the API forgets what happens
        api.slices = {"y": a_slice("y", "10.0.0.9")}
        api.version = 200
        assert await next_of(found) == {"10.0.0.9:8000"}
        assert (api.lists, api.watches) == (2, [100])


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({}, True),
        ({"ready": None}, True),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
    ],
)
async def test_only_ready_endpoints_count_and_terminating_ones_drain(conditions: Any, counts: bool) -> None:
    async with a_kubernetes_api(a_slice("x", "10.0.0.1", **conditions)) as api, answers(api) as found:
        assert await next_of(found) == (frozenset({"10.0.0.1:8000"}) if counts else frozenset())


@pytest.mark.parametrize(
    ("port", "of_slice", "found_port"),
    [("http", 8000, 8000), ("8000", 8000, 8000), ("grpc", 8000, None), ("9", None, 9)],
)
async def test_the_port_is_chosen_by_name_or_number(port: str, of_slice: int | None, found_port: int | None) -> None:
    at = KubernetesService("default", "llm", port)
    async with a_kubernetes_api(a_slice("x", "10.0.0.1", port=of_slice)) as api, answers(api, at) as found:
        assert await next_of(found) == (frozenset() if found_port is None else {f"10.0.0.1:{found_port}"})


async def test_the_token_is_read_again_for_each_question(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    async with a_kubernetes_api(a_slice("x", "10.0.0.1"), token="old") as api, answers(api, token=token) as found:
        await next_of(found)
        waiting = asyncio.create_task(next_of(found))
        await api.watched(1)
        api.token = "new"
        token.write_text("new\n")
        api.end_watches()
        await api.watched(2)
        api.put(a_slice("x", "10.0.0.2"))
        assert await waiting == {"10.0.0.2:8000"}


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"type": "ERROR", "object": {"code": 500, "message": "etcd is tired"}}, "etcd is tired"),
        ({"type": "MODIFIED", "object": {"no": "metadata"}}, "unexpected event"),
        ({"kind": "Status"}, "unexpected event"),
        (
            {"type": "MODIFIED", "object": {"metadata": {"name": "x", "resourceVersion": "7"}, "endpoints": 5}},
            "cannot be read",
        ),
    ],
)
async def test_what_cannot_be_understood_is_a_failure_of_the_source(event: dict[str, Any], why: str) -> None:
    async with a_kubernetes_api(a_slice("x", "10.0.0.1")) as api, answers(api) as found:
        await next_of(found)
        waiting = asyncio.create_task(next_of(found))
        await api.watched(1)
        api.version += 1
        api.say(event)
        with pytest.raises(SourceFailed, match=why):
            await waiting


async def test_an_api_that_refuses_or_is_away_is_a_failure_of_the_source(tmp_path: Path) -> None:
    async with a_kubernetes_api(broken=403) as api, answers(api) as found:
        with pytest.raises(SourceFailed, match="answered 403"):
            await next_of(found)
    async with answers(api) as found:
        with pytest.raises(SourceFailed, match=r"127\.0\.0\.1"):
            await next_of(found)
    async with answers(api, token=tmp_path / "none") as found:
        with pytest.raises(SourceFailed, match="token cannot be read"):
            await next_of(found)


def test_inside_a_pod_the_environment_has_the_address_of_the_api() -> None:
    access = KubernetesAccess.in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert access.url == "https://[fd00::1]:6443"
    with pytest.raises(SourceFailed, match="not in a pod"):
        KubernetesAccess.in_cluster({})
    with pytest.raises(SourceFailed, match="authority"):
        access.tls()
