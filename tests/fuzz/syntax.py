"""What the patterns of tests/fuzz are made of."""

from __future__ import annotations

DATA = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
JSON = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"\\",
    b"\\u0000",
    b"\\\\",
    b"1",
    b" ",
    b"null",
    b'"a":',
    b'{"a":1}',
    b"e",
    b"-",
    b'""',
)
VALUES = (
    b"[],",
    b'{"a":1},',
    b"1,",
    b'"",',
    b"{},",
    b"1e5,",
    b'"\\u0000",',
    b"null,",
    b'{"a":[[]]},',
    b"-0.5,",
    b"NaN,",
)
"""Whole values."""

EVENTS = (
    (b'data: {"choices":[', b"0]}\n\n"),
    (b'data: {"type":"x","index":0,"message":[', b"0]}\n\n"),
    (b'data: {"choices":[{"index":0,"delta":{"content":"a","x":[', b"0]}}]}\n\n"),
    (b'data: {"choices":[{"index":0,"delta":{"content":"', b'"}}]}\n\n'),
)
LOGPROBS = b'{"choices":[{"index":0,"message":{"content":"a"},"logprobs":{"content":['
PACKED_BEGINNINGS = (
    b"",
    b"\x93\xcb\0\0\0\0\0\0\0\0\xdd\0\1\0\0",
    b"\xdd\xff\xff\xff\xff",
    b"\x81",
    b"\xdf\xff\xff\xff\xff",
)
PACKED_FRAMES = (
    (b"\x93\xcb\0\0\0\0\0\0\0\0\xdd\0\0\1\0", b""),
    (b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x97\xabBlockStored\x91\1\xc0\xdd\0\0\1\0", b"\x10\xc0\xc0"),
)
PACKED = (
    *(
        b"\x90",
        b"\x91",
        b"\x80",
        b"\x81",
        b"\xc0",
        b"\xa1a",
        b"\xdd\0\0\0\1",
        b"\xc4\0",
        b"\xd9\0",
        b"\0",
        b"\xff",
        b"\xc1",
    ),
    *(
        b"\x91\xb0AllBlocksCleared",
        b"\x92\xb0AllBlocksCleared\xc0",
        b"\x92\xacBlockRemoved\x90",
        b"\xcf\0\0\0\0\0\0\0\1",
    ),
    *(b"\x91\x90", b"\xce\0\1\0\0", b"\x96\xabBlockStored\x91\1\xc0\x91\1\1\xc0"),
)
LINES = (b"\r", b"\n", b"\r\n", b":", b"data:", b"data: ", b"event:", b"a", b"\xef\xbb\xbf", b"data\n", b" ", b"\0")
HTTP = (
    b"\r\n",
    b"\n",
    b"\r",
    b":",
    b" ",
    b"a",
    b"0",
    b"1",
    b";",
    b",",
    b"\t",
    b"\0",
    b"0\r\n\r\n",
    b"1\r\nx\r\n",
    b"X:\r\n",
    b"10\r\n",
)
MARKS = (
    *(b"<tool_call>", b"</tool_call>", b"<arg_key>", b"</arg_key>", b"<arg_value>", b"</arg_value>", b"<|python_tag|>"),
    *(
        b"[TOOL_CALLS]",
        b"[ARGS]",
        b"f",
        b"<",
        b" ",
        b"\n",
        b"{",
        b"}",
        b'"',
        b"\\",
        b'{"name":',
        b'"f"',
        b'"arguments":',
        b"[",
        b";",
    ),
    *(
        b"<|channel|>",
        b"<|message|>",
        b"<|end|>",
        b"<|start|>",
        b"assistant",
        b"to=functions.f",
        b"</think>",
        b"<think>",
        b",",
    ),
    *(
        "<｜tool▁call▁begin｜>".encode(),
        "<｜tool▁sep｜>".encode(),
        "<｜tool▁call▁end｜>".encode(),
        b"```json\n",
        b"ab",
        b"aba",
    ),
)
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
USAGE_HEAD = b'{"writer":"w","amounts":["cost"]}\n'
USAGE_ROW = b'[1,"t","","","m","c","p","k","",1]'
GGUF = b"GGUF\3\0\0\0"
GGUF_STRINGS = (
    GGUF
    + bytes(8)
    + b"\1"
    + bytes(7)
    + b"\x15"
    + bytes(7)
    + b"tokenizer.ggml.tokens"
    + b"\x09\0\0\0\x08\0\0\0\xff\xff\0\0\0\0\0\0"
)
"""A header with one field, an array of 65,535 texts."""
