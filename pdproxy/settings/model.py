"""Every setting, with its description: one model for each section, and `Settings` over all.

Times are seconds, sizes are bytes. A model that exists is valid: each field by its type, and those that must go
together by the validators here.

After a change here, `make generate` writes docs/settings.md, its JSON schema, and the schema of the chart's values, in
which these settings are `proxy.settings`. `app.build` hands each value to the part that uses it.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from pdproxy.settings import types


class Section(BaseModel):
    """The configuration that all sections share. The text below a field describes it: see `catalog`."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, allow_inf_nan=False)


class Listen(Section):
    """Where clients and operators connect."""

    host: types.Host = "127.0.0.1"
    """Address that clients connect to; 0.0.0.0 for all of the machine's."""
    port: types.Port = 8080
    """Port that clients connect to; 0 picks a free one."""
    admin_host: types.Host = "127.0.0.1"
    """Address of the operators' port; at any but a loopback address, changing nodes needs `admin_token_file`."""
    admin_port: types.Port = 8081
    """Port for health, metrics and node administration; 0 picks a free one."""
    admin_token_file: types.OptionalFile = None
    """File with the token that `/nodes`, `/ui` and `/debug/plan` ask for; without it none is asked for."""
    admin_names: types.HostNames = ()
    """Names by which operators reach their port, besides addresses and localhost; other names are refused."""
    metrics: types.MetricsPort = types.MetricsPort.OPERATORS
    """Which ports serve `/metrics`; at the clients' port it asks for an API key, where there are keys."""
    cors_origins: types.Texts = ()
    """Origins of web pages that may ask from a browser, such as https://chat.example; `*` is every page."""
    keep_alive: types.Seconds = Field(default=620.0, gt=0, le=3600)
    """How long a client's idle connection stays open: longer than any load balancer keeps it (Google 600 s)."""
    sse_keep_alive: types.Seconds = Field(default=0.0, ge=0, le=600)
    """Between comments in a stream without an event yet, or that moves, lest load balancers cut it; 0 is none."""
    root_path: types.PathPrefix = ""
    """Path prefix under which another proxy serves this one, such as /llm; requests may come with it or without."""
    reuse_port: types.ReusePort = types.ReusePort.OFF
    """Whether several proxies of one user share `port` (SO_REUSEPORT, Linux), each with its own `admin_port`."""
    tls_certificate: types.OptionalFile = None
    """PEM certificate chain for the clients' port."""
    tls_key: types.OptionalFile = None
    """PEM private key that belongs to the certificate."""

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.port and self.port == self.admin_port:
            raise ValueError(
                f"listen.port and listen.admin_port are both {self.port}: clients and operators need a port each."
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("listen.tls_certificate and listen.tls_key go together: set both, or neither.")
        if self.reuse_port is types.ReusePort.ON:
            self._check_shared_port()
        return self

    def _check_shared_port(self) -> None:
        if not self.port:
            raise ValueError(
                "listen.reuse_port is on and listen.port is 0: each proxy would pick a port of its own. Name the port"
                " that they share."
            )
        if self.metrics is types.MetricsPort.BOTH:
            raise ValueError(
                "listen.metrics is both and listen.reuse_port is on: a scrape of the clients' port would reach one of"
                " the proxies by chance. Leave listen.metrics at operators."
            )


def _short_form(schema: dict[str, Any]) -> None:
    """In a file, `role` may stand for `roles`."""
    schema["properties"]["role"] = {"type": "string", "enum": [*types.Role], "description": "Short for one of `roles`."}


class ConfiguredNode(Section):
    """One vLLM node, known from the start."""

    model_config = ConfigDict(json_schema_extra=_short_form)

    url: types.NodeUrl
    """Base address, such as http://10.0.0.1:8000."""
    roles: types.NodeRoles = tuple(types.Role)
    """The node's roles; `role: decode` is short for `roles: [decode]`."""
    model: types.Text = ""
    """Model as clients name it; empty asks the node."""
    aliases: types.Texts = ()
    """Further names served here, such as LoRA adapters."""
    weight: types.Number = Field(default=1.0, gt=0)
    """Relative share of requests."""

    _roles = model_validator(mode="before")(types.with_roles)


class Discovery(Section):
    """Where nodes come from, besides `nodes`. They join through the preflight and leave by draining."""

    prefill: types.DiscoveryKind = types.DiscoveryKind.STATIC
    """How prefill nodes are found."""
    decode: types.DiscoveryKind = types.DiscoveryKind.STATIC
    """How decode nodes are found."""
    node: types.DiscoveryKind = types.DiscoveryKind.STATIC
    """How nodes of both roles are found; with `file`, nodes of whatever roles the file says."""
    scheme: types.Scheme = types.Scheme.HTTP
    """How nodes found by `dns` and `kubernetes` are spoken to."""
    file: types.OptionalFile = None
    """For `file`: YAML list of nodes, each as in `nodes`."""
    file_interval: types.Seconds = Field(default=5.0, gt=0)
    """Between two looks into the file."""
    prefill_name: types.Text = ""
    """For `dns`: the name of the prefill nodes."""
    decode_name: types.Text = ""
    """For `dns`: the name of the decode nodes."""
    node_name: types.Text = ""
    """For `dns`: the name of the nodes of both roles."""
    dns_port: types.Port = 0
    """For `dns`: the nodes' port; 0 takes it from SRV records."""
    dns_interval: types.Seconds = Field(default=10.0, gt=0)
    """Between two look-ups of a name."""
    prefill_selector: types.Text = ""
    """For `kubernetes`: labels such as kubernetes.io/service-name=prefill, of EndpointSlices."""
    decode_selector: types.Text = ""
    """For `kubernetes`: the same for the decode nodes."""
    node_selector: types.Text = ""
    """For `kubernetes`: the same for the nodes of both roles."""
    namespace: types.Text = ""
    """For `kubernetes`: where the slices are; empty is the pod's own."""
    port_name: types.Text = ""
    """For `kubernetes`: the name of the nodes' port; empty is the first one."""
    api: types.OptionalAddress = ""
    """For `kubernetes`: address of the API server; empty takes the one of the pod's environment."""

    @property
    def wanted(self) -> bool:
        """Whether any nodes are to be found."""
        return {self.prefill, self.decode, self.node} != {types.DiscoveryKind.STATIC}

    @model_validator(mode="after")
    def _what_is_looked_for(self) -> Self:
        for nodes, kind in (("prefill", self.prefill), ("decode", self.decode), ("node", self.node)):
            needs = {
                types.DiscoveryKind.FILE: "file",
                types.DiscoveryKind.DNS: f"{nodes}_name",
                types.DiscoveryKind.KUBERNETES: f"{nodes}_selector",
            }
            if kind in needs and not getattr(self, needs[kind]):
                raise ValueError(f"discovery.{nodes} is {kind}: that needs discovery.{needs[kind]}.")
        return self


class Upstream(Section):
    """How nodes are spoken to."""

    credential: types.Credential = types.Credential.PASS
    """The Authorization header that a node gets."""
    credential_file: types.OptionalFile = None
    """File with the credential that `replace` sends and that our own health checks carry."""
    ca_file: types.OptionalFile = None
    """PEM authorities for https nodes; empty uses the system's."""
    server_name: str = ""
    """Name that the certificates of https nodes must hold; empty is the host in each node's address."""

    @model_validator(mode="after")
    def _credential(self) -> Self:
        if self.credential is types.Credential.REPLACE and self.credential_file is None:
            raise ValueError("upstream.credential is replace: name the file in upstream.credential_file.")
        return self


class Deadlines(Section):
    """How long each phase of a request may take."""

    connect: types.Seconds = Field(default=5.0, gt=0)
    """Until a connection to a node stands."""
    prefill_headers: types.Seconds = Field(default=600.0, gt=0)
    """Until a prefill node begins its answer."""
    decode_headers: types.Seconds = Field(default=600.0, gt=0)
    """Until a decode node begins its answer."""
    stall: types.Seconds = Field(default=120.0, gt=0)
    """Between two pieces of an answer; also for a client to send its body, and to take what waits."""
    request: types.Seconds = Field(default=3600.0, gt=0)
    """For a request as a whole."""
    drain: types.Seconds = Field(default=30.0, ge=0)
    """For running requests on a node that drains; then they move to another one."""
    shutdown: types.Seconds = Field(default=30.0, ge=0)
    """For running requests when the proxy ends; what outlives it gets an error event. SIGKILL must come later."""
    release: types.Seconds = Field(default=5.0, gt=0)
    """For telling a prefill node to free blocks."""


class Limits(Section):
    """Limits of what a client may ask for."""

    body_bytes: types.Bytes = Field(default=64 * 1024 * 1024, ge=1024)
    """Largest request body."""
    held_bytes: types.Bytes = Field(default=256 * 1024 * 1024, ge=1024)
    """Request bodies held at once; more get 429. Held till the answer begins, or a stream that may move ends."""
    header_bytes: types.Bytes = Field(default=64 * 1024, ge=1024)
    """Largest request head."""
    concurrency: types.Count = Field(default=1024, ge=1)
    """Requests that run at once, each prompt of a list by itself; the next ones wait."""
    decode_fill: types.Number = Field(default=1.0, ge=0)
    """Part of each decode node's capacity that this proxy fills before requests wait; 0 never lets them wait for it."""
    queue: types.Count = Field(default=4096, ge=0)
    """Requests that may wait, for their turn to run and for room on a decode node; more get 429."""
    queue_seconds: types.Seconds = Field(default=600.0, ge=0)
    """Longest wait, then 429; also of a stream whose nodes are all out, then an error event."""
    key_concurrency: types.Count = Field(default=0, ge=0)
    """Requests of one API key that run or wait at once; 0 is no limit. More for single keys: `keys.file`."""
    reserve: types.Number = Field(default=0.125, ge=0, le=0.9)
    """Part of the room that an API key with more than its share leaves free while others ask; 0 is none."""

    @model_validator(mode="after")
    def _largest_body_fits(self) -> Self:
        if self.held_bytes < self.body_bytes:
            raise ValueError(
                f"limits.held_bytes ({self.held_bytes}) is less than limits.body_bytes ({self.body_bytes}):"
                " the largest body would never fit. Raise the one, or lower the other."
            )
        return self


class Policy(Section):
    """Decisions about a request, and what follows a failure."""

    on_prefill_failure: types.OnPrefillFailure = types.OnPrefillFailure.RETRY
    """The step after a failed prefill leg."""
    on_no_decode: types.OnNoDecode = types.OnNoDecode.FAIL
    """The step where no decode node is left: with `prefill`, prefill nodes serve whole requests."""
    routing: types.Routing = types.Routing.CACHE
    """How one of several nodes is chosen; `cache` goes by what each of them has cached and has to compute."""
    retries: types.Count = Field(default=2, ge=0, le=10)
    """Further nodes tried for one leg."""
    migrations: types.Count = Field(default=3, ge=0, le=100)
    """Times that one stream may move to another node when its own dies; 0 is never, and nothing is held for it."""
    ticket_life: types.Seconds = Field(default=30.0, ge=0, le=3600)
    """How long a ticket is tried again elsewhere: no longer than the nodes' kv_lease_duration; 0 is never."""
    itl_budget: types.Seconds = Field(default=0.1, ge=0, le=10)
    """With `cache`: how long a prompt that a decode node resumes by itself may hold up its streams; 0 is never."""
    keep: types.Keep = types.Keep.AUTO
    """Conversations that nodes keep until their next turn; `auto`: also those that have come back before."""
    keep_longest: types.Seconds = Field(default=3600.0, ge=0, le=86400)
    """Longest time for which a client's request has a conversation kept."""


class Events(Section):
    """KV events: nodes tell what they have cached. They are read where `policy.routing` is `cache`."""

    token_ids_seconds: types.Seconds = Field(default=0.05, gt=0, le=60)
    """For a node to tell a prompt's token ids where the plan waits for them; later, the request goes on without."""


class Health(Section):
    """How nodes are watched."""

    interval: types.Seconds = Field(default=5.0, gt=0)
    """Between two health checks of a node."""
    timeout: types.Seconds = Field(default=5.0, gt=0)
    """For one health check."""
    failures: types.Count = Field(default=3, ge=1)
    """Refused connections, or failed health checks, in a row until a node gets no requests; other faults count less."""
    silence: types.Seconds = Field(default=0.4, ge=0)
    """Without a sign of a node that has requests, until it is probed at once; 0 is never."""
    silence_timeout: types.Seconds = Field(default=1.4, gt=0, le=10)
    """For the answer to that probe, after which its streams move at once; up to three times that where none ran."""
    silence_share: types.Number = Field(default=0.5, ge=0, le=1)
    """Part of a role's nodes that may be out for their silence at once; one always may, if another is left.
    It does not limit prefill nodes while a decode node can compute their prompts."""
    cool_down: types.Seconds = Field(default=10.0, gt=0)
    """Until a node that legs failed on gets one request on trial; twice as long after each trial that fails."""
    slow_start: types.Seconds = Field(default=30.0, ge=0)
    """Over which a node that came back gets its full share."""
    first_hand_over: types.FirstHandOver = types.FirstHandOver.KNOWN_ANSWER
    """Test before a node serves: `known_answer` compares answers and bars pairs that fail; `warm_up` compares none."""


class Keys(Section):
    """Who may ask."""

    file: types.OptionalFile = None
    """File with API keys; without it anyone may ask."""


class Log(Section):
    """The log, on standard error."""

    level: types.LogLevel = types.LogLevel.INFO
    """How much is logged."""
    format: types.LogFormat = types.LogFormat.TEXT
    """How a line looks; text is logfmt, with the fields of the JSON."""


class Otel(Section):
    """Tracing; needs the extra `pdproxy[otel]`."""

    export: types.OtelExport = types.OtelExport.OFF
    """Where spans go."""
    endpoint: types.OptionalAddress = "http://127.0.0.1:4318/v1/traces"
    """OTLP/HTTP address of the collector."""
    sample: types.Number = Field(default=0.05, ge=0, le=1)
    """Part of the requests that are traced; a client's own `traceparent` decides for its request."""
    service: types.Text = "pdproxy"
    """Service name that the spans carry."""

    @model_validator(mode="after")
    def _collector(self) -> Self:
        if self.export is types.OtelExport.OTLP and not self.endpoint:
            raise ValueError("otel.export is otlp: name the collector in otel.endpoint.")
        return self


class Sizing(Section):
    """Aims of the advice about the number of nodes."""

    prefill_busy: types.Number = Field(default=0.7, gt=0, le=1)
    """Part of its time for which a prefill node may compute."""
    cache_fill: types.Number = Field(default=0.8, gt=0, le=1)
    """Part of its cache that a decode node's streams may fill."""
    token_seconds: types.Seconds = Field(default=0.05, gt=0)
    """Longest time between the tokens of a stream."""


class Settings(BaseSettings):
    """Everything an operator decides. `load` reads it from its sources; made directly, it reads no environment."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", case_sensitive=True, enable_decoding=False
    )  # not decoded: a list in a variable has commas, and is no JSON

    listen: Listen = Listen()
    nodes: tuple[ConfiguredNode, ...] = ()
    discovery: Discovery = Discovery()
    upstream: Upstream = Upstream()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    policy: Policy = Policy()
    events: Events = Events()
    health: Health = Health()
    sizing: Sizing = Sizing()
    keys: Keys = Keys()
    log: Log = Log()
    otel: Otel = Otel()

    @field_validator("nodes")
    @classmethod
    def _each_once(cls, nodes: tuple[ConfiguredNode, ...]) -> tuple[ConfiguredNode, ...]:
        return types.one_for_each_address(nodes)

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load` names the other sources."""
        return (sources["init_settings"],)
