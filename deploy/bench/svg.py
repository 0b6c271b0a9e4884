"""A small writer of bar charts as SVG: no library for plots is among the dependencies. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, LABELS, ROW, GAP, HEAD = 860, 270, 18, 30, 34
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
STYLE = "text{font:12px sans-serif;fill:#222}.title{font-size:15px;font-weight:bold}.group{font-weight:bold}"


class Bar(NamedTuple):
    """One bar of a group. ``spread``: half the width of its interval, drawn as a line; 0: none."""

    label: str
    value: float
    spread: float = 0.0


def bars(title: str, groups: Mapping[str, Sequence[Bar]], marks: Mapping[str, float]) -> str:
    """Groups of horizontal bars, each group to a scale of its own; a label has the same colour in all of them.

    Args:
        marks: by group, a value that a line is drawn at: what no bar can be below.
    """
    labels = list(dict.fromkeys(bar.label for group in groups.values() for bar in group))
    colours = {label: COLOURS[place % len(COLOURS)] for place, label in enumerate(labels)}
    drawn, top = [f'<text class="title" x="8" y="20">{escape(title)}</text>'], HEAD
    for name, group in groups.items():
        drawn += _group(name, group, colours, marks.get(name), top)
        top += GAP + ROW * len(group)
    size = f'width="{WIDTH}" height="{top + 8}" viewBox="0 0 {WIDTH} {top + 8}"'
    background = f'<rect width="{WIDTH}" height="{top + 8}" fill="#fff"/>'
    body = "\n".join(drawn)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{background}\n{body}\n</svg>\n'


def _group(name: str, group: Sequence[Bar], colours: Mapping[str, str], mark: float | None, top: int) -> list[str]:
    most = max((bar.value + bar.spread for bar in group), default=0.0) or 1.0
    room = WIDTH - LABELS - 70
    drawn = [f'<text class="group" x="8" y="{top + 16}">{escape(name)}</text>']
    for place, bar in enumerate(group):
        y, width = top + 22 + ROW * place, bar.value / most * room
        shape = f'x="{LABELS}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{colours[bar.label]}"'
        drawn.append(f'<text x="{LABELS - 6}" y="{y + 11}" text-anchor="end">{escape(bar.label)}</text>')
        low, high = (LABELS + max(0.0, bar.value + sign * bar.spread) / most * room for sign in (-1, 1))
        told = f"{bar.value:.3g}" if bar.value < 1000 else f"{bar.value:.0f}"
        drawn.append(f'<rect {shape}/><text x="{high + 5:.1f}" y="{y + 11}">{told}</text>')
        if bar.spread:
            drawn.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 7}" y2="{y + 7}" stroke="#222"/>')
    if mark is not None:
        x, begin, end = LABELS + mark / most * room, top + 20, top + 20 + ROW * len(group)
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{begin}" y2="{end}" stroke="#d00" stroke-dasharray="4 2"/>')
    return drawn
