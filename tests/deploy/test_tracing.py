"""`otel.export: otlp` with what the proxy's image installs: spans arrive; with less, one sentence ends the start."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest

from deploy.local.paths import REQUIREMENTS, ROOT
from deploy.local.ports import HOST, free_ports
from tests.fakes.otlp_collector import otlp_collector


def pinned(lock: str) -> list[str]:
    """The names that `requirements/LOCK.txt` pins."""
    return [line.partition("==")[0] for line in (REQUIREMENTS / f"{lock}.txt").read_text().splitlines()]


def link(names: list[str], folder: Path) -> Path:
    """Put these distributions into `folder`, by links; returns it. Raises PackageNotFoundError."""
    for name in names:
        for inside, file in _files(name):
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    return folder


@contextmanager
def without(name: str, folder: Path) -> Iterator[None]:
    """While inside, `folder`, to which it was linked, has no file of this distribution, nor an empty folder of it."""
    places = [folder / inside for inside, _ in _files(name)]
    for place in places:
        place.unlink()
    for parent in sorted({parent for place in places for parent in place.parents}, reverse=True):
        if folder in parent.parents and not any(parent.iterdir()):
            parent.rmdir()
    try:
        yield
    finally:
        link([name], folder)


def _files(name: str) -> Iterator[tuple[str, Path]]:
    """The distribution's files below site-packages; scripts lie elsewhere."""
    for file in distribution(name).files or ():
        if ".." not in file.parts:
            yield str(file), Path(str(file.locate()))


MAIN = "import sys; sys.path[:0] = sys.argv[1:3]; from pdproxy.__main__ import main; sys.exit(main(sys.argv[3:]))"
WITHIN_S = 60.0


@contextmanager
def proxy(packages: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`pdproxy serve` with these packages and no others."""
    line = [sys.executable, "-I", "-S", "-c", MAIN, str(packages), str(ROOT), "serve", *arguments]
    environment = {"PATH": os.environ["PATH"], "NO_PROXY": HOST}
    with subprocess.Popen(line, env=environment, cwd="/", stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def ask(child: "subprocess.Popen[str]", url: str) -> None:
    """GET, until it answers or the process ends. Raises TimeoutError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limit = time.monotonic() + WITHIN_S
    while time.monotonic() < limit and child.poll() is None:
        try:
            opener.open(url, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            time.sleep(0.1)
            continue
        return
    raise TimeoutError(url)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's packages: thousands of links, made once."""
    return link(pinned("proxy"), tmp_path_factory.mktemp("packages"))


def test_spans_arrive_from_what_the_image_installs(packages: Path) -> None:
    port, admin = free_ports(2)
    flags = ["--port", str(port), "--admin-port", str(admin), "--decode", f"http://{HOST}:9"]
    with otlp_collector() as collector:
        more = ["--otel-export", "otlp", "--otel-endpoint", collector.url, "--otel-sample", "1"]
        with proxy(packages, *flags, *more) as child:
            ask(child, f"http://{HOST}:{port}/v1/models")
            child.send_signal(signal.SIGTERM)
            _, log = child.communicate(timeout=WITHIN_S)
    assert child.returncode == 0, log
    assert collector.content_types == {"application/x-protobuf"}, log
    assert "GET" in {span.name for span in collector.spans}


def test_a_missing_package_ends_the_start_with_a_sentence(packages: Path) -> None:
    flags = ["--port", "0", "--admin-port", "0", "--decode", f"http://{HOST}:9"]
    with (
        without("opentelemetry-exporter-otlp-proto-http", packages),
        proxy(packages, *flags, "--otel-export", "otlp") as child,
    ):
        _, log = child.communicate(timeout=WITHIN_S)
    assert child.returncode == 2, log
    [sentence] = [line for line in log.splitlines() if line.startswith("pdproxy: ")]
    assert sentence.startswith("pdproxy: otel.export is otlp, which needs packages that are not installed here (")
    assert sentence.endswith("): pip install 'pdproxy[otel]', or set otel.export to off.")
