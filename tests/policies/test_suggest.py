from policies.suggest import did_you_mean


def test_a_slip_of_the_pen_is_recognised() -> None:
    assert did_you_mean("Interactiv", ["batch", "interactive"]) == "did you mean 'interactive'?"


def test_a_foreign_word_brings_no_hint() -> None:
    assert did_you_mean("zzz", ["batch", "interactive"]) == ""


def test_a_megabyte_of_nonsense_takes_no_time() -> None:
    assert did_you_mean("x" * 10**6, ["batch"]) == ""
