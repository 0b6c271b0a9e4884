"""Warnings that the engine's own imports raise are not ours to mend; everything else stays an error."""

from __future__ import annotations

import pytest

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
