"""gt.ray: wrong arguments, Ray that is not installed, and two nodes of which one loses its worker (needs ray)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

import gt
from gt.errors import ConfigError, SystemFailure
from tests.helpers import ROOT
from tests.helpers.limits import limit


@pytest.mark.parametrize(("arguments", "says"), [
    ({"workers": 0}, "workers is 0, want a number above 0"),
    ({"workers": "2"}, "workers is '2', want a number above 0"),
    ({"workers": 2, "placement": "pack"}, "placement is 'pack', want one of PACK, STRICT_PACK"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gt.ray.start(**arguments)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemFailure, match=r"Ray cannot be imported .*pip install ray"):
        gt.ray.start(workers=1)
    gt.ray.stop()


@pytest.mark.slow
@pytest.mark.timeout(limit(400))
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_training_goes_on_after_the_loss_of_an_actor() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.stress.ray_cluster"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(300), check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("ok: 12 steps"), done.stdout + done.stderr
