"""The messages of external processing, read and made. Pure.

Sources: Envoy 1.40, `envoy/service/ext_proc/v3/external_processor.proto` and the filter's `processing_mode.proto`;
Gateway API Inference Extension, proposal 004 "Endpoint Picker Protocol" 1.0.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from router.protocols.picker.envoy import base_pb2 as core
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.envoy import http_status_pb2 as http
from router.protocols.picker.envoy.processing_mode_pb2 import ProcessingMode

DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key in the metadata, that names the endpoints to take, the best first."""

SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
OBJECTIVE = "x-gateway-inference-objective"

LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
"""Namespaces of metadata."""

MOST_PIECE_BYTES = 62 << 10
"""Envoy advises to send bodies in pieces of at most 64 KiB; a message has a few bytes around its piece."""

_OVERWRITE = core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

Answer = pb.ProcessingResponse


@dataclass(frozen=True, slots=True)
class Modes:
    """How bodies come. `is_duplex`: in pieces, and nothing is to be answered before all of it was seen."""

    is_duplex: bool = True
    is_response_duplex: bool = True


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes and what changes on the way: `endpoints`, the best first, headers, and the `body`.

    None: the body stays as it came.
    """

    endpoints: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    body: bytes | None = None


def modes_of(message: pb.ProcessingRequest) -> Modes:
    """How the gateway that began with `message` sends bodies; one that does not tell keeps to the picker protocol.

    Raises ValueError with a sentence for a mode in which nothing can be picked or nothing can be counted.
    """
    if message.observability_mode:
        raise ValueError("an endpoint picker cannot run in observability_mode")
    if not message.HasField("protocol_config"):
        return Modes()
    of_request, of_response = message.protocol_config.request_body_mode, message.protocol_config.response_body_mode
    if of_request not in (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED):
        raise ValueError("request_body_mode must be FULL_DUPLEX_STREAMED or BUFFERED")
    if of_response == ProcessingMode.NONE:
        raise ValueError("response_body_mode must be FULL_DUPLEX_STREAMED or STREAMED")
    duplex = ProcessingMode.FULL_DUPLEX_STREAMED
    return Modes(is_duplex=of_request == duplex, is_response_duplex=of_response == duplex)


def headers_in(headers: core.HeaderMap) -> dict[str, str]:
    """Name in lower case -> value; values of one name are joined by commas (RFC 9110, 5.3)."""
    found: dict[str, str] = {}
    for one in headers.headers:
        name, value = one.key.lower(), one.raw_value.decode("latin-1") or one.value
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def subset_in(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that the gateway allows, as ip:port or ip; None where it allows all, empty where it allows none.

    They come as a list or, from filters that make metadata of headers, as one text with commas.
    """
    told = _metadata(message, SUBSET_HINT)
    if SUBSET not in told:
        return None
    given = told[SUBSET]
    listed = given if isinstance(given, list) else [given]
    texts = (text for one in listed if isinstance(one, str) for text in one.split(","))
    return frozenset(text.strip() for text in texts if text.strip())


def served_in(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that served the request, where the gateway tells."""
    told = _metadata(message, LB).get(SERVED)
    return told if isinstance(told, str) and told else None


def picked(destination: Destination, body: bytes, modes: Modes, *, ended_by: str) -> Iterator[Answer]:
    """What sends a request, whose `body` came whole, to its `destination`.

    `ended_by` says what ended the request: its `headers`, its `body` or its `trailers`.
    """
    common = pb.CommonResponse(header_mutation=_mutation(destination), clear_route_cache=True)
    chosen = Struct()
    chosen.update({LB: {DESTINATION: ",".join(destination.endpoints)}})
    sent = body if destination.body is None else destination.body
    if ended_by == "headers":
        yield Answer(request_headers=pb.HeadersResponse(response=common), dynamic_metadata=chosen)
    elif modes.is_duplex:
        yield Answer(request_headers=pb.HeadersResponse(response=common), dynamic_metadata=chosen)
        yield from _in_pieces(sent, is_last=ended_by == "body")
        if ended_by == "trailers":
            yield Answer(request_trailers=pb.TrailersResponse())
    else:
        if destination.body is not None:
            common.body_mutation.body = sent
        yield Answer(request_body=pb.BodyResponse(response=common), dynamic_metadata=chosen)


def go_on(phase: str, adds: Mapping[str, str] | None = None) -> Answer:
    """The answer to `phase` that changes nothing, but for headers that it `adds`."""
    answer = Answer()
    said = getattr(answer, phase)
    said.SetInParent()
    if adds:
        said.response.header_mutation.set_headers.extend(_set(adds))
    return answer


def passed_on(piece: pb.HttpBody, modes: Modes) -> Answer:
    """The answer to a piece of a response that sends it on as it is."""
    if not modes.is_response_duplex:
        return go_on("response_body")
    return Answer(response_body=_streamed(piece.body, is_last=piece.end_of_stream))


def immediate(status: int, body: bytes, headers: Mapping[str, str], *, details: str) -> Answer:
    """The answer in the place of an endpoint's; `details` go to the gateway's log."""
    # an open enum: what Envoy knows and this subset does not passes all the same
    code = http.HttpStatus(code=status)  # type: ignore[arg-type]
    said = {"content-type": "application/json", **headers}
    mutation = pb.HeaderMutation(set_headers=_set(said))
    return Answer(immediate_response=pb.ImmediateResponse(status=code, headers=mutation, body=body, details=details))


def _mutation(destination: Destination) -> pb.HeaderMutation:
    # a client that names its own endpoint is not heard: the header is overwritten
    said = {DESTINATION: ",".join(destination.endpoints), **destination.headers}
    removed = [name for name in destination.removed if name not in said]
    return pb.HeaderMutation(set_headers=_set(said), remove_headers=removed)


def _set(headers: Mapping[str, str]) -> Collection[core.HeaderValueOption]:
    return [
        core.HeaderValueOption(
            header=core.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")), append_action=_OVERWRITE
        )
        for name, value in headers.items()
    ]


def _in_pieces(body: bytes, *, is_last: bool) -> Iterator[Answer]:
    for at in range(0, max(1, len(body)), MOST_PIECE_BYTES):
        piece, rest = body[at : at + MOST_PIECE_BYTES], len(body) - at - MOST_PIECE_BYTES
        yield Answer(request_body=_streamed(piece, is_last=is_last and rest <= 0))


def _streamed(body: bytes, *, is_last: bool) -> pb.BodyResponse:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=is_last)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))


def _metadata(message: pb.ProcessingRequest, namespace: str) -> dict[str, object]:
    told = message.metadata_context.filter_metadata
    # a map of messages: to ask for one that is not there would make it
    return MessageToDict(told[namespace]) if namespace in told else {}
