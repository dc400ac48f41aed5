from __future__ import annotations

import pytest

from backends.shard.messages import FORMS, error_of, reuse_of, sampling_of
from policies.errors import (
    BackendFailed,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unreached,
)
from policies.nouns import Grammar, Reuse, Sampling
from shards.wire.limits import MOST_GRAMMAR_CHARACTERS
from shards.wire.v1.shard_pb2 import Finished


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Finished(reason=Finished.DEADLINE), DeadlineExceeded),
        (Finished(reason=Finished.CANCELLED), BackendFailed),
        (Finished(reason=Finished.FAILED, message="why"), BackendFailed),
        (Finished(reason=Finished.REASON_UNSPECIFIED), BackendFailed),
        (Finished(reason=Finished.REJECTED, cause=Finished.CONTEXT, message="why"), ContextExceeded),
        (Finished(reason=Finished.REJECTED, cause=Finished.OVERLOADED), Overloaded),
        (Finished(reason=Finished.REJECTED, cause=Finished.DRAINING), Unreached),
        (Finished(reason=Finished.REJECTED, cause=Finished.INVALID, message="why"), InvalidRequest),
        (Finished(reason=Finished.REJECTED, cause=Finished.GRAMMAR, message="why"), InvalidRequest),
        (Finished(reason=Finished.REJECTED), InvalidRequest),
    ],
)
def test_each_end_has_its_error(end: Finished, kind: type[ExpectedError]) -> None:
    failure = error_of(end, "own-0")
    assert type(failure) is kind
    assert end.message in failure.message


def test_an_unsupported_grammar_is_refused_by_the_field_that_asked_for_it() -> None:
    end = Finished(reason=Finished.REJECTED, cause=Finished.GRAMMAR, message='Unimplemented keys: ["not"]')
    failure = error_of(end, "own-0", Grammar("json_schema", "{}", "guided_json"))
    assert (type(failure), failure.param) == (InvalidRequest, "guided_json")
    assert 'Unimplemented keys: ["not"]' in failure.message
    assert failure.hint


@pytest.mark.parametrize("form", ["json_schema", "regex", "choice", "rules"])
def test_a_grammar_goes_to_the_shard_as_it_is(form: str) -> None:
    sent = sampling_of(Sampling(grammar=Grammar(form, "x", "response_format")), "r").grammar
    assert (sent.form, sent.text) == (FORMS[form], "x")
    assert not sampling_of(Sampling(), "r").HasField("grammar")


@pytest.mark.parametrize(
    ("grammar", "because"),
    [
        (Grammar("structural_tag", "", "response_format"), "as 'structural_tag'"),
        (Grammar("json_schema", "", "response_format"), "a schema that is not there"),
        (Grammar("regex", "x" * (MOST_GRAMMAR_CHARACTERS + 1), "response_format"), "131073 characters"),
    ],
)
def test_a_grammar_that_no_shard_can_read_is_refused(grammar: Grammar, because: str) -> None:
    with pytest.raises(InvalidRequest, match=because) as caught:
        sampling_of(Sampling(grammar=grammar), "r")
    assert caught.value.param == "response_format"


def test_the_places_of_documents_go_to_the_shard_with_their_budget() -> None:
    sent = reuse_of(Reuse(((4, 90), (90, 120)), 0.25))
    assert (list(sent.start), list(sent.stop), sent.budget) == ([4, 90], [90, 120], 0.25)
