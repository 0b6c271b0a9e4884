"""Images, read line by line: a linter's rules, and what the files promise."""

import re
import ssl
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest

from deploy.local.paths import REQUIREMENTS, ROOT
from pdproxy import __version__
from pdproxy.settings.load import load
from tests.deploy.building import build, installed_bytes
from tests.deploy.dockerfile import FOLDER, IMAGES, Stage, stages
from tests.fakes.certificates import identity
from tests.fakes.http_server import HOST, QuietHandler, running

NIXL = "1.5.1"
PROXY = FOLDER / "proxy.Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_BYTES = 60 * 1000 * 1000
"""Bytes that the proxy's wheels may take, installed."""


def copied(stage: Stage) -> list[str]:
    """Files that a stage copies from the repository."""
    return [source for line in stage.all("COPY") if not line.startswith("--from") for source in line.split()[:-1]]


@pytest.mark.parametrize("image", IMAGES, ids=lambda each: each.stem)
class TestImage:
    """Each of them."""

    def test_the_linter_has_nothing_to_say(self, image: Path) -> None:
        hadolint = Path(sys.executable).with_name("hadolint")
        found = subprocess.run([hadolint, "--no-color", image], capture_output=True, text=True, check=False)
        assert (found.returncode, found.stdout) == (0, "")

    def test_what_is_copied_is_there_and_in_the_context(self, image: Path) -> None:
        allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        for source in (source for stage in stages(image) for source in copied(stage)):
            assert (ROOT / source).exists()
            assert any(source == each or source.startswith(f"{each}/") for each in allowed), source

    def test_what_changes_seldom_is_copied_first(self, image: Path) -> None:
        build, *_ = stages(image)
        assert build.name == "build"
        assert copied(build) == sorted(copied(build), key=lambda source: not source.startswith("requirements/"))

    def test_the_last_stage_takes_only_what_was_built_and_data(self, image: Path) -> None:
        last = stages(image)[-1]
        assert any(line.startswith("--from=build") for line in last.all("COPY"))
        assert set(copied(last)) <= {"deploy/local/model/tiny-hybrid"}

    def test_bases_are_pinned(self, image: Path) -> None:
        for stage in stages(image):
            assert ":" in stage.base
            assert not stage.base.endswith(":latest")

    def test_it_says_what_is_in_it(self, image: Path) -> None:
        last = stages(image)[-1]
        found = {name.removeprefix("org.opencontainers.image."): value for name, value in last.labels().items()}
        assert found.keys() == {"title", "description", "base.name", "licenses"}, "who builds it says the version"
        assert found["licenses"] == PROJECT["license"]
        assert found["base.name"].removeprefix("docker.io/").removeprefix("library/") == last.base

    def test_it_tells_its_health_and_takes_signals_itself(self, image: Path) -> None:
        last = stages(image)[-1]
        assert last.listed("ENTRYPOINT")
        assert last.all("STOPSIGNAL") == ["SIGTERM"]
        assert last.health().command[0] == last.listed("ENTRYPOINT")[0] or "python" in last.health().command[0]

    def test_it_runs_as_nobody(self, image: Path) -> None:
        """But for the GPU node, which is as the official image is."""
        user = stages(image)[-1].all("USER")
        assert user == ([] if image.stem == "gpu-node" else ["65532:65532"])


def test_the_proxys_ports_are_the_exposed_ones() -> None:
    last = stages(PROXY)[-1]
    found = {name: value for name, value in last.environment({}).items() if name.startswith("PDPROXY_")}
    listen = load(environment={**found, "PDPROXY_DECODE": "http://d:1"}).listen
    assert f"{listen.port} {listen.admin_port}" == last.all("EXPOSE")[0]
    assert last.listed("ENTRYPOINT")[0] in PROJECT["scripts"]


def test_what_the_proxys_image_installs_is_small() -> None:
    names = [line.partition("==")[0] for line in (REQUIREMENTS / "proxy.txt").read_text().splitlines()]
    files = [file.locate() for name in names for file in distribution(name).files or ()]
    ours = (ROOT / "pdproxy").rglob("*.py")
    assert sum(Path(str(file)).stat().st_size for file in (*files, *ours) if Path(str(file)).is_file()) <= MOST_BYTES


@pytest.mark.parametrize("cuda", ["12.9", "13.0"])
def test_the_gpu_node_gets_the_nixl_that_will_be_looked_for(cuda: str, tmp_path: Path) -> None:
    """One wheel, by the CUDA that torch was built for: `import nixl` asks by the same number."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("from torch import version")
    (tmp_path / "torch/version.py").write_text(f"cuda = {cuda!r}")
    [line] = [line for line in stages(FOLDER / "gpu-node.Dockerfile")[-1].all("RUN") if "nixl==" in line]
    (tmp_path / "python3").write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo "$@"; else exec {sys.executable} "$@"; fi\n'
    )
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["/bin/sh", "-c", line], env=environment, capture_output=True, text=True, check=True)
    *_, install = done.stdout.splitlines()
    wanted = "import nixl_meta_utils, torch; print(nixl_meta_utils.detect_cuda_major())"
    major = subprocess.run(
        [sys.executable, "-c", wanted], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert re.findall(r"(nixl\S*)==(\S+)", install) == [("nixl", NIXL), (f"nixl-cu{major}", NIXL)]
    assert major == cuda.partition(".")[0]


@pytest.mark.long
def test_the_proxys_image_can_be_built_and_is_small(tmp_path: Path) -> None:
    """Every line of its build stage, in a clean environment; then what it is for."""
    made = build(PROXY, tmp_path)
    taken = installed_bytes(made)
    print(f"\n{taken / 1e6:.1f} MB")
    assert taken <= MOST_BYTES
    for words, expected in (("--version", __version__), ("settings", "## deadlines")):
        found = subprocess.run([made / "bin/pdproxy", words], capture_output=True, text=True, cwd="/", check=True)
        assert expected in found.stdout
    bare = subprocess.run([made / "bin/python", "-c", "import torch"], capture_output=True, cwd="/", check=False)
    assert bare.returncode != 0


@pytest.mark.long
def test_the_gpu_nodes_image_gets_our_wheel(tmp_path: Path) -> None:
    made = build(FOLDER / "gpu-node.Dockerfile", tmp_path)
    [wheel] = made.iterdir()
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        [points] = [opened.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert "pdproxy_connector/nixl_connector.py" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"pdproxy_connector"}
    assert "pdproxy_connector = pdproxy_connector.config:register" in points
    assert "pdproxy_endpoints = pdproxy_connector.endpoints:NodeRoutes" in points


@pytest.mark.parametrize("tls", [True, False])
def test_the_gpu_nodes_health_check_asks_as_the_node_speaks(tls: bool, tmp_path: Path) -> None:
    """Any signer of its certificate will do: the container asks itself."""
    health = stages(FOLDER / "gpu-node.Dockerfile")[-1].health()
    for status in (200, 503):
        with serving(status, tmp_path if tls else None) as port:
            environment = {"NODE_PORT": str(port), **({"NODE_TLS": "1"} if tls else {})}
            found = subprocess.run([sys.executable, *health.command[1:]], env=environment, timeout=60, check=False)
        assert (found.returncode == 0) is (status == 200)


@contextmanager
def serving(status: int, certificate: Path | None) -> Iterator[int]:
    """The port of a server that answers with this status; with a folder for its certificate, by HTTPS."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(status if self.path == "/health" else 404)

    server = ThreadingHTTPServer((HOST, 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*identity("node", "elsewhere").write(certificate))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server) as port:
        yield port
