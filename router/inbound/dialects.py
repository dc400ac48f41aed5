"""Which dialect is spoken at which path of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backends.messages.answer import MESSAGES_PATH
from backends.openai.pooled import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH
from backends.openai.responses import RESPONSES_PATH
from router.inbound.anthropic_answers import MessagesDialect
from router.inbound.dialect import Dialect
from router.inbound.embeddings import embeddings_dialect
from router.inbound.openai import CHAT_PATH, COMPLETION_PATH
from router.inbound.openai_dialect import chat_dialect, completion_dialect
from router.inbound.rerank import rerank_dialect, score_dialect
from router.inbound.responses_answers import ResponsesDialect

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    CHAT_PATH: chat_dialect,
    COMPLETION_PATH: completion_dialect,
    RESPONSES_PATH: ResponsesDialect,
    EMBEDDINGS_PATH: embeddings_dialect,
    RERANK_PATH: rerank_dialect,
    SCORE_PATH: score_dialect,
    MESSAGES_PATH: MessagesDialect,
}
"""Path -> what is spoken there."""
