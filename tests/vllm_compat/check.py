"""Our touches against a version's shape: what is a seam, and what that version does not have."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.vllm_compat.our_use import Touch, Touches
from tests.vllm_compat.vllm_source import Shape


@dataclass(frozen=True, slots=True)
class Seams:
    """What we import, override, use of our base classes, and read off what vLLM hands in."""

    imports: tuple[Touch, ...]
    overrides: tuple[Touch, ...]
    uses: tuple[Touch, ...]
    reads: tuple[Touch, ...]

    def __len__(self) -> int:
        return sum(map(len, (self.imports, self.overrides, self.uses, self.reads)))

    @property
    def private(self) -> int:
        """How many touch something that vLLM keeps to itself, by its name."""
        return sum(touch.private for touch in (*self.imports, *self.overrides, *self.uses, *self.reads))


def wanted(found: Touches) -> frozenset[str]:
    """The classes and names that must be known of a version."""
    owners = {touch.owner for touch in (*found.defined, *found.used, *found.read)}
    return frozenset(owners | {f"{touch.owner}:{touch.chain[0]}" for touch in found.imported})


def seams(found: Touches, shape: Shape) -> Seams:
    """The seams on this version: our own additions to its classes are none."""

    def theirs(touch: Touch) -> bool:
        return touch.owner in shape.classes and shape.member(touch.owner, touch.chain) is not None

    return Seams(
        imports=tuple(sorted(found.imported)),
        overrides=tuple(sorted(touch for touch in found.defined if theirs(touch))),
        uses=tuple(sorted(touch for touch in found.used if theirs(touch))),
        reads=tuple(sorted(found.read)),
    )


def broken(known: Seams, shape: Shape) -> Iterator[str]:
    """What of `known` this version lacks, or wants otherwise; each in a line."""
    for touch in known.imports:
        if f"{touch.owner}:{touch.chain[0]}" not in shape.names:
            yield f"vLLM {shape.version} has no {touch}"
    for touch in (*known.uses, *known.reads):
        if touch.owner in shape.classes and shape.member(touch.owner, touch.chain) is None:
            yield f"vLLM {shape.version} has no {touch}"
    for touch in known.overrides:
        member = shape.member(touch.owner, touch.chain)
        if member is None:
            yield f"vLLM {shape.version} never calls {touch}"
        elif member.parameters is not None and not fits(touch, member.parameters):
            yield f"vLLM {shape.version} calls {touch} with ({', '.join(member.parameters)})"


def fits(touch: Touch, theirs: tuple[str, ...]) -> bool:
    """Whether whatever vLLM passes can be passed to ours; our constructors take more, which we pass ourselves."""
    given = touch.parameters or ()
    plain = tuple(name for name in given if not name.startswith("*"))
    if len(plain) < len(given) or touch.chain == ("__init__",):
        shared = min(len(plain), len(theirs))
        return plain[:shared] == theirs[:shared] and (len(plain) >= len(theirs) or len(plain) < len(given))
    return len(plain) == len(theirs)
