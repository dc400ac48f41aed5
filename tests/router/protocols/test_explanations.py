import json
from dataclasses import replace

from policies.explain import Candidate, Explanation, Skipped
from policies.rules import Mismatch, Range
from router.protocols.explanations import MOST_HEADER_BYTES, as_header, as_json, as_text, documents_header

EXPLANATION = Explanation(
    request="r1",
    config_version="v1",
    tenant="acme",
    model="llama",
    priority=None,
    prompt_tokens=90000,
    uncached_tokens=30000,
    max_output_tokens=512,
    rule=2,
    skipped=(Skipped(1, "rag", True, (Mismatch("headers.x-team", ("ads",), "é\x7f\n"),)),),
    ruled_class="chat",
    service_class="batch",
    rank=2,
    targets={"ttft_p95": 12.0, "deadline": 900.0},
    on_miss=("queue 20s", "shed with 503"),
    pools=("own",),
    policy="default",
    weights={"expected_ttft": 3.0, "session": 1.0},
    counted=("expected_ttft",),
    dropped={"own-2": "healthy"},
    candidates=(
        Candidate("own-0", "own", 8, 0, 60000, {"expected_ttft": 1.0, "session": None}, 1.0),
        Candidate("own-1", "own", 0, 0, None, {"expected_ttft": 1 / 3, "session": 0.5}, 1 / 3),
    ),
    equals=("own-0",),
    chosen="own-0",
    predicted_ttft_s=1.23456,
)


def test_text_is_aligned_and_complete() -> None:
    explanation = replace(
        EXPLANATION, skipped=(replace(EXPLANATION.skipped[0], mismatches=(Mismatch("prompt_tokens", (Range(9),), 1),)),)
    )
    assert as_text(explanation).splitlines() == [
        "request   tenant acme, model llama, priority -",
        "          90,000 tokens, 30,000 of them in no cache, answer of at most 512",
        "file      version v1",
        "rules     1 no   the tenant may not use class rag; prompt_tokens is 1, not at least 9",
        "          2 yes",
        "class     batch (rank 2, lowered from chat by the priority)",
        "targets   ttft_p95 12s, deadline 15m",
        "on miss   queue 20s, then shed with 503",
        "pools     own",
        "policy    default",
        "",
        "candidate  pool  running  waiting    held  expected_ttft x3  session x1  total",
        "own-0      own         8        0  60,000             1.000           -  1.000",
        "own-1      own         0        0       ?             0.333       0.500  0.333",
        "not counted, since not known of every candidate: session",
        "dropped   own-2: not well, or draining",
        "expected  first token after 1.235 s",
        "chosen    own-0",
    ]


def test_an_estimated_length_is_marked() -> None:
    explanation = replace(EXPLANATION, prompt_tokens=1520, uncached_tokens=1500, likely_prompt_tokens=(1380, 1660))
    line = as_text(explanation).splitlines()[1]
    assert "about 1,520 tokens (estimated, 1,380 to 1,660), 1,500 of them in no cache" in line
    assert json.loads(as_header(explanation))["likely_prompt_tokens"] == [1380, 1660]
    assert json.loads(as_header(EXPLANATION))["likely_prompt_tokens"] is None


def test_text_says_if_chance_decided_or_no_backend_was_left() -> None:
    assert as_text(replace(EXPLANATION, equals=("own-0", "own-1"))).endswith(
        "chosen    own-0 (at random: own-0, own-1 are equally good)"
    )
    text = as_text(replace(EXPLANATION, candidates=(), chosen=None, equals=(), predicted_ttft_s=None))
    assert text.endswith("dropped   own-2: not well, or draining\nchosen    none: the request is refused")


def test_an_adapter_is_shown_if_one_was_requested() -> None:
    first, second = EXPLANATION.candidates
    explanation = replace(
        EXPLANATION, model="sql", candidates=(replace(first, adapter="ready"), replace(second, adapter="loads"))
    )
    assert "adapter   sql: own-0 has it ready; own-1 has yet to load it" in as_text(explanation).splitlines()
    assert [candidate["adapter"] for candidate in json.loads(as_json(explanation))["candidates"]] == ["ready", "loads"]
    assert "adapter" not in as_text(EXPLANATION)
    assert not any("adapter" in candidate for candidate in json.loads(as_json(EXPLANATION))["candidates"])


def test_text_of_a_class_without_targets_leaves_them_out() -> None:
    text = as_text(replace(EXPLANATION, targets={}, on_miss=()))
    assert "targets" not in text
    assert "on miss" not in text


def test_json_and_header_are_one_record() -> None:
    whole, line = json.loads(as_json(EXPLANATION)), json.loads(as_header(EXPLANATION))
    assert whole["candidates"][1]["total"] == 1 / 3
    assert line["candidates"][1]["total"] == 0.3333
    assert whole["skipped"] == line["skipped"]
    assert whole.keys() == line.keys()


def test_a_header_holds_printable_ascii_only() -> None:
    assert all(" " <= character <= "~" for character in as_header(EXPLANATION))
    assert "é\x7f\n" in json.loads(as_header(EXPLANATION))["skipped"][0]["why"][1]


def test_a_header_is_bounded_and_counts_what_it_leaves_out() -> None:
    many = tuple(replace(EXPLANATION.candidates[1], backend=f"own-{at}") for at in range(100))
    line = as_header(replace(EXPLANATION, candidates=many, dropped={f"b{at}": "healthy" for at in range(1000)}))
    record = json.loads(line)
    assert len(line) <= MOST_HEADER_BYTES
    assert record["candidates"][0]["backend"] == "own-0"
    assert len(record["candidates"]) + len(record["dropped"]) + record["left_out"] == 1100
    assert record["chosen"] == "own-0"


def test_a_header_with_names_that_are_too_long_has_the_essentials() -> None:
    record = json.loads(as_header(replace(EXPLANATION, model="m" * 5000)))
    assert (record["chosen"], record["rule"]) == ("own-0", 2)
    assert "model" not in record


def test_the_order_of_documents_fits_into_a_header() -> None:
    assert documents_header(["a", 'ö"\x7f']) == '["a","\\u00f6\\"\\u007f"]'
    shown = documents_header([f"{number:0100}" for number in range(100)])
    assert len(shown) <= MOST_HEADER_BYTES
    assert json.loads(shown) == [f"{number:0100}" for number in range(39)]
    assert "documents a, b" in as_text(replace(EXPLANATION, documents=("a", "b")))
