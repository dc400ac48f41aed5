"""Parts of tests of batches: a router that takes them, and its official clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from policies.sla.batches import BatchSettings
from policies.sla.config import Config
from router.start.app import Router
from tests.router.parts import CHAT, KEY, MODEL, ScriptedBackend, a_config, a_router, a_tenant

OTHER_KEY = "other-key"


def a_batch_config(folder: Path, **settings: Any) -> Config:
    config = a_config(a_tenant(), a_tenant("other", OTHER_KEY))
    return replace(
        config, batches=BatchSettings(**{"store": str(folder / "batches"), "service_class": "batch", **settings})
    )


@asynccontextmanager
async def a_batch_router(folder: Path, *backends: ScriptedBackend, **settings: Any) -> AsyncIterator[Router]:
    async with a_router(*backends, config=a_batch_config(folder, **settings)) as router:
        yield router


@asynccontextmanager
async def openai_client(router: Router, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key=key, max_retries=0) as client:
        yield client


def a_line(number: int, text: str = "hello", *, endpoint: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body}


async def uploaded(client: openai.AsyncOpenAI, lines: Sequence[object]) -> str:
    content = "\n".join(json.dumps(line) for line in lines).encode()
    return (await client.files.create(file=("lines.jsonl", content), purpose="batch")).id


async def begun(client: openai.AsyncOpenAI, lines: Sequence[object], **fields: Any) -> Batch:
    asked = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=await uploaded(client, lines), **asked)


async def until(client: openai.AsyncOpenAI, batch: Batch, is_so: Callable[[Batch], bool]) -> Batch:
    async with asyncio.timeout(30):
        while not is_so(batch):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    return await until(client, batch, lambda now: now.status in {"completed", "failed", "expired", "cancelled"})


async def lines_in(client: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    """The lines of a file by their ids."""
    assert file is not None
    content = await client.files.content(file)
    found = [json.loads(line) for line in content.text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def files_in(folder: Path) -> list[Path]:
    """The files in a folder and below it."""
    return [path for path in folder.rglob("*") if path.is_file()]
