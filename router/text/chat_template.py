"""Chat templates of Hugging Face's models: Jinja in a sandbox, with the names that they rely on."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from policies.errors import InvalidRequest
from router.ask import Chat
from router.text.call_form import CallForm, form_of
from router.text.content_format import wants_parts
from router.text.conversation import seen_by_template
from router.text.thoughts import thoughts_in
from router.text.tool_formats import format_of

_HINT = "check the roles of the messages, their order and their fields"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class _Template:
    """One template, and the form of messages that its source needs."""

    template: Template
    source: str
    wants_parts: bool

    @classmethod
    def of(cls, source: str, now: Callable[[], dt.datetime]) -> _Template:
        """The compiled `source`. Raises ValueError."""
        return cls(compiled(source, now), source, wants_parts(_environment(now).parse(source)))

    @property
    def knows_developers(self) -> bool:
        """Whether it handles the role developer."""
        return "'developer'" in self.source or '"developer"' in self.source


class ChatTemplate:
    """Renders conversations into prompts as `transformers.apply_chat_template` does, from messages in the form that
    vLLM passes to it.

    `assets` are a model's files by name: chat_template.jinja, else `chat_template` in tokenizer_config.json, else
    chat_template.json.
    """

    def __init__(self, assets: Mapping[str, bytes], now: Callable[[], dt.datetime] = dt.datetime.now) -> None:
        settings = json.loads(assets.get("tokenizer_config.json") or b"{}")
        self.special_tokens = _special_tokens(settings, json.loads(assets.get("special_tokens_map.json") or b"{}"))
        sources = _sources(settings, assets)
        self.source = sources.get("default")
        self._templates = {name: _Template.of(source, now) for name, source in sources.items()}
        self._forms = {
            name: form_of(self._rendering(template)) if "tool_calls" in template.source else CallForm()
            for name, template in self._templates.items()
        }
        self.tool_format = format_of("".join(sources.values()))
        self.thoughts = thoughts_in("".join(sources.values()))

    def __repr__(self) -> str:
        return f"<ChatTemplate {', '.join(self._templates) or 'none'}>"

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows the model its tools."""
        return any("tools" in template.source for template in self._templates.values())

    def render(self, chat: Chat) -> str:
        """The prompt for `chat`. Raises InvalidRequest if the model has no template or its template objects."""
        return "".join(self.parts(chat))

    def parts(self, chat: Chat) -> Iterator[str]:
        """The prompt for `chat`, in parts as the template makes them, or in one if the last message is continued.

        Raises InvalidRequest if the model has no template or its template objects.
        """
        chosen = self._templates.get(self._name(chat))
        if chosen is None:
            raise InvalidRequest("this model has no chat template", hint="use /v1/completions", param="messages")
        yield from self._parts(chosen, chat)

    def with_calls(self, chat: Chat) -> Chat:
        """`chat` with calls of tools in the form that its template shows. Engines may use another one."""
        form = self._forms.get(self._name(chat))
        return chat if form is None else form.chat(chat)

    def _name(self, chat: Chat) -> str:
        return "tool_use" if chat.tools and "tool_use" in self._templates else "default"

    def _rendering(self, template: _Template) -> Callable[[Chat], str]:
        return lambda chat: "".join(self._parts(template, chat))

    def _parts(self, chosen: _Template, chat: Chat) -> Iterator[str]:
        messages = seen_by_template(chat, wants_parts=chosen.wants_parts, knows_developers=chosen.knows_developers)
        last = _mark_end(messages) if chat.continues else ""
        names = {
            **self.special_tokens,
            "documents": None,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.opens_answer,
        }
        parts = _generated(chosen.template, names)
        if chat.continues:
            yield _until_end("".join(parts), last)
        else:
            yield from parts


def _generated(template: Template, names: Mapping[str, Any]) -> Iterator[str]:
    try:
        yield from template.generate(names)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the model's chat template: {error}", hint=_HINT, param="messages") from error


_END = "\x02end of what is continued\x03 "
"""Stands behind the last message while it is rendered. Templates that strip content remove its last space."""


def _mark_end(messages: list[Mapping[str, Any]]) -> str:
    """Mark the end of the last message; returns its text. Raises InvalidRequest if there is none."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1] = {**messages[-1], "content": content + _END}
        return content
    if content:
        # a part that templates see is a text
        text = str(content[-1]["text"])
        messages[-1] = {**messages[-1], "content": [*content[:-1], {**content[-1], "text": text + _END}]}
        return text
    hint = "give the last message a text, or leave `continue_final_message` out"
    raise InvalidRequest("the last message has nothing to continue", hint=hint, param="messages")


def _until_end(text: str, last: str) -> str:
    """The rendered `text` up to the mark; without trailing white space if the template stripped the message."""
    end = text.rfind(_END.strip(" "))
    if end < 0 or last.strip() not in text:
        hint = "leave `continue_final_message` out"
        raise InvalidRequest("the model's chat template changes the last message", hint=hint, param="messages")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def compiled(source: str, now: Callable[[], dt.datetime] = dt.datetime.now) -> Template:
    """The compiled `source`. Raises ValueError with a sentence and the line of the mistake."""
    try:
        return _environment(now).from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"is not a chat template, line {error.lineno}: {error.message}") from error


def _environment(now: Callable[[], dt.datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _sources(settings: Mapping[str, Any], assets: Mapping[str, bytes]) -> dict[str, str]:
    """Template sources by name. The separate file wins over the one in the configuration, as in transformers."""
    if (file := assets.get("chat_template.jinja")) is not None:
        return {"default": file.decode()}
    configured = settings.get("chat_template")
    if configured is None and (processors := assets.get("chat_template.json")) is not None:
        configured = json.loads(processors).get("chat_template")
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    return {} if configured is None else {"default": configured}


def _special_tokens(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use, the model's own names included."""
    own = settings.get("extra_special_tokens")
    named = {**more, **(own if isinstance(own, dict) else {}), **settings}
    names = (*SPECIAL_TOKENS, *(own if isinstance(own, dict) else ()))
    return {name: text_of_token(named[name]) for name in names if named.get(name) is not None}


def text_of_token(token: str | dict[str, Any]) -> str:
    """The text of a special token, which is a text or an object."""
    return token if isinstance(token, str) else str(token["content"])


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which would change what the model reads
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
