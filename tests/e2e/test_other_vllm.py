"""The tests behind the matrix in `docs/tested.md`, on the tested vLLM version without a CPU build."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from connector.vllm_version import TESTED
from deploy.local.paths import ROOT
from deploy.tested import feature_files
from tests.vllm_compat.__main__ import installed_release
from tests.vllm_compat.overlay import environment

MINUTES = 50
pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 60)]


@pytest.mark.parametrize("version", [each for each in TESTED if each != installed_release()])
def test_the_matrix_holds_on_another_version(version: str) -> None:
    """`make record` does the same, and records the passes."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.recorded",
        "--features",
        "-m",
        "e2e",
        *feature_files(),
    ]
    variables = {**os.environ, **environment(version)}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=60 * MINUTES, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]
