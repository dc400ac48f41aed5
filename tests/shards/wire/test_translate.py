from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.nouns import (
    AdapterUse,
    Blend,
    CacheChange,
    CacheEvent,
    Cause,
    DiskUse,
    DocumentSpan,
    Drawn,
    Finished,
    FinishReason,
    Grammar,
    GrammarForm,
    Load,
    Progress,
    Report,
    SamplingParams,
    Submission,
    TokenLogprobs,
)
from shards.wire import limits, translate
from shards.wire.translate import RequestKey
from shards.wire.v1 import shard_pb2 as wire


def a_drawn(
    request: int = 1, choice: int = 0, ids: tuple[int, ...] = (7,), logprobs: tuple[TokenLogprobs, ...] = ()
) -> Drawn:
    return Drawn(RequestKey(0, request), choice, ids, logprobs)


def test_a_submit_becomes_a_submission() -> None:
    submit = wire.Submit(
        request=5,
        prompt_tokens=100,
        max_new_tokens=20,
        domain="acme",
        rank=2,
        deadline_ms=1500,
        prefill_slice=64,
        choices=2,
    )
    submit.sampling.CopyFrom(
        wire.Sampling(temperature=0.5, top_k=4, seed=9, stop=["x"], stop_token_ids=[1], top_logprobs=0)
    )
    submit.sampling.logit_bias[3] = 1.5
    assert translate.submission(submit, "key", now_s=10.0) == Submission(
        key="key",
        prompt_tokens=100,
        max_new_tokens=20,
        domain="acme",
        rank=2,
        deadline_s=11.5,
        prefill_slice=64,
        choices=2,
        sampling=SamplingParams(
            temperature=0.5,
            top_k=4,
            seed=9,
            stop=("x",),
            stop_token_ids=frozenset({1}),
            top_logprobs=0,
            logit_bias={3: 1.5},
        ),
    )


def test_what_a_submit_leaves_out_is_off() -> None:
    submission = translate.submission(wire.Submit(prompt_tokens=1, max_new_tokens=1), "key", now_s=10.0)
    assert submission == Submission("key", 1, 1)


def test_one_token_each_costs_two_columns() -> None:
    columns = translate.tokens([a_drawn(1), a_drawn(2, ids=(8,))])
    assert columns == wire.Tokens(request=[1, 2], token_ids=b"\x07\0\0\0\x08\0\0\0")


def test_the_bytes_of_a_step_are_these() -> None:
    items: list[translate.Item] = [a_drawn(1, choice=1, ids=(7, 8)), Progress(RequestKey(0, 2), 64, 0)]
    (report,) = translate.step_reports(items, epoch=1, step=2)
    assert report.SerializeToString().hex() == (
        "090100000000000000100222130a01011201011a0102220807000000080000002a0408021040"
    )


one_logprob = st.builds(
    TokenLogprobs,
    st.floats(-50, 0, width=32),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-50, 0, width=32)), max_size=3).map(tuple),
)


@st.composite
def drawn_items(draw: st.DrawFn) -> Drawn:
    ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)))
    logprobs = tuple(draw(one_logprob) for _ in ids) if draw(st.booleans()) else ()
    return a_drawn(draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 3)), ids, logprobs)


@given(st.lists(drawn_items(), max_size=6))
def test_tokens_come_back_as_they_went(drawn: list[Drawn]) -> None:
    parsed = wire.Tokens.FromString(translate.tokens(drawn).SerializeToString())
    back = [(request, drawn.choice, drawn.token_ids, drawn.logprobs) for request, drawn in translate.drawn_of(parsed)]
    assert back == [(each.key.request, each.choice, each.token_ids, each.logprobs) for each in drawn]  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_keys_come_back_as_they_went(keys: list[int]) -> None:
    assert translate.unpack_keys(translate.pack_keys(keys)) == tuple(keys)


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("cause", [None, *Cause])
def test_every_reason_and_cause_has_its_word(reason: FinishReason, cause: Cause | None) -> None:
    end = translate.finished(Finished(RequestKey(0, 3), 1, reason, 4, 2, 5, "stop", "why", cause))
    assert wire.Finished.Reason.Name(end.reason) == reason.name
    assert wire.Finished.Cause.Name(end.cause) == (cause.name if cause else "CAUSE_UNSPECIFIED")
    assert (end.request, end.choice, end.prompt_tokens, end.cached_tokens, end.output_tokens) == (3, 1, 4, 2, 5)


@pytest.mark.parametrize("preemptible", [None, True, False])
def test_a_request_may_be_preempted_unless_the_router_says_no(preemptible: bool | None) -> None:
    submit = wire.Submit(request=1, prompt_tokens=1, max_new_tokens=1, preemptible=preemptible)
    assert translate.submission(submit, RequestKey(0, 1), now_s=0.0).preemptible is (preemptible is not False)


def test_predictions_reach_the_stream_of_their_request() -> None:
    report = Report(1, (), (), (), (), Load(0, 0, 0, 1, 1, 0.0, 0.0), {RequestKey(2, 7): 1.5})
    ((stream, items),) = translate.shares(report).items()
    (message,) = translate.step_reports(items, epoch=1, step=1)
    assert stream == 2
    assert [(prediction.request, prediction.ttft_s) for prediction in message.predictions] == [(7, 1.5)]


def test_each_stream_gets_its_own_share_in_order() -> None:
    mine, yours = RequestKey(1, 1), RequestKey(2, 1)
    report = Report(
        step=1,
        drawn=(Drawn(mine, 0, (1,)), Drawn(yours, 0, (2,))),
        progress=(Progress(yours, 1, 0),),
        finished=(Finished(mine, 0, FinishReason.STOP, 1, 0, 1),),
        cache=(),
        load=Load(0, 0, 0, 1, 1, 0.0, 0.0),
    )
    shares = translate.shares(report)
    assert shares == {1: [report.drawn[0], report.finished[0]], 2: [report.drawn[1], report.progress[0]]}


def test_a_large_step_is_split_below_the_limit_and_keeps_its_order() -> None:
    events = list(translate.cache_pieces([CacheEvent(CacheChange.STORED, tuple(range(500_000)))]))
    reports = translate.step_reports([a_drawn(), *events], epoch=1, step=1)
    assert len(reports) > 3
    assert max(report.ByteSize() for report in reports) <= limits.MESSAGE_BYTES
    keys = [key for report in reports for event in report.cache for key in translate.unpack_keys(event.keys)]
    assert keys == list(range(500_000))
    assert max(len(event.keys) // 8 for report in reports for event in report.cache) == limits.CACHE_PIECE_KEYS


@pytest.mark.parametrize("events", [1, 2])
def test_a_load_still_fits_into_a_report_that_is_as_large_as_may_be(events: int) -> None:
    largest = Load(
        *([2**32 - 1] * 2),
        2**64 - 1,
        *([2**32 - 1] * 2),
        1.0,
        1.0,
        draining=True,
        blocks_pinnable=2**32 - 1,
        drafted_tokens=2**64 - 1,
        accepted_tokens=2**64 - 1,
        model_drafted_tokens=2**64 - 1,
        model_accepted_tokens=2**64 - 1,
        disk=DiskUse(*([2**64 - 1] * 6)),
        uncaptured_steps=2**64 - 1,
    )
    room = limits.MESSAGE_BYTES // 8
    for keys in range(room - 24, room):
        halves = ([7] * (keys * half // events) for half in range(1, events + 1))
        items = [CacheEvent(CacheChange.STORED, tuple(half)) for half in halves]
        last = translate.step_reports([*items, a_drawn()], epoch=2**64 - 1, step=2**64 - 1)[-1]
        last.load.CopyFrom(translate.load(largest))
        assert last.ByteSize() <= limits.MESSAGE_BYTES


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (wire.Grammar.JSON_SCHEMA, GrammarForm.JSON_SCHEMA),
        (wire.Grammar.REGEX, GrammarForm.REGEX),
        (wire.Grammar.CHOICE, GrammarForm.CHOICE),
        (wire.Grammar.RULES, GrammarForm.RULES),
        (99, None),
    ],
)
def test_a_grammar_is_read_and_one_of_tomorrow_is_not_passed_over(form: int, read: GrammarForm | None) -> None:
    given = wire.Sampling(grammar=wire.Grammar(form=form, text="x"))  # type: ignore[arg-type]
    assert translate.sampling_params(given).grammar == Grammar(read, "x")
    assert translate.sampling_params(wire.Sampling()).grammar is None


def test_documents_that_may_be_reused_are_read_in_pairs() -> None:
    submit = wire.Submit(reuse=wire.Reuse(start=[4, 90, 300], stop=[90, 120], budget=0.25))
    assert translate.submission(submit, 1, now_s=0).blend == Blend((DocumentSpan(4, 90), DocumentSpan(90, 120)), 0.25)
    assert translate.submission(wire.Submit(), 1, now_s=0).blend is None


def test_blended_tokens_are_reported_beside_cached_ones() -> None:
    key = RequestKey(0, 1)
    assert translate.progress(Progress(key, 9, 2, 5)).blended_tokens == 5
    end = Finished(key, 0, FinishReason.STOP, 9, 2, 1, blended_tokens=5)
    assert translate.finished(end).blended_tokens == 5


def test_known_adapters_are_told_once_and_their_state_each_time() -> None:
    first = AdapterUse(("a", "b"), ("a",), ("a",), 4)
    told = translate.adapters(first)
    assert translate.adapters_of(told, before=None) == first
    second = first._replace(active=())
    told = translate.adapters(second, known_before=first.known)
    assert not told.HasField("known")
    assert translate.adapters_of(told, before=first) == second
    assert translate.adapters_of(translate.adapters(AdapterUse()), before=second) == AdapterUse()


def test_a_submit_may_name_an_adapter() -> None:
    assert translate.submission(wire.Submit(adapter="sql"), "key", now_s=0.0).adapter == "sql"
