"""Bodies that go to disk as they come: a file in a multipart form, or one large JSON object.

Source: RFC 7578, parsed by python-multipart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from http1.errors import BodyTimeout, ClientGone, HttpError
from http1.request import Request
from policies.errors import InvalidRequest, RequestTooLarge
from router.batches.pace import Pace
from router.call.caller import CallerGone

_BUFFER_BYTES = 1 << 20
_FED_BYTES = 64 << 10
_MOST_FIELD_BYTES = 64 << 10
_MOST_FIELDS = 32
_FORM_HINT = "send a form (multipart/form-data) with `file` and `purpose`, as OpenAI's clients do"

Write = Callable[[bytes], object]
"""Takes the next bytes of a content; called in a thread."""


class UploadForm(NamedTuple):
    """The fields of a form, and the name of its file; the content of that was written."""

    fields: Mapping[str, str]
    filename: str


async def receive_form(http: Request, write: Write, pace: Pace, *, most_bytes: int) -> UploadForm:
    """Read a form, and give the content of its part `file` to `write`.

    Raises InvalidRequest, RequestTooLarge, CallerGone, and what `write` raises.
    """
    form = _form_of(http.headers.get("content-type", ""), most_bytes)
    _require_length(http, most_bytes + _MOST_FIELDS * _MOST_FIELD_BYTES)
    async for piece in _pieces(http):
        for at in range(0, len(piece), _FED_BYTES):
            if at:
                # others have their turn: the parser looks at each byte of separators
                await asyncio.sleep(0)
            form.feed(piece[at : at + _FED_BYTES])
        if len(form.content) >= _BUFFER_BYTES:
            await pace.run(write, form.taken())
    await pace.run(write, form.taken())
    return form.result()


def _form_of(content_type: str, most_bytes: int) -> FormReader:
    """A reader of the form that this header announces. Raises InvalidRequest."""
    try:
        kind, options = parse_options_header(content_type)
        if kind == b"multipart/form-data" and (boundary := options.get(b"boundary")):
            return FormReader(boundary, most_bytes)
    except ValueError as error:
        # a boundary that is too long, or has characters that no header can have
        raise InvalidRequest("the form's content-type cannot be read", hint=_FORM_HINT) from error
    raise InvalidRequest("the body is no form", hint=_FORM_HINT)


async def receive(http: Request, write: Write, pace: Pace, *, most_bytes: int) -> None:
    """Give the body to `write`. Raises RequestTooLarge, InvalidRequest, CallerGone, and what `write` raises."""
    _require_length(http, most_bytes)
    buffer, size = bytearray(), 0
    async for piece in _pieces(http):
        size += len(piece)
        if size > most_bytes:
            raise _too_large(most_bytes)
        buffer += piece
        if len(buffer) >= _BUFFER_BYTES:
            data, buffer = bytes(buffer), bytearray()
            await pace.run(write, data)
    await pace.run(write, bytes(buffer))


class FormReader:
    """A form while it comes. `content` is the part of the file that was not taken yet."""

    def __init__(self, boundary: bytes, most_bytes: int) -> None:
        self._most_bytes, self._size = most_bytes, 0
        self.content = bytearray()
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._name, self._text = "", bytearray()
        self._is_file = self._has_ended = False
        self._parts = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._end_all,
            },
        )

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises InvalidRequest, RequestTooLarge."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form is malformed: {error}", hint=_FORM_HINT) from error

    def taken(self) -> bytes:
        """`content`, which is empty then."""
        data, self.content = bytes(self.content), bytearray()
        return data

    def result(self) -> UploadForm:
        """The whole form. Raises InvalidRequest."""
        if not self._has_ended:
            raise InvalidRequest("the form broke off", hint=_FORM_HINT)
        if self._filename is None:
            raise InvalidRequest("the form has no file", hint=_FORM_HINT, param="file")
        return UploadForm(self._fields, self._filename)

    def _begin(self) -> None:
        self._disposition = b""
        self._parts += 1
        # the fields, and the file
        if self._parts > _MOST_FIELDS + 1:
            raise InvalidRequest(f"the form has more than {_MOST_FIELDS} fields", hint=_FORM_HINT)

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name, self._text = options.get(b"name", b"").decode("utf-8", "replace"), bytearray()
        self._is_file = self._name == "file"
        if self._is_file and self._filename is not None:
            raise InvalidRequest("the form has two files", hint="send one file", param="file")
        if self._is_file:
            self._filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:255]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._size += end - start
            if self._size > self._most_bytes:
                raise _too_large(self._most_bytes)
            self.content += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > _MOST_FIELD_BYTES:
            raise InvalidRequest(f"the field `{self._name[:80]}` is too long", hint=_FORM_HINT)

    def _end(self) -> None:
        if not self._is_file:
            self._fields[self._name] = self._text.decode("utf-8", "replace")

    def _end_all(self) -> None:
        self._has_ended = True


async def _pieces(http: Request) -> AsyncIterator[bytes]:
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("files are not read compressed", hint="send the body without content-encoding")
    try:
        async for piece in http.content():
            yield piece
    except BodyTimeout as error:
        hint = "send as many bytes as Content-Length or Transfer-Encoding announces"
        raise InvalidRequest(f"the body did not arrive: {error.reason}", hint=hint) from error
    except HttpError as error:
        raise InvalidRequest("the body cannot be read", hint="check its encoding headers") from error
    except ClientGone as error:
        raise CallerGone from error


def _require_length(http: Request, most_bytes: int) -> None:
    if (http.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> RequestTooLarge:
    hint = "send several smaller files, or have the operator raise batches.max_file"
    return RequestTooLarge(f"the file is larger than {most_bytes:,} bytes", hint=hint)
