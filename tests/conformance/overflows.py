"""What libraries do with a prompt that is too long: run in the environment of `make conformance`.

usage: python overflows.py URL [NAME]. A line for each: name, version, and what its caller gets. The prompt has so many
digits, each a token to most tokenizers.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

PROMPT = "Add these: " + "7 1 9 4 2 8 3 5 " * 9000


def langchain_chats(url: str) -> Any:
    """LangChain (Python) with chats."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="k").invoke(PROMPT)


def langchain_responses(url: str) -> Any:
    """LangChain (Python) with Responses."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="k", use_responses_api=True).invoke(PROMPT)


def langchain_messages(url: str) -> Any:
    """LangChain (Python) with messages."""
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model="m", base_url=url, api_key="k", max_tokens=100).invoke(PROMPT)


def llama_index(url: str) -> Any:
    """LlamaIndex."""
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(model="m", api_base=f"{url}/v1", api_key="k", is_chat_model=True, max_retries=1).complete(PROMPT)


def litellm_chats(url: str) -> Any:
    """LiteLLM, as OpenAI."""
    import litellm

    return litellm.completion(
        model="openai/m", api_base=f"{url}/v1", api_key="k", messages=[{"role": "user", "content": PROMPT}]
    )


def litellm_messages(url: str) -> Any:
    """LiteLLM, as Anthropic."""
    import litellm

    return litellm.completion(
        model="anthropic/m", api_base=url, api_key="k", max_tokens=9, messages=[{"role": "user", "content": PROMPT}]
    )


def pydantic_ai_chats(url: str) -> Any:
    """Pydantic AI, chats."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k"))
    return Agent(model).run_sync(PROMPT).output


def pydantic_ai_messages(url: str) -> Any:
    """Pydantic AI, messages."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key="k"))
    return Agent(model).run_sync(PROMPT).output


def openai_agents(url: str) -> Any:
    """OpenAI Agents SDK, Responses."""
    from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="k")
    agent = Agent(name="a", model=OpenAIResponsesModel("m", client))
    return asyncio.run(Runner.run(agent, PROMPT)).final_output


def instructor(url: str) -> Any:
    """Instructor."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="k"))
    return client.chat.completions.create(model="m", response_model=Sum, messages=[{"role": "user", "content": PROMPT}])


def dspy(url: str) -> Any:
    """DSPy."""
    import dspy

    dspy.configure(lm=dspy.LM("openai/m", api_base=f"{url}/v1", api_key="k", cache=False))
    return dspy.Predict("question -> answer")(question=PROMPT)


def haystack(url: str) -> Any:
    """Haystack."""
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(api_key=Secret.from_token("k"), model="m", api_base_url=f"{url}/v1")
    return generator.run([ChatMessage.from_user(PROMPT)])


def inspect_ai(url: str) -> Any:
    """Inspect AI: an answer with the stop reason model_length."""
    from inspect_ai.model import get_model

    model = get_model("openai-api/own/m", base_url=f"{url}/v1", api_key="k")
    return asyncio.run(model.generate(PROMPT)).stop_reason


LIBRARIES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "LangChain, chats": ("langchain-openai", langchain_chats),
    "LangChain, Responses": ("langchain-openai", langchain_responses),
    "LangChain, messages": ("langchain-anthropic", langchain_messages),
    "LlamaIndex": ("llama-index-llms-openai-like", llama_index),
    "LiteLLM, chats": ("litellm", litellm_chats),
    "LiteLLM, messages": ("litellm", litellm_messages),
    "Pydantic AI, chats": ("pydantic-ai-slim", pydantic_ai_chats),
    "Pydantic AI, messages": ("pydantic-ai-slim", pydantic_ai_messages),
    "OpenAI Agents SDK": ("openai-agents", openai_agents),
    "Instructor": ("instructor", instructor),
    "DSPy": ("dspy", dspy),
    "Haystack": ("haystack-ai", haystack),
    "Inspect AI": ("inspect-ai", inspect_ai),
}


def outcome(ask: Callable[[str], Any], url: str) -> str:
    """What the caller of `ask` gets: the classes of the error, nearest first, and its beginning; or the answer."""
    try:
        return f"answers: {ask(url)}"
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ != "builtins"]
        return f"{' < '.join(kinds[:4])}: {error}"


def main() -> None:
    """Try each, and print what came of it."""
    warnings.simplefilter("ignore")
    url, *only = sys.argv[1:]
    for name, (package, ask) in LIBRARIES.items():
        if not only or name in only:
            said = outcome(ask, url).replace("\t", " ").replace("\n", " ")
            print("\t".join((name, version(package), said[:260])), flush=True)


if __name__ == "__main__":
    main()
