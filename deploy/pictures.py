"""Pictures of the documentation as SVG: the way of a request, and the way of a ticket. Pure.

SVG and not Mermaid: a site that shows Mermaid fetches its scripts from another host (`docs/decisions/site.md`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

ACROSS, EDGE, HEAD, ROW, LINE = 230, 105, 64, 46, 15
HALF = 98
"""Half the width of a box."""
STYLE = (
    "text{font:13px sans-serif;fill:#222}.actor{font-weight:bold}.small{font-size:12px;fill:#555}"
    "line{stroke:#555}.life{stroke:#bbb;stroke-dasharray:4 3}.back{stroke-dasharray:5 3}"
    ".box{fill:#eef2fb;stroke:#4269d0}.note{fill:#fff7df;stroke:#d8a000}"
)
ARROW = (
    '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L10 5L0 10z" fill="#555"/></marker>'
)


class Message(NamedTuple):
    """An arrow from one actor to another. ``back``: an answer, which is drawn broken."""

    sender: str
    receiver: str
    text: str
    back: bool = False


class Note(NamedTuple):
    """A box on one actor's line: what it does by itself. Each text is a line."""

    actor: str
    texts: tuple[str, ...]


Step = Message | Note

CLIENT, PROXY, PREFILL, DECODE = "client", "pdproxy", "prefill node", "decode node"
REQUEST: Sequence[Step] = (
    Message(CLIENT, PROXY, "request"),
    Note(PROXY, ("key, limits, queue", "plan: which nodes?")),
    Message(PROXY, PREFILL, "the prompt, one token asked for"),
    Note(PREFILL, ("computes the prompt", "and keeps its blocks")),
    Message(PREFILL, PROXY, "ticket", back=True),
    Message(PROXY, DECODE, "the request and the ticket"),
    Message(DECODE, PREFILL, "NIXL reads, and: still held?"),
    Note(PREFILL, ("frees the blocks",)),
    Message(DECODE, PROXY, "tokens", back=True),
    Message(PROXY, CLIENT, "the same bytes", back=True),
)
TICKET: Sequence[Step] = (
    Message(PROXY, PREFILL, "prefill leg"),
    Note(PREFILL, ("1 where does it end?", "2 an alias", "3 a lease, a signature")),
    Message(PREFILL, PROXY, "ticket", back=True),
    Message(PROXY, DECODE, "decode leg with the ticket"),
    Note(DECODE, ("4 genuine? of this prompt?", "5 blocks for what is missing")),
    Message(DECODE, PREFILL, "6 NIXL reads of blocks and state"),
    Message(DECODE, PREFILL, "7 did you hold them to the end?"),
    Message(PREFILL, DECODE, "yes", back=True),
    Note(DECODE, ("8 generates; on any other", "answer it computes the prompt")),
    Note(PREFILL, ("frees the blocks, now or", "when the lease ends")),
)


def pictures() -> dict[str, str]:
    """The pictures, each by the name of its file."""
    return {
        "way-of-a-request.svg": sequence("The way of a request", (CLIENT, PROXY, PREFILL, DECODE), REQUEST),
        "way-of-a-ticket.svg": sequence("The way of a ticket", (PROXY, PREFILL, DECODE), TICKET),
    }


def sequence(title: str, actors: Sequence[str], steps: Sequence[Step]) -> str:
    """A sequence diagram: actors side by side, time downwards."""
    places = {actor: EDGE + ACROSS * number for number, actor in enumerate(actors)}
    drawn, top = list[str](), HEAD
    for step in steps:
        drawn += _note(step, places, top) if isinstance(step, Note) else _message(step, places, top)
        top += _height(step)
    width, height = 2 * EDGE + ACROSS * (len(actors) - 1), top + 10
    lives = [f'<line class="life" x1="{x}" x2="{x}" y1="46" y2="{top}"/>' for x in places.values()]
    heads = [part for actor, x in places.items() for part in _box(x, 16, 30, (actor,), "box", "actor")]
    body = "\n".join((f'<rect width="{width}" height="{height}" fill="#fff"/>', *lives, *heads, *drawn))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
    named = f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{ARROW}</defs>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{named}\n{body}\n</svg>\n'


def _height(step: Step) -> int:
    return ROW if isinstance(step, Message) else 26 + LINE * len(step.texts)


def _message(step: Message, places: dict[str, int], top: int) -> Iterator[str]:
    begin, end, y = places[step.sender], places[step.receiver], top + 26
    kind = ' class="back"' if step.back else ""
    yield f'<line{kind} x1="{begin}" x2="{end}" y1="{y}" y2="{y}" marker-end="url(#arrow)"/>'
    middle = (begin + end) // 2 if abs(end - begin) == ACROSS else end + (ACROSS // 2 if begin > end else -ACROSS // 2)
    yield f'<text x="{middle}" y="{y - 7}" text-anchor="middle">{escape(step.text)}</text>'


def _note(step: Note, places: dict[str, int], top: int) -> Iterator[str]:
    return _box(places[step.actor], top + 6, 12 + LINE * len(step.texts), step.texts, "note", "small")


def _box(x: int, y: int, height: int, texts: Sequence[str], kind: str, style: str) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x - HALF}" y="{y}" width="{2 * HALF}" height="{height}" rx="5"/>'
    first = y + (height - LINE * len(texts)) // 2 + 12
    for number, text in enumerate(texts):
        yield f'<text class="{style}" x="{x}" y="{first + LINE * number}" text-anchor="middle">{escape(text)}</text>'
