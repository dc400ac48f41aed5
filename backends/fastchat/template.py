"""A worker's conversation template: from messages to the text that its model was trained to continue. Pure.

Styles are numbers that later versions of FastChat shifted from 8 on, so those that are known are the seven before, and
ChatML, which its roles give away.

Source: FastChat's conversation templates (`Conversation`, `SeparatorStyle`); its OpenAI server for how they are filled.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.openai.messages import content_of, refuse_unknown_members
from policies.errors import BackendFailed, InvalidRequest

_CHATML_ROLE = "<|im_start|>"


class Style(enum.IntEnum):
    """How roles and messages are set apart; the numbers are FastChat's, but for CHATML."""

    COLON_ONE_SEPARATOR = 1
    COLON_TWO_SEPARATORS = 2
    COLON_SPACE = 3
    PLAIN = 4
    PLAIN_TWO_SEPARATORS = 5
    NEW_LINE = 6
    LLAMA2 = 7
    CHATML = 1000


@dataclass(frozen=True, slots=True)
class Conversation:
    """A template. `style` None: not known here. `turns` are (role, text) that come before the client's."""

    style: Style | None
    system_template: str
    system: str
    roles: tuple[str, str]
    separators: tuple[str, str]
    turns: tuple[tuple[str, str], ...] = ()
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


def conversation_of(reply: Any) -> Conversation:
    """The template in {conv}. Raises BackendFailed at nonsense."""
    try:
        conv = reply["conv"]
        roles, stop = tuple(map(str, conv["roles"])), conv.get("stop_str") or ()
        first = str(conv.get("sep") or "")
        return Conversation(
            style=_style(int(conv["sep_style"] or 0), roles[0]),
            system_template=str(conv["system_template"]),
            system=str(conv.get("system_message") or ""),
            roles=(roles[0], roles[1]),
            separators=(first, str(conv.get("sep2") or "")),
            turns=tuple((str(role), str(text)) for role, text in conv.get("messages") or ()),
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(conv.get("stop_token_ids") or ()),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BackendFailed("a worker's conversation template is nonsense") from error


def rendered(messages: Sequence[Mapping[str, Any]], template: Conversation | None) -> str:
    """`messages` as the text to continue, up to where the assistant speaks. Raises InvalidRequest."""
    if template is None or template.style is None:
        raise InvalidRequest(
            "this worker's conversation template is not known", hint="send a text completion", param="messages"
        )
    turns = list(template.turns)
    for at, message in enumerate(messages):
        text = _text(message, f"messages[{at}]")
        if message["role"] in ("system", "developer"):
            template = replace(template, system=text)
        elif message["role"] in ("user", "assistant"):
            turns.append((template.roles[message["role"] == "assistant"], text))
        else:
            raise InvalidRequest(f"FastChat knows no role '{message['role']}'", param=f"messages[{at}].role")
    assert template.style is not None
    return _RENDER[template.style](template, turns)


def _text(message: Mapping[str, Any], where: str) -> str:
    refuse_unknown_members(message, (), "FastChat", where)
    content = content_of(message) or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise InvalidRequest("FastChat's workers take text alone", param=f"{where}.content")
    return "\n".join(part["text"] for part in content)


def _style(number: int, role: str) -> Style | None:
    if role.startswith(_CHATML_ROLE):
        return Style.CHATML
    return Style(number) if 1 <= number <= Style.LLAMA2 else None


def _system(template: Conversation) -> str:
    return template.system_template.replace("{system_message}", template.system)


def _joined(
    template: Conversation,
    turns: Sequence[tuple[str, str]],
    *,
    head: str,
    between: str,
    opening: str,
    ends: Sequence[str],
) -> str:
    """Each turn as role, `between`, text and one of `ends` in turn; then the assistant's role with `opening`.

    A turn without text is only opened, as FastChat has it.
    """
    parts = [
        role + between + text + ends[at % len(ends)] if text else role + opening
        for at, (role, text) in enumerate(turns)
    ]
    return head + "".join(parts) + template.roles[1] + opening


def _colon(template: Conversation, turns: Sequence[tuple[str, str]]) -> str:
    first, second = template.separators
    ends = (first, second) if template.style is Style.COLON_TWO_SEPARATORS else (first,)
    opening = ": " if template.style is Style.COLON_SPACE else ":"
    return _joined(template, turns, head=_system(template) + first, between=": ", opening=opening, ends=ends)


def _plain(template: Conversation, turns: Sequence[tuple[str, str]]) -> str:
    ends = template.separators if template.style is Style.PLAIN_TWO_SEPARATORS else template.separators[:1]
    return _joined(template, turns, head=_system(template), between="", opening="", ends=ends)


def _lines(template: Conversation, turns: Sequence[tuple[str, str]]) -> str:
    system, end = _system(template), template.separators[0]
    end += "\n" if template.style is Style.CHATML else ""
    return _joined(template, turns, head=system and system + end, between="\n", opening="\n", ends=(end,))


def _llama2(template: Conversation, turns: Sequence[tuple[str, str]]) -> str:
    parts = [_system(template) if template.system else "[INST] "]
    for at, (_, text) in enumerate(turns):
        tag, end = template.roles[at % 2], template.separators[at % 2]
        parts.append(tag if not text else f"{text} " if at == 0 else f"{tag} {text}{end}")
    return "".join(parts) + template.roles[len(turns) % 2]


_RENDER = {
    Style.COLON_ONE_SEPARATOR: _colon,
    Style.COLON_TWO_SEPARATORS: _colon,
    Style.COLON_SPACE: _colon,
    Style.PLAIN: _plain,
    Style.PLAIN_TWO_SEPARATORS: _plain,
    Style.NEW_LINE: _lines,
    Style.CHATML: _lines,
    Style.LLAMA2: _llama2,
}
