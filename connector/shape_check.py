"""The check when a node starts: whether the running vLLM is as this package relies on (`vllm_contracts`).

A difference is refused in a sentence, before any of our code runs: found later, it would end the engine in the middle
of a request, or read the wrong blocks. An untested version without a difference is a warning.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from connector.config import ConfigError
from connector.contract import PROPERTY, Contract, Inner, VersionFacts, inner_key, misfits
from connector.vllm_contracts import TESTED

log = logging.getLogger("vllm.pdproxy.shape_check")


class Source(Protocol):
    """Where a version's facts are read from: the running vLLM, or source text. `owner` is `module:Class`."""

    def parameters(self, owner: str, name: str) -> str | None:
        """A method's parameters in order, optional ones with `=`; `PROPERTY`; None where there is no such."""

    def members(self, owner: str) -> frozenset[str]:
        """Methods and attributes, including those that its constructor sets."""

    def fields(self, owner: str) -> tuple[str, ...]:
        """A dataclass's fields."""

    def constant(self, name: str) -> str:
        """The `repr` of the value of `module:NAME`."""

    def tree(self, owner: str, name: str) -> ast.FunctionDef | None:
        """A method's syntax tree; None without such a method, or without its source."""


def require_fit(contract: Contract) -> None:
    """Compare `contract` with the vLLM of this process. Raises ConfigError where they differ."""
    version = running_version()
    found = list(misfits(contract, facts(contract, Running())))
    if found:
        raise ConfigError(sentence(version, found))
    if version not in TESTED:
        log.warning(
            "vLLM %s has not been tried with this connector (%s have). All that the connector relies on looks the "
            "same; whether it means the same, `make test-upstream` shows.",
            version,
            " and ".join(TESTED),
        )


@contextmanager
def vllm_names() -> Iterator[None]:
    """For imports from vLLM. Raises ConfigError for a name that this version does not have."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("vllm."):
            raise
        raise ConfigError(sentence(running_version(), [str(error)])) from error


def facts(contract: Contract, source: Source) -> VersionFacts:
    """The facts of a version that `contract` asks for."""
    methods = [(owner, name) for part in (contract.hooks, contract.calls) for owner in part for name in part[owner]]
    parameters = {f"{owner}.{name}": source.parameters(owner, name) for owner, name in methods}
    return VersionFacts(
        parameters={key: text for key, text in parameters.items() if text is not None},
        attributes={owner: _present(names, source.members(owner)) for owner, names in contract.attributes.items()},
        fields={owner: source.fields(owner) for owner in contract.fields},
        constants={name: source.constant(name) for name in contract.constants},
        inner={inner_key(inner): _inner(source, inner) for inner in contract.inner},
    )


def running_version() -> str:
    """The running vLLM's, without a local part behind `+`."""
    from vllm import __version__ as version

    return str(version).split("+")[0]


def sentence(version: str, found: Iterable[str]) -> str:
    """The message of the refusal."""
    return (
        f"vLLM {version} does not fit this connector, which was made for {' and '.join(TESTED)}: {'; '.join(found)}. "
        f"Install one of those versions, or a release of pdproxy that was made for {version}."
    )


class Running:
    """The running vLLM, whose modules are loaded; nothing is called, and few files are read."""

    def parameters(self, owner: str, name: str) -> str | None:
        member = inspect.getattr_static(_named(owner), name, None)
        if isinstance(member, property):
            return PROPERTY
        function = getattr(member, "__func__", member)
        return render(inspect.signature(function)) if inspect.isfunction(function) else None

    def members(self, owner: str) -> frozenset[str]:
        found = _named(owner)
        names: set[str] = set(dir(found))
        for base in getattr(found, "__mro__", ()):
            names |= set(vars(base).get("__annotations__", ()))
            names |= _set_by(vars(base).get("__init__"))
        return frozenset(names)

    def fields(self, owner: str) -> tuple[str, ...]:
        found = _named(owner)
        return tuple(field.name for field in dataclasses.fields(found)) if dataclasses.is_dataclass(found) else ()

    def constant(self, name: str) -> str:
        return repr(_named(name))

    def tree(self, owner: str, name: str) -> ast.FunctionDef | None:
        function = getattr(_named(owner), name, None)
        try:
            parsed = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]  # type: ignore[arg-type]
        except (OSError, TypeError):
            return None
        return parsed if isinstance(parsed, ast.FunctionDef) else None


def _set_by(constructor: Any) -> set[str]:
    """Every attribute that a constructor names, which includes those that it sets. Cheaper than parsing its source."""
    return (
        set(getattr(getattr(inspect.unwrap(constructor), "__code__", None), "co_names", ())) if constructor else set()
    )


def render(signature: inspect.Signature) -> str:
    """In the form of `VersionFacts.parameters`."""
    return " ".join(map(_parameter, signature.parameters.values()))


def _parameter(parameter: inspect.Parameter) -> str:
    kinds: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    stars = kinds.get(parameter.kind, "")
    return stars + parameter.name + ("" if parameter.default is inspect.Parameter.empty else "=")


def _named(owner: str) -> Any:
    """The object that `module:Name` names, or None."""
    module, name = owner.split(":")
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def _present(names: Iterable[str], members: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in members)


def _inner(source: Source, inner: Inner) -> tuple[str, ...]:
    owner, _, name = inner.method.rpartition(".")
    tree = source.tree(owner, name)
    return () if tree is None else inner.find(tree)
