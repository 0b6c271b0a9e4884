"""The settings, one frozen dataclass per section. Times are seconds, sizes are bytes."""

import dataclasses
from pathlib import Path
from typing import Annotated

from pdproxy.settings.choices import (
    Credential,
    Finding,
    FirstHandOver,
    LogFormat,
    LogLevel,
    NodeRole,
    OnPrefillFailure,
    OtelExport,
    Scheme,
)
from pdproxy.settings.meaning import Meaning


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where clients and operators connect."""

    host: Annotated[str, Meaning("Address that clients connect to; 0.0.0.0 for all of the machine's.")] = "127.0.0.1"
    port: Annotated[int, Meaning("Port that clients connect to; 0 picks a free one.", least=0, most=65535)] = 8080
    admin_host: Annotated[str, Meaning("Address of the operators' port.")] = "127.0.0.1"
    admin_port: Annotated[
        int, Meaning("Port for health, metrics and node administration; 0 picks a free one.", least=0, most=65535)
    ] = 8081
    admin_token_file: Annotated[
        Path | None, Meaning("File with the token that changing nodes asks for; without it none is asked for.")
    ] = None
    tls_certificate: Annotated[Path | None, Meaning("PEM certificate chain for the clients' port.")] = None
    tls_key: Annotated[Path | None, Meaning("PEM private key that belongs to the certificate.")] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """One vLLM node, known from the start."""

    url: Annotated[str, Meaning("Base address, such as http://10.0.0.1:8000.")]
    role: Annotated[NodeRole, Meaning("What the node is asked to do.")]
    model: Annotated[str, Meaning("Model as clients name it; empty asks the node.")] = ""
    aliases: Annotated[tuple[str, ...], Meaning("Further names served here, such as LoRA adapters.")] = ()
    weight: Annotated[float, Meaning("Relative share of requests.", above=0)] = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """Where nodes come from, besides `nodes`. They join through the preflight and leave by draining."""

    prefill: Annotated[Finding, Meaning("How prefill nodes are found.")] = Finding.STATIC
    decode: Annotated[Finding, Meaning("How decode nodes are found.")] = Finding.STATIC
    scheme: Annotated[Scheme, Meaning("How nodes found by `dns` and `kubernetes` are spoken to.")] = Scheme.HTTP
    file: Annotated[Path | None, Meaning("For `file`: YAML list of nodes, each as in `nodes`, of both roles.")] = None
    file_interval: Annotated[float, Meaning("Between two looks into the file.", "seconds", above=0)] = 5.0
    prefill_name: Annotated[str, Meaning("For `dns`: the name of the prefill nodes.")] = ""
    decode_name: Annotated[str, Meaning("For `dns`: the name of the decode nodes.")] = ""
    dns_port: Annotated[
        int, Meaning("For `dns`: the nodes' port; 0 looks SRV records up, which say it.", least=0, most=65535)
    ] = 0
    dns_interval: Annotated[float, Meaning("Between two look-ups of a name.", "seconds", above=0)] = 10.0
    prefill_selector: Annotated[
        str, Meaning("For `kubernetes`: labels such as kubernetes.io/service-name=prefill, of EndpointSlices.")
    ] = ""
    decode_selector: Annotated[str, Meaning("For `kubernetes`: the same for the decode nodes.")] = ""
    namespace: Annotated[str, Meaning("For `kubernetes`: where the slices are; empty is the pod's own.")] = ""
    port_name: Annotated[str, Meaning("For `kubernetes`: the name of the nodes' port; empty is the first one.")] = ""
    api: Annotated[
        str, Meaning("For `kubernetes`: address of the API server; empty takes the one the pod is told.")
    ] = ""

    @property
    def wanted(self) -> bool:
        """Whether any nodes are to be found."""
        return {self.prefill, self.decode} != {Finding.STATIC}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """How nodes are spoken to."""

    credential: Annotated[Credential, Meaning("What a node gets as its Authorization header.")] = Credential.PASS
    credential_file: Annotated[
        Path | None, Meaning("File with the credential that `replace` sends and that our own health checks carry.")
    ] = None
    ca_file: Annotated[Path | None, Meaning("PEM authorities for https nodes; empty uses the system's.")] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each phase of a request may take."""

    connect: Annotated[float, Meaning("Until a connection to a node stands.", "seconds", above=0)] = 5.0
    prefill_headers: Annotated[float, Meaning("Until a prefill node begins its answer.", "seconds", above=0)] = 600.0
    decode_headers: Annotated[float, Meaning("Until a decode node begins its answer.", "seconds", above=0)] = 600.0
    stall: Annotated[
        float,
        Meaning(
            "Between two pieces of an answer; also for a client to send its body, and to take what waits.",
            "seconds",
            above=0,
        ),
    ] = 120.0
    request: Annotated[float, Meaning("For a request as a whole.", "seconds", above=0)] = 3600.0
    drain: Annotated[float, Meaning("For running requests at shutdown or node drain.", "seconds", least=0)] = 30.0
    release: Annotated[float, Meaning("For telling a prefill node to free blocks.", "seconds", above=0)] = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may ask for."""

    body_bytes: Annotated[int, Meaning("Largest request body.", "bytes", least=1024)] = 64 * 1024 * 1024
    held_bytes: Annotated[
        int, Meaning("Request bodies held at once, all together; what comes beyond gets 429.", "bytes", least=1024)
    ] = 256 * 1024 * 1024
    header_bytes: Annotated[int, Meaning("Largest request head.", "bytes", least=1024)] = 64 * 1024
    concurrency: Annotated[int, Meaning("Requests that run at once.", least=1)] = 1024
    queue: Annotated[int, Meaning("Requests that may wait for a place; more get 429.", least=0)] = 4096
    queue_seconds: Annotated[float, Meaning("Longest wait for a place, then 429.", "seconds", least=0)] = 30.0
    key_concurrency: Annotated[int, Meaning("Requests of one API key that run at once; 0 is no limit.", least=0)] = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is decided for a request, and what follows a failure."""

    on_prefill_failure: Annotated[OnPrefillFailure, Meaning("What follows a failed prefill leg.")] = (
        OnPrefillFailure.RETRY
    )
    retries: Annotated[int, Meaning("Further nodes tried for one leg.", least=0, most=10)] = 2
    migrations: Annotated[
        int, Meaning("Times that one stream may move to another node when its own dies; 0 is never.", least=0, most=100)
    ] = 3
    ticket_life: Annotated[
        float,
        Meaning(
            "How long a ticket is tried again elsewhere: no longer than the nodes' kv_lease_duration; 0 is never.",
            "seconds",
            least=0,
            most=3600,
        ),
    ] = 30.0
    local_below_tokens: Annotated[
        int, Meaning("Prompts surely shorter are computed on the decode node; 0 is never.", "tokens", least=0)
    ] = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How nodes are watched."""

    interval: Annotated[float, Meaning("Between two health checks of a node.", "seconds", above=0)] = 5.0
    timeout: Annotated[float, Meaning("For one health check.", "seconds", above=0)] = 5.0
    failures: Annotated[int, Meaning("Failures in a row that open a node's circuit.", least=1)] = 3
    cool_down: Annotated[float, Meaning("Until a node with an open circuit is probed.", "seconds", above=0)] = 10.0
    slow_start: Annotated[
        float, Meaning("Over which a node that came back gets its full share.", "seconds", least=0)
    ] = 30.0
    first_hand_over: Annotated[
        FirstHandOver,
        Meaning(
            "What nodes hand over before they serve: `known_answer` compares the answer with what the decode node says"
            " alone, and keeps pairs apart that fail; `warm_up` only makes the handshake."
        ),
    ] = FirstHandOver.KNOWN_ANSWER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Who may ask."""

    file: Annotated[Path | None, Meaning("File with API keys; without it anyone may ask.")] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is logged, on standard error."""

    level: Annotated[LogLevel, Meaning("How much is logged.")] = LogLevel.INFO
    format: Annotated[LogFormat, Meaning("How a line looks.")] = LogFormat.TEXT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Otel:
    """Tracing; needs the extra `pdproxy[otel]`, which the proxy's image has."""

    export: Annotated[OtelExport, Meaning("Where spans go.")] = OtelExport.OFF
    endpoint: Annotated[str, Meaning("OTLP/HTTP address of the collector.")] = "http://127.0.0.1:4318/v1/traces"
    service: Annotated[str, Meaning("Service name that the spans carry.")] = "pdproxy"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything an operator decides, read once at start."""

    listen: Listen = Listen()
    nodes: tuple[NodeEntry, ...] = ()
    discovery: Discovery = Discovery()
    upstream: Upstream = Upstream()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    policy: Policy = Policy()
    health: Health = Health()
    keys: Keys = Keys()
    log: Log = Log()
    otel: Otel = Otel()
