"""Backends that are asked for tokens: what is sent to each kind of server, and what is read of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from backends.base import TextReader, Tokenized, as_text_reader
from backends.http.backend import HttpBackend
from backends.http.exchange import HttpOptions
from backends.llama_cpp.backend import LlamaCpp
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.sglang import SGLang, SGLangOptions
from backends.tgi.backend import TGI, TGIOptions
from backends.vllm import VLLM, VLLMOptions
from policies.errors import BackendFailed, ExpectedError

KINDS: dict[type[HttpBackend], type[HttpOptions]] = {
    VLLM: VLLMOptions,
    SGLang: SGLangOptions,
    LlamaCpp: OpenAIOptions,
    TGI: TGIOptions,
    OpenAICompatible: OpenAIOptions,
}
MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def asked(kind: type[HttpBackend], answers: dict[str, Any]) -> AsyncIterator[tuple[Any, list[tuple[str, Any]]]]:
    """A backend of `kind` with a server of these answers by path, and the requests that it got."""
    received: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        received.append((request.path, await request.json()))
        answer = answers.get(request.path)
        if isinstance(answer, int) or answer is None:
            return web.json_response({"error": {"message": "no"}}, status=answer or 404)
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        options = KINDS[kind](models={"ours": "theirs"})
        backend = kind("b", str(server.make_url("")), pool="p", options=options)
        try:
            yield backend, received
        finally:
            await backend.close()


async def test_vllm_renders_chats_with_all_that_templates_see() -> None:
    body = {
        "messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}, *MESSAGES],
        "tools": [],
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
        "max_tokens": 5,
        "add_generation_prompt": False,
    }
    async with asked(VLLM, {"/tokenize": {"count": 2, "tokens": [1, 2], "token_strs": None}}) as (backend, received):
        assert await backend.tokenize(body, model="ours") == Tokenized([1, 2])
    assert received == [
        (
            "/tokenize",
            {
                "model": "theirs",
                "messages": [
                    {"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning": "hm"},
                    *MESSAGES,
                ],
                "tools": [],
                "add_generation_prompt": False,
                "chat_template_kwargs": {
                    "documents": [{"text": "d"}],
                    "reasoning_effort": "low",
                    "enable_thinking": True,
                    "x": 1,
                },
            },
        )
    ]


async def test_vllm_reads_texts_and_makes_texts_of_ids() -> None:
    answers = {"/tokenize": {"tokens": [5], "token_strs": ["a"]}, "/detokenize": {"prompt": "a<s>"}}
    async with asked(VLLM, answers) as (backend, received):
        body = {"prompt": "a", "add_special_tokens": False, "return_token_strs": True, "stop": "x"}
        assert await backend.tokenize(body, model="ours") == Tokenized([5], ["a"])
        assert await backend.detokenize([5, 1], model="m") == "a<s>"
    assert [sent for _, sent in received] == [
        {"model": "theirs", "prompt": "a", "add_special_tokens": False, "return_token_strs": True},
        {"model": "m", "tokens": [5, 1]},
    ]


async def test_sglang_reads_texts_alone() -> None:
    answers = {"/tokenize": {"tokens": [5], "count": 1}, "/detokenize": {"text": "a<s>"}}
    async with asked(SGLang, answers) as (backend, received):
        assert await backend.tokenize({"messages": MESSAGES}, model="ours") is None
        assert await backend.tokenize({"prompt": "a", "add_special_tokens": False}, model="ours") == Tokenized([5])
        assert await backend.detokenize([5], model="ours") == "a<s>"
    assert [sent for _, sent in received] == [
        {"model": "theirs", "prompt": "a", "add_special_tokens": False},
        {"model": "theirs", "tokens": [5], "skip_special_tokens": False},
    ]


async def test_llama_cpp_applies_the_template_first() -> None:
    answers = {
        "/apply-template": {"prompt": "<|user|>hi"},
        "/tokenize": {"tokens": [7, 8]},
        "/detokenize": {"content": "ab"},
    }
    async with asked(LlamaCpp, answers) as (backend, received):
        assert await backend.tokenize({"messages": MESSAGES}, model="ours") == Tokenized([7, 8])
        assert await backend.detokenize([7, 8], model="ours") == "ab"
    assert received[:2] == [
        ("/apply-template", {"messages": MESSAGES}),
        ("/tokenize", {"content": "<|user|>hi", "add_special": True, "parse_special": True, "with_pieces": False}),
    ]
    pieces = {"/tokenize": {"tokens": [{"id": 7, "piece": "a"}, {"id": 8, "piece": [0xC3, 0xA9]}]}}
    async with asked(LlamaCpp, pieces) as (backend, _):
        wanted = {"prompt": "aé", "return_token_strs": True}
        assert await backend.tokenize(wanted, model="ours") == Tokenized([7, 8], ["a", "é"])


async def test_tgi_has_a_path_for_chats_and_makes_no_text_of_ids() -> None:
    tokens = [{"id": 3, "text": "hi", "start": 0, "stop": 2}]
    answers = {"/chat_tokenize": {"tokenize_response": tokens, "templated_text": "hi"}, "/tokenize": tokens}
    async with asked(TGI, answers) as (backend, received):
        assert await backend.tokenize({"messages": MESSAGES, "seed": 1}, model="ours") == Tokenized([3], ["hi"])
        assert await backend.tokenize({"prompt": "hi"}, model="ours") == Tokenized([3], ["hi"])
        assert await backend.detokenize([3], model="ours") is None
    assert received == [("/chat_tokenize", {"model": "tgi", "messages": MESSAGES}), ("/tokenize", {"inputs": "hi"})]


@pytest.mark.parametrize("kind", [VLLM, SGLang, LlamaCpp, TGI])
@pytest.mark.parametrize(
    "reply",
    [404, 500, {"tokens": "many"}, {"tokens": [-1]}, {"tokens": [2**40]}, [{"id": None}], ["x"], {"tokens": [True]}],
)
async def test_nonsense_and_refusals_are_failures_with_words(kind: type[HttpBackend], reply: Any) -> None:
    async with asked(kind, {"/tokenize": reply}) as (backend, _):
        with pytest.raises(ExpectedError) as caught:
            await backend.tokenize({"prompt": "a"}, model="ours")
    assert isinstance(caught.value, BackendFailed) or reply == 404


def test_only_kinds_with_servers_that_tokenize_are_asked() -> None:
    backends = [kind("b", "http://b:1", pool="p") for kind in KINDS]
    readers = {type(backend) for backend in backends if as_text_reader(backend) is backend}
    assert readers == {VLLM, SGLang, LlamaCpp, TGI}
    assert all(isinstance(backend, TextReader) == (type(backend) in readers) for backend in backends)
