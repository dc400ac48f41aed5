"""Parses JSON bodies into typed fields, with errors that name the field and the remedy. For every dialect over HTTP."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from backends.nesting import TooDeep, decode_json
from policies.errors import InvalidRequest

_Fields = TypeVar("_Fields")


def decode(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidRequest."""
    try:
        body = decode_json(raw)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not UTF-8: {error.reason} at byte {error.start}", hint="send UTF-8"
        ) from None
    except TooDeep as error:
        raise InvalidRequest(f"the body is {error}", hint="send a flatter JSON object") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", hint="send one JSON object") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object", hint="send {'model': ..., ...}")
    return body


def converted(body: Mapping[str, Any], kind: type[_Fields], *, hints: Mapping[str, str], elsewhere: str) -> _Fields:
    """`body` as a `kind`. Raises InvalidRequest with the hint for the wrong field, or else with `elsewhere`."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        missing = re.search(r"missing required field `(\w+)`", what)
        param = ".".join(filter(None, (path.strip("`$."), missing[1] if missing else "")))
        hint = hints.get(re.split(r"[.\[]", param)[0], elsewhere)
        raise InvalidRequest(f"{param}: {what}" if param else what, hint=hint, param=param or None) from None


def members_beyond(
    body: Mapping[str, Any], fields: type[msgspec.Struct], *, idle: Collection[str], instead: Mapping[str, str]
) -> dict[str, Any]:
    """The other fields of `body`, for backends that read them under the same names; without null and `idle` ones.

    `instead` has fields of OpenAI's chats with another name here. Raises InvalidRequest for one of them, with the name
    to use.
    """
    more: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in fields.__struct_fields__ or name in idle:
            continue
        if name in instead:
            raise InvalidRequest(f"`{name}` is not a field of this API", hint=instead[name], param=name)
        more[name] = value
    return more
