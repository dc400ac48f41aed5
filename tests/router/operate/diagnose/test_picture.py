"""The picture: well-formed SVG, with bars as long as the losses, each where the one before ended."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from router.operate.diagnose.nouns import Diagnosis
from router.operate.diagnose.picture import as_svg, hit_bars, target_bars
from simulation.changes import Slowdown
from tests.router.operate.diagnose.scene import a_file, questions, simulated

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """A diagnosis with losses and missed targets."""
    log = Path(tmp_path_factory.mktemp("logs")) / "log"
    asked = questions(60, documents=6, gap_s=0.7)
    slow = (Slowdown(5.0, "own-1", 8.0),)
    return simulated(log, a_file(policy="round_robin"), asked, changes=slow).diagnosis


def test_the_waterfall_goes_from_ideal_to_measured(found: Diagnosis) -> None:
    assert found.hit_rate is not None
    ideal, *losses, measured = hit_bars(found.hit_rate)
    assert (ideal.start, ideal.end, measured.start) == (0.0, 1.0, 0.0)
    assert losses[0].end == ideal.end
    assert all(before.start == after.end for before, after in pairwise(losses))
    assert losses[-1].start == pytest.approx(measured.end)
    assert measured.end < 1.0


def test_the_causes_of_missed_targets_follow_one_another(found: Diagnosis) -> None:
    (target, *_) = [target for target in found.targets if target.missed]
    *causes, measured = target_bars(target)
    assert causes[0].start == 0.0
    assert all(before.end == after.start for before, after in pairwise(causes))
    assert causes[-1].end == pytest.approx(measured.end) == 1.0


def test_every_bar_and_every_label_is_inside_the_picture(found: Diagnosis) -> None:
    root = ET.fromstring(as_svg(found))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    bars = list(root.iter(f"{SVG}rect"))
    assert len(bars) > 10
    for bar in bars:
        x, y, wide, high = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"ideal", "cache domains", "placement", "measured", "slow backend"} <= set(texts)
    for element in root.iter(f"{SVG}text"):
        assert 0 < float(element.attrib["y"]) < height


def test_names_are_escaped_and_an_empty_diagnosis_is_a_picture_too() -> None:
    root = ET.fromstring(as_svg(Diagnosis(0, 0.0, 0.0, (), None, ())))
    assert "Nothing to show" in "".join(root.itertext())
