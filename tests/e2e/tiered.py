"""A prefill node, and a decode node that has two tiers on disk beside its tickets."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.local.model.quiz import Quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports
from deploy.local.stack import start_nodes
from deploy.local.supervise import Supervisor
from tests.connector.tiers.harness import pull, tier
from tests.e2e.fleet import DEVELOPING
from tests.e2e.legs import complete

BLOCK = 256
"""Tokens in a block of every group of the tiny model."""
ALIGNED = ("--block-size", str(BLOCK))
"""See `disk_tier`."""
WEIGHTS = {"disk": 1.0, "fast": 1.25}
CHILDREN = ("pull", *WEIGHTS)
LEASE_S = 300
"""Longer than a test takes: a lease that ended was ended."""


@dataclass(frozen=True)
class Tiered:
    """The running nodes. `shelves`: the tiers' folders by name."""

    prefill: Node
    decode: Node
    shelves: dict[str, Path]

    def shelve(self, paper: Quiz, tiers: Collection[str]) -> dict[str, list[Path]]:
        """Store the prompt in these tiers, and drop it from the decode node's cache. Returns the files by tier.

        Raises httpx.HTTPError, and AssertionError where nothing was stored.
        """
        if not tiers:
            return {}
        known = self._files()
        complete(self.decode.url, paper.prompt(), 1)
        new = {name: files - known[name] for name, files in self._files().items()}
        assert all(new.values()), "a tier stored nothing"
        for path in (path for name, files in new.items() if name not in tiers for path in files):
            path.unlink()
        httpx.post(f"{self.decode.url}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
        return {name: sorted(new[name]) for name in tiers}

    def _files(self) -> dict[str, set[Path]]:
        return {name: set(folder.iterdir()) for name, folder in self.shelves.items()}


def start_tiered(supervisor: Supervisor, folder: Path) -> Tiered:
    """Start both nodes. `folder`: for the tiers' files. Raises as `start_nodes`."""
    shelves = {name: folder / name for name in WEIGHTS}
    for shelf in shelves.values():
        shelf.mkdir()
    tiers = [tier(shelves[name], name, load_weight=weight) for name, weight in WEIGHTS.items()]
    leases: dict[str, Any] = {"kv_lease_duration": LEASE_S}
    specs = on_free_ports(
        NodeSpec("prefill", Role.PREFILL, 0, 0, connector_config=leases, more_arguments=ALIGNED),
        NodeSpec(
            "decode", Role.DECODE, 0, 0, more_arguments=several(pull(**leases), *tiers), more_environment=DEVELOPING
        ),
    )
    prefill, decode = start_nodes(supervisor, specs, print)
    return Tiered(prefill, decode, shelves)


def several(*children: dict[str, object]) -> tuple[str, ...]:
    """The arguments of a decode node with these child connectors."""
    config = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "pdproxy_connector.tiers",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    return ("--kv-transfer-config", json.dumps(config), *ALIGNED)
