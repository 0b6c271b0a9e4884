"""The blocks that fake prefill nodes hold for decode nodes, and what was wrong about their use."""

import dataclasses

COPY = "#"
"""Between a hand-over id and the number of a further prefill leg with the same id."""


@dataclasses.dataclass(slots=True)
class HeldTicket:
    """Blocks of one prefill leg."""

    node: str
    prompt: tuple[int, ...]
    readers: int
    dialect: int = 0
    """See `FakeNode.dialect`."""


class FakeKvTransfer:
    """Shared by the fake nodes of one test: the KV transfer between them."""

    def __init__(self) -> None:
        self.held: dict[str, HeldTicket] = {}
        self.released: set[str] = set()
        self.wrong: list[str] = []
        """Misuse: a ticket for another prompt, one hand-over id used twice."""
        self.copies_allowed = False
        """A leg may come twice, for a connection breaks under its first copy. That of a prefill leg is not aborted:
        each of the two holds blocks."""
        self.pulled = 0
        self.told: dict[str, str] | None = None
        """Decode nodes' reports of their reads, to whoever asks."""
        self.address = "10.0.0.1"
        """In tickets."""
        self.deaf = False
        """No read succeeds: decode nodes compute, though blocks are held."""
        self._seen: set[str] = set()
        self._forgotten: set[str] = set()

    def hold(self, hand_over: str, held: HeldTicket) -> str:
        """A prefill leg began; its release may have overtaken it. The name by which its ticket is read."""
        name = hand_over
        if hand_over in self._seen:
            name = f"{hand_over}{COPY}{len(self._seen)}"
            if not self.copies_allowed:
                self.wrong.append(f"hand-over {hand_over} was used twice")
        self._seen |= {hand_over, name}
        if hand_over not in self.released and hand_over not in self._forgotten:
            self.held[name] = held
        return name

    def forget(self) -> None:
        """Drop old hand-over ids, for a soak has no end of them; releases are remembered until the next call."""
        self._forgotten, self.released, self._seen = self.released, set(), set()

    def free(self, hand_over: str) -> None:
        """The proxy released it, or the prefill node refused the leg."""
        self.held.pop(hand_over, None)

    def lose(self, node: str) -> None:
        """The node's process died, and its memory with it."""
        self.held = {name: held for name, held in self.held.items() if held.node != node}

    def release(self, hand_over: str) -> None:
        """The proxy released it. Unknown ids are fine: the blocks may have been pulled."""
        self.released.add(hand_over)
        for name in [name for name in self.held if name.partition(COPY)[0] == hand_over]:
            self.free(name)

    def pull(self, hand_over: str, prompt: tuple[int, ...], readers: int) -> HeldTicket | None:
        """A decode node reads; None when nothing is held any more (it recomputes)."""
        held = self.held.get(hand_over)
        if held is None or self.deaf:
            return None
        if held.prompt != prompt or held.readers != readers:
            self.wrong.append(f"ticket {hand_over} is for another prompt or number of readers")
            return None
        self.free(hand_over)
        self.pulled += 1
        return held
