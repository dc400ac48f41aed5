from hypothesis import given
from hypothesis import strategies as st

from router.fleet.discovery.belief import Belief

ONE, TWO, NONE = frozenset({"a:1"}), frozenset({"a:1", "b:1"}), frozenset[str]()


def test_the_last_addresses_are_believed() -> None:
    belief = Belief(30.0)
    belief.hear(TWO, 0.0)
    belief.hear(ONE, 1.0)
    assert (belief.addresses, belief.due_at) == (ONE, None)


def test_an_empty_answer_is_believed_once_it_has_been_true_for_a_while() -> None:
    belief = Belief(30.0)
    belief.hear(ONE, 0.0)
    belief.hear(NONE, 10.0)
    belief.hear(NONE, 39.0)
    assert (belief.addresses, belief.due_at) == (ONE, 40.0)
    belief.settle(39.9)
    assert belief.addresses == ONE
    belief.settle(40.0)
    assert (belief.addresses, belief.due_at) == (NONE, None)


def test_a_failure_or_an_address_in_between_begins_the_wait_anew() -> None:
    belief = Belief(30.0)
    belief.hear(ONE, 0.0)
    belief.hear(NONE, 10.0)
    belief.fail()
    belief.hear(NONE, 41.0)
    assert belief.addresses == ONE
    belief.hear(TWO, 60.0)
    belief.hear(NONE, 80.0)
    assert (belief.addresses, belief.due_at) == (TWO, 110.0)


def test_without_patience_an_empty_answer_is_believed_at_once() -> None:
    belief = Belief(0.0)
    belief.hear(ONE, 5.0)
    belief.hear(NONE, 5.0)
    assert belief.addresses == NONE


answers = st.none() | st.frozensets(st.sampled_from(["a:1", "b:1", "c:1"]))


@given(st.lists(st.tuples(answers, st.floats(0.0, 20.0)), max_size=50))
def test_all_addresses_are_dropped_only_if_all_were_gone_for_the_whole_time(steps: list) -> None:  # type: ignore[type-arg]
    belief, now, empty_for = Belief(30.0), 0.0, 0.0
    for addresses, after_s in steps:
        now += after_s
        if belief.due_at is not None:
            empty_for += after_s
        before = belief.addresses
        if addresses is None:
            belief.fail()
        else:
            belief.hear(addresses, now)
        if addresses != NONE:
            empty_for = 0.0
        if before and not belief.addresses:
            assert empty_for >= 30.0 - 1e-6
            empty_for = 0.0
        assert belief.addresses in ({addresses, before} if addresses else {before, NONE})
