"""A message with more fields than are parsed at once is refused; what one has is counted exactly."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import protobuf
from backends.protobuf import MOST_FIELDS, TooManyFields, has_many_fields, read_message
from router.protocols.grpc.v1 import inference_pb2 as pb
from tests.work import work_of

REQUESTS = (pb.GenerateRequest, pb.CountTokensRequest, pb.ListModelsRequest)


def units(kind: Descriptor) -> list[bytes]:
    """The shortest field of each number and wire form, groups among them, and one field in each known message."""
    short = [bytes([number << 3 | wire]) + tail for number in range(1, 16) for wire, tail in FORMS]
    groups = [bytes([number << 3 | 3, number << 3 | 4]) for number in range(1, 16)]
    within = [bytes([each.number << 3 | 2, 2, 8, 1]) for each in kind.fields if each.message_type and each.number < 16]
    return short + groups + within


FORMS = ((0, b"\1"), (1, bytes(8)), (2, b"\0"), (5, bytes(4)))


@pytest.mark.parametrize("kind", REQUESTS)
def test_fields_of_any_form_are_counted(kind: type[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "MOST_FIELDS", 100)
    for unit in units(kind.DESCRIPTOR):
        assert has_many_fields(unit * 101, kind.DESCRIPTOR), unit
        assert not has_many_fields(unit * 50, kind.DESCRIPTOR), unit


def test_a_message_of_many_fields_is_refused() -> None:
    with pytest.raises(TooManyFields, match="more than 65536 fields"):
        read_message(b"R\0" * (2 * MOST_FIELDS + 1), pb.GenerateRequest())


@settings(deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_what_is_no_message_is_left_to_the_parser(start: bytes, rest: bytes) -> None:
    assert not has_many_fields(start + rest, pb.GenerateRequest.DESCRIPTOR)


def count(message: Message) -> int:
    """The fields that `message` is written with."""
    total = 0
    for field, value in message.ListFields():
        for each in values_of(field, value):
            total += 1 + (count(each) if isinstance(each, Message) else 0)
    return total


def values_of(field: FieldDescriptor, value: Any) -> list[Any]:
    return list(value) if field.is_repeated else [value]


@given(st.integers(0, 5), st.integers(0, 5), st.text(max_size=300))
def test_the_fields_of_a_usual_request_are_counted_exactly(messages: int, calls: int, text: str) -> None:
    request = pb.GenerateRequest(model="m", prompt=text, tools_json=text)
    for _ in range(messages):
        request.chat.messages.add(role="user", content=text)
    for _ in range(calls):
        request.chat.messages.add(role="assistant", tool_calls_json="[]")
    raw, exact = request.SerializeToString(), count(request)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(protobuf, "MOST_FIELDS", exact)
        assert not has_many_fields(raw, request.DESCRIPTOR)
        patched.setattr(protobuf, "MOST_FIELDS", exact - 1)
        assert has_many_fields(raw, request.DESCRIPTOR)


def test_long_values_cost_nothing() -> None:
    request = pb.GenerateRequest(model="m", prompt="a" * (4 << 20), tools_json="[" * (4 << 20))
    raw = request.SerializeToString()
    assert work_of(lambda: has_many_fields(raw, request.DESCRIPTOR)).lines < 200
