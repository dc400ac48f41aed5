"""Requests that do not fit the context, in the words by which clients of each API recognise them: they then compact the
conversation or ask for less.

Source: errors of OpenAI's API and vLLM ("This model's maximum context length is"), of Anthropic's API ("prompt is too
long", "exceed context limit"), and their readers in LiteLLM, LangChain, Claude Code, Cline and opencode.
"""

from __future__ import annotations

import re

from policies.errors import ContextExceeded, Overflow

_OPENAIS = "This model's maximum context length is"
_ANTHROPICS = re.compile(r"^(?:prompt is too long|input length and `max_tokens` exceed context limit)")
_MOST_CHARACTERS = 2000

_N = r"(\d{1,12})"
_CONTEXT = (
    rf"context (?:length|window|size)(?: is| of)? ?\(?(?:only )?{_N}",
    rf"maximum (?:allowed|model) length (?:of )?\(?{_N}",
    rf"> {_N}(?: maximum|$|,)",
    rf"(?:must have less than|must be <=) {_N}",
    rf"maximum number of tokens allowed \({_N}",
    rf"with {_N} maximum context length",
)
_PROMPT = (
    rf"{_N} input tokens",
    rf"{_N} tokens from the input",
    rf"resulted in {_N} tokens",
    rf"{_N} (?:tokens )?in (?:the|your) (?:messages|prompt)",
    rf"{_N} `inputs` tokens",
    rf"(?:request|input|prompt|input length|decoder prompt) \((?:length )?{_N}",
    rf"[Gg]iven: {_N}",
    rf"too long: {_N}",
    rf"limit: {_N} \+",
    rf"token count \({_N}",
    rf"[Pp]rompt contains {_N}",
)
_ANSWER = (
    rf"{_N} output tokens",
    rf"{_N} tokens for the completion",
    rf"{_N} in (?:the|your) completion",
    rf"{_N} `max_new_tokens`",
    rf"\+ {_N} >",
    rf"is too large: {_N}",
)


def openai_words(error: ContextExceeded) -> str:
    """The message of OpenAI's APIs: its own, if a client recognises that."""
    own = error.public_message
    if _OPENAIS in own:
        return own
    overflow = _overflow_of(error)
    if overflow is None:
        return f"{_OPENAIS} exceeded. However, there are no numbers: {own}"
    return f"{ContextExceeded.of(overflow).message}: {own}"


def anthropic_words(error: ContextExceeded) -> str:
    """The message of Anthropic's API."""
    own = error.public_message
    if _ANTHROPICS.match(own):
        return own
    overflow = _overflow_of(error)
    if overflow is None or overflow.prompt_tokens + (overflow.answer_tokens or 0) < overflow.context_tokens:
        return f"prompt is too long: {own}"
    prompt, answer, context, _ = overflow
    if answer is None or prompt > context:
        return f"prompt is too long: {prompt} tokens > {context} maximum: {own}"
    sizes = f"{prompt} + {answer} > {context}"
    return f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens`: {own}"


def _overflow_of(error: ContextExceeded) -> Overflow | None:
    """The numbers of the error, or those in the words of its engine."""
    if error.overflow is not None:
        return error.overflow
    text = re.sub(r"(?<=\d),(?=\d{3})", "", error.message[:_MOST_CHARACTERS])
    prompt, context = _number(_PROMPT, text), _number(_CONTEXT, text)
    if prompt is None or context is None:
        return None
    return Overflow(prompt, _number(_ANSWER, text), context, at_least="at least" in text)


def _number(patterns: tuple[str, ...], text: str) -> int | None:
    found = (re.search(pattern, text, re.IGNORECASE) for pattern in patterns)
    return next((int(match[1]) for match in found if match), None)
