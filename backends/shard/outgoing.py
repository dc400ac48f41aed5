"""Messages that a router still has to send on one shard's stream, and their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shards.kv.keys import TOKEN_BYTES
from shards.wire import limits
from shards.wire.v1 import shard_pb2 as wire


@dataclass(slots=True)
class _Upload:
    token_ids: memoryview
    sent_bytes: int
    allowed_bytes: int


class Outgoing:
    """Commands first, in order; then prompts, one piece each in turn, as far as the shard's window lets them.

    A prompt is never copied into a queue: its pieces are cut when the stream can take one. The number of commands is
    bounded by that of requests (`has_room`).
    """

    def __init__(self, window_tokens: int, most_commands: int = 8192) -> None:
        self._window_bytes = window_tokens * TOKEN_BYTES
        self._most_commands = most_commands
        self._commands: deque[wire.Command] = deque()
        self._uploads: dict[int, _Upload] = {}

    def __repr__(self) -> str:
        return f"<Outgoing {len(self._commands)} commands, {len(self._uploads)} prompts>"

    @property
    def has_room(self) -> bool:
        """Whether another request may be submitted."""
        return len(self._commands) < self._most_commands

    def submit(self, submit: wire.Submit, token_ids: bytes) -> None:
        """Say `submit`, then its prompt."""
        self._commands.append(wire.Command(submit=submit))
        self._uploads[submit.request] = _Upload(memoryview(token_ids), 0, self._window_bytes)

    def say(self, command: wire.Command) -> None:
        """Say `command`, which belongs to no request."""
        self._commands.append(command)

    def grant(self, request: int, computed_tokens: int) -> None:
        """The shard has computed `computed_tokens` of a prompt: more of it may be sent."""
        if upload := self._uploads.get(request):
            upload.allowed_bytes = max(upload.allowed_bytes, computed_tokens * TOKEN_BYTES + self._window_bytes)

    def cancel(self, request: int) -> None:
        """Say Cancel and nothing more of this request's prompt."""
        self.drop(request)
        self._commands.append(wire.Command(cancel=wire.Cancel(request=request)))

    def drop(self, request: int) -> None:
        """Say nothing more of this request's prompt."""
        self._uploads.pop(request, None)

    def next(self) -> wire.Command | None:
        """The next message; None if there is none, or only prompts that wait for their shard."""
        if self._commands:
            return self._commands.popleft()
        for request, upload in self._uploads.items():
            end = min(len(upload.token_ids), upload.allowed_bytes, upload.sent_bytes + limits.PROMPT_PIECE_BYTES)
            if end > upload.sent_bytes:
                piece = bytes(upload.token_ids[upload.sent_bytes : end])
                upload.sent_bytes = end
                # to the end of the line: prompts take turns
                del self._uploads[request]
                if end < len(upload.token_ids):
                    self._uploads[request] = upload
                return wire.Command(prompt=wire.Prompt(request=request, token_ids=piece))
        return None

    def check(self) -> None:
        """Raise AssertionError if a prompt was sent beyond its window, or is done and still here."""
        for upload in self._uploads.values():
            assert upload.sent_bytes <= upload.allowed_bytes, "a prompt is beyond its window"
            assert upload.sent_bytes < len(upload.token_ids), "a prompt that was sent is still here"
