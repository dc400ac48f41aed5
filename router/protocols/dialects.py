"""The dialect of each HTTP path."""

from __future__ import annotations

from collections.abc import Mapping

from backends.messages.answer import MESSAGES_PATH
from backends.openai.pooled import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH
from backends.openai.responses import RESPONSES_PATH
from router.protocols.anthropic.answers import MessagesDialect
from router.protocols.dialect import Dialect
from router.protocols.openai.dialect import CHATS, COMPLETIONS
from router.protocols.openai.request import CHAT_PATH, COMPLETION_PATH
from router.protocols.pooled.embeddings import EMBEDDINGS
from router.protocols.pooled.rerank import RERANK, SCORE
from router.protocols.responses.answers import ResponsesDialect

OTHER_PATHS: Mapping[str, str] = {"/v2/rerank": RERANK_PATH, "/rerank": RERANK_PATH, "/score": SCORE_PATH}
"""Other names of paths, of Cohere's and Jina's clients and of vLLM -> the path."""

_USUAL: Mapping[str, Dialect] = {
    CHAT_PATH: CHATS,
    COMPLETION_PATH: COMPLETIONS,
    RESPONSES_PATH: ResponsesDialect(),
    EMBEDDINGS_PATH: EMBEDDINGS,
    RERANK_PATH: RERANK,
    SCORE_PATH: SCORE,
    MESSAGES_PATH: MessagesDialect(),
}
DIALECTS: Mapping[str, Dialect] = {**_USUAL, **{path: _USUAL[usual] for path, usual in OTHER_PATHS.items()}}
"""Path -> its dialect."""
