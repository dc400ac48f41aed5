"""The form in which a chat template needs calls of tools: found by trying it, since templates do not tell.

Most take arguments as an object and print it as JSON; DeepSeek's add them to a text, so they must be one. Some show a
call only if the message has no content at all. transformers leaves both to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from msgspec.structs import replace

from policies.errors import InvalidRequest
from router.ask import Chat
from router.text.conversation import Arguments, Message

_NAME, _KEY = "tried_function", "tried_key"
_WRITTEN = f'{{"{_KEY}": "a"}}'
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls stand in messages. `has_text`: their arguments are JSON in a text, else an object. `has_null`: an empty
    content beside them is null, else an empty text.
    """

    has_text: bool = False
    has_null: bool = False

    def chat(self, chat: Chat) -> Chat:
        """`chat` with its calls in this form."""
        if not (self.has_text or self.has_null) or not any("tool_calls" in message for message in chat.messages):
            return chat
        return replace(chat, messages=[self._message(message) for message in chat.messages])

    def _message(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.has_text:
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        return {**message, "content": None} if self.has_null and not message["content"] else message


def form_of(render: Callable[[Chat], str]) -> CallForm:
    """The first form in which `render` shows a call and its arguments; the usual one if none does."""
    for has_text, has_null in product((False, True), repeat=2):
        form = CallForm(has_text=has_text, has_null=has_null)
        try:
            text = render(form.chat(Chat(_tried(), _TOOLS)))
        except InvalidRequest:
            continue
        # an object that is printed as Python does is no JSON
        if _NAME in text and (_WRITTEN in text if has_text else _KEY in text and f"'{_KEY}'" not in text):
            return form
    return CallForm()


def _tried() -> Sequence[Message]:
    function = {"arguments": Arguments({_KEY: "a"}, _WRITTEN), "name": _NAME}
    # an id of nine letters, as Mistral's templates want it
    call = {"id": "abcdefghi", "function": function, "type": "function"}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "abcdefghi"},
    ]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": arguments.text}}
