"""The Grafana dashboard, made from the queries below: `make generate` writes it for compose and for the chart.

Every panel groups by `namespace` and `release`, so that no release hides behind another, and reads only what the
variables on top of the page pick. Names of metrics that several panels share stand at the top.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.promql import with_matchers

RATE = "[$__rate_interval]"
BY = "namespace, release"
WHO = "{{namespace}}/{{release}}"
PHASES = "pdproxy_phase_seconds_bucket"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds_bucket"
PROMPT_TOKENS = 'pdproxy_tokens_total{kind="prompt"}'
STALLS = "pdproxy_stream_stall_seconds"
DECODED, DECODE_NODES = 'vllm:generation_tokens_total{role="decode"}', 'up{job="vllm",role="decode"}'
TOKEN_GAPS = 'vllm:inter_token_latency_seconds_%s{role="decode"}'
LAG_WITHIN_5_S = 'pdproxy_kv_event_lag_seconds_bucket{le="5.0"}'
WIDTH, HEIGHT, COLUMNS = 8, 8, 24

Query = tuple[str, str]
"""PromQL, and what its line is called."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. ``right``: how many of its last queries have their scale on the right."""

    title: str
    unit: str
    queries: Sequence[Query]
    about: str = ""
    right: int = 0


def rate(metric: str, *by: str) -> str:
    """How much a counter grows each second, by release and further labels."""
    return f"sum by ({', '.join((BY, *by))}) (rate({metric}{RATE}))"


def quantiles(buckets: str, *by: str, name: str = "") -> list[Query]:
    """Median and 99th percentile of a histogram."""
    return [
        (f"histogram_quantile({part}, {rate(buckets, 'le', *by)})", f"{WHO}{name} {word}")
        for part, word in ((0.5, "p50"), (0.99, "p99"))
    ]


ROWS: Mapping[str, Sequence[Panel]] = {
    "Requests": (
        Panel("Requests by outcome", "reqps", [(rate("pdproxy_requests_total", "outcome"), f"{WHO} {{{{outcome}}}}")]),
        Panel("Time to the first token", "s", quantiles(FIRST_TOKEN)),
        Panel(
            "Where the time goes (p50)",
            "s",
            [(f"histogram_quantile(0.5, {rate(PHASES, 'le', 'phase')})", f"{WHO} {{{{phase}}}}")],
        ),
        Panel(
            "Running and waiting",
            "short",
            [
                (f"sum by ({BY}) (pdproxy_requests_active)", f"{WHO} running"),
                (f"sum by ({BY}) (pdproxy_requests_queued)", f"{WHO} waiting"),
            ],
        ),
        Panel(
            "Prompt tokens on their way (estimate)",
            "short",
            [(f"sum by ({BY}, model) (pdproxy_prefill_pending_tokens_estimate)", f"{WHO} {{{{model}}}}")],
        ),
        Panel("Turned away", "reqps", [(rate("pdproxy_rejected_total", "reason"), f"{WHO} {{{{reason}}}}")]),
    ),
    "Speed": (
        Panel(
            "Tokens per second: of a decode node, and of one stream",
            "short",
            [
                (
                    f"{rate(DECODED)} / count by ({BY}) ({DECODE_NODES} == 1)",
                    f"{WHO} a node",
                ),
                (f"{rate(TOKEN_GAPS % 'count')} / {rate(TOKEN_GAPS % 'sum')}", f"{WHO} a user's stream"),
            ],
            about="The more streams share a node, the more tokens it makes and the fewer each of them gets.",
            right=1,
        ),
        Panel(
            "Tokens of answers, by node",
            "short",
            [(rate("vllm:generation_tokens_total", "node"), f"{WHO} {{{{node}}}}")],
        ),
        Panel(
            "Prompt tokens computed, by node",
            "short",
            [(rate('pdproxy_connector_prompt_tokens_total{source="computed"}', "node"), f"{WHO} {{{{node}}}}")],
        ),
        Panel("Tokens, as nodes report them", "short", [(rate("pdproxy_tokens_total", "kind"), f"{WHO} {{{{kind}}}}")]),
        Panel("Time between tokens", "s", quantiles(TOKEN_GAPS % "bucket")),
    ),
    "Failures, and what became of them": (
        Panel(
            "Failed legs",
            "reqps",
            [(rate("pdproxy_leg_faults_total", "leg", "fault"), f"{WHO} {{{{leg}}}}: {{{{fault}}}}")],
        ),
        Panel("Steps taken", "reqps", [(rate("pdproxy_steps_total", "step"), f"{WHO} {{{{step}}}}")]),
        Panel(
            "Prompts computed twice, or on the decode node alone",
            "reqps",
            [
                (rate("pdproxy_recomputed_total"), f"{WHO} recomputed"),
                (rate("pdproxy_local_total", "reason"), f"{WHO} local: {{{{reason}}}}"),
            ],
        ),
        Panel(
            "Streams that had to move",
            "reqps",
            [
                (rate("pdproxy_migrations_total", "outcome"), f"{WHO} {{{{outcome}}}}"),
                (rate(f"{STALLS}_count", "move"), f"{WHO} went on: {{{{move}}}}"),
            ],
        ),
        Panel("Their stalls: time without bytes for the client", "s", quantiles(f"{STALLS}_bucket")),
    ),
    "Nodes": (
        Panel(
            "State",
            "short",
            [(f"max by ({BY}, node, state) (pdproxy_node_up == 1)", f"{WHO} {{{{node}}}}: {{{{state}}}}")],
        ),
        Panel("Legs in flight", "short", [(f"sum by ({BY}, node, role) (pdproxy_node_active)", f"{WHO} {{{{node}}}}")]),
        Panel(
            "Nodes that the last hour needed, and that serve",
            "short",
            [
                (f"sum by ({BY}, role) (pdproxy_nodes_needed)", f"{WHO} needed: {{{{role}}}}"),
                (
                    f'count by ({BY}, role) (max by ({BY}, node, role) (pdproxy_node_up{{state="up"}} == 1))',
                    f"{WHO} there: {{{{role}}}}",
                ),
            ],
            about="Needed in its busiest five minutes; a node is a whole one, so round up.",
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            [(f"max by ({BY}, node) (vllm:kv_cache_usage_perc)", f"{WHO} {{{{node}}}}")],
        ),
        Panel(
            "Preemptions",
            "short",
            [(rate("vllm:num_preemptions_total", "node"), f"{WHO} {{{{node}}}}")],
            about="Sequences that lost their blocks to others, and are computed again: the node has too many at once.",
        ),
        Panel(
            "Running and waiting in the engines",
            "short",
            [
                (f"sum by ({BY}, node) (vllm:num_requests_running)", f"{WHO} {{{{node}}}} running"),
                (f"sum by ({BY}, node) (vllm:num_requests_waiting)", f"{WHO} {{{{node}}}} waiting"),
            ],
        ),
    ),
    "What nodes have cached": (
        Panel(
            "Share of prompt tokens that hit: planned, and real",
            "percentunit",
            [
                (f"{rate('pdproxy_planned_hit_tokens_total')} / {rate(PROMPT_TOKENS)}", f"{WHO} planned"),
                (f"{rate('pdproxy_real_hit_tokens_total')} / {rate(PROMPT_TOKENS)}", f"{WHO} real"),
            ],
            about="Planned is 0 with a policy that does not ask what is cached.",
        ),
        Panel(
            "Cached prompt tokens, as planned and as they were",
            "short",
            [
                (rate("pdproxy_planned_hit_tokens_total", "role"), f"{WHO} planned, {{{{role}}}}"),
                (rate("pdproxy_real_hit_tokens_total", "role"), f"{WHO} real, {{{{role}}}}"),
            ],
        ),
        Panel("Plans by what is cached", "reqps", [(rate("pdproxy_plans_total", "reason"), f"{WHO} {{{{reason}}}}")]),
        Panel(
            "KV events: late batches, and ranks forgotten",
            "short",
            [
                (
                    f"{rate('pdproxy_kv_event_lag_seconds_count')} - {rate(LAG_WITHIN_5_S)}",
                    f"{WHO} later than 5 s",
                ),
                (rate("pdproxy_kv_places_forgotten_total", "reason"), f"{WHO} forgotten: {{{{reason}}}}"),
            ],
        ),
    ),
    "Connector": (
        Panel(
            "Prompt tokens by source",
            "short",
            [(rate("pdproxy_connector_prompt_tokens_total", "source"), f"{WHO} {{{{source}}}}")],
        ),
        Panel(
            "Blocks by group",
            "short",
            [(rate("pdproxy_connector_blocks_total", "group", "kind"), f"{WHO} {{{{group}}}} {{{{kind}}}}")],
        ),
        Panel(
            "Bytes by group",
            "Bps",
            [(rate("pdproxy_connector_bytes_total", "group", "kind"), f"{WHO} {{{{group}}}} {{{{kind}}}}")],
        ),
        Panel(
            "Reads by outcome",
            "reqps",
            [(rate("pdproxy_connector_reads_total", "outcome"), f"{WHO} {{{{outcome}}}}")],
        ),
        Panel(
            "Tickets not read, as the path is cut",
            "reqps",
            [(rate("pdproxy_connector_barred_tickets_total", "reason"), f"{WHO} {{{{reason}}}}")],
        ),
        Panel(
            "Refused tickets, junk",
            "reqps",
            [
                (rate("pdproxy_connector_refused_total", "reason"), f"{WHO} refused: {{{{reason}}}}"),
                (rate("pdproxy_connector_junk_total", "where"), f"{WHO} junk: {{{{where}}}}"),
            ],
        ),
        Panel(
            "How leases end",
            "reqps",
            [(rate("pdproxy_connector_leases_ended_total", "how"), f"{WHO} {{{{how}}}}")],
        ),
        Panel("From last byte to verdict", "s", quantiles("pdproxy_connector_verify_seconds_bucket")),
    ),
}

_RELEASE = {"namespace": '=~"$namespace"', "release": '=~"$release"'}
_NODE = {"node": '=~"$node"'}
_WITH_NODE = {"pdproxy_node_active", "pdproxy_node_up"}
"""Series of the proxy that are of a node."""


def matchers(metric: str) -> dict[str, str]:
    """The conditions by which the variables pick a metric's series, as far as they have such labels."""
    if metric == "up":
        return {**_RELEASE, **_NODE}
    if metric.startswith(("pdproxy_connector_", "vllm:")):
        return {**_RELEASE, **_NODE, "model_name": '=~"$model"'}
    if metric == "pdproxy_prefill_pending_tokens_estimate":
        return {**_RELEASE, "model": '=~"$model"'}
    return {**_RELEASE, **(_NODE if metric in _WITH_NODE else {})}


def dashboard() -> str:
    """The dashboard's JSON."""
    board = {
        "uid": "pdproxy",
        "title": "pdproxy",
        "tags": ["vllm"],
        "timezone": "browser",
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _variables() -> list[dict[str, Any]]:
    """The source of data, then namespace, release, model and node; each but the first may be several, or all."""
    of_release = 'namespace=~"$namespace",release=~"$release"'
    asked = {
        "namespace": "label_values(pdproxy_requests_active, namespace)",
        "release": 'label_values(pdproxy_requests_active{namespace=~"$namespace"}, release)',
        "model": f"label_values(vllm:num_requests_running{{{of_release}}}, model_name)",
        "node": f"label_values(pdproxy_node_active{{{of_release}}}, node)",
    }
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [source, *(_variable(name, query) for name, query in asked.items())]


def _variable(name: str, query: str) -> dict[str, Any]:
    """``.*`` for all: it takes series without the label, too."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 0
    for title, panels in ROWS.items():
        number += 1
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            line, column = divmod(index, COLUMNS // WIDTH)
            place = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": top + line * HEIGHT}
            yield _panel(number, panel, place)
        top += -(-len(panels) // (COLUMNS // WIDTH)) * HEIGHT


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    refs = [chr(ord("A") + index) for index in range(len(panel.queries))]
    right = {"id": "custom.axisPlacement", "value": "right"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0},
            "overrides": [
                {"matcher": {"id": "byFrameRefID", "options": ref}, "properties": [right]}
                for ref in refs[len(refs) - panel.right :]
            ],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": ref, "datasource": _SOURCE, "expr": with_matchers(query, matchers), "legendFormat": legend}
            for ref, (query, legend) in zip(refs, panel.queries, strict=True)
        ],
    }
