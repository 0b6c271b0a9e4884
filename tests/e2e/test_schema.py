"""Schemathesis makes requests from the proxy's own OpenAPI document, valid and invalid ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.paths import ROOT
from deploy.local.stack import Proxy
from deploy.local.supervise import inherited

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RUN_S = 900.0
EXAMPLES = 60
"""Per operation and phase."""
LEFT_TO_NODES = "positive_data_acceptance,negative_data_rejection"
"""The node, not the document, decides which bodies are valid: it may refuse more, and accept more."""


@pytest.mark.timeout(1000)
def test_no_request_finds_an_error_of_ours(proxy: Proxy, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{proxy.url}/openapi.json", "--seed", "1"]
    command += ["--checks", "all", "--exclude-checks", LEFT_TO_NODES, "--phases", "coverage,fuzzing"]
    command += [
        "--max-response-time",
        str(RUN_S),
        "--max-examples",
        str(EXAMPLES),
        "--suppress-health-check",
        "all",
        "--continue-on-failure",
    ]
    path = os.pathsep.join((str(ROOT), inherited().get("PYTHONPATH", "")))
    environment = {**inherited(), "SCHEMATHESIS_HOOKS": "tests.e2e.schema_hooks", "PYTHONPATH": path}
    run = subprocess.run(
        [*command, "--request-timeout", "120", "--no-color"],
        cwd=tmp_path,
        env={**environment, "NO_PROXY": "127.0.0.1"},
        timeout=RUN_S,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = run.stdout.decode(errors="replace")
    assert run.returncode == 0, said
    print(said[-800:])
