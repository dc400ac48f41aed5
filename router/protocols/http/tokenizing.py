"""`/tokenize`, `/detokenize` and `/tokenizer_info` as in vLLM, by the model's tokenizer or by a backend that has it.

Source: vLLM documentation, "OpenAI-Compatible Server", "Tokenizer API".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta

from backends.http.lenient_json import read_json
from http1.request import Request, Response
from policies.errors import InvalidRequest, Unsupported
from policies.nouns import Tenant
from router.ask import Ask
from router.call.bodies import Held
from router.call.gateway import Gateway
from router.fleet.cluster.served_model import ServedModel
from router.protocols.dialect import converted
from router.protocols.http.body import ReadBody
from router.protocols.http.routes import Routes
from router.protocols.openai.request import chat_ask, completion_ask
from router.text.documents import written
from router.text.engine_text import first_reply
from router.text.token_ids import count, pack, unpack
from router.text.tokenize import ModelText
from router.text.turns import once

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"
INFO_PATH = "/tokenizer_info"

Identify = Callable[[Request], Awaitable[Tenant]]

_HINTS = {
    "prompt": "send one text as `prompt`, or `messages`",
    "tokens": "`tokens` is a list of token ids such as [1, 2, 3]",
    "model": "GET /v1/models lists the models",
}
_JSON = {"Content-Type": "application/json"}
_ELSEWHERE = "docs/clients.md lists the fields"
_NO_TOKENIZER = "operators can give its pool a `tokenizer`"
_FILES = ("vocab_file", "merges_file")
_SHORTER = "send a shorter prompt"

_ID_COST, _ID_AND_TEXT_COST = 24, 96
"""Bytes of memory for each token of a reply."""

_SLICE = 16 * 2**10
"""Tokens of a reply that are encoded at a time: 1 ms, or 10 with their texts."""

_Fields = TypeVar("_Fields")


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`, without the fields that select how the prompt is read."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]
    model: str | None = None


def add_tokenizing(routes: Routes, gateway: Gateway, identify: Identify, read: ReadBody) -> None:
    """Add both calls to `routes`; `identify` finds the tenant, `read` parses the body."""

    async def tokens_of(http: Request) -> Response:
        tenant = await identify(http)
        with Held(gateway.bodies, tenant.name) as held:
            body, fields = await read(http, held, lambda body: (body, _fields(body, TokenizeBody)))
            model = _model(fields.model, tenant, gateway)
            ask = await held.run(once(lambda: tokenize_ask(fields, body, model.name)))
            ids = await _ids(ask, model, tenant, gateway)
            wants_texts = bool(fields.return_token_strs)
            await held.take(count(ids) * (_ID_AND_TEXT_COST if wants_texts else _ID_COST), "the reply", _SHORTER)
            texts = await _texts(ids, body, model, gateway) if wants_texts else None
            return Response(200, await held.run(_reply(ids, model.context_tokens, texts)), _JSON)

    async def text_of(http: Request) -> Response:
        tenant = await identify(http)
        with Held(gateway.bodies, tenant.name) as held:
            fields = await read(http, held, lambda body: _fields(body, DetokenizeBody))
            model = _model(fields.model, tenant, gateway)
            text = await _text(fields.tokens, model, gateway, held)
            return Response(200, msgspec.json.encode({"prompt": text}), _JSON)

    async def info_of(http: Request) -> Response:
        tenant = await identify(http)
        named = parse_qs(http.query).get("model", [""])[-1]
        model = _model(named, tenant, gateway)
        if (text := await gateway.sources.text_of(model)) is None:
            what = f"the router has no tokenizer of '{model.name}'"
            raise Unsupported(what, hint=_NO_TOKENIZER, param="model")
        with Held(gateway.bodies, tenant.name) as held:
            return Response(200, await held.run(once(lambda: tokenizer_info(text))), _JSON)

    routes.add("GET", INFO_PATH, info_of)
    routes.add("POST", TOKENIZE_PATH, tokens_of)
    routes.add("POST", DETOKENIZE_PATH, text_of)


def tokenizer_info(text: ModelText) -> bytes:
    """The settings of a tokenizer as JSON: each token as its text, and the chat template of the default name."""
    settings = read_json(text.assets.get("tokenizer_config.json") or b"{}")
    info = {name: _plain(value) for name, value in settings.items() if name not in _FILES}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **info, **text.template.special_tokens}
    return msgspec.json.encode(told if text.template.source is None else told | {"chat_template": text.template.source})


def _plain(value: Any) -> Any:
    """`value` with texts in place of the objects that describe tokens."""
    if isinstance(value, dict):
        if "content" in value:
            return value["content"]
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def tokenize_ask(fields: TokenizeBody, body: Mapping[str, Any], model: str) -> Ask:
    """The Ask of a body of /tokenize. Raises InvalidRequest."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("send either `messages` or `prompt`", hint=_HINTS["prompt"], param="prompt")
    named = {name: value for name, value in body.items() if name != "truncate_prompt_tokens"} | {"model": model}
    return written(chat_ask(named, {})) if fields.prompt is None else completion_ask(named, {})


def _model(name: str | None, tenant: Tenant, gateway: Gateway) -> ServedModel:
    """The model `name`, or without a name the only one that `tenant` may use."""
    name = gateway.models.meant(name, tenant.name, gateway.config)
    if not name:
        raise InvalidRequest("which model?", hint=_HINTS["model"], param="model")
    return gateway.models.find(name, tenant, gateway.config)


def _fields(body: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    return converted(body, kind, hints=_HINTS, elsewhere=_ELSEWHERE)


async def _ids(ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway) -> bytes:
    if ask.inputs == ("",):
        return await _ids_of_nothing(ask, model, gateway)
    (tokens,) = await gateway.prompts.tokens(ask, model, tenant, gateway.config, is_asked=True)
    if not tokens.token_ids:
        raise _no_ids(model)
    return tokens.token_ids


async def _ids_of_nothing(ask: Ask, model: ServedModel, gateway: Gateway) -> bytes:
    """The ids of an empty text: special tokens, if any."""
    if (text := await gateway.sources.text_of(model)) is not None:
        return b"" if ask.reading.adds_special is False else text.tokenizer.with_ends(b"")
    read = await first_reply(
        gateway.prompts.readers_of(model), lambda reader: reader.tokenize(ask.bodies[0], model=model.name)
    )
    return b"" if read is None else pack(read.ids)


async def _texts(ids: bytes, body: Mapping[str, Any], model: ServedModel, gateway: Gateway) -> Iterable[str] | None:
    """The text of each of `ids`; None if neither the tokenizer nor a backend gives it."""
    if (text := await gateway.sources.text_of(model)) is not None:
        return map(text.tokenizer.token_of, unpack(ids))
    read = await first_reply(gateway.prompts.readers_of(model), lambda reader: reader.tokenize(body, model=model.name))
    return None if read is None else read.texts


def _reply(ids: bytes, context_tokens: int | None, texts: Iterable[str] | None) -> Generator[int, None, bytes]:
    """The reply as JSON, made in slices, as `tokens` and `token_strs` may have millions of elements."""
    tokens = yield from _array(unpack(ids))
    token_strs = b"null" if texts is None else (yield from _array(texts))
    head = msgspec.json.encode({"count": count(ids), "max_model_len": context_tokens})
    return b"".join((head[:-1], b',"tokens":', tokens, b',"token_strs":', token_strs, b"}"))


def _array(values: Iterable[int | str]) -> Generator[int, None, bytes]:
    parts, rest = list[bytes](), iter(values)
    while some := list(islice(rest, _SLICE)):
        parts.append(msgspec.json.encode(some)[1:-1])
        yield len(parts[-1])
    return b"[%b]" % b",".join(parts)


async def _text(ids: list[int], model: ServedModel, gateway: Gateway, held: Held) -> str:
    if (text := await gateway.sources.text_of(model)) is not None:
        packed = await held.run(once(lambda: pack(ids)))
        return await held.run(text.tokenizer.decoded_in_turns(packed))
    decoded = await first_reply(
        gateway.prompts.readers_of(model), lambda reader: reader.detokenize(ids, model=model.name)
    )
    if decoded is None:
        raise _no_ids(model)
    return decoded


def _no_ids(model: ServedModel) -> InvalidRequest:
    what = f"the router has no tokenizer of '{model.name}', and no backend gives the ids"
    return InvalidRequest(what, hint=_NO_TOKENIZER, param="model")
