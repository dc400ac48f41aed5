"""An endpoint picker, from a gateway's stream to a real server and back."""

from __future__ import annotations

import json

from tests.router.parts import MODEL
from tests.router.picker.parts import a_chat, a_gateway, chat, endpoint
from tests.standins.openai_compatible import OpenAIServer


async def test_a_request_goes_where_the_picker_says_and_its_answer_comes_back_as_it_is() -> None:
    engine = OpenAIServer(model=MODEL)
    async with a_gateway(engine) as (envoy, router):
        reply = await chat(envoy)
        assert reply.status == 200
        assert json.loads(reply.body)["choices"][0]["message"]["content"] == engine.text
        assert reply.sent_to == [endpoint(engine)]
        assert reply.sent_body == a_chat()
        assert reply.metadata["envoy.lb"] == {"x-gateway-destination-endpoint": endpoint(engine)}
        assert reply.headers["x-pointsman-backend"] == "b0"
