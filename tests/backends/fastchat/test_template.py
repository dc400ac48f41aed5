from __future__ import annotations

from typing import Any

import pytest

from backends.fastchat.template import conversation_of, rendered
from policies.errors import BackendFailed, InvalidRequest

TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Who?"},
]
LLAMA2 = {"sep_style": 7, "roles": ["[INST]", "[/INST]"]}


def a_template(**fields: Any) -> dict[str, Any]:
    usual = {"system_template": "{system_message}", "system_message": "S.", "roles": ["U", "A"], "sep": "|"}
    return {"conv": {**usual, "messages": [], "sep2": "/", "stop_str": None, "stop_token_ids": None, **fields}}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sep_style": 1}, "S.|U: Hello|A: Hi.|U: Who?|A:"),
        ({"sep_style": 2}, "S.|U: Hello|A: Hi./U: Who?|A:"),
        ({"sep_style": 3}, "S.|U: Hello|A: Hi.|U: Who?|A: "),
        ({"sep_style": 4}, "S.UHello|AHi.|UWho?|A"),
        ({"sep_style": 5}, "S.UHello|AHi./UWho?|A"),
        ({"sep_style": 6}, "S.|U\nHello|A\nHi.|U\nWho?|A\n"),
        ({"sep_style": 6, "system_message": ""}, "U\nHello|A\nHi.|U\nWho?|A\n"),
        (
            {**LLAMA2, "system_template": "[INST] <<SYS>>{system_message}<</SYS>>"},
            "[INST] <<SYS>>S.<</SYS>>Hello [/INST] Hi./[INST] Who?|[/INST]",
        ),
        ({**LLAMA2, "system_message": ""}, "[INST] Hello [/INST] Hi./[INST] Who?|[/INST]"),
        (
            {"sep_style": 9, "roles": ["<|im_start|>user", "<|im_start|>assistant"], "sep": "<|im_end|>"},
            (
                "S.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
                "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        ({"sep_style": 1, "messages": [["U", "1+1"], ["A", "2"]]}, "S.|U: 1+1|A: 2|U: Hello|A: Hi.|U: Who?|A:"),
    ],
)  # fmt: skip
def test_each_style_that_is_known_is_rendered_as_fastchat_does(fields: dict[str, Any], text: str) -> None:
    assert rendered(TURNS, conversation_of(a_template(**fields))) == text


def test_a_system_message_takes_the_templates_place_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert rendered(messages, conversation_of(a_template(sep_style=1))) == "Be kind.|U: a\nb|A:"


def test_a_templates_stops_are_one_or_several() -> None:
    conversation = conversation_of(a_template(sep_style=1, stop_str="</s>", stop_token_ids=[2]))
    assert (conversation.stops, conversation.stop_token_ids) == (("</s>",), (2,))
    assert conversation_of(a_template(sep_style=1, stop_str=["a", "b"])).stops == ("a", "b")


@pytest.mark.parametrize("number", [8, 15, 0, None])
def test_a_style_that_is_not_known_is_refused_and_its_worker_stays_well(number: int | None) -> None:
    with pytest.raises(InvalidRequest, match="template is not known"):
        rendered(TURNS, conversation_of(a_template(sep_style=number)))
    with pytest.raises(InvalidRequest, match="template is not known"):
        rendered(TURNS, None)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": "ada"}, "messages[0].name"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
    ],
)
def test_what_a_template_has_no_place_for_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        rendered([message], conversation_of(a_template(sep_style=1)))
    assert failure.value.param == param


@pytest.mark.parametrize("reply", [None, {}, {"conv": {}}, {"conv": [1]}, a_template(sep_style=1, roles=["U"])])
def test_nonsense_for_a_template_is_a_failure(reply: object) -> None:
    with pytest.raises(BackendFailed):
        conversation_of(reply)
