"""What somebody said about settings, and where: the common form of the file, the environment and the flags."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """A value as it was written, and where: "the file pdproxy.yaml", "PDPROXY_LOG_LEVEL", "--log-level"."""

    value: object
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """One source's say.

    Attributes:
        values: by key, such as ``deadlines.connect``.
        nodes: what it says about each node, by field; empty where it names none.
    """

    values: Mapping[str, Said] = dataclasses.field(default_factory=dict)
    nodes: tuple[Mapping[str, Said], ...] = ()


def over(weaker: Given, stronger: Given) -> Given:
    """Both, where ``stronger`` has the last word. A source that names any node names them all."""
    return Given({**weaker.values, **stronger.values}, stronger.nodes or weaker.nodes)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " Did you mean x?", or "" when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
