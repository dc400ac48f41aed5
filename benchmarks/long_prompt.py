"""A prompt of 200,000 tokens through router and link: its effect on the router's event loop, cold and warm.

Starts `pointsman up` with one shard on a tiny random model with a sliding window (so that the network costs little and
everything around it is visible), sends the prompt as text over HTTP, then again with another ending, while a second
client requests `/healthz` all the time. Prints TTFT, the event loop's worst lag as the router exports it, and the
second client's latencies.

    python benchmarks/long_prompt.py [--tokens 200000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tokenizers import Tokenizer
from transformers import MistralConfig, MistralForCausalLM

from shards.bundled import weights
from shards.bundled.documents import document, facts_within

HTTP = "127.0.0.1:18480"
ADMIN = "127.0.0.1:18482"
SLA = """
pools: {{own: {{kind: shard, local: 1, model: "{model}"}}}}
rules: [{{class: long, pools: [own]}}]
classes: {{long: {{ttft_p95: 60s}}}}
server: {{http: "{http}", grpc: "127.0.0.1:18481", admin: "127.0.0.1:18482", state: off}}
"""


def a_windowed_model(folder: Path, context_tokens: int) -> None:
    """A one-layer random Mistral with the bundled tokenizer and a context of `context_tokens`."""
    shutil.copytree(weights(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "*.md"))
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = MistralConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=256,
        max_position_embeddings=context_tokens,
    )
    MistralForCausalLM(config).save_pretrained(folder)


def a_text(tokens: int) -> str:
    """Documents one after another, about `tokens` long, cut to the token."""
    tokenizer = Tokenizer.from_file(str(weights() / "tokenizer.json"))
    rng, pieces, have = random.Random(3), [], 0
    while have < tokens:
        piece = document(rng, facts_within(2000)).text + "\n"
        have += len(tokenizer.encode(piece).ids)
        pieces.append(piece)
    return str(tokenizer.decode(tokenizer.encode("".join(pieces)).ids[:tokens]))


def ask(text: str) -> tuple[float, dict[str, object]]:
    """Seconds to the first token, and the usage."""
    body = {"model": "long", "prompt": text, "max_tokens": 2, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{HTTP}/v1/completions", json.dumps(body).encode(), headers)
    started, first, usage = time.perf_counter(), 0.0, {}
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first = first or time.perf_counter()
                usage = event.get("usage") or usage
    return first - started, usage


def metric(name: str) -> float:
    with urllib.request.urlopen(f"http://{ADMIN}/metrics", timeout=60) as reply:
        found = re.search(rf"^{name} (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found, f"/metrics has no {name}"
    return float(found[1])


class Bystander(threading.Thread):
    """Requests /healthz all the time and records how long each answer took."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            started = time.perf_counter()
            with urllib.request.urlopen(f"http://{HTTP}/healthz", timeout=60) as reply:
                reply.read()
            self.seconds.append(time.perf_counter() - started)


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{HTTP}/readyz", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("pointsman up ended before it was ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model, sla = Path(scratch) / "long", Path(scratch) / "sla.yaml"
        a_windowed_model(model, asked.tokens + 1024)
        sla.write_text(SLA.format(model=model, http=HTTP))
        text = a_text(asked.tokens)
        process = subprocess.Popen([sys.executable, "-P", "-m", "router", "up", str(sla)], stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(process)
            ask("Hello")
            bystander = Bystander()
            bystander.start()
            before_ms = metric("pointsman_event_loop_lag_max_seconds") * 1e3
            print(f"{asked.tokens} tokens, {len(text) / 2**20:.2f} MiB of text; worst lag before: {before_ms:.1f} ms")
            for label, ending in (("cold", " one"), ("warm", " two"), ("warm", " three")):
                ttft_s, usage = ask(text + ending)
                details = usage["prompt_tokens_details"]
                assert isinstance(details, dict)
                lag_ms = metric("pointsman_event_loop_lag_max_seconds") * 1e3
                sizes = f"prompt {usage['prompt_tokens']}   cached {details['cached_tokens']}"
                print(f"{label}: TTFT {ttft_s:6.2f} s   {sizes}   worst lag of the event loop so far {lag_ms:5.1f} ms")
            bystander.ended.set()
            bystander.join()
            seconds = sorted(bystander.seconds)
            worst_ms, median_ms = seconds[-1] * 1e3, statistics.median(seconds) * 1e3
            print(f"beside it, {len(seconds)} x /healthz: median {median_ms:.1f} ms, slowest {worst_ms:.1f} ms")
        finally:
            process.terminate()
            process.wait(timeout=60)


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
