"""A RAG service in one minute: one long document, many questions, two tenants, HTTP and gRPC.

Starts `pointsman up` on free ports, asks the questions, checks every answer against the document, and prints a table.
Exits with 0 if everything is right: the answers, the cached tokens, the placement, and the separation of the tenants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
from rich.console import Console
from rich.table import Table

from router.protocols.grpc.v1 import inference_pb2 as wire
from router.protocols.grpc.v1 import inference_pb2_grpc as services
from shards.bundled.documents import Document, Question, document, facts_within, prompt

HERE = Path(__file__).parent
MODEL = "pointsman-reader"
KEYS = {"acme": "demo-key-of-acme", "labs": "demo-key-of-labs"}
DOCUMENT_TOKENS = 1900
QUESTIONS_PER_LANE = 2
STARTUP_S = 120.0


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


@dataclass(frozen=True)
class Asked:
    """One question with its answer and the router's report on it."""

    tenant: str
    lane: str
    question: Question
    answer: str
    service_class: str
    backend: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tokens_per_s: float

    @property
    def is_right(self) -> bool:
        return self.question.needle in self.answer

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def pointsman_up() -> Iterator[Ports]:
    """`pointsman up` on the demo's SLA file, ready for requests; stopped on exit. What it keeps is gone then."""
    ports = Ports(free_port(), free_port())
    listen = ["--http", f"127.0.0.1:{ports.http}", "--grpc", f"127.0.0.1:{ports.grpc}"]
    command = [sys.executable, "-P", "-m", "router", "up", str(HERE / "sla.yaml"), *listen]
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory(prefix="pointsman-demo-") as state:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "STATE_DIRECTORY": state})
        try:
            wait_until_ready(process, ports)
            yield ports
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], ports: Ports) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports.http}/readyz", timeout=2) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise SystemExit("the router did not get ready; its log follows")


def ask_over_http(ports: Ports, tenant: str, text: str, question: Question) -> Asked:
    """Stream one answer through the official OpenAI client."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ports.http}/v1", api_key=KEYS[tenant], max_retries=0) as client:
        client.models.list()  # a client's first call imports much of its code, which is not the router's TTFT
        started = time.perf_counter()
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt(text, question.question)}],
            temperature=0,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces, usage, first = [], None, None
        for chunk in raw.parse():
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter()
                pieces.append(chunk.choices[0].delta.content)
        ended = time.perf_counter()
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert first is not None
    return Asked(
        tenant=tenant,
        lane="HTTP",
        question=question,
        answer="".join(pieces),
        service_class=raw.headers["x-pointsman-class"],
        backend=raw.headers["x-pointsman-backend"],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        ttft_s=first - started,
        tokens_per_s=(usage.completion_tokens - 1) / (ended - first),
    )


def ask_over_grpc(ports: Ports, tenant: str, text: str, question: Question) -> Asked:
    """Stream one answer through `pointsman.v1.Inference`."""
    request = wire.GenerateRequest(
        model=MODEL,
        chat=wire.Messages(messages=[wire.Message(role="user", content=prompt(text, question.question))]),
        sampling=wire.Sampling(temperature=0, max_tokens=48),
    )
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        started = time.perf_counter()
        stub = services.InferenceStub(channel)
        replies = stub.Generate(request, metadata=[("authorization", f"Bearer {KEYS[tenant]}")], timeout=60)
        pieces, first = [], None
        placement, usage = wire.Placement(), wire.Usage()
        for reply in replies:
            if reply.HasField("placement"):
                placement = reply.placement
            if reply.HasField("usage"):
                usage = reply.usage
            if reply.text:
                first = first or time.perf_counter()
                pieces.append(reply.text)
        ended = time.perf_counter()
    assert first is not None
    return Asked(
        tenant=tenant,
        lane="gRPC",
        question=question,
        answer="".join(pieces),
        service_class=placement.service_class,
        backend=placement.backend,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        ttft_s=first - started,
        tokens_per_s=(usage.completion_tokens - 1) / (ended - first),
    )


def ask_everything(ports: Ports, paper: Document, questions: list[Question]) -> list[Asked]:
    """Each tenant asks the same questions about the same document, half of them over HTTP and half over gRPC."""
    return [
        ask(ports, tenant, paper.text, question)
        for tenant in KEYS
        for ask, share in (
            (ask_over_http, questions[:QUESTIONS_PER_LANE]),
            (ask_over_grpc, questions[QUESTIONS_PER_LANE:]),
        )
        for question in share
    ]


def show(console: Console, asked: list[Asked]) -> None:
    table = Table("tenant", "class", "over", "shard", box=None, header_style="bold", pad_edge=False)
    for column in ("prompt", "cached", "TTFT ms", "tok/s"):
        table.add_column(column, justify="right")
    table.add_column("answer", overflow="fold")
    for turn in asked:
        sign = "[green]✓[/]" if turn.is_right else "[red]✗[/]"
        numbers = (
            f"{turn.prompt_tokens}",
            f"{turn.cached_tokens}",
            f"{turn.ttft_s * 1e3:.0f}",
            f"{turn.tokens_per_s:.0f}",
        )
        table.add_row(turn.tenant, turn.service_class, turn.lane, turn.backend, *numbers, f"{sign} {turn.answer}")
    console.print(table)


def complaints(asked: list[Asked]) -> Iterator[str]:
    """The deviations from the expected results."""
    for turn in asked:
        if not turn.is_right:
            question = turn.question
            yield f"{turn.tenant}: {question.question!r} was answered {turn.answer!r}, not {question.answer!r}"
    for tenant in KEYS:
        first, *later = [turn for turn in asked if turn.tenant == tenant]
        if first.cached_tokens:
            yield f"{tenant} found {first.cached_tokens} cached tokens before it had sent anything"
        for turn in later:
            if turn.cached_share < 0.9:
                yield f"{tenant}: only {turn.cached_share:.0%} of the prompt was cached"
            if turn.backend != first.backend:
                yield f"{tenant}: went to {turn.backend}, but its document is on {first.backend}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print all answers at the end")
    options = parser.parse_args()
    # as Ctrl-C does, so that the router and its shards end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(width=int(os.environ.get("COLUMNS", "150")))
    paper = document(random.Random(2026), facts_within(DOCUMENT_TOKENS))
    questions = random.Random(7).sample(paper.questions, 2 * QUESTIONS_PER_LANE)
    console.print(f"A document of {len(paper.text.split())} words states {len(paper.questions)} facts. It begins:")
    console.print(f"  [dim]{textwrap.shorten(paper.text, 110, placeholder=' ...')}[/]")
    console.print("Starting the router and two shards ...")
    with pointsman_up() as ports:
        asked = ask_everything(ports, paper, questions)
    console.print()
    show(console, asked)
    wrong = list(complaints(asked))
    for complaint in wrong:
        console.print(f"[red]not right:[/] {complaint}")
    if not wrong:
        console.print(
            "\nEvery answer is right. Later questions found the document's KV on the shard that held it; "
            "the tenants shared nothing."
        )
    if options.json:
        console.print_json(
            json.dumps([vars(turn) | {"question": turn.question.question} for turn in asked], default=str)
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
