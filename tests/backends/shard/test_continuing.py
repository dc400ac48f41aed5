"""A shard draws the rest of an answer as if it had drawn the beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import Unreached
from policies.nouns import Beginning, Capability, Sampling, Usage
from shards.wire.facts import ShardFacts
from shards.wire.translate import pack_ids
from shards.wire.v1 import shard_pb2 as wire
from tests.backends.parts import END, a_prompt, a_request, everything, ids_of, text_of
from tests.backends.shard.test_backend import a_backend, an_engine
from tests.shards.attached import a_shard

WHOLE = "one, two 😀 three"


def begun(ids: tuple[int, ...]) -> Beginning:
    return Beginning(len(ids), "", pack_ids(ids))


@pytest.mark.parametrize("cut", range(1, len(ids_of(WHOLE)) + 1))
async def test_the_text_joins_wherever_the_answer_was_cut_even_inside_a_character(tmp_path: Path, cut: int) -> None:
    ids = ids_of(WHOLE)[:cut]
    async with a_shard(an_engine(tmp_path, WHOLE)) as server, a_backend(server) as backend:
        deltas = await everything(backend, a_request(), a_prompt(beginning=begun(ids)))
        repeated, *rest = deltas
        assert repeated.is_repeat
        assert repeated.token_ids == ids
        assert repeated.text + text_of(rest) == WHOLE
        assert tuple(token for delta in rest for token in delta.token_ids) == ids_of(WHOLE + END)[cut:]
        assert rest[-1].usage == Usage(5, len(ids_of(WHOLE + END)), 0)


async def test_the_shard_learns_which_tokens_are_of_the_answer_and_how_many_are_left(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, WHOLE)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await everything(backend, a_request(max_new_tokens=10), a_prompt(beginning=begun(ids_of(WHOLE)[:4])))
    (submission,) = engine.submitted
    assert (submission.prompt_tokens, submission.answered_tokens, submission.max_new_tokens) == (9, 4, 6)


async def test_a_stop_string_across_the_cut_is_not_shown(tmp_path: Path) -> None:
    beginning = begun(ids_of("one, t"))
    request = a_request(sampling=Sampling(stop=(", two",)))
    async with a_shard(an_engine(tmp_path, WHOLE)) as server, a_backend(server) as backend:
        repeated, *rest = await everything(backend, request, a_prompt(beginning=beginning))
    assert (repeated.text, text_of(rest)) == ("one", "")
    assert rest[-1].finish_reason == "stop"


async def test_any_shard_has_the_same_seed_for_the_same_request(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, WHOLE)
    async with a_shard(engine) as server, a_backend(server) as backend:
        for name in ("r1", "r1", "r2"):
            await everything(backend, a_request(id=name))
    first, again, other = (submission.sampling.seed for submission in engine.submitted)
    assert first == again
    assert first != other


async def test_a_shard_of_before_is_not_asked_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = ShardFacts.welcome

    def of_before(self: ShardFacts, snapshot: tuple[object, ...]) -> wire.Welcome:
        told = welcome(self, snapshot)  # type: ignore[arg-type]
        told.ClearField("continues_answers")
        return told

    monkeypatch.setattr(ShardFacts, "welcome", of_before)
    async with a_shard(an_engine(tmp_path, WHOLE)) as server, a_backend(server) as backend:
        described = backend.describe()
        assert described is not None
        assert Capability.CONTINUES_TOKENS not in described.capabilities
        with pytest.raises(Unreached, match="cannot continue"):
            await everything(backend, a_request(), a_prompt(beginning=begun(ids_of("one"))))
