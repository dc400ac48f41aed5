"""Parses OpenAI's text API: a body becomes an Ask, or an InvalidRequest that names the field and the remedy.

Fields that Pointsman understands are checked; all others stay in the body for backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from policies.errors import InvalidRequest
from policies.nouns import DIALS, Capability, Native, Sampling
from router.ask import Ask, Chat, Reading
from router.protocols.dialect import converted
from router.protocols.openai.documents import BLOCK_END, OWN_FIELDS, documents_in, lifted, marked
from router.protocols.openai.fields import MOST_DOCUMENTS, MOST_PROMPTS, ChatBody, Common, CompletionBody, Message, Part
from router.protocols.openai.grammars import FORMAT_FIELDS, grammar_in
from router.text.conversation import message_of, tool_of, without_billing
from router.text.documents import texts_of
from router.text.token_ids import pack

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

COMPLETION_MAX_TOKENS = 16
"""Default of `max_tokens` at OpenAI's completions endpoint."""

_AS_GIVEN = MappingProxyType(
    {
        **{name: name for name in DIALS},
        "min_tokens": "min_new_tokens",
        "n": "choices",
        "ignore_eos": "ignore_eos",
        "include_stop_str_in_output": "shows_stop",
    }
)
"""Name of a field in the body -> name of the equal field of Sampling."""

OF_SAMPLING = FORMAT_FIELDS | {
    *(*_AS_GIVEN, "seed", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs"),
}
"""Fields in the body that Sampling depends on."""

_USUAL = Sampling()
_NO_NEEDS = frozenset[Capability]()

_HINTS = {
    "model": "GET /v1/models lists the models",
    "messages": "`messages` is a list of objects such as {'role': 'user', 'content': 'Hello'}",
    "prompt": "a prompt is a text, a list of texts, a list of token ids, or a list of such lists",
    "max_tokens": "leave `max_tokens` out to get as much as fits",
    "max_completion_tokens": "leave `max_completion_tokens` out to get as much as fits",
    "temperature": "0 is greedy, 1 the default, 2 the most",
    "stop": "`stop` is one text or a list of at most 16",
    "tools": "a tool is {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}",
    "top_logprobs": "from 0 to 20",
    "documents": f"at most {MOST_DOCUMENTS} objects such as {{'id': 'a', 'title': 'A', 'text': 'A is ...'}}; "
    "for a chat template with documents of its own form, `chat_template_kwargs` passes them on unread",
    "document_set": "GET /v1/document_sets lists yours",
    "reuse": "'chunks' permits approximate KV of documents, 'off' forbids it",
    "reuse_budget": "the share of each document that is computed again: from 0 to 1",
    "structured_outputs": "set one of `json`, `regex`, `choice`, `grammar` and `json_object`",
}
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Parts of a message that are text: type -> the member that holds it."""

_ALONE = 2
"""Number of members of a part with nothing beside its type and text, or of a message beside its role and content."""

_OF_TEXT_ALONE = frozenset({"user", "assistant"})
"""Roles of messages of which nothing is left out or added if they have only a text."""

MEDIA_PARTS = frozenset({"audio_url", "file", "image_url", "input_audio", "video_url"})
"""Parts of a message that are not text: OpenAI's, and those that vLLM and SGLang add."""

_PART_MEMBERS = frozenset(
    {*TEXT_PARTS.values(), *MEDIA_PARTS, "type", "uuid", "name", "closed", "data", "prompt_cache_breakpoint"}
    | {"image_pil", "image_embeds", "audio_embeds", "video_embeds"}
)
"""Members of parts that engines handle; templates see all others."""

_ELSEWHERE = "see OpenAI's API reference for this field"


_URL_MEMBERS = ("url", "file_url")


def chat_ask(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Ask:
    """The Ask of a body of /v1/chat/completions. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, ChatBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    if _has_block(body):
        body = lifted(body)
        fields = converted(body, ChatBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    documents = None if OWN_FIELDS.isdisjoint(body) else documents_in(fields)
    if documents is not None:
        body = marked(body, is_empty=not (documents.each or documents.of_set))
        fields = converted(body, ChatBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`", hint="set `logprobs` to true", param="top_logprobs")
    chat = chat_in(fields, body)
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    is_usual = OF_SAMPLING.isdisjoint(body)
    sampling = _USUAL if is_usual else _sampling(fields, body, logprobs)
    return Ask(
        model=fields.model,
        inputs=(chat,),
        bodies=(body,),
        natives=(Native(CHAT_PATH, body),),
        path=CHAT_PATH,
        sampling=sampling,
        max_new_tokens=None if limit is None else _checked_limit(limit, fields),
        needs=_NO_NEEDS if is_usual and not chat.media else _needs(sampling, has_media=chat.media > 0),
        media_urls=_urls_in(body) if chat.media else (),
        documents=documents,
        **_common(fields, headers or {}),
    )


def _has_block(body: Mapping[str, Any]) -> bool:
    """Whether a message of `body` has documents in its text."""
    for message in body["messages"]:
        content = message.get("content")
        for text in (content,) if isinstance(content, str) else texts_of(content):
            # most texts have no brace, and one character is found twenty times as fast as several
            if "{" in text and BLOCK_END in text:
                return True
    return False


def chat_in(fields: ChatBody, body: Mapping[str, Any]) -> Chat:
    """The conversation of `body` (parsed: `fields`). Raises InvalidRequest."""
    continues = bool(fields.continue_final_message)
    messages, parts_of, media, images = list[Mapping[str, Any]](), dict[int, Sequence[Mapping[str, Any]]](), 0, 0
    for at, (message, raw) in enumerate(zip(fields.messages, body["messages"], strict=True)):
        if isinstance(message.content, str):
            if len(raw) == _ALONE and message.role in _OF_TEXT_ALONE:
                # as most messages
                messages.append({"role": message.role, "content": message.content})
                continue
            parts: Sequence[Mapping[str, Any]] = [{"type": "text", "text": message.content}]
        else:
            parts = _parts(message, raw, at)
        if message.role == "system":
            parts = without_billing(parts)
        messages.append(message_of(raw, parts))
        if len(parts) != 1 or len(parts[0]) > _ALONE:
            parts_of[at] = parts
        if isinstance(message.content, list):
            kinds = [part.type for part in message.content if isinstance(part, Part) and part.type in MEDIA_PARTS]
            media += len(kinds)
            images += kinds.count("image_url")
    variables = fields.chat_template_kwargs or {}
    own = variables.get("chat_template") if fields.chat_template is None else fields.chat_template
    if fields.reasoning_effort is not None:
        variables = variables | _variables_of(fields.reasoning_effort, variables)
    return Chat(
        messages=messages,
        tools=[tool_of(tool) for tool in body["tools"]] if fields.tools else None,
        variables=variables,
        opens_answer=fields.add_generation_prompt is not False and not continues,
        continues=continues,
        media=media,
        images=images,
        forced=frozenset() if fields.tool_choice is None else _forced(fields),
        one_call=fields.parallel_tool_calls is False or isinstance(fields.tool_choice, dict),
        bars_tools=fields.tool_choice == "none",
        parts=parts_of,
        template=None if own is None else str(own),
    )


def _variables_of(effort: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a template for the reasoning `effort`, by vLLM's names. It switches thinking too, unless `variables`
    do."""
    thinking = {} if "enable_thinking" in variables else {"enable_thinking": effort != "none"}
    return {"reasoning_effort": effort, **thinking}


def completion_ask(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Ask:
    """The Ask of a body of /v1/completions. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, CompletionBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    _refuse_unsupported(fields)
    prompts = _prompts(fields.prompt)
    scores_prompt = bool(fields.echo) and fields.logprobs is not None
    is_single = prompts[0] is fields.prompt
    natives = [body] if is_single else [{**body, "prompt": prompt} for prompt in prompts]
    echoes = bool(fields.echo) and not scores_prompt
    only_echo = bool(fields.echo) and fields.max_tokens == 0
    sampling = _sampling(fields, body, fields.logprobs)
    limit = 1 if only_echo else fields.max_tokens
    if limit is not None and not only_echo:
        limit = _checked_limit(limit, fields)
    # for backends without `echo` the router answers it; with the field in the body, others would repeat the prompt too
    bodies = [_without_echo(each) for each in natives] if echoes else natives
    return Ask(
        model=fields.model,
        inputs=tuple(prompt if isinstance(prompt, str) else _packed(prompt) for prompt in prompts),
        bodies=tuple(bodies),
        natives=tuple(Native(COMPLETION_PATH, each) for each in natives),
        path=COMPLETION_PATH,
        sampling=sampling,
        max_new_tokens=limit,
        only_echo=only_echo,
        usual_new_tokens=COMPLETION_MAX_TOKENS,
        echo=echoes,
        needs=_needs(
            sampling,
            takes_ids=not all(isinstance(prompt, str) for prompt in prompts),
            has_suffix=bool(fields.suffix),
            scores_prompt=scores_prompt,
        ),
        **_common(fields, headers or {}),
    )


_NEEDS = (
    *(Capability.MEDIA, Capability.STRUCTURED_OUTPUT, Capability.TOKEN_IDS, Capability.LOGPROBS),
    *(Capability.SUFFIX, Capability.PROMPT_LOGPROBS, Capability.CHOICES),
)


def _without_echo(body: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in body.items() if name != "echo"}
    return rest | {"max_tokens": 1} if rest.get("max_tokens") == 0 else rest


def _needs(
    sampling: Sampling,
    *,
    takes_ids: bool = False,
    has_media: bool = False,
    has_suffix: bool = False,
    scores_prompt: bool = False,
) -> frozenset[Capability]:
    has_grammar, has_logprobs = sampling.grammar is not None, sampling.top_logprobs is not None
    needs = (has_media, has_grammar, takes_ids, has_logprobs, has_suffix, scores_prompt, sampling.choices > 1)
    return frozenset(compress(_NEEDS, needs))


def _common(fields: Common, headers: Mapping[str, str]) -> dict[str, Any]:
    options = fields.stream_options
    return {
        "reading": Reading(
            adds_special=fields.add_special_tokens,
            most_tokens=fields.truncate_prompt_tokens,
            keeps_start=None if fields.truncation_side is None else fields.truncation_side == "right",
        ),
        "stream": bool(fields.stream),
        "include_usage": bool(options and options.include_usage),
        "usage_so_far": bool(options and options.include_usage and options.continuous_usage_stats),
        "priority": headers.get("x-pointsman-priority") or None,
        "session": headers.get("x-pointsman-session") or None,
        "user": fields.user or None,
        "explain": headers.get("x-pointsman-explain") == "1",
        "metadata": _texts_in(fields.metadata) if fields.metadata else {},
        "headers": headers,
    }


def _texts_in(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `metadata`. A list of texts, as LiteLLM's clients send tags, is one with commas."""
    found = {name: value for name, value in metadata.items() if isinstance(value, str)}
    for name, value in metadata.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            found[name] = ",".join(value)
    return found


def _checked_limit(limit: int, fields: Common) -> int:
    if limit == 0:
        hint = "at least 1; 0 with `echo` returns the prompt"
        raise InvalidRequest("`max_tokens` must be at least 1, got 0", hint=hint, param="max_tokens")
    if (fields.min_tokens or 0) > limit:
        raise InvalidRequest("`min_tokens` is more than `max_tokens`", hint="lower `min_tokens`", param="min_tokens")
    return limit


def _sampling(fields: Common, body: Mapping[str, Any], top_logprobs: int | None) -> Sampling:
    given: dict[str, Any] = {}
    for name in body:
        if name in _AS_GIVEN and (value := getattr(fields, name)) is not None:
            given[_AS_GIVEN[name]] = value
    if given.get("top_p") == 0:
        # an empty nucleus keeps the likeliest token: the same as greedy
        given["temperature"], given["top_p"] = 0.0, 1.0
    if given.get("top_k") == -1:
        given["top_k"] = 0
    stop = fields.stop
    return Sampling(
        # backends take unsigned seeds
        seed=None if fields.seed is None else fields.seed % 2**64,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        top_logprobs=top_logprobs,
        logit_bias=_logit_bias(fields.logit_bias) if fields.logit_bias else {},
        grammar=None if FORMAT_FIELDS.isdisjoint(body) else grammar_in(fields),
        **given,
    )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    ids = [key for key in biases if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32)]
    if ids:
        hint = "the keys of `logit_bias` are token ids in decimal"
        raise InvalidRequest(f"logit_bias: '{ids[0][:40]}' is not a token id", hint=hint, param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _urls_in(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The URLs in the messages of `body`; all parts of these have been checked before."""
    contents = (message.get("content") for message in body["messages"])
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping))
    media = (part[part["type"]] for part in parts if part["type"] in MEDIA_PARTS)
    return tuple(url for each in media for name in _URL_MEMBERS if isinstance(url := each.get(name), str))


def _forced(fields: ChatBody) -> frozenset[str]:
    """The tools of which one must be called: all, or the named one. Raises InvalidRequest if there is no such tool."""
    names = frozenset(tool.function.name for tool in fields.tools or ())
    if not isinstance(fields.tool_choice, dict) or fields.tool_choice.get("type") != "function":
        return names if fields.tool_choice == "required" else frozenset()
    function = fields.tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        hint = "name one of `tools`"
        raise InvalidRequest(f"tool_choice: there is no tool {str(name)[:80]!r}", hint=hint, param="tool_choice")
    return frozenset({name})


def _parts(message: Message, raw: Mapping[str, Any], at: int) -> list[Mapping[str, Any]]:
    """The content of `raw`, a list, as parts of text; media become marks, equal for equal bytes."""
    where = f"messages[{at}]"
    if message.content is None and not message.tool_calls and message.role in ("system", "developer", "user", "tool"):
        hint = "give it a text"
        raise InvalidRequest(f"{where}: a {message.role} message needs content", hint=hint, param=f"{where}.content")
    if message.content is None:
        return []
    pairs = enumerate(zip(message.content, raw["content"], strict=True))
    return [read for n, (part, own) in pairs if (read := _part(part, own, f"{where}.content[{n}]")) is not None]


def _part(part: Part | str, raw: Any, param: str) -> Mapping[str, Any] | None:
    """One part as text, with the members that only its template reads; None if its text is null."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.type in TEXT_PARTS and isinstance(text := raw.get(TEXT_PARTS[part.type]), str | None):
        more = {name: value for name, value in raw.items() if name not in _PART_MEMBERS}
        return None if text is None else {"type": "text", "text": text, **more}
    if part.type in MEDIA_PARTS and isinstance(raw.get(part.type), Mapping):
        digest = xxh3_64_hexdigest(msgspec.json.encode(raw[part.type]))
        return {"type": "text", "text": f"\x1d{part.type} {digest}\x1d"}
    kinds = ", ".join(sorted(MEDIA_PARTS))
    hint = f"{{'type': 'text', 'text': ...}}, or {{'type': T, T: {{...}}}} with T one of {kinds}"
    raise InvalidRequest(f"{param}: parts of type '{part.type[:40]}' are not supported", hint=hint, param=param)


def _refuse_unsupported(fields: CompletionBody) -> None:
    if fields.best_of is not None and fields.best_of != (1 if fields.n is None else fields.n):
        raise InvalidRequest("`best_of` must equal `n`", hint="leave `best_of` out", param="best_of")


def _prompts(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """The prompts in `prompt`. A list of integers is one prompt of token ids, any other list has several prompts."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if not kinds or not kinds <= {str, list}:
        raise InvalidRequest("prompt: a list of neither texts nor token ids", hint=_HINTS["prompt"], param="prompt")
    if len(prompt) > MOST_PROMPTS:
        hint = f"send at most {MOST_PROMPTS} prompts in one request"
        raise InvalidRequest(f"prompt: {len(prompt)} prompts are too many", hint=hint, param="prompt")
    return prompt


def _packed(ids: Sequence[Any]) -> bytes:
    if set(map(type, ids)) != {int}:
        raise InvalidRequest("prompt: token ids must be integers", hint=_HINTS["prompt"], param="prompt")
    try:
        return pack(ids)
    except OverflowError:
        raise InvalidRequest("prompt: a token id is out of range", hint="ids start at 0", param="prompt") from None
