"""One request's answer, from a shard's tokens to Deltas. Pure but for its own memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace
from tokenizers import Tokenizer

from backends.detokenize import StopCutter, TokenNames, TokenText, marks_of
from backends.shard.inbox import News, Piece
from backends.shard.messages import error_of
from policies.nouns import Beginning, Delta, Sampling, TokenLogprob, Usage
from shards.nouns import TokenLogprobs
from shards.wire.translate import unpack_ids
from shards.wire.v1 import shard_pb2 as wire

_FINISH_REASONS = {wire.Finished.STOP: "stop", wire.Finished.LENGTH: "length"}


class _Choice:
    def __init__(
        self, tokenizer: Tokenizer | None, sampling: Sampling, shown: Mapping[int, str], before: Sequence[int]
    ) -> None:
        self.text = TokenText(tokenizer, shown, before) if tokenizer else None
        self.cutter = StopCutter(sampling.stop, shows=sampling.shows_stop)
        self._shows_end = sampling.shows_stop
        self.output_tokens = 0
        self.is_done = False
        self._least_tokens = sampling.min_new_tokens

    def push(self, piece: Piece) -> str:
        unstopped = self._least_tokens - self.output_tokens
        self.output_tokens += len(piece.token_ids)
        if self.text is None:
            return ""
        # what ends an answer is no part of it, unless the client wants it
        is_end = piece.end is not None and piece.end.by_token and not self._shows_end
        ids = piece.token_ids[:-1] if is_end else piece.token_ids
        if unstopped <= 0:
            return self.cutter.push(self.text.push(ids))
        passed = self.cutter.push(self.text.push(ids[:unstopped]), may_stop=False)
        return passed + self.cutter.push(self.text.push(ids[unstopped:]))

    def flush(self) -> str:
        last = self.cutter.push(self.text.flush()) if self.text else ""
        return last if self.cutter.found else last + self.cutter.flush()


class ShardAnswer:
    """Turns News into Deltas until every choice is done; the last Delta then carries usage.

    A stop string is found here too, so that none is ever shown, whatever the shard does; `is_done` is then True before
    the shard has ended by itself. Without a tokenizer Deltas have token ids and no text. Of a chat, what
    stands around channels and reasoning, and with `has_tools` around calls, is text, also where the model has special
    tokens for it.
    `before` are the last tokens of the prompt. A stop string that is complete within the first `min_new_tokens` is
    text, as in vLLM; a token that ends the answer is none.
    """

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: Tokenizer | None,
        *,
        backend: str,
        prompt_tokens: int,
        is_chat: bool = False,
        has_tools: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self._backend, self._grammar = backend, sampling.grammar
        self._names = TokenNames(tokenizer) if tokenizer and sampling.top_logprobs is not None else None
        self._prompt_tokens, self._computed_tokens, self._cached_tokens = prompt_tokens, 0, 0
        self._blended_tokens = 0
        self._resumed_tokens = 0
        shown = marks_of(tokenizer, has_tools=has_tools) if tokenizer and is_chat else {}
        self._choices = [_Choice(tokenizer, sampling, shown, before) for _ in range(max(1, sampling.choices))]

    def __repr__(self) -> str:
        return f"<ShardAnswer {sum(choice.is_done for choice in self._choices)} of {len(self._choices)} choices done>"

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_done for choice in self._choices)

    def resume(self, beginning: Beginning) -> Delta:
        """Go on behind `beginning`, drawn elsewhere, as if it had come from this shard; the Delta that repeats it."""
        piece = Piece(0, list(unpack_ids(beginning.token_ids)))
        self._resumed_tokens = len(piece.token_ids)
        return replace(self._delta(piece), is_repeat=True)

    def deltas(self, news: News) -> Iterator[Delta]:
        """The Deltas of `news`. Raises the error of a shard's refusal or failure."""
        if news.progress is not None:
            self._cached_tokens = news.progress.cached_tokens
            self._blended_tokens = news.progress.blended_tokens
            self._computed_tokens = news.progress.computed_tokens
        if news.progress is not None or news.expected_s is not None:
            yield Delta(computed_tokens=self._computed_tokens, expected_s=news.expected_s)
        for piece in news.pieces:
            if piece.end is not None and piece.end.reason not in _FINISH_REASONS:
                raise error_of(piece.end, self._backend, self._grammar)
            if not self._choices[piece.choice].is_done:
                yield self._delta(piece)

    def _delta(self, piece: Piece) -> Delta:
        choice = self._choices[piece.choice]
        text = choice.push(piece)
        if piece.end is not None:
            text += choice.flush()
            choice.output_tokens = self._resumed_tokens + piece.end.output_tokens
            # the shard counts the beginning as prompt
            self._cached_tokens = min(piece.end.cached_tokens, self._prompt_tokens)
            self._blended_tokens = min(piece.end.blended_tokens, self._prompt_tokens - self._cached_tokens)
        choice.is_done = piece.end is not None or choice.cutter.found is not None
        return Delta(
            text=text,
            choice=piece.choice,
            token_ids=tuple(piece.token_ids),
            logprobs=tuple(map(self._logprob, piece.token_ids, piece.logprobs)),
            finish_reason=_finish_reason(choice, piece),
            stop=choice.cutter.found,
            usage=self._usage() if self.is_done else None,
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.output_tokens for choice in self._choices),
            cached_tokens=self._cached_tokens,
            blended_tokens=self._blended_tokens,
        )

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = tuple(self._named(other, logprob) for other, logprob in logprobs.top)
        return self._named(token_id, logprobs.logprob, top)

    def _named(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text = "" if self._names is None else self._names.text(token_id)
        octets = None if self._names is None else self._names.octets(token_id, text)
        return TokenLogprob(token_id, text, logprob, top, octets)


def _finish_reason(choice: _Choice, piece: Piece) -> str | None:
    if choice.cutter.found is not None:
        return "stop"
    return _FINISH_REASONS[piece.end.reason] if piece.end is not None else None
