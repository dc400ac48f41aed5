"""If helm is on the path: its lint, and the same objects as without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, NAMESPACE, RELEASE
from tests.helm.test_render import render_set
from tests.helm.value_sets import VALUE_SETS

HELM = shutil.which("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm here")


def helm(*arguments: str) -> str:
    assert HELM is not None
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", VALUE_SETS)
def test_helm_makes_the_same_objects(name: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(VALUE_SETS[name]))
    helm("lint", "--strict", str(CHART), "-f", str(values))
    made = helm("template", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(values), "--kube-version", "1.32")
    objects = {
        f"{resource['kind']} {resource['metadata']['name']}": resource
        for resource in yaml.safe_load_all(made)
        if resource
    }
    assert objects == render_set(name).by_name()
