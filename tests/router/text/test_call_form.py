"""Second turns with calls and their results, in templates of each kind, beside transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocols.openai.request import chat_ask
from router.text.call_form import CallForm, form_of
from router.text.chat_template import ChatTemplate

_REST = "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"


def _template(of_calls: str) -> str:
    shown = "{% if m.role == 'assistant' and m.tool_calls is defined %}" + of_calls + _REST
    return "{{ bos_token }}{% for m in messages %}" + shown + "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


ADDED = "{% for c in m.tool_calls %}{{ c.function.name + '\\n' + c.function.arguments + '</c>' }}{% endfor %}"
"""Arguments are added to a text, as in all templates of DeepSeek."""

PRINTED = (
    "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}"
)
PAIRS = (
    "{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}{% endfor %}"
)
TEMPLATES = {
    "an object": (_template("{{ m.content or '' }}" + PRINTED), CallForm()),
    "pairs of an object": (_template(PAIRS), CallForm()),
    "a text": (_template("{{ m.content or '' }}" + ADDED), CallForm(has_text=True)),
    "a text beside content that may be null": (
        _template("{% if m.content is none %}" + ADDED + "{% else %}{{ m.content }}" + ADDED + "{% endif %}"),
        CallForm(has_text=True),
    ),
    "a text beside null alone": (
        _template("{% if m.content is none %}" + ADDED + "{% else %}{{ m.content }}{% endif %}"),
        CallForm(has_text=True, has_null=True),
    ),
    "an object beside null alone": (
        _template("{% if m.content is none %}" + PRINTED + "{% else %}{{ m.content }}{% endif %}"),
        CallForm(has_null=True),
    ),
    "either": (_template(EITHER), CallForm()),
}


def _turns(*arguments: str, content: str | None) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": "get", "arguments": each}}
        for at, each in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    return [
        {"role": "user", "content": "how is it?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "and now?"},
    ]


def _rendered(source: str, messages: list[dict[str, Any]]) -> str:
    template = ChatTemplate({"chat_template.jinja": source.encode(), "tokenizer_config.json": b'{"bos_token": "<s>"}'})
    (chat,) = chat_ask({"model": "m", "messages": messages}).inputs
    assert not isinstance(chat, str | bytes)
    return template.render(template.with_calls(chat))


@pytest.mark.torch
@pytest.mark.parametrize("content", [None, "", "let me see"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_and_results_are_rendered_as_transformers_renders_them(kind: str, content: str | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source, form = TEMPLATES[kind]
    messages = _turns('{"city":"Oslo"}', '{"city": "Rome", "days": [1, 2.0]}', content=content)
    ours = _rendered(source, messages)
    theirs = deepcopy(messages)
    if not form.has_text:
        for call in theirs[1]["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if not content:
        theirs[1]["content"] = None if form.has_null else ""
    rendered: Any = render_jinja_template(
        [theirs], chat_template=source, bos_token="<s>", tools=None, add_generation_prompt=True
    )
    assert ours == rendered[0][0]
    assert "get" in ours or (form.has_null and content)


@pytest.mark.parametrize(("source", "form"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_form_is_found_by_trying(source: str, form: CallForm) -> None:
    template = ChatTemplate({"chat_template.jinja": source.encode()})
    assert form_of(template.render) == form


@pytest.mark.parametrize(
    "source", ["{{ tool_calls }}", "{{ raise_exception('no tool_calls') }}", "{{ 1 // 0 }}tool_calls"]
)
def test_a_template_that_shows_no_calls_gets_the_usual_form(source: str) -> None:
    assert form_of(ChatTemplate({"chat_template.jinja": source.encode()}).render) == CallForm()


@given(st.dictionaries(st.text(max_size=8), st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists)))
def test_arguments_that_stand_in_a_text_are_the_clients_own_words(arguments: dict[str, Any]) -> None:
    source, _ = TEMPLATES["a text"]
    for written in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))):
        assert f"get\n{written}</c>" in _rendered(source, _turns(written, content=None))


@pytest.mark.parametrize(("written", "shown"), [("", "{}"), ("{bro", "{bro"), ("[1]", "[1]"), ("null", "null")])
def test_arguments_that_are_no_object_lose_no_conversation(written: str, shown: str) -> None:
    assert f"get\n{shown}</c>" in _rendered(TEMPLATES["a text"][0], _turns(written, content=None))
    assert '"arguments": {}' in _rendered(TEMPLATES["an object"][0], _turns(written, content=None))
