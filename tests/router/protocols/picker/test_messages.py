"""The messages of external processing: the same on the wire as Envoy's, and what is read out of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocols.picker.envoy import base_pb2 as core
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.messages import (
    MOST_HEADERS,
    MOST_PIECE_BYTES,
    Destination,
    Modes,
    go_on,
    headers_in,
    immediate,
    picked,
    served_in,
    subset_in,
)
from tests.work import work_of

OURS = [
    f"router.protocols.picker.envoy.{name}_pb2"
    for name in ("base", "external_processor", "http_status", "processing_mode")
]
ENVOYS = Path(__file__).parents[3] / "golden" / "envoy_ext_proc.json"
"""What `described` says of Envoy's own descriptors of the same names, in xds-protos 1.85.0. That package cannot be
installed beside OpenTelemetry's exporter: both bring files of opentelemetry.proto."""

DESCRIBE = """
import json, sys
from importlib import import_module

found = {}

def enum(one):
    found.update({f"{one.full_name}.{value.name}": value.number for value in one.values})

def message(one):
    for field in one.fields:
        of = field.message_type or field.enum_type
        within = field.containing_oneof.name if field.containing_oneof else None
        found[field.full_name] = [field.number, field.type, field.is_repeated, of and of.full_name, within]
    for nested in one.nested_types:
        message(nested)
    for nested in one.enum_types:
        enum(nested)

for name in sys.argv[1:]:
    file = import_module(name).DESCRIPTOR
    for one in file.message_types_by_name.values():
        message(one)
    for one in file.enum_types_by_name.values():
        enum(one)
    for service in file.services_by_name.values():
        for one in service.methods:
            kinds = [one.input_type.full_name, one.output_type.full_name]
            found[one.full_name] = [*kinds, one.client_streaming, one.server_streaming]
print(json.dumps(found))
"""


def described(names: list[str]) -> dict[str, Any]:
    """Every field, value and method of the modules `names`; in a process of its own, to be run on Envoy's too."""
    command = [sys.executable, "-c", DESCRIBE, *names]
    content: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return content


def test_every_field_has_envoys_own_name_number_and_type() -> None:
    ours, envoys = described(OURS), json.loads(ENVOYS.read_text())
    assert len(ours) > 50
    assert ours == envoys


def metadata(namespace: str, key: str, value: Any) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.metadata_context.filter_metadata[namespace].update({key: value})
    return message


SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")


@pytest.mark.parametrize(
    ("subset_hint", "subset"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80,10.0.0.2:80", 7, ""], {"10.0.0.1:80", "10.0.0.2:80"}),
        ([], set()),
        ("", set()),
    ],
)
def test_a_subset_is_a_list_or_a_text(subset_hint: Any, subset: set[str]) -> None:
    assert subset_in(metadata(*SUBSET, subset_hint)) == subset


def test_without_the_key_every_endpoint_is_allowed() -> None:
    assert subset_in(pb.ProcessingRequest()) is None
    assert subset_in(metadata("envoy.lb.subset_hint", "other", [])) is None


def test_the_endpoint_that_served_is_in_the_metadata() -> None:
    key = "x-gateway-destination-endpoint-served"
    assert served_in(metadata("envoy.lb", key, "10.0.0.1:80")) == "10.0.0.1:80"
    assert served_in(metadata("envoy.lb", key, 7)) is None
    assert served_in(pb.ProcessingRequest()) is None


def test_headers_are_read_raw_and_joined() -> None:
    pairs = [("Accept", b"a", ""), ("accept", b"b", ""), ("old", b"", "plain"), ("odd", b"\xe9", "")]
    headers = core.HeaderMap(headers=[core.HeaderValue(key=k, raw_value=raw, value=v) for k, raw, v in pairs])
    assert headers_in(headers) == {"accept": "a, b", "old": "plain", "odd": "é"}


def test_a_header_of_many_lines_is_joined_and_a_message_of_too_many_is_refused() -> None:
    one = core.HeaderValue(key="a", raw_value=b"b")
    assert headers_in(core.HeaderMap(headers=[one] * MOST_HEADERS)) == {"a": ", ".join(["b"] * MOST_HEADERS)}
    with pytest.raises(ValueError, match="more than 10000 headers"):
        headers_in(core.HeaderMap(headers=[one] * (MOST_HEADERS + 1)))


def test_one_value_is_read_of_metadata_with_many() -> None:
    message = metadata(*SUBSET, ["10.0.0.1:80"])
    for number in range(1000):
        message.metadata_context.filter_metadata[SUBSET[0]].update({f"other{number}": [number]})
    assert work_of(lambda: subset_in(message)).lines < 50


WHERE = Destination(
    ("10.0.0.1:80", "10.0.0.2:80"), headers={"authorization": "Bearer k"}, removed=("authorization", "x")
)


@pytest.mark.parametrize("ended_by", ["headers", "body", "trailers"])
@pytest.mark.parametrize("is_duplex", [True, False])
def test_header_and_metadata_name_the_same_endpoints_in_the_same_order(ended_by: str, is_duplex: bool) -> None:
    first, *_ = picked(WHERE, b"{}", Modes(is_duplex=is_duplex), ended_by=ended_by)
    common = first.request_headers.response if first.HasField("request_headers") else first.request_body.response
    headers = {
        set_header.header.key: set_header.header.raw_value.decode() for set_header in common.header_mutation.set_headers
    }
    assert headers["x-gateway-destination-endpoint"] == "10.0.0.1:80,10.0.0.2:80"
    assert first.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.1:80,10.0.0.2:80"
    # a header that is set is not removed as well
    assert list(common.header_mutation.remove_headers) == ["x"]
    assert common.clear_route_cache


@given(size=st.integers(0, 3 * MOST_PIECE_BYTES + 1), ended_by=st.sampled_from(["body", "trailers"]))
def test_a_streamed_body_arrives_whole_and_ends_once(size: int, ended_by: str) -> None:
    body = bytes(size)
    _, *rest = picked(WHERE, body, Modes(), ended_by=ended_by)
    pieces = [
        message.request_body.response.body_mutation.streamed_response
        for message in rest
        if message.HasField("request_body")
    ]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [ended_by == "body"]
    assert rest[-1].HasField("request_trailers") == (ended_by == "trailers")


def test_a_buffered_body_is_left_alone_unless_it_changes() -> None:
    (same,) = picked(WHERE, b"{}", Modes(is_duplex=False), ended_by="body")
    assert not same.request_body.response.HasField("body_mutation")
    (other,) = picked(Destination(("10.0.0.1:80",), body=b"[]"), b"{}", Modes(is_duplex=False), ended_by="body")
    assert other.request_body.response.body_mutation.body == b"[]"


@pytest.mark.parametrize(
    "phase", ["request_headers", "request_body", "request_trailers", "response_headers", "response_trailers"]
)
def test_to_go_on_is_an_answer_of_the_same_phase_that_changes_nothing(phase: str) -> None:
    answer = go_on(phase)
    assert answer.WhichOneof("response") == phase
    assert answer.ByteSize() <= 4


def test_an_immediate_answer_is_json_and_keeps_a_status_that_is_not_in_the_subset() -> None:
    answer = immediate(418, b"{}", {"retry-after": "3"}, details="odd").immediate_response
    headers = {set_header.header.key: set_header.header.raw_value for set_header in answer.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"3"}
    assert (answer.status.code, answer.body, answer.details) == (418, b"{}", "odd")
