"""Splits the body of Anthropic's new batch, `{"requests": [...]}`, into its requests without reading it whole."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from policies.errors import InvalidRequest, RequestTooLarge

_READ_BYTES = 1 << 18
_SPACE = re.compile(r"[ \t\n\r]*")
_HINT = "send {'requests': [{'custom_id': ..., 'params': {...}}, ...]}"


def requests_in(body: BinaryIO, *, most_bytes: int) -> Iterator[Any]:
    """The entries of `requests`, each decoded. Raises InvalidRequest, and RequestTooLarge for one of more than
    `most_bytes`."""
    text = _Text(body, most_bytes)
    text.take("{")
    names = set[str]()
    while not text.takes("}"):
        if names:
            text.take(",")
        name = text.value()
        if not isinstance(name, str) or name in names:
            raise InvalidRequest("the body is no JSON object with different members", hint=_HINT)
        names.add(name)
        text.take(":")
        if name != "requests":
            text.value()
            continue
        text.take("[")
        is_first = True
        while not text.takes("]"):
            if not is_first:
                text.take(",")
            is_first = False
            yield text.value()
    text.end()
    if "requests" not in names:
        raise InvalidRequest("`requests` is missing", hint=_HINT, param="requests")


class _Text:
    """JSON text that is read as it is needed."""

    def __init__(self, body: BinaryIO, most_bytes: int) -> None:
        self._body, self._most = body, most_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._json = json.JSONDecoder()
        self._text, self._at, self._is_whole = "", 0, False

    def takes(self, sign: str) -> bool:
        """Whether `sign` comes next; it is behind us then."""
        self._skip()
        if self._text.startswith(sign, self._at):
            self._at += 1
            return True
        return False

    def take(self, sign: str) -> None:
        """`sign` must come next."""
        if not self.takes(sign):
            raise self._malformed(f"'{sign}' is expected")

    def value(self) -> Any:
        """The value that comes next."""
        self._skip()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                # other errors are those of a number with too many digits, and of too many brackets
                if self._is_whole or not isinstance(error, json.JSONDecodeError):
                    raise self._malformed(str(error).partition(":")[0]) from None
                self._more()
                continue
            # a number may go on
            if end < len(self._text) or self._is_whole:
                self._at = end
                return value
            self._more()

    def end(self) -> None:
        """Nothing may follow."""
        self._skip()
        if self._at < len(self._text):
            raise self._malformed("something follows the object")

    def _skip(self) -> None:
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or self._is_whole:
                return
            self._more()

    def _more(self) -> None:
        # as much again as there is, so that a long value is not decoded too often
        rest = self._text[self._at :]
        if len(rest) > self._most:
            what = f"a request of the batch is larger than {self._most:,} bytes"
            raise RequestTooLarge(what, hint="shorten the prompt, or raise server.max_body")
        raw = self._body.read(max(_READ_BYTES, len(rest)))
        self._is_whole = not raw
        try:
            self._text, self._at = rest + self._decode(raw, self._is_whole), 0
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8: {error.reason}", hint="send UTF-8") from None

    def _malformed(self, what: str) -> InvalidRequest:
        near = self._text[self._at : self._at + 20]
        return InvalidRequest(f"the body is not valid JSON: {what} at '{near}'", hint=_HINT)
