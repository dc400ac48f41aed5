"""A required format of answers reaches each kind of server that supports it, in that server's fields."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from backends.http.backend import HttpBackend
from policies.errors import InvalidRequest
from policies.nouns import Capability, Prompt
from router.protocols.openai.request import chat_ask
from tests.backends.parts import a_request
from tests.contracts.catalogue import STAGES

SCHEMA = {"type": "object", "properties": {"colour_of_the_door": {"type": "string"}}}
WANTED = {"type": "json_schema", "json_schema": {"name": "door", "schema": SCHEMA}}
ABLE = {
    name: backend
    for name, stage in STAGES.items()
    if isinstance(backend := stage.an_unreachable(), HttpBackend)
    and Capability.STRUCTURED_OUTPUT in backend.capabilities
}


def sent(backend: HttpBackend, **fields: object) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, **fields}
    ask = chat_ask(body, {})
    request = replace(a_request(), sampling=ask.sampling, needs=ask.needs)
    return backend.exchange(request, Prompt(body=ask.bodies[0], path=ask.path)).post.content


@pytest.mark.parametrize("kind", ABLE)
def test_a_json_schema_reaches_the_server(kind: str) -> None:
    content = json.loads(sent(ABLE[kind], response_format=WANTED))
    shape = content.get("response_format") or content.get("format") or content.get("output_config")
    assert "colour_of_the_door" in json.dumps(shape)


@pytest.mark.parametrize("kind", [kind for kind in ABLE if kind in ("anthropic", "ollama", "tgi", "llama_cpp", "mlc")])
def test_servers_without_vllms_fields_refuse_them_by_name(kind: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sent(ABLE[kind], structured_outputs={"regex": "[a-z]+"})
    assert str(refused.value.param).startswith("structured_outputs")
