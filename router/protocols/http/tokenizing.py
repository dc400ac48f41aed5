"""`/tokenize` and `/detokenize` as in vLLM, by the model's tokenizer or by a backend that has it.

Source: vLLM documentation, "OpenAI-Compatible Server", "Tokenizer API".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from http1.request import Request, Response
from policies.errors import InvalidRequest
from policies.nouns import Tenant
from router.ask import Ask
from router.call.gateway import Gateway
from router.call.prepare import find_model, readers_of, tokenize
from router.fleet.cluster.served_model import ServedModel
from router.protocols.http.routes import Routes
from router.protocols.openai.request import chat_ask, completion_ask
from router.protocols.reading import converted
from router.text.engine_text import first_reply
from router.text.token_ids import pack, unpack

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"

Identify = Callable[[Request], Tenant]
Read = Callable[[Request], Awaitable[dict[str, Any]]]

_HINTS = {
    "prompt": "send one text as `prompt`, or `messages`",
    "tokens": "`tokens` is a list of token ids such as [1, 2, 3]",
    "model": "GET /v1/models lists the models",
}
_JSON = {"Content-Type": "application/json"}
_ELSEWHERE = "docs/clients.md lists the fields"


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


def add_tokenizing(routes: Routes, gateway: Gateway, identify: Identify, read: Read) -> None:
    """Add both calls to `routes`; `identify` finds the tenant, `read` parses the body."""

    async def tokens_of(http: Request) -> Response:
        tenant = identify(http)
        body = await read(http)
        fields = converted(body, TokenizeBody, hints=_HINTS, elsewhere=_ELSEWHERE)
        model = _model(fields.model, tenant, gateway)
        ids = await _ids(tokenize_ask(fields, body, model.name), model, tenant, gateway)
        texts = await _texts(ids, body, model, gateway) if fields.return_token_strs else None
        reply = {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids, "token_strs": texts}
        return Response(200, msgspec.json.encode(reply), _JSON)

    async def text_of(http: Request) -> Response:
        tenant = identify(http)
        fields = converted(await read(http), DetokenizeBody, hints=_HINTS, elsewhere=_ELSEWHERE)
        model = _model(fields.model, tenant, gateway)
        text = await _text(fields.tokens, model, gateway)
        return Response(200, msgspec.json.encode({"prompt": text}), _JSON)

    routes.add("POST", TOKENIZE_PATH, tokens_of)
    routes.add("POST", DETOKENIZE_PATH, text_of)


def tokenize_ask(fields: TokenizeBody, body: Mapping[str, Any], model: str) -> Ask:
    """The Ask of a body of /tokenize. Raises InvalidRequest."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("send either `messages` or `prompt`", hint=_HINTS["prompt"], param="prompt")
    named = {name: value for name, value in body.items() if name != "truncate_prompt_tokens"} | {"model": model}
    return (chat_ask if fields.prompt is None else completion_ask)(named, {})


def _model(name: str | None, tenant: Tenant, gateway: Gateway) -> ServedModel:
    """The model `name`, or without a name the only one that `tenant` may use."""
    if name is None and len(models := gateway.models_for(tenant)) == 1:
        (name,) = models
    if not name:
        raise InvalidRequest("which model?", hint=_HINTS["model"], param="model")
    return find_model(name, tenant, gateway)


async def _ids(ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway) -> list[int]:
    if ask.inputs == ("",):
        return await _ids_of_nothing(ask, model, gateway)
    (tokens,) = await tokenize(ask, model, tenant, gateway, is_asked=True)
    if not tokens.token_ids:
        raise _no_ids(model)
    return unpack(tokens.token_ids).tolist()


async def _ids_of_nothing(ask: Ask, model: ServedModel, gateway: Gateway) -> list[int]:
    """The ids of an empty text: special tokens, if any."""
    if (text := await gateway.sources.text_of(model)) is not None:
        return unpack(b"" if ask.reading.adds_special is False else text.tokenizer.with_ends(b"")).tolist()
    read = await first_reply(
        readers_of(model, gateway), lambda reader: reader.tokenize(ask.bodies[0], model=model.name)
    )
    return [] if read is None else list(read.ids)


async def _texts(ids: list[int], body: Mapping[str, Any], model: ServedModel, gateway: Gateway) -> list[str] | None:
    """The text of each of `ids`; None if neither the tokenizer nor a backend gives it."""
    if (text := await gateway.sources.text_of(model)) is not None:
        return [text.tokenizer.token_of(token_id) for token_id in ids]
    read = await first_reply(readers_of(model, gateway), lambda reader: reader.tokenize(body, model=model.name))
    return None if read is None or read.texts is None else list(read.texts)


async def _text(ids: list[int], model: ServedModel, gateway: Gateway) -> str:
    if (text := await gateway.sources.text_of(model)) is not None:
        return text.tokenizer.decode(pack(ids))
    decoded = await first_reply(readers_of(model, gateway), lambda reader: reader.detokenize(ids, model=model.name))
    if decoded is None:
        raise _no_ids(model)
    return decoded


def _no_ids(model: ServedModel) -> InvalidRequest:
    hint = "operators can give its pool a `tokenizer`"
    return InvalidRequest(
        f"the router has no tokenizer of '{model.name}', and no backend gives the ids", hint=hint, param="model"
    )
