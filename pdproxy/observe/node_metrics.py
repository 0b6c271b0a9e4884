"""The metrics of nodes: their states, their legs, which pairs and cohorts exchange tickets."""

import enum
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter, Gauge
from pdproxy.observe.labels import Proof, SilenceOutcome

ROLES = ("prefill", "decode")


class NodeMetrics:
    """Counts facts of nodes; `Metrics` has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._prefill_tokens = gauge(
            "pdproxy_prefill_pending_tokens_estimate",
            "Prompt tokens, estimated, that prefill nodes still have to compute.",
            ["model"],
        )
        self._node_active = gauge("pdproxy_node_active", "Legs in flight on a node.", ["node", "role"])
        self._node_up = gauge("pdproxy_node_up", "1 for the state a node is in, else 0.", ["node", "role", "state"])
        self._needed = gauge("pdproxy_nodes_needed", "Nodes that the last hour needed, unrounded.", ["role"])
        self._cohort_nodes = gauge(
            "pdproxy_cohort_nodes", "Nodes that serve, by what they exchange tickets in.", ["cohort", "role"]
        )
        self._cohort_requests = counter(
            "pdproxy_cohort_requests_total", "Requests sent to decode nodes of a cohort.", ["cohort"]
        )
        self._hand_overs_fail = gauge(
            "pdproxy_hand_overs_failing", "1 while nodes of both roles are there and hand nothing over, else 0."
        )
        self._barred = gauge("pdproxy_pair_barred", "1 for nodes that exchange no tickets.", ["prefill", "decode"])
        self._proofs = counter("pdproxy_known_answer_tests_total", "Known-answer tests of pairs of nodes.", ["result"])
        self._circuit = counter("pdproxy_circuit_moves_total", "Moves of a node's circuit.", ["node", "to"])
        self._silences = counter(
            "pdproxy_silence_probes_total", "Probes of nodes from whose legs nothing came.", ["role", "outcome"]
        )
        self._proofs.export_zeros(Proof)
        self._silences.export_zeros(ROLES, SilenceOutcome)

    def watch_prefill(self, model: str, tokens: Callable[[], float]) -> None:
        """Ask for the tokens that prefill nodes of a model still have to compute whenever metrics are scraped.
        ``model`` is the nodes' own, no client's word."""
        self._prefill_tokens.labels(model).set_function(tokens)

    def watch_node(self, node: str, role: enum.StrEnum, legs: Callable[[], float]) -> None:
        """Ask for the number of legs on a node whenever metrics are scraped."""
        self._node_active.labels(node, role).set_function(legs)

    def node_state(self, node: str, role: enum.StrEnum, state: enum.StrEnum) -> None:
        """Set the one state that a node is in; the other states of the same enumeration become 0."""
        for each in type(state):
            self._node_up.labels(node, role, each).set(1 if each is state else 0)

    def roles_forgotten(self, node: str, roles: Iterable[enum.StrEnum], states: type[enum.StrEnum]) -> None:
        """Drop the series of a node in roles that it has not any more: those of its states too."""
        for role in roles:
            self._node_active.remove(node, role)
            for each in states:
                self._node_up.remove(node, role, each)

    def node_forgotten(
        self, node: str, roles: Iterable[enum.StrEnum], states: type[enum.StrEnum], phases: type[enum.StrEnum]
    ) -> None:
        """Drop the series of a node that was removed: those of its states and of its circuit's phases too."""
        self.roles_forgotten(node, roles, states)
        for phase in phases:
            self._circuit.remove(node, phase)

    def nodes_needed(self, role: enum.StrEnum, nodes: float) -> None:
        """Set how many nodes of a role the last hour needed, for what went through this proxy."""
        self._needed.labels(role).set(nodes)

    def cohort_nodes(self, cohort: str, role: enum.StrEnum, nodes: int) -> None:
        """Set how many nodes of a cohort serve in a role; "" is the cohort of nodes that publish nothing."""
        self._cohort_nodes.labels(cohort, role).set(nodes)
        self._cohort_requests.labels(cohort)

    def cohort_requested(self, cohort: str) -> None:
        """Count a request that goes to a decode node of a cohort."""
        self._cohort_requests.labels(cohort).inc()

    def cohort_forgotten(self, cohort: str, roles: type[enum.StrEnum]) -> None:
        """Drop the series of a cohort whose last node has left; where there are none, nothing happens."""
        for role in roles:
            self._cohort_nodes.remove(cohort, role)
        self._cohort_requests.remove(cohort)

    def watch_hand_overs(self, fail: Callable[[], bool]) -> None:
        """Ask at each scrape whether nothing is handed over."""
        self._hand_overs_fail.labels().set_function(fail)

    def pair_barred(self, prefill: str, decode: str) -> None:
        """Two nodes exchange no tickets: they failed the known-answer test, or their tickets were of no use."""
        self._barred.labels(prefill, decode).set(1)

    def pair_allowed(self, prefill: str, decode: str) -> None:
        """They may again, or one of them has left: the series goes."""
        self._barred.remove(prefill, decode)

    def proof_ended(self, result: Proof) -> None:
        """Count a known-answer test."""
        self._proofs.labels(result).inc()

    def circuit_moved(self, node: str, to: enum.StrEnum) -> None:
        """Count a move of a node's circuit."""
        self._circuit.labels(node, to).inc()

    def silence_probed(self, role: enum.StrEnum, outcome: SilenceOutcome) -> None:
        """Count a probe of a node from whose legs nothing came."""
        self._silences.labels(role, outcome).inc()
