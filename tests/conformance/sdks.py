"""Clients as libraries, each with a conversation of ten calls of a tool: run in the environment of `make conformance`.

usage: python sdks.py URL OF_POOLED_URL. Prints a line for each: name, version, passed, failed, why.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version

TURNS = 10
DONE = "the tools were run"


def cohere_rerank(url: str) -> Iterator[Callable[[], None]]:
    """Cohere's SDK scores documents."""
    import cohere

    def reranks() -> None:
        reply = cohere.ClientV2(api_key="k", base_url=url).rerank(model="m", query="q", documents=["a", "b"], top_n=2)
        assert len(reply.results) == 2, reply

    yield reranks


def openai_agents(url: str) -> Iterator[Callable[[], None]]:
    """The Agents SDK, with chats and with Responses, whole and streamed."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    def runs(model: type, is_streamed: bool) -> None:
        ran: list[str] = []

        @function_tool
        def run(command: str) -> str:
            """Runs a command."""
            ran.append(command)
            return "ok"

        async def go() -> str:
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key="k")
            agent = Agent(name="a", model=model("m", client), tools=[run])
            if not is_streamed:
                return str((await Runner.run(agent, "go", max_turns=15)).final_output)
            streamed = Runner.run_streamed(agent, "go", max_turns=15)
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)

        said = asyncio.run(go())
        assert DONE in said, said
        assert len(ran) == TURNS, ran

    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for is_streamed in (False, True):
            yield lambda model=model, is_streamed=is_streamed: runs(model, is_streamed)  # type: ignore[misc]


def pydantic_ai(url: str) -> Iterator[Callable[[], None]]:
    """Pydantic AI with its three clients, whole and streamed."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    def openai() -> OpenAIProvider:
        return OpenAIProvider(base_url=f"{url}/v1", api_key="k")

    def runs(make: Callable[[], object], is_streamed: bool) -> None:
        ran: list[str] = []
        agent = Agent(make())

        @agent.tool_plain
        def run(command: str) -> str:
            """Runs a command."""
            ran.append(command)
            return "ok"

        async def go() -> str:
            if not is_streamed:
                return str((await agent.run("go")).output)
            async with agent.run_stream("go") as streamed:
                return str(await streamed.get_output())

        said = asyncio.run(go())
        assert DONE in said, said
        assert len(ran) == TURNS, ran

    makers: list[Callable[[], object]] = [
        lambda: OpenAIChatModel("m", provider=openai()),
        lambda: OpenAIResponsesModel("m", provider=openai()),
        lambda: AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key="k")),
    ]
    for make in makers:
        for is_streamed in (False, True):
            yield lambda make=make, is_streamed=is_streamed: runs(make, is_streamed)  # type: ignore[misc]


def main() -> None:
    """Try each, and print how it went."""
    url, of_pooled = sys.argv[1:]
    for name, package, tries in (
        ("Cohere's SDK, rerank", "cohere", cohere_rerank(of_pooled)),
        ("OpenAI Agents SDK", "openai-agents", openai_agents(url)),
        ("Pydantic AI", "pydantic-ai-slim", pydantic_ai(url)),
    ):
        passed, why = 0, list[str]()
        for attempt in tries:
            try:
                attempt()
                passed += 1
            except Exception as error:
                why.append(f"{type(error).__name__}: {error}"[:150].replace("\t", " ").replace("\n", " "))
        print("\t".join((name, version(package), str(passed), str(len(why)), "; ".join(why))), flush=True)


if __name__ == "__main__":
    main()
