"""One Helm for all tests of the chart; what it renders is rendered once."""

from collections.abc import Callable, Iterator

import pytest

from tests.helm.engine import Engine, Manifests, engine, read_values, value_files

Rendered = Callable[[str], Manifests]


@pytest.fixture(scope="session")
def helm() -> Iterator[Engine]:
    """Helm's engine."""
    with engine() as running:
        yield running


@pytest.fixture(scope="session")
def rendered(helm: Engine) -> Rendered:
    """The manifests of a values file, by its name."""
    known: dict[str, Manifests] = {}

    def render(name: str) -> Manifests:
        if name not in known:
            known[name] = helm.manifests(read_values(value_files()[name]))
        return known[name]

    return render
