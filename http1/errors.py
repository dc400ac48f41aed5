"""Failures of HTTP itself: of what a client sent, and of what a server answered."""

from __future__ import annotations


class HttpError(Exception):
    """A request that cannot be served, with the status that says so."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class BadRequest(HttpError):
    """Bytes that are no HTTP, or that two programs could read differently."""

    def __init__(self, reason: str) -> None:
        super().__init__(400, reason)


class BodyTimeout(HttpError):
    """Nothing of the body came for the longest silence that is allowed."""

    def __init__(self, silence_s: float) -> None:
        super().__init__(408, f"nothing of the body came for {silence_s:g} s")


class BodyTooLarge(HttpError):
    """A body of more bytes than are allowed."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(413, f"the body is larger than {most_bytes} bytes")


class HeadTooLarge(HttpError):
    """More headers, or longer ones, than are allowed."""

    def __init__(self, most: str) -> None:
        super().__init__(431, f"the head of the request has more than {most}")


class ClientGone(ConnectionError):
    """The client closed its connection."""


class AnswerError(Exception):
    """A request to a server that got no complete answer."""


class Unconnected(AnswerError):
    """No connection: refused, not found, too late, or too many are open. The server has seen nothing of the request."""


class Disconnected(AnswerError):
    """The connection ended before the answer did."""


class IdleDisconnected(Disconnected):
    """A connection that had lain idle ended before anything of an answer came: its server may have closed it before the
    request came, or have the request.
    """


class AnswerTimeout(AnswerError):
    """The server was silent for longer than is allowed."""


class BadAnswer(AnswerError):
    """Bytes that are no HTTP, or more than is allowed."""
