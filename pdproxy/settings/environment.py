"""Settings from environment variables."""

import re
from collections.abc import Mapping

from pdproxy.errors import SettingsError
from pdproxy.settings.given import Given, Said, did_you_mean
from pdproxy.settings.leaves import PREFIX, leaves

CONFIG = PREFIX + "CONFIG"
NODES = {PREFIX + "PREFILL": "prefill", PREFIX + "DECODE": "decode"}

_NOT_OURS = re.compile(
    # the connector's, which a launcher may hand to all that it starts
    r"PDPROXY_(TICKET|CONNECTOR|TEST)_\w+"
    # what Kubernetes sets in every pod beside a service called pdproxy
    r"|PDPROXY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def read_environment(environment: Mapping[str, str]) -> Given:
    """What the variables that begin with ``PDPROXY_`` say.

    Raises:
        SettingsError: one of them names no setting.
    """
    known = {leaf.variable: leaf.key for leaf in leaves()}
    values: dict[str, Said] = {}
    for name, value in environment.items():
        if name in known:
            values[known[name]] = Said(value, name)
        elif name.startswith(PREFIX) and name not in (CONFIG, *NODES) and not _foreign(name, value):
            near = did_you_mean(name, [*known, CONFIG, *NODES])
            raise SettingsError(f"the environment variable {name} names no setting.{near}")
    return Given(values, _nodes(environment))


def _foreign(name: str, value: str) -> bool:
    link = name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value)
    return bool(link or _NOT_OURS.fullmatch(name))


def _nodes(environment: Mapping[str, str]) -> tuple[dict[str, Said], ...]:
    return tuple(
        {"url": Said(url.strip(), name), "role": Said(role, name)}
        for name, role in NODES.items()
        for url in environment.get(name, "").split(",")
        if url.strip()
    )
