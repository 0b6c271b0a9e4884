"""The test pod's script against a small proxy: it fails where `helm test` must."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.http_server import QuietHandler, served
from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, only_container

ANSWERS = {
    "/ready": {"status": "ready"},
    "/v1/models": {"data": [{"id": "tiny"}]},
    "/v1/chat/completions": {"choices": [{"message": {"content": "yes"}}]},
}


@contextmanager
def proxy(statuses: Mapping[str, int]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the keys that it was shown."""
    keys: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("authorization", ""))
            self.body()
            self.answer_json(statuses.get(self.path, 200), ANSWERS[self.path])

        def do_POST(self) -> None:
            self.do_GET()

    with served(Handler) as address:
        yield address, keys


def smoke(address: str, key_file: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the script as the pod does."""
    script = (CHART / "files" / "smoke.py").read_text()
    more = {"KEY_FILE": str(key_file)} if key_file else {}
    environment = {**os.environ, "CLIENTS": address, "OPERATORS": address, **more}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_passes_where_a_model_answers(tmp_path: Path) -> None:
    (tmp_path / "api.keys").write_text("# ours\n\nsk-first alice 8\nsk-second\n")
    with proxy({}) as (address, keys):
        done = smoke(address, tmp_path / "api.keys")
    assert (done.returncode, done.stderr) == (0, "")
    assert "model: tiny" in done.stdout
    assert keys == ["Bearer sk-first"] * 3


def test_fails_where_no_decode_node_serves() -> None:
    with proxy({"/ready": 503}) as (address, keys):
        done = smoke(address)
    assert done.returncode == 1
    assert "/ready answers 503" in done.stderr
    assert keys == [""]


def test_fails_where_the_model_does_not_answer() -> None:
    with proxy({"/v1/chat/completions": 502}) as (address, _):
        done = smoke(address)
    assert done.returncode == 1
    assert "answers 502" in done.stderr


def test_the_pod_runs_this_script(rendered: Rendered) -> None:
    container = only_container(rendered("default").one("Pod"))
    assert container["command"] == ["python", "-c"]
    assert container["args"][0].strip() == (CHART / "files" / "smoke.py").read_text().strip()
    services = {service["metadata"]["name"]: service["spec"]["ports"] for service in rendered("default").of("Service")}
    said = {each["name"]: each["value"] for each in container["env"]}
    assert said["CLIENTS"] == f"http://demo-pdproxy:{services['demo-pdproxy'][0]['port']}"
    assert said["OPERATORS"] == f"http://demo-pdproxy-admin:{services['demo-pdproxy-admin'][0]['port']}"
