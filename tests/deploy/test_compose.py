"""compose.yaml, read by a compose implementation, profile by profile; images, read line by line.

podman-compose resolves variables, anchors and profiles; all that it wants of podman for that is a version.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector.config import ConnectorConfig
from pdproxy.settings.load import load

ROOT = Path(__file__).parent.parent.parent
COMPOSE = ROOT / "compose.yaml"
EXAMPLE = ROOT / ".env.example"
PROFILES = {
    "prefill": {"prefill"},
    "decode": {"decode", "proxy"},
    "cpu": {"cpu-prefill", "cpu-decode", "cpu-proxy"},
    "watch": {"prometheus", "grafana"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with a podman that knows its version and nothing else."""
    folder = tmp_path_factory.mktemp("bin")
    stub = folder / "podman"
    stub.write_text("#!/bin/sh\necho 'podman version 5.0.0'\n")
    stub.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def resolved(path: str, profile: str, **variables: str) -> dict[str, Any]:
    """The services of a profile, every variable filled in."""
    line = [sys.executable, "-m", "podman_compose", "-f", str(COMPOSE), "--profile", profile, "config"]
    environment = {"PATH": path, "HOME": "/nonexistent", **variables}
    told = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    services = yaml.safe_load(told.stdout)["services"]
    return {name: each for name, each in services.items() if profile in each.get("profiles", [])}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_resolves_to_its_services(path: str, profile: str) -> None:
    assert set(resolved(path, profile)) == PROFILES[profile]


@pytest.mark.parametrize(("profile", "service"), [("decode", "proxy"), ("cpu", "cpu-proxy")])
def test_the_proxys_environment_is_one_that_it_takes(path: str, profile: str, service: str) -> None:
    said = resolved(path, profile)[service]["environment"]
    settings = load(environment={name: str(value) for name, value in said.items() if value is not None})
    assert {node.role for node in settings.nodes} == {"prefill", "decode"}


def test_the_proxys_keys_are_where_the_example_says(path: str, tmp_path: Path) -> None:
    proxy = resolved(path, "decode", KEY_FILES=str(tmp_path))["proxy"]
    assert proxy["volumes"] == [f"{tmp_path}:/keys:ro"]
    said = dict(re.findall(r"^# (PDPROXY_\w+)=(\S+)", EXAMPLE.read_text(), re.MULTILINE))
    assert said.keys() == {name for name, value in proxy["environment"].items() if value is None}
    for name in ("api.keys", "node.key"):
        (tmp_path / name).write_text("key-0123456789\n")
    here = {name: value.replace("/keys/", f"{tmp_path}/") for name, value in said.items()}
    settings = load(environment={"PDPROXY_DECODE": "http://d:1", **here})
    assert (settings.keys.file, settings.upstream.credential_file) == (tmp_path / "api.keys", tmp_path / "node.key")
    assert settings.upstream.credential == "replace"


@pytest.mark.parametrize(
    ("profile", "service", "role"),
    [
        ("prefill", "prefill", "kv_producer"),
        ("decode", "decode", "kv_consumer"),
        ("cpu", "cpu-prefill", "kv_producer"),
        ("cpu", "cpu-decode", "kv_consumer"),
    ],
)
def test_a_nodes_connector_takes_its_configuration(path: str, profile: str, service: str, role: str) -> None:
    command = resolved(path, profile)[service]["command"]
    words = command.split() if isinstance(command, str) else " ".join(command)
    found = re.search(
        r"--kv-transfer-config[= ]*'?(\{.*?\})'?( |$)", words if isinstance(words, str) else " ".join(words)
    )
    assert found is not None
    config = json.loads(found[1])
    assert config["kv_connector_module_path"] == "connector.facade"
    made = ConnectorConfig.from_extra(config["kv_role"], config["kv_load_failure_policy"], {}, {})
    assert made.role == role


def test_what_is_set_in_env_arrives(path: str) -> None:
    services = resolved(path, "decode", DECODE_PORT="9999", MODEL="some/model", PREFILL_URLS="http://p:1,http://q:2")
    assert "9999" in str(services["decode"]["command"])
    assert "some/model" in str(services["decode"]["command"])
    assert services["proxy"]["environment"]["PDPROXY_PREFILL"] == "http://p:1,http://q:2"


def test_the_example_has_every_knob_and_no_other() -> None:
    used = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    passed_on = set(re.findall(r"^\s+(PDPROXY_\w+|VLLM_API_KEY):$", COMPOSE.read_text(), re.MULTILINE))
    explained = set(re.findall(r"^# (\w+)=", EXAMPLE.read_text(), re.MULTILINE))
    assert explained == used | passed_on


@pytest.mark.parametrize("image", sorted((ROOT / "deploy/docker").glob("*.Dockerfile")), ids=lambda each: each.stem)
class TestImage:
    """hadolint's rules that matter, and what the files promise."""

    def test_what_is_copied_is_there_and_in_the_context(self, image: Path) -> None:
        allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        for line in re.findall(r"^COPY (?!--from)(.+)$", image.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists()
                assert any(source == each or source.startswith(f"{each}/") for each in allowed), source

    def test_bases_are_pinned(self, image: Path) -> None:
        for base in re.findall(r"^FROM (\S+)", image.read_text(), re.MULTILINE):
            assert ":" in base
            assert not base.endswith(":latest")

    def test_it_has_a_health_check_and_an_exec_entry_point(self, image: Path) -> None:
        text = image.read_text()
        assert "HEALTHCHECK" in text
        assert all(line.startswith("[") for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.+)$", text, re.MULTILINE))

    def test_packages_leave_no_cache(self, image: Path) -> None:
        text = image.read_text()
        assert "apt-get" not in text or ("--no-install-recommends" in text and "rm -rf /var/lib/apt/lists" in text)
        assert "PIP_NO_CACHE_DIR" in text or "--no-cache-dir" in text
