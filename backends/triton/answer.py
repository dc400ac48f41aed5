"""Answers of a text model on Triton, in server-sent events or tensors, and its errors. Pure but for memory.

Source: Triton's docs/protocol/extension_generate.md; KServe v2, "Tensor Data"; TensorRT-LLM's Triton models.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from backends.detokenize import StopCutter
from backends.http.errors import details_of, error_of
from backends.http.event_answer import EventAnswer
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, REQUIRED, reported_usage
from backends.http.sse import SseDecoder
from backends.kserve import inference_pb2 as kserve
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import Delta, Request, Usage

_HALF = "\ufffd"
_TOO_LONG = re.compile(
    r"exceeds? (?:the )?max\w* (?:input|sequence|seq)|max_(?:seq|input)_len|prompt length .*exceed", re.IGNORECASE
)
_ITS_OWN = re.compile(r"not healthy|not ready|failed to load|Executor has been", re.IGNORECASE)
_MAY_BE_REQUESTS = re.compile(r"CUDA|out of memory|failed to process|output tensor", re.IGNORECASE)
_UNKNOWN = re.compile(r"unknown model.*not found", re.IGNORECASE)
_BUSY = re.compile(r"Exceeds maximum queue size|max_queue_size|timeout.*queue", re.IGNORECASE)
_NUMBERS = {"INT32": "<i", "INT64": "<q", "UINT32": "<I", "UINT64": "<Q", "FP32": "<f", "FP64": "<d", "BOOL": "<?"}


class TritonText:
    """The text of one generation, response by response. Usage comes last and once.

    `is_cumulative`: each response repeats all that came before. Stop words are cut off. Each response that adds text
    counts as a token: the models report the number of prompt tokens, not of drawn ones.
    """

    def __init__(self, request: Request, *, is_cumulative: bool) -> None:
        self._is_cumulative, self._most = is_cumulative, request.max_new_tokens
        self._cutter = StopCutter(request.sampling.stop)
        self._rest, self._sent, self._drawn = "", 0, 0
        self._prompt_tokens, self._is_guess, self._reason = request.prompt_tokens, True, ""

    def hear(self, outputs: Mapping[str, Any]) -> Iterator[Delta]:
        """The Deltas of one response. Raises KeyError, TypeError or ValueError if it has another shape."""
        text = str(_one(outputs["text_output"]))
        if outputs.get("num_input_tokens") is not None:
            told = reported_usage(_one(outputs["num_input_tokens"] or [REQUIRED]), 0)
            if not told.is_guess:
                self._prompt_tokens, self._is_guess = told.prompt_tokens, False
        self._reason = str(_one(outputs.get("finish_reason") or self._reason))
        if new := self._new(text) if self._is_cumulative else text:
            self._drawn += 1
            if piece := self._cutter.push(new):
                yield Delta(text=piece)

    def finish(self) -> Iterator[Delta]:
        """The end and the usage."""
        rest = self._cutter.push(self._rest) + self._cutter.flush()
        is_full = self._drawn >= self._most and self._cutter.found is None
        yield Delta(text=rest, finish_reason=self._reason or ("length" if is_full else "stop"))
        yield Delta(usage=Usage(self._prompt_tokens, self._drawn, is_guess=self._is_guess))

    def _new(self, whole: str) -> str:
        """What `whole` adds to the text before. Half a character at its end can become a whole one."""
        certain = len(whole.rstrip(_HALF))
        new, self._sent = whole[self._sent : certain], max(self._sent, certain)
        self._rest = whole[self._sent :]
        return new


class TritonAnswer(EventAnswer):
    """Fed with the body of a reply to generate_stream, which ends without a word: the end of the body is the end."""

    last_word = "a response"

    def __init__(self, backend: str, request: Request, *, is_cumulative: bool) -> None:
        super().__init__(backend)
        self._text, self._has_begun = TritonText(request, is_cumulative=is_cumulative), False

    def end(self) -> Iterator[Delta]:
        """The end and the usage. Raises BackendFailed if there was no response."""
        self.is_over = self._has_begun
        yield from super().end()
        yield from self._text.finish()

    def _read(self, data: bytes) -> Iterator[Delta]:
        event = read_json(data)
        if event.get("error"):
            raise triton_error(self._backend, str(event["error"]))
        self._has_begun = True
        yield from self._text.hear(event)


def heard_of(backend: str, text: TritonText, response: kserve.ModelInferResponse) -> list[Delta]:
    """The Deltas that `response` adds to `text`. Raises BackendFailed for an invalid response."""
    try:
        outputs = {
            output.name: _first_of(output.datatype, raw)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
            if output.name in ("text_output", "num_input_tokens", "finish_reason")
        }
        return list(text.hear(outputs)) if outputs else []
    except (*MISSHAPEN, struct.error) as error:
        raise BackendErred(f"{backend} answered with tensors that cannot be read") from error


def is_final(response: kserve.ModelInferResponse) -> bool:
    """Nothing follows it; it may be empty (`triton_enable_empty_final_response`)."""
    return response.parameters["triton_final_response"].bool_param


def error_of_triton(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
    """The error for an HTTP `status`; the body of generate_stream is an event also where the first response failed."""
    # the unfinished end of a long body that was cut is not an event
    events = SseDecoder().feed(body + b"\n\n") if body.startswith(b"data:") else ()
    message = str(details_of(events[0].data if events else body).get("message") or "")
    if status in (400, 500, 503) and message:
        return triton_error(backend, message)
    return error_of(backend, status, body, headers)


def triton_error(backend: str, message: str) -> ExpectedError:
    """The error for a sentence of Triton's: its codes do not show the culprit, 400 stands for most."""
    message = message[:2000]
    if _TOO_LONG.search(message):
        return ContextExceeded(message)
    if _BUSY.search(message):
        return Overloaded(f"{backend} is busy: {message}")
    if _ITS_OWN.search(message):
        return BackendFailed(f"{backend} failed: {message}")
    if _MAY_BE_REQUESTS.search(message):
        return BackendErred(f"{backend} failed: {message}")
    if _UNKNOWN.search(message):
        return BackendRefused(f"{backend} refused: {message}")
    return InvalidRequest(message)


def _one(value: Any) -> Any:
    """The value, or the first of several: of several sequences only one was asked for."""
    while isinstance(value, list):
        value = value[0]
    return value


def _first_of(datatype: str, raw: bytes) -> list[Any]:
    """The first value of a tensor, if it has one: others were not asked for, and there may be millions."""
    if not raw:
        return []
    if datatype != "BYTES":
        return list(struct.unpack_from(_NUMBERS[datatype], raw))
    (size,) = struct.unpack_from("<I", raw)
    if 4 + size > len(raw):
        raise ValueError("a text is longer than its tensor")
    return [raw[4 : 4 + size].decode(errors="replace")]
