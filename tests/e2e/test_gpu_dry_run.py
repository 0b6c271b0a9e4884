"""The whole run-book for one GPU or two, on CPUs: every step holds, and the archive reports all without a secret."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy.gpu import ADVICE
from deploy.local.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(2400)]

HUB_TOKEN = "hf_" + "Zz9" * 11
LIMIT_S = 2100


def test_every_step_holds_and_is_collected(tmp_path: Path) -> None:
    """As a user runs it, with a token in the environment."""
    line = [sys.executable, "-m", "deploy.gpu", "--cpu", "--folder", str(tmp_path / "dry")]
    environment = {**os.environ, "HF_TOKEN": HUB_TOKEN}
    done = subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "FAILED" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

    with tarfile.open(tmp_path / "dry.tar.gz") as packed:
        held = {each.name.partition("/")[2]: source.read() for each in packed if (source := packed.extractfile(each))}
    assert not [name for name, content in held.items() if HUB_TOKEN.encode() in content]
    assert {"summary.txt", "versions.txt", "settings.txt", "pdproxy-check.txt"} <= held.keys()
    assert {f"metrics/{step}-proxy.prom" for step in ("answers", "attacks", "kills", "measure")} <= held.keys()
    assert {"logs/prefill.2.log", "logs/decode-0.2.log", "logs/proxy.log"} <= held.keys()
    assert {f"bench/{system}-300-2.json" for system in ("one-engine", "both-nodes")} <= held.keys()
    results = json.loads(held["results.json"])
    assert list(results) == [step for step in ADVICE if step != "collect"], "it was packed before it ended"
    assert all(check["holds"] for checks in results.values() for check in checks)
    assert re.search(rb"UCX between nodes: intra-node", held["versions.txt"])
