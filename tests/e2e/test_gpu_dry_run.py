"""The run-book for two GPUs, whole, on CPUs: every step holds, and the archive tells of all without a secret."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy.gpu.results import Step
from deploy.local.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(2400)]

HUB_TOKEN = "hf_" + "Zz9" * 11
LIMIT_S = 2100


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it, with a token in the environment."""
    line = [sys.executable, "-m", "deploy.gpu", "--cpu", "--folder", str(folder), *more]
    environment = {**os.environ, "HF_TOKEN": HUB_TOKEN}
    return subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # fmt: skip


def test_every_step_holds_and_is_resumed_and_collected(tmp_path: Path) -> None:
    folder = tmp_path / "dry"
    done = run(folder)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "FAILED" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    results = {path.stem: json.loads(path.read_text()) for path in (folder / "results").glob("*.json")}
    assert set(results) == set(Step)
    assert all(each["checks"] and not each["broken"] for each in results.values())

    [archive] = tmp_path.glob("dry-*.tar.gz")
    secrets = [HUB_TOKEN.encode(), (folder / "ticket.key").read_bytes()]
    with tarfile.open(archive) as packed:
        held = {each.name.partition("/")[2]: source.read() for each in packed if (source := packed.extractfile(each))}
    assert not [name for name, content in held.items() if any(each in content for each in secrets)]
    assert {"summary.md", "versions.txt", "settings.json", "pdproxy-check.txt"} <= held.keys()
    assert {f"metrics/{step}-proxy.prom" for step in ("answers", "attacks", "kills", "measure")} <= held.keys()
    assert {"logs/1/alone.1.log", "logs/2/prefill.2.log", "logs/2/decode-0.2.log", "logs/2/proxy.log"} <= held.keys()
    summary = held["summary.md"].decode()
    assert "**Every check holds.**" in summary
    assert re.search(r"UCX between nodes \| intra-node", summary)

    again = run(folder)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("held before; not run again") == len(Step) - 1, "nothing is started twice"
