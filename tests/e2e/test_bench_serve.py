"""vLLM's own load generator finds nothing wrong with the proxy."""

import json
import subprocess
from pathlib import Path

import pytest

from deploy.local.bench_serve import command
from deploy.local.node import SERVED_NAME
from deploy.local.paths import MODEL, ROOT
from deploy.local.stack import Proxy
from deploy.local.supervise import inherited

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RUN_S = 500.0
PROMPTS = 48
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_request_succeeds(proxy: Proxy, backend: str, tmp_path: Path) -> None:
    line = command(proxy.url, SERVED_NAME, str(MODEL), tmp_path / "result.json")
    line += ["--backend", backend, "--endpoint", BACKENDS[backend], "--max-concurrency", "16", "--save-detailed"]
    line += ["--random-input-len", "300", "--random-output-len", "24", "--num-prompts", str(PROMPTS)]
    offline = {**inherited(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    run = subprocess.run(
        line, cwd=ROOT, env=offline, timeout=RUN_S, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = run.stdout.decode(errors="replace")
    assert run.returncode == 0, said
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (PROMPTS, 0), said
    assert [error for error in result["errors"] if error] == []
    assert result["output_lens"] == [24] * PROMPTS
