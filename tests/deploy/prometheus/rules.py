"""Alert rules as Prometheus runs them: pending while they hold, firing once they have held for long enough."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tests.deploy.prometheus.evaluate import evaluate
from tests.deploy.prometheus.storage import NAME, Labels, Storage
from tests.deploy.prometheus.syntax import seconds

ALERTS = "ALERTS"


@dataclasses.dataclass(slots=True)
class Rule:
    """One alert, and since when it holds for which labels."""

    name: str
    expr: str
    held: float
    labels: Mapping[str, str]
    since: dict[Labels, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, rule: Mapping[str, Any]) -> "Rule":
        """As the rules file has it."""
        return cls(rule["alert"], rule["expr"], seconds(rule.get("for", "0s")), rule.get("labels", {}))

    def step(self, storage: Storage, at: float) -> dict[Labels, str]:
        """Evaluate it once more; the state by labels of everything that is active."""
        found = [frozenset(pair for pair in labels if pair[0] != NAME) for labels in evaluate(self.expr, storage, at)]
        self.since = {labels: self.since.get(labels, at) for labels in found}
        return {
            frozenset({**dict(labels), **self.labels, "alertname": self.name}.items()): self._state(at - began)
            for labels, began in self.since.items()
        }

    def _state(self, age: float) -> str:
        return "firing" if age >= self.held else "pending"


def run(rules: Iterable[Rule], storage: Storage, moments: Iterable[float]) -> None:
    """Evaluate all rules at each moment; the storage then holds ALERTS as they are at the last one."""
    rules = list(rules)
    for at in moments:
        active = [(labels, state) for rule in rules for labels, state in rule.step(storage, at).items()]
        storage.forget(ALERTS)
        for labels, state in active:
            storage.add(labels | {(NAME, ALERTS), ("alertstate", state)}, at, 1.0)


def firing(storage: Storage, at: float) -> list[dict[str, str]]:
    """The labels of what fires, after `run`."""
    found = evaluate(f'{ALERTS}{{alertstate="firing"}}', storage, at)
    return [{key: value for key, value in labels if key not in (NAME, "alertstate")} for labels in found]
