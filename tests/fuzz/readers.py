"""Every reader of bytes that other programs send, and what its patterns are made of."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping

from backends.detokenize import StopCutter
from backends.events import sglang, tensorrt_llm, vllm
from backends.fastchat.answer import FastChatAnswer
from backends.http.exchange import WholeBody
from backends.http.frames import FrameDecoder
from backends.http.generate_answer import GenerateAnswer
from backends.http.prometheus_text import Metrics
from backends.http.sse import SseDecoder
from backends.messages.answer import AnthropicAnswer
from backends.messages.passed import PassedMessage
from backends.ollama.answer import OllamaAnswer
from backends.openai.answer import OpenAIAnswer, ReadWhole
from backends.openai.passed import Ear, PassedStream, PassedWhole
from backends.tgi.answer import TGIAnswer
from backends.triton.answer import TritonAnswer
from router.batches.requests import requests_in
from router.identity.signing_keys import read_keys
from router.protocols.openai.documents import lifted
from router.shared.replicas import news
from router.text.channels import ChannelReader
from router.text.thoughts import ThoughtReader, ThoughtSyntax
from router.text.tool_formats import DEEPSEEK_3, GLM_45, HERMES, LLAMA, MISTRAL_11
from tests.fuzz.runs import (
    Given,
    Reader,
    answer,
    answers,
    asked,
    batch_lines,
    calls_of,
    certificate,
    checkpoint,
    coded,
    form,
    generate,
    json_body,
    keys_in_lines,
    link,
    lora,
    pages,
    peer,
    requests,
    sla,
    stream,
    text,
    token,
    watch,
    whole,
)
from tests.fuzz.stored import (
    audit,
    debts,
    decisions,
    document_hashes,
    error_page,
    gateway_message,
    gguf,
    handshakes,
    in_folder,
    inferred,
    journal,
    kv_file,
    snapshot,
)
from tests.fuzz.syntax import (
    CHUNKED,
    DATA,
    EVENTS,
    GGUF,
    GGUF_STRINGS,
    HEAD,
    HTTP,
    JSON,
    LINES,
    LOGPROBS,
    MARKS,
    OK,
    PACKED,
    PACKED_BEGINNINGS,
    PACKED_FRAMES,
    USAGE_HEAD,
    USAGE_ROW,
    VALUES,
)


def answered(make: Callable[[], WholeBody]) -> Reader:
    """The reader of an answer in one piece."""
    frames = ((b'{"choices":[', b"0]}"), (b'{"x":[', b"0]}"), (LOGPROBS, b"0]}}]}"), (b"[", b"0]"))
    return whole(answer(make), (b"", b"{", b'{"choices":['), (*JSON, *VALUES), frames=frames)


def events_of(decode: Callable[[bytes], object], *, on_thread: bool = True) -> Reader:
    """A message of cache events in MessagePack."""
    return whole(decode, PACKED_BEGINNINGS, PACKED, frames=PACKED_FRAMES, most_bytes=4 << 20, on_thread=on_thread)


def documents(body: bytes) -> None:
    """Documents between marks in a message."""
    lifted({"messages": [{"role": "user", "content": body.decode(errors="replace")}]})


def message_batch(body: bytes) -> None:
    """Anthropic's batch."""
    for _ in requests_in(io.BytesIO(body), most_bytes=8 << 20):
        pass


def metrics(page: bytes) -> None:
    """A page of metrics."""
    found = Metrics(page, ("m", "vllm:num_requests_running"))
    found.total("m")
    found.labels("m")


def keys(document: bytes) -> None:
    """An issuer's keys."""
    try:
        read_keys(document)
    except ValueError:
        return


READERS: Mapping[str, Reader] = {
    "HTTP requests": Reader(
        requests,
        (
            b"",
            b"GET /",
            HEAD,
            HEAD + b"X: ",
            HEAD + CHUNKED,
            HEAD + CHUNKED + b"fffffff\r\n",
            HEAD + CHUNKED + b"0\r\n",
            HEAD + b"Content-Length: 60000000\r\n\r\n",
            HEAD + CHUNKED + b"1;",
        ),
        (*HTTP, HEAD + b"\r\n", HEAD + CHUNKED + b"0\r\n\r\n", HEAD + b"Content-Length: 1\r\n\r\nx"),
    ),
    "HTTP answers": Reader(
        answers,
        (
            b"",
            OK,
            OK + b"X: ",
            OK + CHUNKED,
            OK + CHUNKED + b"fffffff\r\n",
            OK + CHUNKED + b"0\r\n",
            OK + b"\r\n",
            OK + CHUNKED + b"1;",
        ),
        (*HTTP, b"HTTP/1.1 100 Continue\r\n\r\n"),
    ),
    "multipart forms": Reader(
        form,
        (
            b"",
            b"--xx\r\n",
            b"--xx\r\nContent-Disposition: form-data; name=a\r\n\r\n",
            b"--xx\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n",
            b"--xx\r\nContent-Disposition: ",
        ),
        (
            b"\r",
            b"\n",
            b"\r\n",
            b"-",
            b"--",
            b"--x",
            b"\r\n--x",
            b"--xx\r\n",
            b"\r\n--xx",
            b"\r\n--xx\r\n\r\n",
            b"a",
            b":",
            b";",
            b'"',
            b"a: b\r\n",
            b"name=a;",
            b"\\",
            b"=",
            b" ",
            b'name="',
            b"*0=",
        ),
        at_once=64 << 10,
    ),
    "gzip": Reader(
        coded("gzip"),
        (b"", b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x1f\x8b\x08\x1f"),
        (b"\0", b"\xff", b"\0\0\0\xff\xff", b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x03\0\0\0\0\0\0\0\0\0", b"a", b"\x01"),
    ),
    "deflate": Reader(
        coded("deflate"), (b"", b"x\x9c"), (b"\0", b"\xff", b"\0\0\0\xff\xff", b"\x03\0", b"a", b"\x01", b"\x9c")
    ),
    "deflate that grows": Reader(coded("deflate"), (b"",), (b"\0", b"a", b"ab", b"\r\n"), encode=zlib.compress),
    "SSE": stream(SseDecoder, (b"", b"data: ", b"event: a\ndata: b"), LINES),
    "JSON lines": stream(FrameDecoder, (b"", b"{"), (b"\n", b"\r\n", b" ", b"a", b"\0", b"{}\n")),
    "OpenAI's stream, passed": stream(
        lambda: PassedStream(Ear("b", 5), shows_usage=False),
        (b"", DATA, b"data: {", b'data: {"choices":['),
        (*LINES, *JSON, DATA, *VALUES),
        frames=EVENTS,
    ),
    "OpenAI's stream, read": stream(
        lambda: OpenAIAnswer("b", asked(), is_streamed=True),
        (b"", DATA, b"data: {"),
        (*LINES, *JSON, DATA, *VALUES),
        frames=EVENTS,
    ),
    "OpenAI's answer, passed": answered(lambda: PassedWhole(Ear("b", 5))),
    "OpenAI's answer, read": answered(lambda: ReadWhole(OpenAIAnswer("b", asked(), is_streamed=False))),
    "Anthropic's stream, passed": stream(
        lambda: PassedMessage("b"), (b"", b'data: {"type":"ping"'), (*LINES, *JSON, b'data: {"type":"ping"}\n\n')
    ),
    "Anthropic's stream, read": stream(
        lambda: AnthropicAnswer("b"),
        (b"", b'data: {"type":"ping"'),
        (*LINES, *JSON, b'data: {"type":"ping"}\n\n', *VALUES),
        frames=EVENTS,
    ),
    "Ollama's stream": stream(
        lambda: OllamaAnswer("b"),
        (b"", b"{"),
        (
            *JSON,
            b"\n",
            *VALUES,
            b'{"message":{"content":"a"}}\n',
            b'{"message":{"tool_calls":[{"function":{"name":"f","arguments":{}}}]}}\n',
        ),
        frames=((b'{"message":[', b"0]}\n"), (b'{"context":[', b"0]}\n")),
    ),
    "TGI's stream": stream(
        lambda: TGIAnswer("b", stops=("aab",)),
        (b"",),
        (*LINES, *JSON, b'data: {"token":{"id":1,"text":"aa","logprob":0,"special":false}}\n\n'),
    ),
    "SGLang's stream": stream(
        lambda: GenerateAnswer("b", is_cumulative=True),
        (b"",),
        (*LINES, *JSON, b'data: {"text":"a","meta_info":{"id":"a"},"output_ids":[1]}\n\n'),
    ),
    "SGLang's stream, pieces": stream(
        lambda: GenerateAnswer("b", is_cumulative=False),
        (b"",),
        (b'data: {"text":"a","meta_info":{"id":"a"},"output_ids":[1]}\n\n', b"\n", b":"),
    ),
    "FastChat's stream": stream(
        lambda: FastChatAnswer("b"), (b"", b"{"), (*JSON, b"\0", b'{"text":"a","error_code":0}\0')
    ),
    "JSON bodies": whole(
        json_body, (b"", b"{", b'{"a":"', b'{"a":[', b'{"a":{', b'{"model":"a","a":"'), JSON, on_thread=True
    ),
    "documents in messages": whole(
        documents,
        (b"", b"{{documents any}}\n"),
        (
            b"{{documents any}}",
            b"{{documents fixed}}\n",
            b"{{/documents}}",
            b"{{document a: b}}\n",
            b"{",
            b"}",
            b"\n",
            b"a",
            b"{{document ",
            b": ",
        ),
        on_thread=True,
    ),
    "message batches": whole(
        message_batch,
        (b"", b"{", b'{"requests":[', b'{"requests":["'),
        (*JSON, b"[],", b'{"custom_id":"a"},'),
        on_thread=True,
    ),
    "metrics": whole(
        metrics,
        (b"", b"m", b"m{", b'm{a="'),
        (b"\n", b"m", b" ", b"1", b"{", b"}", b'"', b"\\", b",", b"=", b'a="b",', b'm{a="b"} 1\n', b"m 1\n", b"#"),
    ),
    "keys of issuers": whole(
        keys,
        (b"", b'{"keys":['),
        (*JSON, b'{"kty":"RSA","n":"AQAB","e":"AQAB"},', b'{"kty":"OKP","crv":"Ed25519","x":"AA"},'),
        on_thread=True,
    ),
    "cache events, vLLM": events_of(vllm.decode),
    "cache events, SGLang": events_of(sglang.decode),
    "news of routers": whole(news.decode, (b"", b"\x93\x90", b"\x94\xdd\0\1\0\0"), PACKED, most_bytes=64 << 10),
    "cache events, TensorRT-LLM": whole(
        tensorrt_llm.decode,
        (b"", b"["),
        (*JSON, *VALUES, b'{"event_id":1,"data":{"type":"created"}},'),
        frames=((b"[", b"null]"), (b'[{"event_id":1,"data":{"type":"removed","block_hashes":[', b"0]}}]")),
        most_bytes=8 << 20,
        on_thread=True,
    ),
    "Triton's stream, pieces": stream(
        lambda: TritonAnswer("b", asked(), is_cumulative=False), (b"",), (b'data: {"text_output":"a"}\n\n', b"\n", b":")
    ),
    "Triton's stream": stream(
        lambda: TritonAnswer("b", asked(), is_cumulative=True),
        (b"",),
        (*LINES, *JSON, b'data: {"text_output":"a"}\n\n'),
        frames=((b'data: {"text_output":[', b"0]}\n\n"), (b'data: {"text_output":"', b'"}\n\n')),
    ),
    "pages of engines": whole(
        pages,
        (b"", b"{", b"[", b'{"loads":[', b'{"paths":{'),
        (*JSON, *VALUES, b'{"is_processing":true},', b'"/a":{"post":{}},', b'{"dp_rank":1},', b'{"kvCacheStats":{}},'),
        frames=((b"[", b"{}]"), (b'{"paths":{', b'"b":{}}}'), (b'{"loads":[', b"{}]}")),
        most_bytes=8 << 20,
    ),
    "tokens of issuers": whole(
        token,
        (b"eyJ", b"eyJhIjoi", b"eyJ9.", b"eyJ9.e30."),
        (b"a", b"=", b".", b"-", b"W1tb", b"e30", b"\0", b"IiI6"),
        most_bytes=64 << 10,
    ),
    "certificates": whole(
        certificate,
        (b"", b"\x30\x82\xff\xff", b"\x30\xff"),
        (b"\x30", b"\x30\x80", b"\x02\x01\0", b"\xff", b"\0", b"\x30\x84\0\0\0\0"),
    ),
    "gRPC requests": whole(
        generate,
        (b"", b"\x0a\1m", b"[", b"{"),
        (*JSON, *VALUES, b"\x0a\0", b"\x12\0", b"\x1a\0", b"\x22\0", b"\x08\1", b"\xff", b"\x0a\x01a\x12\x01p"),
        frames=((b"[", b"0]"),),
        on_thread=True,
    ),
    "KV of other shards": Reader(
        peer,
        (b"", b"W\1\0", b"O\0\1\0\0\0\1\0\0", b"O\1\1\xff\xff\0\x40\0\0"),
        (b"W", b"O", b"\0", b"\1", b"\xff", b"\x40\0", b"W\1\0", b"O\0\0\0\0\1\0\0\0", b"a"),
        on_thread=True,
    ),
    "links of a divided model": Reader(
        link,
        (b"", b"\xff\xff\0\0", b"\0\0\0\x10"),
        (b"\0", b"\1", b"\1\0\0\0\x90", b"\0\0\0\0", b"\xff", b"\x90", b"\x91", b"\x80"),
        on_thread=True,
    ),
    "adapters' files": whole(
        lora,
        (b"", b"{", b'{"a":{"dtype":"'),
        (*JSON, *VALUES, b'"a":{"dtype":"F32"},'),
        frames=((b"{", b'"z":{"dtype":"F32"}}'), (b"[", b"0]")),
        on_thread=True,
    ),
    "config.json": whole(
        checkpoint,
        (b"", b"{", b'{"architectures":["'),
        (*JSON, *VALUES),
        frames=((b'{"architectures":["LlamaForCausalLM"],"x":[', b"0]}"), (b'{"architectures":[', b'"a"]}')),
        on_thread=True,
    ),
    "SLA files": whole(
        sla,
        (b"", b"pools:\n", b"pools: {", b"a: &a ["),
        (
            *(
                b"a: ",
                b"\n",
                b"  ",
                b"- ",
                b"{",
                b"}",
                b"[",
                b"]",
                b",",
                b"&a ",
                b"*a",
                b"'",
                b'"',
                b"#",
                b"|\n",
                b"? ",
                b": ",
            ),
            *(b"a", b"!!x ", b"---\n", b"pools:\n", b"  own: {kind: fake}\n", b"\t", b"<<: *a", b"%"),
        ),
        on_thread=True,
    ),
    "key files": whole(
        keys_in_lines,
        (b"", b"{"),
        (*JSON, b"\n", b'{"sha256":"' + b"a" * 64 + b'","tenant":"t","created":1}\n'),
        on_thread=True,
    ),
    "lines of batches": whole(
        batch_lines,
        (b"", b"{", b'{"custom_id":"a","method":"POST","url":"/","body":{'),
        (*JSON, *VALUES, b"\n", b"\r", b"\xe2\x80\xa8", b'{"custom_id":"a","method":"POST","url":"/","body":{}}\n'),
        frames=((b'{"custom_id":"a","method":"POST","url":"/","body":[', b"0]}\n"),),
        on_thread=True,
    ),
    "Kubernetes' watch": whole(
        watch,
        (b"", b"{"),
        (*JSON, *VALUES, b'{"addresses":["10.0.0.1"]},'),
        frames=((b'{"ports":[{"name":"http","port":1}],"endpoints":[', b"{}]}"), (b"[", b"0]")),
        most_bytes=8 << 20,
    ),
    "calls, Hermes": calls_of(
        HERMES, (b"", b"<tool_call>", b'<tool_call>{"name": "', b'<tool_call>{"name":"f","arguments":{')
    ),
    "calls, Llama": calls_of(LLAMA, (b"", b"{", b'{"name":"f","parameters":{')),
    "calls, Mistral": calls_of(MISTRAL_11, (b"", b"[TOOL_CALLS]", b"[TOOL_CALLS]f[ARGS]{")),
    "calls, DeepSeek": calls_of(DEEPSEEK_3, (b"", "<｜tool▁calls▁begin｜>".encode())),
    "calls, GLM": calls_of(
        GLM_45,
        (
            b"",
            b"<tool_call>f\n",
            b"<tool_call>f\n<arg_key>a</arg_key><arg_value>",
            b"<tool_call>f\n<arg_key>b</arg_key><arg_value>",
        ),
    ),
    "channels": text(
        lambda: ChannelReader(str),
        (b"", b"<|channel|>analysis<|message|>", b"<|channel|>commentary to=functions.f<|message|>"),
        MARKS,
    ),
    "reasoning": text(lambda: ThoughtReader(ThoughtSyntax()), (b"", b"<think>", b"<think>a"), MARKS),
    "stop strings": text(
        lambda: StopCutter(("aab" * 10, "ab" * 499 + "c", "a" * 999 + "b")), (b"",), (b"a", b"ab", b"aab", b"b", b" ")
    ),
    "messages of gateways": whole(
        gateway_message,
        (b"", b"\x12\0"),
        (
            *(
                b"\x0a\0",
                b"\x0a\3\x0a\1a",
                b"\x0a\6\x0a\1a\x1a\1b",
                b"\x0a\3\x1a\1a",
                b"\x0a\3\x1a\1,",
                b"\x42\0",
                b"\x0a\2\x32\0",
            ),
            *(b"\x12\0", b"\x22\3\x0a\1a", b"\x0a", b"\xff", b"\0", b"\x5b\x5c", b"\x5b"),
        ),
    ),
    "Triton over gRPC": whole(
        inferred,
        (b"", b"\x0a\1m"),
        (
            *(
                b"\x2a\0",
                b"\x32\0",
                b"\x22\0",
                b"\x12\0",
                b"\0\0\0\0",
                b"\1\0\0\0a",
                b"\x0a\0",
                b"\xff",
                b"\x5b\x5c",
                b"\x5b",
            ),
            b"\x2a\x14\x0a\x0btext_output\x12\x05BYTES",
            b"\x32\5\1\0\0\0a",
        ),
    ),
    "document sets in Redis": whole(document_hashes, PACKED_BEGINNINGS, (*PACKED, b"1", b"e", b"9", b"inf", b":")),
    "snapshots of routers": whole(
        snapshot,
        (*PACKED_BEGINNINGS, b"\x94\1\xa1a", b"\x98\xa9residence\xa1b\xa30-0\1\0\xc2"),
        (*PACKED, b"\xc5\1\0", b"\xc4\xff"),
    ),
    "journals of usage": whole(
        in_folder(journal),
        (b"", USAGE_HEAD, USAGE_HEAD + b'{"seq":1,"rows":['),
        (*JSON, *VALUES, b"\n", b'{"seq":1,"rows":[]}\n', b'{"seq":1,"rows":[' + USAGE_ROW + b"]}\n", USAGE_ROW + b","),
        frames=((USAGE_HEAD + b'{"seq":1,"rows":[', USAGE_ROW + b"]}\n"),),
        on_thread=True,
    ),
    "debts to the store": whole(
        in_folder(debts),
        (b"", b'"p"\n', b'"p"\n["l","i","w",1,0,['),
        (*JSON, *VALUES, b"\n", b'["l","i","w",1,0,[]]\n', b'["m",0,1],'),
        frames=((b'"p"\n["l","i","w",1,0,[', b'["m",0,1]]]\n'),),
        on_thread=True,
    ),
    "decision logs": whole(
        in_folder(decisions), (b"", b"{", b'{"version":1,"time":1,'), (*JSON, *VALUES, b"\n", b"\r"), on_thread=True
    ),
    "audit logs": whole(
        in_folder(audit),
        (b"", b'{"seq":1,"prev":"' + b"0" * 64 + b'",'),
        (*JSON, *VALUES, b"\n", b'{"seq":1}\n', b'","sha256":"', b"0" * 64 + b'"}\n', b"\r"),
        on_thread=True,
    ),
    "errors with the router's keys": whole(
        error_page,
        (b"", b"sk-"),
        (b"s", b"sk", b"sk-", b"0", b"sk-" + b"0" * 39, b"\xff", b"a", b"sk-own"),
        most_bytes=64 << 10,
    ),
    "GGUF files": whole(
        in_folder(gguf),
        (
            b"",
            GGUF + b"\0" * 8 + b"\xff\xff\0\0\0\0\0\0",
            GGUF + b"\xff\xff\0\0\0\0\0\0" + b"\0" * 8,
            GGUF + b"\0" * 8 + b"\1" + b"\0" * 7,
        ),
        (
            *(
                b"\0",
                b"\1",
                b"\xff",
                b"\1\0\0\0\0\0\0\0a",
                b"\0\0\0\0\1",
                b"\x08\0\0\0",
                b"\x09\0\0\0",
                b"\0\0\0\0\0\0\0\0",
            ),
            b"\1\0\0\0\0\0\0\0a\0\0\0\0\1",
            b"\1\0\0\0\0\0\0\0a\0\0\0\0\0\0\0\0" + b"\0" * 8,
        ),
        frames=((GGUF_STRINGS, b""),),
        at_start=True,
    ),
    "files of KV": whole(
        in_folder(kv_file), (b"", b"pointsman-kv\0\0\0\1"), (b"\0", b"\xff", b"pointsman-kv\0\0\0\1"), on_thread=True
    ),
    "handshakes of shards": Reader(
        handshakes(Given),
        (b"", b"pointsman-peer\0\3", b"pointsman-peer\0\3" + bytes(32)),
        (b"\0", b"\xff", b"pointsman-peer\0\3", b"a"),
        on_thread=True,
    ),
}
