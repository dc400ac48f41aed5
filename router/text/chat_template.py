"""Chat templates as Hugging Face's models bring them: Jinja in a sandbox, with the names that they rely on."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from policies.errors import InvalidRequest
from router.ask import Chat
from router.text.tool_calls import format_of

_HINT = "check the roles of the messages, their order and their fields"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns conversations into prompts the way `transformers.apply_chat_template` does.

    `assets` are a model's files by name: chat_template.jinja, else `chat_template` in tokenizer_config.json.
    """

    def __init__(self, assets: Mapping[str, bytes], now: Callable[[], dt.datetime] = dt.datetime.now) -> None:
        settings = json.loads(assets.get("tokenizer_config.json") or b"{}")
        self._special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name) is not None}
        sources = _sources(settings.get("chat_template"), assets.get("chat_template.jinja"))
        self._templates = {name: compiled(source, now) for name, source in sources.items()}
        self.tool_format = format_of("".join(sources.values()))

    def __repr__(self) -> str:
        return f"<ChatTemplate {', '.join(self._templates) or 'none'}>"

    def render(self, chat: Chat) -> str:
        """The prompt for `chat`. Raises InvalidRequest if the model has no template or its template objects."""
        template = (chat.tools and self._templates.get("tool_use")) or self._templates.get("default")
        if template is None:
            raise InvalidRequest("this model has no chat template", hint="use /v1/completions", param="messages")
        names = {
            **self._special,
            **chat.variables,
            "messages": chat.messages,
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": chat.opens_answer,
        }
        try:
            text = template.render(names)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template: {error}", hint=_HINT, param="messages") from error
        return _until_last_message(text, chat) if chat.continues else text


def compiled(source: str, now: Callable[[], dt.datetime] = dt.datetime.now) -> Template:
    """The template that `source` is. Raises ValueError with a sentence that says where it is wrong."""
    try:
        return _environment(now).from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"is no chat template, line {error.lineno}: {error.message}") from error


def _until_last_message(text: str, chat: Chat) -> str:
    last = str(chat.messages[-1]["content"]).strip()
    end = text.rfind(last)
    if end < 0:
        hint = "leave `continue_final_message` out"
        raise InvalidRequest("the model's chat template changes the last message", hint=hint, param="messages")
    return text[: end + len(last)]


def _environment(now: Callable[[], dt.datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _sources(configured: str | list[dict[str, str]] | None, file: bytes | None) -> dict[str, str]:
    """Template sources by name. The file of its own wins over the one in the configuration, as in transformers."""
    if file is not None:
        return {"default": file.decode()}
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    return {} if configured is None else {"default": configured}


def _content(token: str | dict[str, Any]) -> str:
    """Special tokens are texts, or objects with more than the text."""
    return token if isinstance(token, str) else str(token["content"])


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which would change what the model reads
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
