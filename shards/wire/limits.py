"""Size limits that both ends of the link keep, and the matching gRPC settings."""

from __future__ import annotations

MESSAGE_BYTES = 1 << 20
"""The largest message on the link; gRPC itself refuses larger ones, at both ends."""

PROMPT_PIECE_BYTES = 64 << 10
"""Token ids in one `Prompt` message: small enough that many prompts share a stream fairly."""

ASSET_PIECE_BYTES = 256 << 10
"""Content of one `AssetPiece`."""

CACHE_PIECE_KEYS = 8192
"""Keys in one cache event: the receiver stores them at once, on an event loop."""

PIN_PIECE_KEYS = 65536
"""Keys in one `Pin`: 512 KiB, four million tokens."""

PIN_NAME_CHARACTERS = 512
"""The longest name of a pin."""

KEY_BYTES = 8
"""Bytes of a block key on the wire: little-endian uint64."""

TEXT_CHARACTERS = 4096
"""The longest message for people; the rest is cut."""

MOST_GRAMMAR_CHARACTERS = 1 << 17
"""The longest grammar: at four bytes each, half of a message."""

HEARTBEAT_S = 1.0
"""Both ends of the link send something at least this often."""

SILENT_BEATS = 3
"""A shard that sent nothing for so many heartbeats is gone, as far as its router can tell."""

MISSED_BEATS = 10
"""A router that sent nothing for so many heartbeats is gone: more than of a shard, as its requests would end."""

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Each channel connects anew: with a shared subchannel a new attempt would wait out the last one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two shards on one port would share its connections at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
)
