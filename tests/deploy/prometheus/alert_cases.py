"""For each alert: series that make it fire and then end, and series that come close and must not.

Values are in promtool's notation: `0+1x20` is 0, 1, 2, … 20; `3x5` is six times 3; `_x4` is nothing, four times, and
at `stale` the series is gone. They stand `Case.interval` apart. `promtool_tests` puts `namespace` and `release` in, and
sets releases side by side.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Series = Mapping[str, str]
"""Values by series."""
PROXY = 'up{job="pdproxy",instance="proxy"}'


@dataclass(frozen=True, slots=True)
class Case:
    """One alert.

    Attributes:
        ill: series that make it fire.
        well: series that must not; an alert that never fires would pass without ``ill``.
        fires: of each alert that fires, the labels that it has besides its name, severity, namespace and release.
        pending, firing, over: moments at which it does not fire yet, fires, and does not any more; "" for none.
        quiet: moments at which ``well`` does not fire.
        severity: of the rule.
        further: more series that must not fire, by what they are.
    """

    alert: str
    ill: Series
    well: Series
    pending: str
    firing: str
    over: str
    quiet: Sequence[str] = ("20m",)
    fires: Sequence[Mapping[str, str]] = ({},)
    severity: str = "ticket"
    interval: str = "30s"
    further: Mapping[str, Series] = field(default_factory=dict)


def _up(role: str, node: str, state: str) -> str:
    return f'pdproxy_node_up{{instance="proxy",node="{node}",role="{role}",state="{state}"}}'


ACTIVE = 'pdproxy_requests_active{instance="proxy"}'
OTHER_ACTIVE = 'pdproxy_requests_active{instance="other"}'
COMPLETIONS = 'pdproxy_requests_total{endpoint="/v1/completions",model="m",outcome="%s"}'
CHAT = 'endpoint="/v1/chat/completions",gen_ai_operation_name="chat",gen_ai_provider_name="vllm"'
FIRST_TOKEN = (
    f'gen_ai_server_time_to_first_token_seconds_%s{{{CHAT},gen_ai_request_model="m",gen_ai_request_stream="true"%s}}'
)
TOKENS = 'vllm:inter_token_latency_seconds_%s{engine="0",instance="d:8000",model_name="m",role="decode"%s}'
SILENCE = 'pdproxy_silence_probes_total{role="%s",outcome="%s"}'
FORGOTTEN = 'pdproxy_kv_places_forgotten_total{reason="%s"}'
HITS = 'pdproxy_%s_hit_tokens_total{role="%s"}'
NODE = 'engine="0",model_name="m",instance'
BARRED = f'pdproxy_connector_barred_peers{{{NODE}="%s"}}'
READS = f'pdproxy_connector_reads_total{{{NODE}="%s",outcome="%s"}}'
REFUSED = f'pdproxy_connector_refused_total{{{NODE}="%s",reason="%s"}}'
QUESTIONS = f'pdproxy_connector_side_channel_refused_total{{{NODE}="%s",reason="%s"}}'
KEY_FILES = f'pdproxy_connector_key_file_changes_total{{{NODE}="%s",outcome="%s"}}'
LEASES = f'pdproxy_connector_leases_ended_total{{{NODE}="p:8000",how="%s"}}'

CASES = (
    Case(
        "PdproxyDown",
        ill={PROXY: "1x10 0x20 1x20", 'up{job="pdproxy",instance="gone"}': "1x10 stale _x19 1x20"},
        well={PROXY: "1x10 0x8 1x42", 'up{job="pdproxy",instance="other"}': "1x50"},
        pending="5m30s",
        firing="8m",
        over="16m",
        quiet=("8m",),
        severity="page",
        further={"a restart within a minute": {PROXY: "1x10 0x1 1x40"}},
    ),
    Case(
        "PdproxyReplicaDown",
        ill={PROXY: "1x60", 'up{job="pdproxy",instance="other"}': "1x10 0x20 1x30"},
        well={PROXY: "1x60", 'up{job="pdproxy",instance="other"}': "1x10 0x8 1x42"},
        pending="9m",
        firing="14m",
        over="16m",
        fires=[{"job": "pdproxy", "instance": "other"}],
    ),
    Case(
        "PdproxyNodeNotScraped",
        ill={'up{job="vllm",instance="d:8000",node="decode-0",role="decode"}': "1x10 0x50 1x10"},
        well={'up{job="vllm",instance="d:8000",node="decode-0",role="decode"}': "1x10 0x20 1x40"},
        pending="18m",
        firing="25m",
        over="31m",
        fires=[{"job": "vllm", "instance": "d:8000", "node": "decode-0", "role": "decode"}],
    ),
    Case(
        "PdproxyNoDecodeNode",
        # One of two proxies does not see the node that the other sees.
        ill={
            _up("decode", "decode-0", "up"): "1x5 0x15 1x30",
            _up("decode", "decode-0", "down"): "0x5 1x15 0x30",
            _up("prefill", "prefill-0", "up"): "1x50",
            ACTIVE: "3x50",
            'pdproxy_node_up{instance="other",node="decode-0",role="decode",state="up"}': "1x50",
            'pdproxy_node_up{instance="other",node="prefill-0",role="prefill",state="up"}': "1x50",
            OTHER_ACTIVE: "3x50",
        },
        well={
            _up("decode", "decode-0", "up"): "0x50",
            _up("decode", "decode-1", "probing"): "1x50",
            _up("prefill", "prefill-0", "up"): "1x50",
            ACTIVE: "3x50",
        },
        pending="1m",
        firing="2m",
        over="5m",
        quiet=("1m30s", "5m"),
        severity="page",
        interval="10s",
    ),
    Case(
        "PdproxyNoDecodeNode",
        # There never was one, or the last one has left, and its series with it.
        ill={_up("prefill", "prefill-0", "up"): "1x50", ACTIVE: "0x50", _up("decode", "decode-0", "up"): "_x20 1x20"},
        well={_up("prefill", "prefill-0", "up"): "1x50", _up("decode", "decode-0", "up"): "1x50", ACTIVE: "0x50"},
        pending="20s",
        firing="2m",
        over="5m",
        quiet=("5m",),
        severity="page",
        interval="10s",
    ),
    Case(
        "PdproxyNoPrefillNode",
        ill={
            _up("decode", "decode-0", "up"): "1x50",
            _up("prefill", "prefill-0", "up"): "0x20 1x30",
            _up("prefill", "prefill-0", "draining"): "1x20 0x30",
            ACTIVE: "3x50",
        },
        well={
            _up("decode", "decode-0", "up"): "1x50",
            _up("prefill", "prefill-0", "probing"): "1x50",
            ACTIVE: "3x50",
        },
        pending="30s",
        firing="2m",
        over="5m",
        quiet=("1m30s", "5m"),
        severity="page",
        interval="10s",
    ),
    Case(
        "PdproxyNodeDown",
        ill={
            _up("decode", "decode-0", "up"): "0x40 1x20",
            _up("decode", "decode-0", "down"): "1x40 0x20",
            _up("decode", "decode-1", "up"): "1x60",
            _up("prefill", "prefill-0", "up"): "1x60",
            _up("prefill", "prefill-1", "refused"): "1x40 0x20",
        },
        well={
            _up("decode", "decode-0", "up"): "1x5 0x5 1x30",
            _up("decode", "decode-0", "down"): "0x5 1x5 0x30",
            _up("decode", "decode-1", "draining"): "1x40",
            _up("decode", "decode-2", "up"): "1x40",
            _up("prefill", "prefill-0", "up"): "1x40",
        },
        pending="1m30s",
        firing="3m",
        over="8m",
        quiet=("2m", "4m"),
        fires=[
            {"node": "decode-0", "role": "decode", "state": "down"},
            {"node": "prefill-1", "role": "prefill", "state": "refused"},
        ],
        interval="10s",
    ),
    Case(
        "PdproxyNodeNeverJoins",
        ill={_up("prefill", "prefill-1", "joining"): "1x40 0x10"},
        well={_up("prefill", "prefill-1", "joining"): "1x20 0x20"},
        pending="29m",
        firing="31m",
        over="45m",
        quiet=("40m",),
        fires=[{"node": "prefill-1", "role": "prefill", "state": "joining"}],
        interval="1m",
    ),
    Case(
        "PdproxyFailing",
        ill={COMPLETIONS % "ok": "0+98x100", COMPLETIONS % "failed": "0+2x40 80x60"},
        well={
            COMPLETIONS % "ok": "0+995x100",
            COMPLETIONS % "client_error": "0+300x100",
            COMPLETIONS % "failed": "0+5x100",
        },
        pending="3m",
        firing="15m",
        over="40m",
        severity="page",
        further={"a proxy without requests": {COMPLETIONS % "ok": "0x60", COMPLETIONS % "failed": "0x60"}},
    ),
    Case(
        "PdproxySlowFirstToken",
        ill={
            FIRST_TOKEN % ("bucket", ',le="10.0"'): "0+80x40 3210+100x80",
            FIRST_TOKEN % ("count", ""): "0+100x120",
        },
        well={
            FIRST_TOKEN % ("bucket", ',le="10.0"'): "0+95x120",
            FIRST_TOKEN % ("count", ""): "0+100x120",
        },
        pending="5m",
        firing="18m",
        over="50m",
        further={
            "no requests": {FIRST_TOKEN % ("bucket", ',le="10.0"'): "7x60", FIRST_TOKEN % ("count", ""): "9x60"},
        },
    ),
    Case(
        "PdproxySlowTokens",
        ill={TOKENS % ("bucket", ',le="0.2"'): "0+80x40 3210+100x80", TOKENS % ("count", ""): "0+100x120"},
        well={TOKENS % ("bucket", ',le="0.2"'): "0+95x120", TOKENS % ("count", ""): "0+100x120"},
        pending="5m",
        firing="18m",
        over="50m",
    ),
    Case(
        "PdproxyRejecting",
        ill={'pdproxy_rejected_total{reason="queue_full"}': "0+1x40 40x60"},
        # A burst of two minutes is what the queue is for.
        well={'pdproxy_rejected_total{reason="queue_full"}': "0+50x4 200x60"},
        pending="5m",
        firing="15m",
        over="40m",
        quiet=("5m", "20m"),
    ),
    Case(
        "PdproxyHandOversFail",
        ill={"pdproxy_hand_overs_failing": "0x4 1x40 0x40"},
        # A proxy that restarts while its nodes do.
        well={"pdproxy_hand_overs_failing": "1x1 0x80"},
        pending="2m",
        firing="6m",
        over="44m",
        severity="page",
    ),
    Case(
        "PdproxyRecomputing",
        ill={COMPLETIONS % "ok": "0+100x120", "pdproxy_recomputed_total": "0+6x50 300x70"},
        well={COMPLETIONS % "ok": "0+100x60", "pdproxy_recomputed_total": "0+4x60"},
        pending="3m",
        firing="20m",
        over="45m",
    ),
    Case(
        "PdproxyReleasesFail",
        ill={
            'pdproxy_releases_total{outcome="done"}': "0+9x120",
            'pdproxy_releases_total{outcome="failed"}': "0+1x50 50x70",
        },
        well={
            'pdproxy_releases_total{outcome="done"}': "0+9x60",
            'pdproxy_releases_total{outcome="failed"}': "7x60",
        },
        pending="3m",
        firing="20m",
        over="45m",
    ),
    Case(
        "PdproxyKnownAnswerFailed",
        ill={
            'pdproxy_known_answer_tests_total{result="failed"}': "0x10 1x80",
            'pdproxy_known_answer_tests_total{result="passed"}': "0+1x90",
        },
        well={
            'pdproxy_known_answer_tests_total{result="failed"}': "1x90",
            'pdproxy_known_answer_tests_total{result="passed"}': "0+1x90",
        },
        pending="4m",
        firing="7m",
        over="25m",
    ),
    Case(
        "PdproxyPairBarred",
        # Without the series the two may exchange tickets: it comes and goes.
        ill={'pdproxy_pair_barred{prefill="*",decode="decode-1"}': "_x4 1x20 stale"},
        # One failure that the next test, half a minute later, took back.
        well={'pdproxy_pair_barred{prefill="prefill-0",decode="decode-1"}': "1x2 stale"},
        pending="3m",
        firing="8m",
        over="19m",
        fires=[{"prefill": "*", "decode": "decode-1"}],
    ),
    Case(
        "PdproxyTaskFails",
        # Once is enough: the proxy shows the series from its start, at 0.
        ill={
            'pdproxy_task_failures_total{task="health"}': "0x10 1x50",
            'pdproxy_task_failures_total{task="files"}': "0x60",
        },
        well={'pdproxy_task_failures_total{task="health"}': "1x60"},
        pending="4m",
        firing="6m",
        over="20m",
        fires=[{"task": "health"}],
    ),
    Case(
        "PdproxyNodesFreeze",
        ill={
            SILENCE % ("decode", "given_up"): "0x10 1x10 2x10 3x100",
            SILENCE % ("decode", "answered"): "0+30x130",
            SILENCE % ("prefill", "too_many"): "0x130",
        },
        well={SILENCE % ("decode", "given_up"): "0x10 1x60", SILENCE % ("decode", "answered"): "0+30x70"},
        pending="14m",
        firing="20m",
        over="55m",
        fires=[{"role": "decode", "outcome": "given_up"}],
    ),
    Case(
        "PdproxyFileUnusable",
        ill={
            'pdproxy_file_unusable{setting="keys.file"}': "0x2 1x20 0x20",
            'pdproxy_file_unusable{setting="upstream.ca_file"}': "0x42",
        },
        well={'pdproxy_file_unusable{setting="keys.file"}': "0x2 1x2 0x60"},
        pending="2m",
        firing="6m",
        over="15m",
        fires=[{"setting": "keys.file"}],
    ),
    Case(
        "PdproxyCacheEventsLost",
        ill={FORGOTTEN % "gap": "0+1x60 60x40", FORGOTTEN % "restart": "0+1x100"},
        # A gap that a replay did not mend, once; nodes that are restarted, or leave.
        well={FORGOTTEN % "gap": "0x10 1x50", FORGOTTEN % "restart": "0+1x60", FORGOTTEN % "left": "0+1x60"},
        pending="3m",
        firing="20m",
        over="45m",
        fires=[{"reason": "gap"}],
    ),
    Case(
        "PdproxyCacheEventsLate",
        ill={
            'pdproxy_kv_event_lag_seconds_bucket{le="5.0"}': "0+80x60 4810+100x60",
            "pdproxy_kv_event_lag_seconds_count": "0+100x120",
        },
        well={
            'pdproxy_kv_event_lag_seconds_bucket{le="5.0"}': "0+95x60",
            "pdproxy_kv_event_lag_seconds_count": "0+100x60",
        },
        pending="3m",
        firing="20m",
        over="55m",
    ),
    Case(
        "PdproxyHitsMispredicted",
        # Decode nodes have less than was planned; of prefill nodes the plans are nearly right.
        ill={
            HITS % ("planned", "decode"): "0+1000x180",
            HITS % ("real", "decode"): "0+700x80 56000+1000x100",
            HITS % ("planned", "prefill"): "0+1000x180",
            HITS % ("real", "prefill"): "0+900x180",
        },
        # A little more than was planned; and decode nodes of which nothing was planned.
        well={
            HITS % ("planned", "prefill"): "0+1000x80",
            HITS % ("real", "prefill"): "0+1150x80",
            HITS % ("planned", "decode"): "0x80",
            HITS % ("real", "decode"): "0+10x80",
        },
        pending="10m",
        firing="30m",
        over="80m",
        quiet=("35m",),
        fires=[{"role": "decode"}],
    ),
    Case(
        "PdproxyTicketsRefused",
        ill={
            REFUSED % ("a:8000", "digest"): "0+1x60 60x40",
            REFUSED % ("b:8000", "digest"): "0+1x60 60x40",
            REFUSED % ("b:8000", "unknown_version"): "3x100",
        },
        well={REFUSED % ("a:8000", "digest"): "3x60"},
        pending="3m",
        firing="20m",
        over="45m",
        fires=[{"reason": "digest"}],
    ),
    Case(
        "PdproxyReadsFail",
        ill={
            READS % ("a:8000", "verified"): "0+95x120",
            READS % ("a:8000", "not_held"): "0+5x60 300x60",
            READS % ("b:8000", "verified"): "0+95x120",
            READS % ("b:8000", "not_held"): "0x120",
        },
        # One in a hundred.
        well={
            READS % ("a:8000", "verified"): "0+99x120",
            READS % ("a:8000", "no_progress"): "0+1x120",
        },
        pending="5m",
        firing="20m",
        over="45m",
        fires=[{"instance": "a:8000"}],
    ),
    Case(
        "PdproxyPathCut",
        ill={BARRED % "a:8000": "0x10 1x120 0x40", BARRED % "b:8000": "0x160"},
        # A cut of a minute, and the probes that end it.
        well={BARRED % "a:8000": "0x20 1x4 0x140"},
        pending="6m",
        firing="20m",
        over="70m",
        fires=[{"instance": "a:8000"}],
    ),
    Case(
        "PdproxyQuestionsRefused",
        ill={QUESTIONS % ("p:8000", "unsigned"): "0+1x60 60x40", QUESTIONS % ("p:8000", "replayed"): "3x100"},
        well={QUESTIONS % ("p:8000", "unsigned"): "3x100"},
        pending="5m",
        firing="20m",
        over="45m",
        fires=[{"instance": "p:8000", "reason": "unsigned"}],
    ),
    Case(
        "PdproxyKeyFileRefused",
        ill={KEY_FILES % ("a:8000", "refused"): "0+6x60 360x40", KEY_FILES % ("b:8000", "taken"): "0+1x100"},
        well={KEY_FILES % ("a:8000", "refused"): "3x60"},
        pending="1m",
        firing="20m",
        over="40m",
        fires=[{"instance": "a:8000"}],
    ),
    Case(
        "PdproxyNodesIncompatible",
        ill={READS % ("a:8000", "incompatible"): "0+1x30 30x30", READS % ("b:8000", "incompatible"): "0x60"},
        # Reads that end otherwise, and one that was wrong once.
        well={READS % ("a:8000", "verified"): "0+300x60", READS % ("a:8000", "incompatible"): "0x2 1x58"},
        pending="5m",
        firing="20m",
        over="50m",
        quiet=("25m",),
        fires=[{"instance": "a:8000"}],
        interval="1m",
    ),
    Case(
        "PdproxyLeasesExpire",
        ill={LEASES % "read": "0+97x120", LEASES % "expired": "0+3x60 180x60"},
        well={LEASES % "read": "0+99x60", LEASES % "expired": "0+1x60"},
        pending="3m",
        firing="20m",
        over="50m",
    ),
)
"""`PdproxyNotScraped` is not here: it fires where a series is missing, see `test_alerts.py`."""


def promtool_tests() -> list[dict[str, Any]]:
    """All cases, as releases that one Prometheus scrapes: each alert must fire for its own releases, and for no other.

    Each case is three releases and more: two of one name, in two namespaces, which are ill at the same time; one that
    comes close; and one for each of its ``further``. One test for each `Case.interval`: a test has one interval.
    """
    numbered = list(enumerate(CASES))
    return [
        {
            "interval": interval,
            "input_series": [row for n, case in numbered if case.interval == interval for row in _rows(n, case)],
            "promql_expr_test": [ask for n, case in numbered if case.interval == interval for ask in _asked(n, case)],
        }
        for interval in sorted({case.interval for case in CASES})
    ]


NAMESPACES = ("llm", "staging")


def _rows(number: int, case: Case) -> list[dict[str, str]]:
    ill = [({"namespace": namespace, "release": f"ill-{number}"}, case.ill) for namespace in NAMESPACES]
    well = [({"namespace": "llm", "release": f"well-{number}"}, case.well)]
    further = [({"namespace": "llm", "release": f"well-{number}: {what}"}, more) for what, more in case.further.items()]
    return [row for release, series in (*ill, *well, *further) for row in labelled(series, release)]


def labelled(series: Series, release: Mapping[str, str]) -> list[dict[str, str]]:
    """Rows of a promtool test: of a release, which has a proxy that answers Prometheus where nothing is said of it."""
    scraped = {} if any('job="pdproxy"' in each for each in series) else {PROXY: "1x400"}
    return [{"series": with_labels(each, release), "values": values} for each, values in {**series, **scraped}.items()]


def _asked(number: int, case: Case) -> list[dict[str, Any]]:
    name = {"alertname": case.alert, "severity": case.severity, "release": f"ill-{number}"}
    alerts = [{**name, "namespace": namespace, **own} for namespace in NAMESPACES for own in case.fires]
    ill = [firing(f"ill-{number}", case.pending), firing(f"ill-{number}", case.firing, alerts)]
    quiet = [firing(f"well-{number}.*", at) for at in case.quiet]
    return [*ill, firing(f"ill-{number}", case.over), *quiet]


def firing(release: str, at: str, alerts: Iterable[Mapping[str, str]] = ()) -> dict[str, Any]:
    """Alerts that promtool should find firing for a release, by a regular expression of its name."""
    samples = [{"labels": series_of("ALERTS", {"alertstate": "firing", **labels}), "value": 1} for labels in alerts]
    return {"eval_time": at, "expr": f'ALERTS{{alertstate="firing",release=~"{release}"}}', "exp_samples": samples}


def with_labels(series: str, more: Mapping[str, str]) -> str:
    """The series with more labels."""
    name, labels = re.fullmatch(r"([\w:]+)(?:\{(.*)\})?", series).groups()  # type: ignore[union-attr]
    return series_of(name, {**dict(re.findall(r'(\w+)="([^"]*)"', labels or "")), **more})


def series_of(name: str, labels: Mapping[str, str]) -> str:
    """A series, as Prometheus writes it."""
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
