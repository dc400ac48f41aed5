from __future__ import annotations

import pytest
from msgspec.structs import replace

from backends.http.unsupported import refuse_unknown, refuse_unsupported
from policies.errors import InvalidRequest
from policies.nouns import Grammar, Sampling

UNUSUAL = Sampling(
    temperature=0.5,
    top_p=0.5,
    top_k=5,
    min_p=0.1,
    repetition_penalty=2.0,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    seed=0,
    stop=("x",),
    stop_token_ids=(1,),
    shows_stop=True,
    ignore_eos=True,
    min_new_tokens=1,
    top_logprobs=0,
    logit_bias={1: 1.0},
    choices=2,
    grammar=Grammar("json_schema", "{}", "response_format"),
)
NAMES = Sampling.__struct_fields__


def test_what_is_as_usual_is_never_refused() -> None:
    refuse_unsupported(Sampling(), (), "it")


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_refused_by_the_name_that_clients_give_it_and_passes_where_it_is_known(name: str) -> None:
    sampling = replace(Sampling(), **{name: getattr(UNUSUAL, name)})
    refuse_unsupported(sampling, (name,), "it")
    with pytest.raises(InvalidRequest) as failure:
        refuse_unsupported(sampling, set(NAMES) - {name}, "it")
    clients = {
        "min_new_tokens": "min_tokens",
        "choices": "n",
        "top_logprobs": "logprobs",
        "grammar": "response_format",
        "shows_stop": "include_stop_str_in_output",
    }
    assert failure.value.param == clients.get(name, name)
    assert "it does not know" in failure.value.message


@pytest.mark.parametrize("field", ["structured_outputs.regex", "guided_json"])
def test_servers_that_read_response_format_do_not_know_vllms_fields_for_the_shape_of_an_answer(field: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        refuse_unsupported(Sampling(grammar=Grammar("regex", "a", field)), ("grammar",), "it")
    assert failure.value.param == field


def test_a_field_grammar_of_the_body_is_an_engines_own() -> None:
    with pytest.raises(InvalidRequest) as failure:
        refuse_unknown({"grammar": "root ::= x"}, (), "it")
    assert failure.value.param == "grammar"


def test_a_body_may_have_what_the_router_reads_what_is_idle_and_what_the_engine_knows() -> None:
    idle = {"user": "u", "metadata": {"a": 1}, "tools": [], "suffix": None, "echo": False}
    refuse_unknown(
        {"model": "m", "messages": [1], "n": 2, "max_tokens": 3, "top_k": 1, "think": True, **idle}, ["think"], "it"
    )


def test_any_other_field_of_a_body_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as failure:
        refuse_unknown({"model": "m", "mirostat": 2}, ["think"], "it")
    assert failure.value.param == "mirostat"
