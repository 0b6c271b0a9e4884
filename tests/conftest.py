"""Settings that all tests share."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is slow without being wrong, and CI is to see the same examples every time.
UNHURRIED = (HealthCheck.too_slow,)
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=UNHURRIED)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=int(os.environ.get("FUZZED", "0")) or 1,
    suppress_health_check=UNHURRIED,
)
settings.load_profile("fuzz" if "FUZZED" in os.environ else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with engines of their own go first: once the shared ones are up they stay, and memory is not endless."""
    items.sort(key=lambda item: item.get_closest_marker("own_engines") is None)


# Warnings that the engine's own imports raise are not ours to mend; everything else stays an error.
FOREIGN = (
    "ignore::DeprecationWarning:(torch|vllm|nixl|transformers|importlib)",
    "ignore::FutureWarning:(torch|vllm|transformers)",
    "ignore::UserWarning:(torch|vllm|transformers|nixl)",
    "ignore:builtin type .* has no __module__ attribute:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Add the exceptions to the rule that a warning is an error."""
    for line in FOREIGN:
        config.addinivalue_line("filterwarnings", line)
