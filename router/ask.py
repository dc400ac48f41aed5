"""One call of a client, in no particular protocol: parsed and checked, not yet a Request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from policies.nouns import Capability, Delta, Native, Sampling


class Chat(msgspec.Struct, frozen=True):
    """A conversation that the model's chat template turns into a prompt.

    `messages` and `tools` are in the form for templates (`router/text/conversation.py`), with `content` always text, in
    which a mark replaces each image, sound and file; `media` counts them, and `images` those that are images. `parts`
    has the original parts of messages, by number, if the content had several or a part that is not text. `variables`
    reach the template by name.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    opens_answer: bool = True
    """The prompt ends with the opening of the assistant's turn."""
    continues: bool = False
    """The last message is to be continued, not answered: the prompt ends with its content."""
    media: int = 0
    images: int = 0
    forced: frozenset[str] = frozenset()
    """Names of tools; the answer must call one of them. Empty: no call is required."""
    one_call: bool = False
    """At most one call of a tool is allowed."""
    bars_tools: bool = False
    """No call of a tool is allowed. Engines differ in whether the model sees the tools then."""
    parts: Mapping[int, Sequence[Mapping[str, Any]]] = msgspec.field(default_factory=dict)
    template: str | None = None
    """The client's own chat template."""
    starts: str = ""
    """Each text that begins with this word behind a line break may come again at another place, behind other texts."""


class AskDocument(msgspec.Struct, frozen=True):
    """A text that a retrieval found for a prompt. Prompts and answers name it by its `id`.

    Without a text it is the document of this id in the request's document set.
    """

    id: str
    text: str
    title: str = ""


class Documents(msgspec.Struct, frozen=True):
    """The documents of a request, in the client's order. `is_free`: any other order is as good to the client, in which
    the first `leading` stay in front.

    `of_set` is the tenant's document set that has those without a text, and all documents if `each` is empty.
    """

    each: tuple[AskDocument, ...]
    is_free: bool = False
    leading: int = 0
    of_set: str = ""
    reuse_budget: float | None = None
    """The share of each that is computed again where it is reused at another place; None: as the operators have it."""


class DocumentSpans(msgspec.Struct, frozen=True):
    """Where the documents `ids` of the set `of_set` stand in a prompt of `size` characters: each from begin to end."""

    of_set: str
    ids: tuple[str, ...]
    each: tuple[tuple[int, int], ...]
    size: int


class Targets(msgspec.Struct, frozen=True):
    """Latencies that a caller hopes for, in seconds: until the first token, and of each further one."""

    ttft_s: float | None = None
    tpot_s: float | None = None


Input = Chat | str | bytes
"""One prompt: a conversation, text as it is, or little-endian uint32 token ids."""


class Reading(msgspec.Struct, frozen=True):
    """How the client wants its prompts tokenized.

    `adds_special` tokens at their ends; None: the endpoint's default, which adds them to texts only.
    A prompt is truncated to `most_tokens` (-1: to the model's limit), at its beginning unless it `keeps_start`;
    None: at its beginning, inside its special tokens.
    """

    adds_special: bool | None = None
    most_tokens: int | None = None
    keeps_start: bool | None = None


class Ask(msgspec.Struct, frozen=True):
    """One call of a client. Each of `inputs` becomes one Request; their answers share the call's choices.

    `max_new_tokens` None: as many as fit, but no more than `usual_new_tokens`. `bodies` has one OpenAI body per input,
    for backends that speak that dialect. `headers` have lower-case names. `deadline_s` is in seconds from when the call
    was read. Backends in `avoiding` are not used.
    """

    model: str
    inputs: tuple[Input, ...]
    bodies: tuple[Mapping[str, Any], ...]
    path: str
    natives: tuple[Native, ...] = ()
    """One for each input: the call in the client's own dialect, for backends that speak it too."""
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    reading: Reading = Reading()
    max_new_tokens: int | None = None
    usual_new_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    usage_so_far: bool = False
    """Each chunk has the usage so far: vLLM's `continuous_usage_stats`."""
    echo: bool = False
    only_echo: bool = False
    """Only the prompt is wanted in the answer: generated tokens are left out."""
    needs: frozenset[Capability] = frozenset()
    priority: str | None = None
    targets: Targets | None = None
    """They hold where the class has none, or tighter ones."""
    session: str | None = None
    user: str | None = None
    """The client's name for its user."""
    deadline_s: float | None = None
    avoiding: frozenset[str] = frozenset()
    yields: bool = False
    """No client waits for it: whatever its class, it is queued behind all others, is preemptible and never shed."""
    counted_as: str | None = None
    """Of one that yields: the class in which telemetry and usage count it; None: in none."""
    explain: bool = False
    """The client wants an explanation of the choice of backend."""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    media_urls: tuple[str, ...] = ()
    """URLs of its images, sounds and files, which an engine would fetch."""
    passed_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Headers that belong to the body: a backend of the client's dialect needs them to read it."""

    documents: Documents | None = None
    """Documents that are yet to be written where the mark for them stands in its chat and bodies."""
    document_ids: tuple[str, ...] = ()
    """Ids of the documents that were written into it, in their order there."""
    spans: DocumentSpans | None = None
    """Where those of a document set stand; None: there are none."""
    document_spans: tuple[tuple[int, int], ...] = ()
    """The first tokens of these documents, and the tokens behind their last ones; empty if they are not known."""
    reuse_budget: float | None = None
    """That of its documents."""

    def echoed(self, delta: Delta, echo: str, unechoed: set[int]) -> Delta:
        """`delta` behind the prompt's text `echo`, if it is the first of a choice that is still in `unechoed`; without
        its generated text if only the echo is wanted. Bytes of a backend that echoes by itself stay unchanged.
        """
        is_first = delta.choice in unechoed
        unechoed.discard(delta.choice)
        if self.only_echo and delta.raw is None and delta.body is None:
            delta = Delta(choice=delta.choice, finish_reason="length" if is_first else None, usage=delta.usage)
        return msgspec.structs.replace(delta, text=echo + delta.text) if is_first else delta

    @property
    def subject(self) -> str:
        """The field that holds the prompt, for error messages."""
        return "messages" if isinstance(self.inputs[0], Chat) else "prompt"
