"""Parses and makes the messages of external processing. Pure.

Sources: Envoy 1.40, `envoy/service/ext_proc/v3/external_processor.proto` and the filter's `processing_mode.proto`;
Gateway API Inference Extension, proposal 004 "Endpoint Picker Protocol" 1.0.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.struct_pb2 import Struct, Value

from router.protocols.picker.envoy import base_pb2 as core
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.envoy import http_status_pb2 as http
from router.protocols.picker.envoy.processing_mode_pb2 import ProcessingMode

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key in the metadata, with the endpoints to use, the best first."""

SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_IDS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
MODEL_REWRITES = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
TTFT_TARGETS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_TARGETS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""Headers of callers: the newer name, then the older one."""

LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
"""Namespaces of metadata."""

MOST_HEADERS = 10_000
"""Of one message; Envoy takes a hundred unless it is told otherwise."""

MOST_PIECE_BYTES = 62 << 10
"""Envoy recommends pieces of at most 64 KiB for bodies; a message has a few bytes around its piece."""

_OVERWRITE = core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

Answer = pb.ProcessingResponse


@dataclass(frozen=True, slots=True)
class Modes:
    """How bodies are sent. `is_duplex`: in pieces, and the picker may not answer before it has seen them all."""

    is_duplex: bool = True
    is_response_duplex: bool = True


@dataclass(frozen=True, slots=True)
class Destination:
    """The endpoints for a request, the best first, and the changes to it: headers, and the `body`.

    `body` None: unchanged.
    """

    endpoints: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    body: bytes | None = None


def modes_of(message: pb.ProcessingRequest) -> Modes:
    """How the gateway sends bodies, from its first `message`; by default as the picker protocol requires.

    Raises ValueError with a sentence for a mode in which no endpoint can be picked or no answer counted.
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
    """Name in lower case -> value; values of one name are joined by commas (RFC 9110, 5.3).

    Raises ValueError with a sentence for more than MOST_HEADERS.
    """
    if len(headers.headers) > MOST_HEADERS:
        raise ValueError(f"a message has more than {MOST_HEADERS} headers")
    found: dict[str, list[str]] = {}
    for header in headers.headers:
        found.setdefault(header.key.lower(), []).append(header.raw_value.decode("latin-1") or header.value)
    return {name: ", ".join(values) for name, values in found.items()}


def subset_in(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that the gateway allows, as ip:port or ip; None if it allows all, empty if it allows none.

    They come as a list or, from filters that make metadata of headers, as one text with commas.
    """
    given = _metadata(message, SUBSET_HINT, SUBSET)
    if given is None:
        return None
    listed = given.list_value.values if given.HasField("list_value") else (given,)
    texts = (part for each in listed for part in each.string_value.split(","))
    return frozenset(text.strip() for text in texts if text.strip())


def served_in(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that served the request, if the gateway reports it."""
    served = _metadata(message, LB, SERVED)
    return None if served is None else served.string_value or None


def picked(destination: Destination, body: bytes, modes: Modes, *, ended_by: str) -> Iterator[Answer]:
    """The answers that send a request with the complete `body` to its `destination`.

    `ended_by` is the last part of the request: its `headers`, its `body` or its `trailers`.
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
    """The answer to `phase` that changes nothing, except for headers that it `adds`."""
    answer = Answer()
    reply = getattr(answer, phase)
    reply.SetInParent()
    if adds:
        reply.response.header_mutation.set_headers.extend(_set(adds))
    return answer


def passed_on(piece: pb.HttpBody, modes: Modes) -> Answer:
    """The answer to a piece of a response that passes it on unchanged."""
    if not modes.is_response_duplex:
        return go_on("response_body")
    return Answer(response_body=_streamed(piece.body, is_last=piece.end_of_stream))


def immediate(status: int, body: bytes, headers: Mapping[str, str], *, details: str) -> Answer:
    """The reply to the client in place of an endpoint's answer; `details` go to the gateway's log."""
    # an open enum: Envoy accepts codes that this subset of the protocol does not name
    code = http.HttpStatus(code=status)  # type: ignore[arg-type]
    all_headers = {"content-type": "application/json", **headers}
    mutation = pb.HeaderMutation(set_headers=_set(all_headers))
    return Answer(immediate_response=pb.ImmediateResponse(status=code, headers=mutation, body=body, details=details))


def _mutation(destination: Destination) -> pb.HeaderMutation:
    # overwrite the header, so that a client cannot name its own endpoint
    changed = {DESTINATION: ",".join(destination.endpoints), **destination.headers}
    removed = [name for name in destination.removed if name not in changed]
    return pb.HeaderMutation(set_headers=_set(changed), remove_headers=removed)


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


def _metadata(message: pb.ProcessingRequest, namespace: str, key: str) -> Value | None:
    """One value: all of them would take a turn of their own."""
    metadata = message.metadata_context.filter_metadata
    # protobuf maps of messages: reading a missing key would add it
    if namespace not in metadata or key not in metadata[namespace].fields:
        return None
    return metadata[namespace].fields[key]
