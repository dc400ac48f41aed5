from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest

from policies.errors import InvalidRequest
from router.ask import Chat
from router.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<b>&'\"é"}, {"role": "assistant", "content": " yes "}]


def a_template(source: str | list[dict[str, str]], **settings: object) -> ChatTemplate:
    assets = {"tokenizer_config.json": json.dumps({"chat_template": source, **settings}).encode()}
    return ChatTemplate(assets, now=lambda: dt.datetime(2026, 3, 1))


def rendered(source: str, chat: Chat | None = None, **settings: object) -> str:
    return a_template(source, **settings).render(chat or Chat(MESSAGES))


def test_templates_have_the_names_and_manners_that_models_rely_on() -> None:
    assert rendered("{{ bos_token }}{{ eos_token }}", bos_token="<s>", eos_token={"content": "</s>"}) == "<s></s>"
    assert rendered("{{ messages[0].content }}") == "<b>&'\"é"
    assert rendered("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<b>&\'\\"é"}'
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "01 Mar 2026"
    assert rendered("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert rendered("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "user"
    assert rendered("{% generation %}{{ messages[1].content }}{% endgeneration %}") == " yes "
    assert rendered("{{ tools is none }} {{ documents is none }}") == "True True"
    assert rendered("{{ add_generation_prompt }}", Chat(MESSAGES, opens_answer=False)) == "False"
    assert rendered("{{ enable_thinking }}", Chat(MESSAGES, variables={"enable_thinking": 5, "messages": 1})) == "5"


@pytest.mark.torch
def test_it_renders_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{{ bos_token }}{%- for m in messages %}\n  {%- if m.role == 'user' %}\n[{{ m.content | trim }}]\n"
        "{%- else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}\n"
        "{%- endfor %}\n{{ tools | tojson(indent=2) }}"
    )
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    theirs: Any = render_jinja_template([MESSAGES], tools=tools, chat_template=source, bos_token="<s>")
    assert rendered(source, Chat(MESSAGES, tools), bos_token="<s>") == theirs[0][0]


def test_a_template_of_its_own_for_tools_is_used_when_there_are_tools() -> None:
    template = a_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert template.render(Chat(MESSAGES)) == "plain"
    assert template.render(Chat(MESSAGES, tools=[{}])) == "tools"


def test_a_template_in_a_file_wins() -> None:
    assets = {"chat_template.jinja": b"file", "tokenizer_config.json": b'{"chat_template": "config"}'}
    assert ChatTemplate(assets).render(Chat(MESSAGES)) == "file"


def test_a_last_message_that_is_continued_ends_the_prompt() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    assert rendered(source, Chat(MESSAGES, continues=True)).endswith("<assistant> yes ")
    trimming = source.replace("m.content", "m.content | trim")
    assert rendered(trimming, Chat(MESSAGES, continues=True)).endswith("<assistant>yes")
    repeating = source + "{{ messages[-1].content }}"
    assert rendered(repeating, Chat(MESSAGES, continues=True)).endswith("</> yes ")
    again = [{"role": "user", "content": " yes "}, {"role": "assistant", "content": " "}]
    assert rendered(source, Chat(again, continues=True)) == "<user> yes </><assistant> "
    with pytest.raises(InvalidRequest, match="changes the last message"):
        rendered("nothing", Chat(MESSAGES, continues=True))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_what_a_template_objects_to_is_the_clients_mistake(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered(source)
    assert caught.value.hint
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate({}).render(Chat(MESSAGES))


def test_templates_that_loop_over_content_get_lists_and_others_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    chat = Chat(
        [
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "", "tool_calls": [{}]},
            {"role": "tool", "content": "r1\nr2"},
            {"role": "user", "content": "plain"},
        ],
        parts={0: parts, 1: [], 2: parts},
    )
    looping = "{% for m in messages %}{% for p in m.content if m.role != 'tool' %}{% endfor %}{% endfor %}"
    contents = "{{ messages | map(attribute='content') | list | tojson }}"
    assert json.loads(rendered(contents, chat)) == ["a\nb", "", "r1\nr2", "plain"]
    assert json.loads(rendered(looping + contents, chat)) == [
        parts,
        [],
        "r1\nr2",
        [{"type": "text", "text": "plain"}],
    ]


def test_a_template_without_developers_gets_one_system_message_in_their_place() -> None:
    messages = [
        {"role": "developer", "content": "d", "tools": None},
        {"role": "user", "content": "u"},
        {"role": "system", "content": "s"},
    ]
    assert json.loads(rendered("{{ messages | tojson }}", Chat(messages))) == [
        {"role": "system", "content": "d\n\ns"},
        {"role": "user", "content": "u"},
    ]
    knowing = "{{ messages | tojson }}{% if messages[0].role == 'developer' %}{% endif %}"
    assert json.loads(rendered(knowing, Chat(messages))) == messages
    assert json.loads(rendered("{{ messages | tojson }}", Chat(messages[1:]))) == messages[1:]


@pytest.mark.torch
@pytest.mark.parametrize(
    "template", ["{{ m.content }}", "{{ m.content | trim }}", "{% for p in m.content %}{{ p.text }}-{% endfor %}"]
)
@pytest.mark.parametrize("content", ["yes", " yes ", "yes\n\n", "é <|x|>"])
def test_a_last_message_is_continued_as_transformers_does(template: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{% for m in messages %}<{{ m.role }}>" + template + "</>{% endfor %}"
    in_parts = "p.text" in template
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]
    listed: Any = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    theirs: Any = render_jinja_template(
        [listed if in_parts else messages], chat_template=source, continue_final_message=True
    )
    assert rendered(source, Chat(messages, continues=True, opens_answer=False)) == theirs[0][0]


def test_nothing_can_be_continued_that_has_no_text() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        rendered(source, Chat(MESSAGES[:1], continues=True, parts={0: []}))


def test_special_tokens_of_a_models_own_have_their_names() -> None:
    settings = {"extra_special_tokens": {"image_token": "<img>", "other": {"content": "<o>"}}, "bos_token": "<s>"}
    assert rendered("{{ bos_token }}{{ image_token }}{{ other }}{{ eos_token }}", **settings) == "<s><img><o>"
    assets = {
        "special_tokens_map.json": b'{"bos_token": {"content": "<m>"}}',
        "chat_template.jinja": b"{{ bos_token }}",
    }
    assert ChatTemplate(assets).render(Chat(MESSAGES)) == "<m>"
    assert ChatTemplate({"chat_template.json": b'{"chat_template": "json"}'}).render(Chat(MESSAGES)) == "json"
