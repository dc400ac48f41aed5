from __future__ import annotations

from typing import Any

import pytest

from backends.anthropic.prompt import messages_body
from backends.fastchat.template import conversation_of, rendered
from backends.ollama.body import messages_of
from backends.openai.messages import content_of
from policies.errors import InvalidRequest
from policies.nouns import Prompt
from tests.backends.fastchat.test_template import a_template
from tests.backends.parts import a_request

TEMPLATE = conversation_of(a_template(sep_style=1))
ELSEWHERE: dict[str, Any] = {
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
    "reasoning_content": "Hm.",
    "annotations": [{"type": "url_citation"}],
    "refusal": None,
}
"""The content of a message from another kind of backend."""


def test_a_refusal_is_the_text_of_its_message_wherever_it_stands() -> None:
    part = {"type": "refusal", "refusal": "No."}
    assert content_of({"content": [part, {"type": "text", "text": "b"}]}) == [
        {"type": "text", "text": "No."},
        {"type": "text", "text": "b"},
    ]
    assert content_of({"content": None, "refusal": "No."}) == "No."
    assert content_of({"content": "a", "refusal": None}) == "a"
    assert content_of({"content": None}) is None


def a_conversation(**of_the_assistant: Any) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "A.", **of_the_assistant}
    return [{"role": "user", "content": "Hello"}, answer, {"role": "user", "content": "Go on."}]


@pytest.mark.parametrize(
    "message", [{"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}]
)
def test_a_conversation_with_a_refusal_goes_to_any_backend(message: dict[str, Any]) -> None:
    messages = a_conversation(**message)
    assert messages_of(messages)[1]["content"] == "No."
    assert "No." in rendered(messages, TEMPLATE)
    sent = messages_body(a_request(), Prompt(body={"messages": messages}), "m")
    assert sent["messages"][1] == {"role": "assistant", "content": [{"type": "text", "text": "No."}]}


def test_a_conversation_that_another_kind_of_backend_began_goes_on_with_any() -> None:
    messages = a_conversation(**ELSEWHERE)
    assert messages_of(messages)[1] == {"role": "assistant", "content": "A.", "thinking": "Hm."}
    assert "Hm." not in rendered(messages, TEMPLATE)


def test_what_would_change_an_answer_is_refused_by_its_place() -> None:
    for refuse in (messages_of, lambda messages: rendered(messages, TEMPLATE)):
        with pytest.raises(InvalidRequest, match=r"does not know `messages\[1\].audio`") as failure:
            refuse(a_conversation(audio={"id": "a"}))
        assert failure.value.param == "messages[1].audio"
