"""Why a prompt was not handed over, as a sentence with the two nodes, the address and what to change. Pure.

The cause is what the decode node tells in its answer (its connector's `read_reports`); the address is the ticket's.
"""

import dataclasses
import ipaddress
import re
import urllib.parse
from collections.abc import Mapping
from types import MappingProxyType

from pdproxy.nodes.node import Node
from pdproxy.request import Json

REPORT = "pdproxy_read"
"""In the ``kv_transfer_params`` of a decode node's answer."""
EXPLAIN = "pdproxy_explain"
"""Beside the ticket: asks for that report."""
HANDED_OVER = frozenset({"verified", "not_needed", "own_engine"})
"""Causes that are none: the ticket was read, the decode node had all of it cached, or it is the prefill node itself."""
_BY_ADDRESS = frozenset({"", "peer_unreachable"})
"""Causes that an address has which is right on the prefill node's own host alone."""

_DATA_PATH = (
    "let UCX connect the two hosts on any port (or on those of UCX_TCP_PORT_RANGE), or name network and transports with"
    " UCX_NET_DEVICES and UCX_TLS on both, and restart both"
)
_UNREACHABLE: Mapping[str, str] = MappingProxyType(
    {
        "ticket key": "",
        "NIXL_ERR": f"its side channel answers, and UCX finds no way: {_DATA_PATH}",
        "another engine": "another node has that address: give each host its own NODE_ADDRESS, and each node of a host"
        " its own VLLM_NIXL_SIDE_CHANNEL_PORT",
        "no side channel": "another program listens there: give {p} another VLLM_NIXL_SIDE_CHANNEL_PORT",
        "refused": "nothing listens there: set {p}'s NODE_ADDRESS and VLLM_NIXL_SIDE_CHANNEL_PORT to where {d} reaches"
        " it",
        "": "let {d}'s host reach that address and port (firewall, security group, network policy, route)",
    }
)
"""Advice where a node cannot be reached, by a word of what the other one says; the first that fits."""
_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "": "{d} computed the prompt itself though it had a ticket of {p}, to be read at {at}; its log says why",
        "no_progress": f"{{d}} reaches {{p}} at {{at}}, but no bytes come to its reads: {_DATA_PATH}",
        "transfer_failed": f"{{d}} reaches {{p}} at {{at}}, but its reads fail: {_DATA_PATH}",
        "unverified": "{p} at {at} does not tell {d} in time whether it still held what was read: see its log and its"
        " load",
        "not_held": "the lease of {p} ends before {d} has read: raise kv_lease_duration (LEASE_SECONDS) on both, and"
        " policy.ticket_life",
        "incompatible": "NIXL refuses to connect {d} with {p}{why}: both need one vLLM release, one --model path, one"
        " --kv-cache-dtype, and transports (UCX_TLS, UCX_NET_DEVICES) that both have",
        "unsigned": "{d} has ticket keys and {p} signs with none: give both the same (PDPROXY_TICKET_KEYS or"
        " pdproxy_key_file)",
        "bad_signature": "{p} signs with a ticket key that {d} has not: give both the same (PDPROXY_TICKET_KEYS or"
        " pdproxy_key_file)",
        "host": "{d} does not read from {p} at {at}: add that host to its pdproxy_allowed_hosts",
        "digest": "{d} makes another prompt of a request than {p}: give both the same --tokenizer and --chat-template",
        "number": "{d} expects a ticket for another number of tokens than {p} makes: give both the same"
        " --prefix-match-unit and --speculative-config",
        "missing_field": "the tickets of {p} are not of pdproxy's connector{why}: run it on both, or on neither",
        "unknown_version": "{p} and {d} run different releases of pdproxy's connector: install one",
        "wrong_role": "{d} does not read the tickets of {p}: start it with kv_role kv_consumer",
    }
)
"""By cause. ``{p}``, ``{d}``: the nodes; ``{at}``: the address in the ticket; ``{why}``: what the node knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class SideChannel:
    """Where a prefill node's tickets say that it can be asked. ``host`` is "" where they do not."""

    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of_ticket(cls, ticket: Json) -> "SideChannel":
        """The address in a ticket."""
        host, port = ticket.get("remote_host"), ticket.get("remote_port")
        return cls(host if isinstance(host, str) else "", port if type(port) is int else 0)

    @classmethod
    def of_label(cls, label: str) -> "SideChannel":
        """The address in the label of a node's metrics."""
        host, _, port = label.rpartition(":")
        return cls(host.strip("[]"), int(port)) if port.isdecimal() else cls()

    def is_own_host(self) -> bool:
        """Whether it means, on each host, that host itself."""
        return self.host == "localhost" or _is_own_host(self.host)


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """A decode node's report of the ticket that it was given. ``cause``: "" where it does not tell."""

    cause: str = ""
    why: str = ""


def read_told(answer: Json) -> Told:
    """The report in a decode node's answer; an empty one of a node without pdproxy's connector."""
    params = answer.get("kv_transfer_params")
    report = params.get(REPORT) if isinstance(params, dict) else None
    if not isinstance(report, dict):
        return Told()
    cause, why = report.get("cause"), report.get("why")
    return Told(cause if isinstance(cause, str) else "", why if isinstance(why, str) else "")


def sentence(prefill: Node, decode: Node, at: SideChannel, told: Told) -> str:
    """Why the decode node did not read a ticket of the prefill node, and what to change."""
    why = f" ({told.why})" if told.why else ""
    if told.cause in _BY_ADDRESS and at.is_own_host() and host_of(prefill) != host_of(decode):
        return f"{decode.name} cannot reach {prefill.name} at {at}: {set_address(prefill)}{why}"
    names = {"p": prefill.name, "d": decode.name, "at": str(at), "why": why}
    if told.cause == "peer_unreachable":
        advice = next(advice for word, advice in _UNREACHABLE.items() if word in told.why).format(**names)
        return f"{decode.name} cannot reach {prefill.name} at {at}{why}" + (f": {advice}" if advice else "")
    text = _SENTENCES.get(told.cause)
    if text is None:
        what = f"{decode.name} does not read the tickets of {prefill.name} ({told.cause}){why}"
        return f"{what}: pdproxy check compares them"
    return text.format(**names)


def change_of(told: str) -> str:
    """Changes that such a sentence names: they follow its first colon outside of brackets. "" where it names none."""
    depth = 0
    for place, letter in enumerate(told):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth and told.startswith(": ", place):
            change = re.sub(r" \(\[[^()]*\)$", "", told[place + 2 :])  # what the node's system said
            return "" if change.startswith("pdproxy check") else change
    return ""


def set_address(prefill: Node) -> str:
    """Advice for a node whose tickets name its own host as each host names itself."""
    return (
        f"set NODE_ADDRESS on {prefill.name}'s host (outside of Compose VLLM_NIXL_SIDE_CHANNEL_HOST) to the address by"
        f" which other hosts reach it, and restart {prefill.name}"
    )


def host_of(node: Node) -> str:
    """The host by which the proxy reaches a node."""
    return urllib.parse.urlsplit(node.url).hostname or ""


def is_elsewhere(node: Node) -> bool:
    """Whether the proxy reaches a node by an address that is not its own host's; False for names."""
    try:
        return not ipaddress.ip_address(host_of(node)).is_loopback
    except ValueError:
        return False


def _is_own_host(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
