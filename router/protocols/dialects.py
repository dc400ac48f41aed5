"""The dialect of each HTTP path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backends.messages.answer import MESSAGES_PATH
from backends.openai.pooled import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH
from backends.openai.responses import RESPONSES_PATH
from router.protocols.anthropic.answers import MessagesDialect
from router.protocols.dialect import Dialect
from router.protocols.openai.dialect import chat_dialect, completion_dialect
from router.protocols.openai.request import CHAT_PATH, COMPLETION_PATH
from router.protocols.pooled.embeddings import embeddings_dialect
from router.protocols.pooled.rerank import rerank_dialect, score_dialect
from router.protocols.responses.answers import ResponsesDialect

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    CHAT_PATH: chat_dialect,
    COMPLETION_PATH: completion_dialect,
    RESPONSES_PATH: ResponsesDialect,
    EMBEDDINGS_PATH: embeddings_dialect,
    RERANK_PATH: rerank_dialect,
    SCORE_PATH: score_dialect,
    MESSAGES_PATH: MessagesDialect,
}
"""Path -> its dialect."""
