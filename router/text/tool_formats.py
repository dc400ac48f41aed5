"""How models write calls of tools in their text, by the chat template that teaches it to them.

Hermes and Qwen (`<tool_call>{json}</tool_call>`), Llama 3 (`{"name": ..., "parameters": ...}`, bare or behind
`<|python_tag|>`), Mistral (`[TOOL_CALLS][{json}, ...]`, and `[TOOL_CALLS]name[ARGS]{json}` since its tokenizer v11),
DeepSeek V3, R1 and V3.1 (their tokens around name and arguments), Phi-4-mini and Granite 3
(`<|tool_call|>[{json}, ...]`; `functools[...]`, as Phi-4-mini also writes), GLM-4.5 to 4.7 (`<tool_call>name`, then
pairs of `<arg_key>` and `<arg_value>`), Qwen3-Coder (`<tool_call><function=name>`, then `<parameter=key>`), gpt-oss
(messages to `functions.name`, see `router/text/channels.py`). Sources: the models' published chat templates, and for
`functools` vLLM's parser phi4_mini_json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.ask import Chat

_BETWEEN = r"[\s\[\],;]{0,1024}+"
_MISTRAL_HEAD = re.compile(_BETWEEN + r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BECOME_MISTRAL = re.compile(_BETWEEN + r"(?:[\w.-]+(?:\[[A-Z_]*(?:\]\w*(?:\[[A-Z]*\]?)?)?)?\s*)?")
_DEEPSEEK_HEAD = re.compile(r"\s*(?:\w+<｜tool▁sep｜>)?\s*([^\s<｜{}]+)\s*(?:<｜tool▁sep｜>|```(?:json)?)\s*(?=\{)")
_MAY_BECOME_DEEPSEEK = re.compile(r"[^{}]{0,512}")

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class PairMarks:
    """The marks of a format with arguments as pairs of key and value.

    `name` matches the name of a tool behind the mark that opens its call, and `may_become_name` text that can still
    become that. `closes` ends a call; `ends` may stand behind it. `key` begins a pair, and `pair` matches up to its
    value. A value ends with `end_value`; where `has_lines`, a line break at each of its ends is none of it.
    """

    name: re.Pattern[str]
    may_become_name: re.Pattern[str]
    closes: str
    ends: str
    key: str
    pair: re.Pattern[str]
    may_become_pair: re.Pattern[str]
    end_value: str
    has_lines: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model's format of calls.

    One of `opens` begins them, one of `closes` ends each one; of marks with the same beginning the longest comes first.
    `is_bare`: an answer may begin with a call without an opening mark. `is_listed`: further calls may follow the first
    one without a mark. `head` matches a name that stands before the arguments instead of among them, up to their brace,
    and `may_become` text that can still become that. `pairs`: arguments are pairs of marked texts, not JSON.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    is_bare: bool = False
    is_listed: bool = False
    head: re.Pattern[str] | None = None
    may_become: re.Pattern[str] = re.compile(_BETWEEN)
    pairs: PairMarks | None = None


HERMES = ToolFormat("hermes", ("<tool_call>",), ("</tool_call>",))
LLAMA = ToolFormat("llama", ("<|python_tag|>",), is_bare=True, is_listed=True)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), is_listed=True, head=_MISTRAL_HEAD, may_become=_MAY_BECOME_MISTRAL)
MISTRAL_11 = ToolFormat(
    "mistral 11", ("[TOOL_CALLS]",), is_listed=True, head=_MISTRAL_HEAD, may_become=_MAY_BECOME_MISTRAL
)
DEEPSEEK_3 = ToolFormat(
    "deepseek 3",
    (_CALLS + _CALL, _CALL),
    ("```" + _END_CALL + _END_CALLS, "```" + _END_CALL, _END_CALL + _END_CALLS, _END_CALL),
    head=_DEEPSEEK_HEAD,
    may_become=_MAY_BECOME_DEEPSEEK,
)
DEEPSEEK_31 = ToolFormat(
    "deepseek 3.1",
    (_CALLS + _CALL, _CALL),
    (_END_CALL + _END_CALLS, _END_CALL),
    head=_DEEPSEEK_HEAD,
    may_become=_MAY_BECOME_DEEPSEEK,
)
PHI_4 = ToolFormat("phi 4", ("<|tool_call|>", "functools["), ("<|/tool_call|>",), is_listed=True)
HARMONY = ToolFormat(
    "harmony",
    ("<|channel|>commentary to=functions.",),
    ("<|call|>", "<|end|>"),
    head=re.compile(r"([\w.-]+)\s*(?:<\|constrain\|>\s*json)?\s*<\|message\|>\s*(?=\{)"),
    may_become=re.compile(r"[^{}]{0,512}"),
)
"""Of answers that are held to a call; in all others `router/text/channels.py` reads the messages."""

GLM_45 = ToolFormat(
    "glm 4.5",
    ("<tool_call>",),
    ("</tool_call>",),
    pairs=PairMarks(
        name=re.compile(r"\s*([^\s<>{}\"]+)\s*(?=<arg_key>|</tool_call>)"),
        may_become_name=re.compile(
            r"\s*(?:[^\s<>{}\"]{1,256}\s*(?:<(?:a(?:r(?:g(?:_(?:k(?:ey?)?)?)?)?)?)?"
            r"|</(?:t(?:o(?:o(?:l(?:_(?:c(?:a(?:ll?)?)?)?)?)?)?)?)?)?)?"
        ),
        closes="</tool_call>",
        ends="",
        key="<arg_key>",
        pair=re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
        may_become_pair=re.compile(r"<arg_key>[^<]*(?:</?(?:arg_key>?|arg_ke?|arg_?|arg?|a?)\s*(?:<[arg_vlue]*)?)?"),
        end_value="</arg_value>",
    ),
)
QWEN_3_CODER = ToolFormat(
    "qwen 3 coder",
    ("<tool_call>", "<function="),
    ("</tool_call>",),
    pairs=PairMarks(
        name=re.compile(r"\s*(?:<function=)?([^\s<>{}\"=]+)>\s*"),
        may_become_name=re.compile(
            r"\s*(?:<(?:f(?:u(?:n(?:c(?:t(?:i(?:on?)?)?)?)?)?)?)?|(?:<function=)?[^\s<>{}\"=]{0,256})?"
        ),
        closes="</function>",
        ends="</tool_call>",
        key="<parameter=",
        pair=re.compile(r"\s*<parameter=([^<>\n]+)>(?:\n|(?=[^\n]))"),
        may_become_pair=re.compile(r"<parameter=[^<>\n]*>?"),
        end_value="</parameter>",
        has_lines=True,
    ),
)


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How calls may stand in one answer: the model's format, and the request's tools by name with their parameters'
    schemas.
    """

    format: ToolFormat
    names: frozenset[str]
    schemas: Mapping[str, Any] = field(default_factory=dict)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; None if it is not one of those above."""
    if "<|channel|>" in template:
        return HARMONY
    if _CALL in template:
        return DEEPSEEK_3 if "```json" in template else DEEPSEEK_31
    if HERMES.opens[0] in template:
        if "<function=" in template and "<parameter=" in template:
            return QWEN_3_CODER
        return GLM_45 if "<arg_key>" in template else HERMES
    if MISTRAL.opens[0] in template:
        return MISTRAL_11 if "[ARGS]" in template else MISTRAL
    if PHI_4.opens[0] in template or "<|/tool|>" in template:
        return PHI_4
    is_llama = LLAMA.opens[0] in template or ("ipython" in template and '"parameters"' in template)
    return LLAMA if is_llama else None


def syntax_of(chat: Chat, tool_format: ToolFormat | None) -> ToolSyntax | None:
    """The syntax of calls in the answer to `chat`; None without tools or without a format of the model."""
    if tool_format is None or not chat.tools:
        return None
    functions = [tool["function"] for tool in chat.tools]
    schemas = {str(function["name"]): function.get("parameters") for function in functions}
    return ToolSyntax(tool_format, frozenset(schemas), schemas)
