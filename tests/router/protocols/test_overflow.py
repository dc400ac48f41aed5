from __future__ import annotations

import re

import msgspec
import pytest

from backends.http.errors import error_of
from backends.messages.answer import error_of_anthropic
from policies.errors import ContextExceeded, Overflow
from router.protocols.anthropic.answers import anthropic_failure
from router.protocols.openai.dialect import openai_failure
from router.protocols.overflow import anthropic_words, openai_words
from router.protocols.responses.answers import ResponsesDialect

TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
TOO_MUCH = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
ENGINES = {
    "vLLM": (
        (
            "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens."
            " Please reduce the length of the input messages."
        ),
        (5000, None, 4096),
    ),
    "vLLM, with an answer": (
        (
            "This model's maximum context length is 4096 tokens. However, you requested 100 output tokens and"
            " your prompt contains at least 5000 input tokens, for a total of at least 5100 tokens."
        ),
        (5000, 100, 4096),
    ),
    "vLLM, an answer that is too long": (
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context length is"
            " 4096 tokens and your request has 500 input tokens (4000 > 4096 - 500)."
        ),
        (500, 4000, 4096),
    ),
    "vLLM's engine": (
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        (5000, None, 4096),
    ),
    "OpenAI": (
        (
            "This model's maximum context length is 4097 tokens. However, you requested 5100 tokens (5000 in"
            " the messages, 100 in the completion). Please reduce the length of the messages or completion."
        ),
        (5000, 100, 4097),
    ),
    "OpenAI, without an answer": (
        "This model's maximum context length is 4097 tokens. However, your messages resulted in 5000 tokens.",
        (5000, None, 4097),
    ),
    "OpenAI's responses": ("Your input exceeds the context window of this model.", None),
    "SGLang": (
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        (5000, None, 4096),
    ),
    "SGLang, with an answer": (
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total"
            " of 5100 tokens: 5000 tokens from the input messages and 100 tokens for the completion."
        ),
        (5000, 100, 4096),
    ),
    "llama.cpp": (
        "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        (5000, None, 4096),
    ),
    "Mistral": (
        "Prompt contains 5000 tokens and 0 draft tokens, too large for model with 4096 maximum context length",
        (5000, None, 4096),
    ),
    "Gemini": (
        "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
        (5000, None, 4096),
    ),
    "Bedrock": ("Input is too long for requested model.", None),
    "Groq": ("Please reduce the length of the messages or completion.", None),
    "Anthropic, through a gateway": ("prompt is too long: 5000 tokens > 4096 maximum", (5000, None, 4096)),
}


@pytest.mark.parametrize(("message", "numbers"), ENGINES.values(), ids=ENGINES)
def test_each_engines_refusal_becomes_words_that_clients_of_each_api_recognise(
    message: str, numbers: tuple[int, int | None, int] | None
) -> None:
    error = error_of("b", 400, msgspec.json.encode({"error": {"message": message}}), {})
    assert isinstance(error, ContextExceeded)
    for_openai = msgspec.json.decode(openai_failure(error).body)["error"]
    assert for_openai["code"] == "context_length_exceeded"
    assert "This model's maximum context length is" in for_openai["message"]
    assert message in for_openai["message"]
    for_anthropic = msgspec.json.decode(anthropic_failure(error).body)["error"]
    assert for_anthropic["type"] == "invalid_request_error"
    said = for_anthropic["message"]
    if numbers is None:
        assert said.startswith("prompt is too long: ")
    elif numbers[0] > numbers[2]:
        assert [int(found) for found in TOO_LONG.findall(said)[0]] == [numbers[0], numbers[2]]
    else:
        assert [int(found) for found in TOO_MUCH.findall(said)[0]] == list(numbers)


OURS = [
    (Overflow(5000, None, 4096), "prompt is too long: 5000 tokens > 4096 maximum"),
    (Overflow(5000, 100, 4096), "prompt is too long: 5000 tokens > 4096 maximum"),
    (Overflow(4000, 100, 4096), "input length and `max_tokens` exceed context limit: 4000 + 100 > 4096"),
    (Overflow(5000, None, 4096, at_least=True), "prompt is too long: 5000 tokens > 4096 maximum"),
]


@pytest.mark.parametrize(("overflow", "start"), OURS)
def test_our_own_refusal_begins_with_the_words_of_each_api_and_ends_with_model_and_hint(
    overflow: Overflow, start: str
) -> None:
    error = ContextExceeded.of(overflow, where=" of 'tiny'", hint="shorten the prompt", param="messages")
    assert openai_words(error).startswith("This model's maximum context length is 4096 tokens. However, ")
    assert anthropic_words(error).startswith(start)
    for words in (openai_words(error), anthropic_words(error)):
        assert words.endswith(" of 'tiny' (shorten the prompt)")


def test_anthropics_own_words_stay_as_they_are() -> None:
    message = "input length and `max_tokens` exceed context limit: 4000 + 100 > 4096, decrease input length"
    error = error_of_anthropic("b", 400, msgspec.json.encode({"error": {"message": message}}), {})
    assert isinstance(error, ContextExceeded)
    assert anthropic_words(error) == message
    assert openai_words(error).startswith("This model's maximum context length is 4096 tokens. However, you requested")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("tools", "tools"),
        (None, None),
    ],
)
def test_a_response_names_the_field_of_its_own_api(ours: str | None, theirs: str | None) -> None:
    error = ContextExceeded.of(Overflow(5000, 100, 4096), param=ours)
    assert msgspec.json.decode(ResponsesDialect().failure(error).body)["error"]["param"] == theirs
