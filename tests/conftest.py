"""Settings and fixtures that all tests share. Nothing is imported from vLLM, which is not installed everywhere."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

FOREIGN_LOGGERS = frozenset({"torch", "transformers", "huggingface_hub"})
OUR_LOGGERS = "vllm.pdproxy"
# A loaded machine is slow without being wrong, and CI is to see the same examples every time: few of them, for
# `make test-long` and `make fuzz` try hundreds and thousands of others.
UNHURRIED = (HealthCheck.too_slow,)
settings.register_profile("default", deadline=None, derandomize=True, max_examples=20, suppress_health_check=UNHURRIED)
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and never what then is there: it is most objects, and stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000)
        forget_foreign_loggers()


def forget_foreign_loggers() -> None:
    """Take the loggers of torch, of vLLM's modules and others off the list of all; whoever has one goes on with it.

    Thrice for every test pytest goes through that list, and adds its handlers to those that do not propagate.
    """
    listed = logging.root.manager.loggerDict
    for name in [name for name in listed if name.partition(".")[0] in FOREIGN_LOGGERS or name.startswith("vllm.")]:
        if not name.startswith(OUR_LOGGERS):
            del listed[name]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage is not collected: what is alive is what something refers to, or a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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
