"""The table of faults fits the code that it changes and the tests that it runs."""

from __future__ import annotations

import ast

import pytest

from tests.late_gpu.faults import FAULTS, ROOT, Fault, evidence_of


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_in_the_code_and_a_test(fault: Fault) -> None:
    changed = fault.put_into((ROOT / fault.file).read_text())
    assert ast.parse(changed)
    file, _, name = fault.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_a_fault_without_its_place_cannot_be_tried() -> None:
    with pytest.raises(RuntimeError, match="has 0 places"):
        FAULTS[0].put_into("")


def test_only_a_line_with_the_sign_tells_of_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    report = "E   RuntimeError: the machine is busy\nE   AssertionError: Tensor-likes are not close!\n"
    assert evidence_of(report, "not close") == "AssertionError: Tensor-likes are not close!"
    assert evidence_of(report, "past the end") == ""
    assert "not a sign of the fault: RuntimeError: the machine is busy" in capsys.readouterr().err
