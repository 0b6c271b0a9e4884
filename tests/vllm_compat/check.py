"""The counted list of seams, and what is different about them in another version of vLLM."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.vllm_compat.our_use import Touch, Touches
from tests.vllm_compat.seams import FEATURES, HAND_OVERS, Inside
from tests.vllm_compat.vllm_source import Library, Shape


class Kind(StrEnum):
    """How the connector relies on a seam."""

    IMPORT = "imports"
    OVERRIDE = "overrides"
    USE = "uses"
    """A member of a base class, through `self` or `super()`."""
    READ = "reads"
    """A member of a parameter that is annotated with a class of vLLM's."""
    UNSEEN = "unseen"
    """A member that is listed by hand."""
    INSIDE = "insides"
    """The text of a method, a class or a constant."""


FOUND = (Kind.IMPORT, Kind.OVERRIDE, Kind.USE, Kind.READ)
"""The kinds that are found in the connector's source."""


@dataclass(frozen=True, slots=True, order=True)
class Seam:
    """One thing of vLLM's that the connector relies on."""

    kind: Kind
    touch: Touch

    @property
    def private(self) -> bool:
        """Whether vLLM keeps it to itself, by its name."""
        return self.touch.private

    @property
    def name(self) -> str:
        """Without the parameters."""
        return ".".join((self.touch.owner, *self.touch.chain))


@dataclass(frozen=True, slots=True)
class Version:
    """A vLLM whose source is read. `called`: names that the connector calls; classes, to construct one."""

    library: Library
    shape: Shape
    called: frozenset[Touch] = frozenset()

    def describe(self, seam: Seam) -> str | None:
        """How a seam is declared in this version; None where it is not there."""
        touch = seam.touch
        if seam.kind is Kind.INSIDE:
            return self.library.text(seam.name)
        if seam.kind is Kind.IMPORT:
            asked = f"{touch.owner}:{touch.chain[0]}"
            if touch in self.called and asked in self.shape.classes:
                return self.shape.constructor(asked)
            return self.shape.names.get(asked)
        if touch.owner not in self.shape.classes:
            return None if seam.kind is Kind.UNSEEN else ""
        member = self.shape.member(touch.owner, touch.chain)
        return None if member is None else member.text


def wanted(found: Touches, unseen: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    """The classes and names that must be known of a version."""
    owners = {touch.owner for touch in (*found.defined, *found.used, *found.read)}
    listed = {owner for classes in unseen.values() for owner in classes}
    return frozenset(owners | listed | {f"{touch.owner}:{touch.chain[0]}" for touch in found.imported})


def seams(found: Touches, shapes: Iterable[Shape]) -> frozenset[Seam]:
    """The seams in the source that one of the versions has; our own additions to vLLM's classes are none."""
    known = tuple(shapes)

    def theirs(touch: Touch) -> bool:
        return any(each.classes.get(touch.owner, {}).get(touch.chain[0]) is not None for each in known)

    return frozenset(
        {Seam(Kind.IMPORT, touch) for touch in found.imported}
        | {Seam(Kind.OVERRIDE, touch) for touch in found.defined if theirs(touch)}
        | {Seam(Kind.USE, touch) for touch in found.used if theirs(touch)}
        | {Seam(Kind.READ, touch) for touch in found.read}
    )


def by_feature(
    found: Mapping[str, Touches],
    shapes: Iterable[Shape],
    unseen: Mapping[str, Mapping[str, str]],
    insides: Iterable[Inside],
) -> dict[str, frozenset[Seam]]:
    """The whole list. A seam that two features rely on is in both."""
    known = tuple(shapes)
    rows: dict[str, set[Seam]] = {}
    for module, touches in found.items():
        rows.setdefault(feature_of(module), set()).update(seams(touches, known))
    for feature, classes in unseen.items():
        members = ((owner, name) for owner, names in classes.items() for name in names.split())
        rows.setdefault(feature, set()).update(Seam(Kind.UNSEEN, Touch(owner, (name,))) for owner, name in members)
    for each in insides:
        owner, *method = each.where.split(":")[1].split(".")
        touch = Touch(f"{each.where.split(':')[0]}:{owner}", tuple(method))
        rows.setdefault(each.feature, set()).add(Seam(Kind.INSIDE, touch))
    return {feature: frozenset(rows[feature]) for feature in sorted(rows) if rows[feature]}


def feature_of(module: str) -> str:
    """The feature that a module of the connector serves."""
    return FEATURES.get(module, FEATURES.get(module.partition(".")[0], HAND_OVERS))


def differences(known: Iterable[Seam], mine: Version, other: Version) -> Iterator[tuple[str, str]]:
    """Each seam that one version lacks or declares otherwise, with the parts that only one of them has."""
    for seam in sorted(set(known)):
        here, there = mine.describe(seam), other.describe(seam)
        if here is None or here != there:
            first = f"{_parts(here, there)} in {mine.shape.version}"
            yield seam.name, f"{first}, {_parts(there, here)} in {other.shape.version}"


def misfits(known: Iterable[Seam], shape: Shape) -> Iterator[str]:
    """Overrides that do not take what this version passes; those that it does not have are `differences`."""
    for seam in sorted(set(known)):
        member = shape.member(seam.touch.owner, seam.touch.chain) if seam.kind is Kind.OVERRIDE else None
        if member is not None and member.parameters is not None and not fits(seam.touch, member.parameters):
            yield f"vLLM {shape.version} calls {seam.touch} with ({', '.join(member.parameters)})"


def fits(touch: Touch, theirs: tuple[str, ...]) -> bool:
    """Whether whatever vLLM passes can be passed to ours; our constructors take more, which we pass ourselves."""
    given = touch.parameters or ()
    plain = tuple(name for name in given if not name.startswith("*"))
    if len(plain) < len(given):
        shared = min(len(plain), len(theirs))
        return plain[:shared] == theirs[:shared]
    return plain[: len(theirs)] == theirs if touch.chain == ("__init__",) else plain == theirs


def _parts(text: str | None, other: str | None) -> str:
    """The lines, parameters or fields of a text that the other one does not have."""
    if text is None:
        return "not there"
    parts, others = (re.split(r", |\n", each or "") for each in (text, other))
    return ", ".join(part.strip() for part in parts if part not in others) or "nothing more"
