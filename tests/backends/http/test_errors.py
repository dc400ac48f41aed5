"""Error bodies as servers of OpenAI's dialect, and what stands in front of them, really write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.errors import MOST_WAIT_S, error_in_stream, error_of, retry_after_s
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLacks,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unsupported,
)

NGINX = (
    b"<html>\r\n<head><title>502 Bad Gateway</title><style>h1 { color: red }</style></head>\r\n<body>\r\n"
    b"<center><h1>502 Bad Gateway</h1></center>\r\n<hr><center>nginx/1.27</center>\r\n</body>\r\n</html>\r\n"
)


def test_the_errors_of_fastapi_are_passed_on_field_by_field() -> None:
    wrong = [
        {"type": "missing", "loc": ["body", "messages", 0, "role"], "msg": "Field required", "input": {}},
        {"type": "less_than", "loc": ["body", "top_p"], "msg": "Input should be at most 1", "input": 7},
    ]
    error = error_of("up", 422, json.dumps({"detail": wrong}).encode(), {})
    assert type(error) is InvalidRequest
    assert error.message == "messages.0.role: Field required; top_p: Input should be at most 1"
    assert error.param == "messages.0.role"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "Model is not loaded"}, "Model is not loaded"),
        ({"detail": {"error": "no such adapter"}}, "no such adapter"),
        ({"detail": {"error": {"message": "deep down"}}}, "deep down"),
        ({"detail": {"message": "said there"}}, "said there"),
        ({"detail": ["first", "second"]}, "first; second"),
        ({"object": "error", "message": "flat", "type": "BadRequestError"}, "flat"),
        ({"error": "plain text"}, "plain text"),
        ({"reason": "a proxy's own words"}, '{"reason": "a proxy\'s own words"}'),
        ({}, "status 400"),
        ([], "status 400"),
        (None, "status 400"),
    ],
)
def test_the_message_of_an_error_body_is_found_in_every_shape(body: object, message: str) -> None:
    assert error_of("up", 400, json.dumps(body).encode(), {}).message == message


def test_only_the_text_of_a_proxys_page_is_passed_on() -> None:
    error = error_of("up", 502, NGINX, {})
    assert type(error) is BackendErred
    assert error.message == "up answered 502: 502 Bad Gateway 502 Bad Gateway nginx/1.27"


def test_a_page_that_opens_tags_without_end_is_read_in_no_time() -> None:
    assert len(error_of("up", 502, b"<" * 65536, {}).message) < 3000


@pytest.mark.parametrize("status", [401, 402])
def test_a_key_that_a_server_does_not_take_is_not_the_clients_fault_and_another_server_may_be_asked(
    status: int,
) -> None:
    error = error_of("up", status, b'{"error": {"message": "Incorrect API key provided"}}', {})
    assert type(error) is BackendFailed
    assert "pool's key" in error.hint


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (403, "flagged", BackendRefused),
        (403, "This content violates our policy", BackendRefused),
        (403, "Project does not have access to model", BackendLacks),
        (404, "The model `x` does not exist.", BackendLacks),
        (410, "This model was retired", BackendLacks),
        (501, "This engine cannot do that", BackendLacks),
        (400, "Your credit balance is too low to access the Anthropic API.", BackendLacks),
        (400, "Insufficient credits", BackendLacks),
        (400, "temperature must be at most 2", InvalidRequest),
        (409, "no", BackendRefused),
    ],
)
def test_what_a_server_lacks_may_be_asked_of_another_and_what_it_judges_may_not(
    status: int, message: str, kind: type[ExpectedError]
) -> None:
    assert type(error_of("up", status, json.dumps({"error": {"message": message}}).encode(), {})) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "m", "type": "invalid_request_error", "code": None}, InvalidRequest),
        ({"message": "m", "type": "invalid_request_error", "code": "context_length_exceeded"}, ContextExceeded),
        ({"message": "m", "type": None, "code": "context_length_exceeded"}, ContextExceeded),
        ({"message": "m", "type": "BadRequestError"}, InvalidRequest),
        ({"message": "m", "type": "content_filter", "code": "content_filter"}, InvalidRequest),
        ({"message": "m", "type": "tokens", "code": "rate_limit_exceeded"}, Overloaded),
        ({"message": "m", "type": "insufficient_quota", "code": "insufficient_quota"}, Overloaded),
        ({"message": "m", "type": "overloaded_error"}, Overloaded),
        ({"message": "m", "type": "server_error", "code": None}, BackendErred),
        ({"message": "m", "type": "invalid_request_error", "code": 503}, BackendFailed),
        ({"message": "m", "type": ["?"], "code": {}}, BackendErred),
    ],
)
def test_an_error_in_a_stream_is_read_by_its_words_where_it_has_no_status(
    error: dict[str, object], kind: type[ExpectedError]
) -> None:
    assert type(error_in_stream("up", error)) is kind


NOW = 1_700_000_000.0
LATER = ["Tue, 14 Nov 2023 22:15:20 GMT", "Tuesday, 14-Nov-23 22:15:20 GMT", "Tue Nov 14 22:15:20 2023"]


@pytest.mark.parametrize(
    ("asked", "wait_s"),
    [
        *(({"retry-after": date}, 120.0) for date in LATER),
        # clocks differ: the answer's own date counts
        ({"retry-after": LATER[0], "date": "Tue, 14 Nov 2023 22:15:00 GMT"}, 20.0),
        ({"retry-after": LATER[0], "date": "nonsense"}, 120.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 9999 07:28:00 GMT"}, MOST_WAIT_S),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "9" * 301}, MOST_WAIT_S),
        ({"retry-after": "9" * 5000}, MOST_WAIT_S),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        *(
            ({"retry-after": junk}, None)
            for junk in ("inf", "nan", "1e300", "-1", "\u00b2", "", "1, 2", "soon", "Mon, 99")
        ),
        ({"retry-after": "Wed, 21 Oct 2015 99:99:99 GMT"}, None),
        ({}, None),
    ],
)
def test_the_time_to_come_back_is_a_date_or_seconds_and_at_most_a_day(
    asked: dict[str, str], wait_s: float | None
) -> None:
    assert retry_after_s(asked, lambda: NOW) == wait_s
    if asked:
        for status in (429, 503):
            error = error_of("up", status, b"", asked)
            assert type(error) is Overloaded, "a server that says when to come back is well"


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode(errors="surrogateescape")))
def test_no_time_to_come_back_breaks_anything(asked: str) -> None:
    wait_s = retry_after_s({"retry-after": asked, "retry-after-ms": asked, "date": asked}, lambda: NOW)
    assert wait_s is None or 0 <= wait_s <= MOST_WAIT_S


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The request queue is full.", Overloaded),
        ("Model is overloaded", Overloaded),
        ("The server is currently at capacity", Overloaded),
        ("server busy, please try again.  maximum pending requests exceeded", Overloaded),
        ("Loading model", BackendFailed),
        ("upstream connect error or disconnect/reset before headers", BackendFailed),
        ("", BackendFailed),
    ],
)
def test_a_server_that_is_full_is_well_and_one_that_is_away_is_not(message: str, kind: type[ExpectedError]) -> None:
    error = {"error": {"message": message, "code": 503}}
    assert type(error_of("b", 503, json.dumps(error).encode(), {})) is kind
    assert type(error_in_stream("b", error["error"])) is kind


@pytest.mark.parametrize(
    ("status", "body", "is_unsupported"),
    [
        (404, b'{"detail":"Not Found"}', True),
        (404, b"404 page not found", True),
        (404, b"", True),
        (405, b'{"detail":"Method Not Allowed"}', True),
        (501, b'{"error":{"message":"Not Implemented"}}', True),
        (404, b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError"}}', False),
    ],
)
def test_an_endpoint_that_a_server_lacks_is_not_the_clients_mistake(
    status: int, body: bytes, is_unsupported: bool
) -> None:
    assert isinstance(error_of("b", status, body, {}), Unsupported) is is_unsupported
