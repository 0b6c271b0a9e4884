"""A node's counters in `/metrics`: where prompt tokens and cache blocks came from."""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

SERIES = {
    "pdproxy_connector_prompt_tokens_total": ("source",),
    "pdproxy_connector_blocks_total": ("group", "kind"),
}
"""The connector's counters shown here, with the labels that tell them apart."""

Counts = Tally[tuple[str, ...]]
"""How many, by series and label values: ("pdproxy_connector_blocks_total", "attention", "hit")."""

PATIENCE_S = 10.0
POLL_S = 0.25


def parse(exposition: str) -> Counts:
    """Read the counters of `SERIES` from a Prometheus text exposition; the sum where an engine has several."""
    counts: Counts = Tally()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in SERIES:
                key = (sample.name, *(sample.labels.get(label, "") for label in SERIES[sample.name]))
                counts[key] += round(sample.value)
    return counts


def read(client: httpx.Client, url: str) -> Counts:
    """Ask a node. Raises httpx.HTTPError."""
    return parse(client.get(f"{url}/metrics").raise_for_status().text)


def await_change(before: Counts, look: Callable[[], Counts], patience: float = PATIENCE_S) -> Counts:
    """Return what was added since `before`, once two looks agree; a node tells a moment after it answered.

    Empty when nothing was added within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    seen: Counts = Tally()
    added = look() - before
    while (not added or added != seen) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        seen, added = added, look() - before
    return added


def describe(counts: Counts) -> list[str]:
    """Return one line for the prompt's tokens and one for each kind of group."""
    tokens = [(key[1], count) for key, count in counts.items() if key[0].endswith("prompt_tokens_total")]
    lines = [f"prompt tokens: {listing(tokens)}"] if tokens else []
    groups = sorted({key[1] for key in counts if key[0].endswith("blocks_total")})
    for group in groups:
        kinds = [(key[2], count) for key, count in counts.items() if key[1] == group and len(key) > 2]
        lines.append(f"{group} blocks: {listing(kinds)}")
    return lines


def listing(pairs: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(pairs))
