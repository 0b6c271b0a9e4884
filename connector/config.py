"""The connector's settings and errors, and its vLLM plugin entry point.

    ConnectorError
    ├── ConfigError        a setting that cannot work, or a vLLM that is not tested; the sentence names it
    └── SideChannelError   the side-channel address cannot be bound

Both are raised only while a node starts: nothing that arrives in a request raises, it is refused (`RefusalReason`).

Settings are read once in each process, from `kv_connector_extra_config`: `pdproxy_key_file`, `pdproxy_allowed_hosts`,
`pdproxy_read_deadline`, `pdproxy_probe_timeout`, `pdproxy_verify_timeout`, `pdproxy_progress_delay`,
`pdproxy_side_channel_connections`, `pdproxy_weights_label`, `pdproxy_keep_share`, `pdproxy_allow_untested_vllm`, and
vLLM's `kv_lease_duration`. vLLM logs that extra config, so ticket keys never stand in it: they come from a file (one
key per line, `#` starts a comment) or from the environment variable `PDPROXY_TICKET_KEYS` (separated by commas). The
first key signs, all verify. A running node takes new ones from the file (`ticket_keys`).
"""

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


class ConnectorError(Exception):
    """Base class of this package's errors."""


class ConfigError(ConnectorError):
    """A setting of this node, or its version of vLLM, cannot work; the message is a sentence that names it."""


class SideChannelError(ConnectorError):
    """The side-channel address is in use or cannot be bound."""


KEYS_VARIABLE = "PDPROXY_TICKET_KEYS"
SHORTEST_KEY = 16
LONGEST_WAIT = 3600.0


class Role(StrEnum):
    """A node's job, by vLLM's words for it (`kv_role`).

    A node of both roles runs with `kv_consumer` and `pdproxy_roles`: vLLM's own `kv_both` is deprecated with NIXL
    (docs/decisions/roles-of-a-node.md). It is taken as long as vLLM has it.
    """

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"
    BOTH = "kv_both"

    @property
    def prefills(self) -> bool:
        """Whether the node issues tickets."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether the node accepts tickets."""
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """All times are in seconds. Without `allowed_hosts` any prefill address is accepted. Without `keys` tickets are not
    signed. `key_file`: where the keys are from, None for elsewhere.

    `side_channel_connections`: how many a prefill node keeps open in all; of one peer, half as many.
    `progress_delay`: of NIXL's progress thread; 0 lets it spin, None chooses by the node's device.
    `weights_label`: the operator's word for the weights, which goes into the fingerprint.
    `keep_share`: of the cache's blocks, what is kept for conversations' next turns at most; 0 keeps nothing.
    """

    role: Role
    keys: Sequence[bytes] = field(default=(), repr=False)
    allowed_hosts: frozenset[str] = frozenset()
    read_deadline: float = 30.0
    probe_timeout: float = 5.0
    verify_timeout: float = 5.0
    progress_delay: float | None = None
    lease_duration: float = 30.0
    side_channel_connections: int = 2048
    key_file: str | None = None
    weights_label: str = ""
    keep_share: float = 0.3

    @classmethod
    def from_extra(
        cls, role: str, failure_policy: str, extra: Mapping[str, Any], environ: Mapping[str, str]
    ) -> "ConnectorConfig":
        """The settings of a node.

        Raises ConfigError, with a sentence, for anything that is out of range or cannot work.
        """
        parsed_role = _role(role, extra.get("pdproxy_roles"))
        if parsed_role.decodes and failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {failure_policy!r}: set it to 'recompute', so that a refused or failed "
                "transfer is computed locally instead of failing the request."
            )
        if extra.get("bidirectional_kv_xfer"):
            raise ConfigError(
                "bidirectional_kv_xfer is on: blocks that a decode node lends back are not verified; turn it off."
            )
        key_file = None if (path := extra.get("pdproxy_key_file")) is None else str(path)
        return cls(
            role=parsed_role,
            keys=_keys(key_file, environ.get(KEYS_VARIABLE)),
            key_file=key_file,
            allowed_hosts=_hosts(extra.get("pdproxy_allowed_hosts")),
            read_deadline=_seconds(extra, "pdproxy_read_deadline", 30.0),
            probe_timeout=_seconds(extra, "pdproxy_probe_timeout", 5.0),
            verify_timeout=_seconds(extra, "pdproxy_verify_timeout", 5.0),
            progress_delay=_delay(extra.get("pdproxy_progress_delay")),
            lease_duration=_seconds(extra, "kv_lease_duration", 30.0),
            side_channel_connections=_integer(extra, "pdproxy_side_channel_connections", 2048, range(16, 65537)),
            weights_label=str(extra.get("pdproxy_weights_label", "")),
            keep_share=_share(extra.get("pdproxy_keep_share", 0.3)),
        )


def from_vllm(kv_transfer_config: Any, environ: Mapping[str, str]) -> ConnectorConfig:
    """The settings in vLLM's `KVTransferConfig`. Raises ConfigError."""
    get: Callable[[str, Any], Any] = kv_transfer_config.get_from_extra_config
    names = (
        "bidirectional_kv_xfer",
        "kv_lease_duration",
        "pdproxy_roles",
        "pdproxy_key_file",
        "pdproxy_allowed_hosts",
        "pdproxy_read_deadline",
        "pdproxy_probe_timeout",
        "pdproxy_verify_timeout",
        "pdproxy_progress_delay",
        "pdproxy_side_channel_connections",
        "pdproxy_weights_label",
        "pdproxy_keep_share",
    )
    extra = {name: value for name in names if (value := get(name, None)) is not None}
    return ConnectorConfig.from_extra(
        kv_transfer_config.kv_role, kv_transfer_config.kv_load_failure_policy, extra, environ
    )


ALLOW_UNTESTED_VLLM = "pdproxy_allow_untested_vllm"


def allows_untested_vllm(extra: Mapping[str, Any]) -> bool:
    """Whether a node may run a version of vLLM that is not tested (`vllm_version`). Raises ConfigError.

    With several connectors on the node, the setting counts beside their list and in the extra config of each of them.
    """
    listed = extra.get("connectors")
    children = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    given = [extra, *(child.get("kv_connector_extra_config") or {} for child in children)]
    values = [each.get(ALLOW_UNTESTED_VLLM, False) for each in given]
    for value in values:
        if not isinstance(value, bool):
            raise ConfigError(f"{ALLOW_UNTESTED_VLLM} is {value!r}: use true or false.")
    return any(values)


_ROLES = {
    frozenset({"prefill"}): Role.PREFILL,
    frozenset({"decode"}): Role.DECODE,
    frozenset({"prefill", "decode"}): Role.BOTH,
}


def _role(kv_role: str, roles: object) -> Role:
    """The node's job. `roles`: the setting `pdproxy_roles`, None without it."""
    try:
        role = Role(kv_role)
    except ValueError:
        text = f"kv_role is {kv_role!r}: use 'kv_producer' (prefill) or 'kv_consumer' (decode)."
        raise ConfigError(text) from None
    if roles is None:
        return role
    words = roles.split(",") if isinstance(roles, str) else roles if isinstance(roles, list) else []
    asked = _ROLES.get(frozenset(str(word).strip() for word in words))
    if asked is None:
        raise ConfigError(f"pdproxy_roles is {roles!r}: name prefill, decode, or both.")
    if asked is not role and (asked, role) != (Role.BOTH, Role.DECODE):
        raise ConfigError(
            f"pdproxy_roles is {roles!r} and kv_role {kv_role!r}: with 'kv_consumer' a node may do both, and with any"
            " other role what that says. (vLLM orders what is written into freed blocks only on a node that reads.)"
        )
    return asked


def _seconds(extra: Mapping[str, Any], name: str, default: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_WAIT:
        raise ConfigError(f"{name} is {value!r}: use a number of seconds over 0 and up to {LONGEST_WAIT:.0f}.")
    return float(value)


def _delay(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"pdproxy_progress_delay is {value!r}: use 0 (spin) or a number of seconds up to 1.")
    return float(value)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"pdproxy_keep_share is {value!r}: use a share of the cache's blocks, from 0 to 1.")
    return float(value)


def _integer(extra: Mapping[str, Any], name: str, default: int, allowed: range) -> int:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise ConfigError(f"{name} is {value!r}: use a whole number from {allowed.start} to {allowed.stop - 1}.")
    return value


def _hosts(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset()
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(host, str) for host in listed):
        raise ConfigError(f"pdproxy_allowed_hosts is {value!r}: use a list of host names or addresses.")
    return frozenset(host.strip() for host in listed if host.strip())


def _keys(path: str | None, variable: str | None) -> tuple[bytes, ...]:
    if path is not None:
        return read_keys(path)
    return () if variable is None else _parsed(variable.split(","), KEYS_VARIABLE)


def read_keys(path: str) -> tuple[bytes, ...]:
    """The ticket keys in a file. Raises ConfigError, with a sentence, for a file that cannot be used."""
    try:
        return _parsed(Path(path).read_text(encoding="utf-8").splitlines(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pdproxy_key_file {path!r} cannot be read: {error}.") from error


def _parsed(lines: Iterable[str], source: str) -> tuple[bytes, ...]:
    keys = tuple(line.strip().encode() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"no ticket key in {source}: put one in, or leave the setting out.")
    if any(len(key) < SHORTEST_KEY for key in keys):
        raise ConfigError(f"a ticket key in {source} is shorter than {SHORTEST_KEY} characters.")
    return keys


PLUGINS = "VLLM_PLUGINS"
ENDPOINT_PLUGIN = "pdproxy_endpoints"


def has_endpoints(environ: Mapping[str, str]) -> bool:
    """Whether this process's API server has our routes (`endpoints`). vLLM loads a plugin that adds routes only if it
    is installed, and named in `VLLM_PLUGINS`."""
    named = ENDPOINT_PLUGIN in environ.get(PLUGINS, "").split(",")
    return named and bool(entry_points(group="vllm.endpoint_plugins", name=ENDPOINT_PLUGIN))


STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"

TCP_LIMITS: Mapping[str, str] = {
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_SYN_CNT": "1",
    "UCX_TCP_USER_TIMEOUT": "10s",
    "UCX_TCP_KEEPIDLE": "5s",
}
"""How long UCX's TCP connections wait for a network that drops everything. By its defaults a handshake blocks its
thread for over a minute, a read never ends, and a connection that was cut for a minute needs another one to notice that
it works again. So connections are made without waiting, are given up after three seconds, and break when nothing was
acknowledged for 10 s, with every read on them. RDMA has limits of its own (UCX_RC_TIMEOUT, UCX_RC_RETRY_COUNT)."""


def register() -> None:
    """vLLM's `vllm.general_plugins` entry point: sets the environment that a hybrid model's transfer needs, limits for
    UCX's TCP connections, the secret that the processes of one node share, and an id of the node.

    vLLM calls it in the process that parses the engine's arguments, in the engine core and in every worker, before the
    model is built.
    """
    set_state_layout(os.environ)
    limit_tcp(os.environ)
    set_node_secret(os.environ)
    name_node(os.environ)


NODE_ID = "PDPROXY_NODE_ID"
"""Environment variable by which the processes of a node find each other's sockets (`liveness`)."""


def name_node(environ: MutableMapping[str, str]) -> None:
    """Give the node an id, unless it has one: its first process chooses it, and the others inherit it."""
    environ.setdefault(NODE_ID, os.urandom(8).hex())


def set_state_layout(environ: MutableMapping[str, str]) -> None:
    """Lay out mamba's convolution state dimension-first ("DS"), so that it can be moved block by block.

    vLLM does so by itself on CPU only. A node whose environment sets another layout keeps it. A node without our
    connector, or without state groups, is not affected.
    """
    environ.setdefault(STATE_LAYOUT, "DS")


def limit_tcp(environ: MutableMapping[str, str]) -> None:
    """Bound how long UCX's TCP connections wait. What the node's environment sets stays."""
    for name, value in TCP_LIMITS.items():
        environ.setdefault(name, value)


SECRET_VARIABLE = "PDPROXY_NODE_SECRET"


def set_node_secret(environ: MutableMapping[str, str]) -> None:
    """The secret with which this node's API server signs resume orders for its engine (`resume_order`).

    The first process of a node sets it, and all others inherit it. With ticket keys in the environment it is made of
    the first one, so that processes that inherit nothing from each other, but were given the same keys, agree.
    """
    first = environ.get(KEYS_VARIABLE, "").split(",")[0].strip().encode()
    made = hmac.new(first, b"pdproxy node secret", hashlib.sha256).hexdigest() if first else os.urandom(32).hex()
    environ.setdefault(SECRET_VARIABLE, made)
