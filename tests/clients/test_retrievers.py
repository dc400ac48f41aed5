"""The examples of docs/rag.md with retrievers of LangChain and LlamaIndex: they run as they stand there."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from policies.sla.parse import parse
from router.start.app import Router
from tests.clients.serving import KEY, MODEL, SLA
from tests.standins.standin import TEXT, running
from tests.standins.vllm import VLLMServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rag.md").read_text()
BLOCKS = re.findall(r"<!-- checked by: tests/clients/test_retrievers.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)


@asynccontextmanager
async def a_router() -> AsyncIterator[tuple[str, VLLMServer]]:
    """The address of a router, and the server behind it, which shows what it gets."""
    server = VLLMServer()
    async with running(server):
        config = parse(SLA.format(kind="vllm", url=server.url), environment={"CLIENT_KEY": KEY, "THEIR_KEY": "theirs"})
        async with Router(config) as router:
            assert await router.wait_until_reached(10)
            yield router.http_url, server
            router.check()


@pytest.mark.parametrize(("library", "number"), [("langchain_openai", 1), ("llama_index.llms.openai_like", 2)])
async def test_found_sections_are_documents_of_the_chat(library: str, number: int, tmp_path: Path) -> None:
    pytest.importorskip(library)
    assert len(BLOCKS) == 3
    (tmp_path / "pages.py").write_text(BLOCKS[0])
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    async with a_router() as (url, server):
        code = BLOCKS[number].replace("http://127.0.0.1:8080", url)
        code = code.replace('"any", model="pointsman-reader"', f'"{KEY}", model="{MODEL}"')
        (tmp_path / "example.py").write_text(code)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "example.py", cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert TEXT in output.decode()
        bodies: list[Any] = [seen.body for seen in server.received if "messages" in seen.body]
    (body,) = bodies
    assert "documents" not in body
    content = body["messages"][0]["content"]
    assert content.startswith("Documents:\n\nDocument ")
    assert content.count("\nDocument ") >= 4
    assert content.endswith("How long does a pinned prefix stay?")
    assert "Document prefixes-" in content
