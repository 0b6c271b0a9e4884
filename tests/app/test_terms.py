"""The settings reach the orchestration."""

import dataclasses

from pdproxy.app.build import orchestration_config
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.planning.cache_aware import ITL_BUDGET, CacheAware
from pdproxy.planning.session import Session
from pdproxy.settings.model import Deadlines, Limits, Policy, Settings
from pdproxy.settings.types import OnPrefillFailure, Routing

SAID = Settings(
    deadlines=Deadlines(connect=1, prefill_headers=2, decode_headers=3, stall=4, release=5.5),
    policy=Policy(
        on_prefill_failure=OnPrefillFailure.FAIL,
        retries=7,
        migrations=8,
        ticket_life=9,
        routing=Routing.SESSION,
    ),
    limits=Limits(concurrency=11, queue=12, queue_seconds=13, decode_fill=0.5),
)


def test_default_settings_are_the_default_config() -> None:
    assert orchestration_config(Settings()) == OrchestrationConfig()


def test_every_setting_reaches_the_config() -> None:
    said = SAID.deadlines.model_dump() | SAID.policy.model_dump()
    arrived = dataclasses.asdict(orchestration_config(SAID))
    named = arrived.keys() & said.keys()
    assert {name: arrived[name] for name in named} == {name: said[name] for name in named}
    others = {"fan_out", "routing_policy", "queue", "decode_fill"}
    assert arrived.keys() - named == others, "has no setting, and have ones of another name or section"
    assert orchestration_config(SAID).queue == QueueLimits(11, 12, 13)
    assert orchestration_config(SAID).decode_fill == 0.5
    assert orchestration_config(SAID).routing_policy == Session()


def test_the_budget_reaches_the_policy() -> None:
    said = Settings(policy=Policy(routing=Routing.CACHE, itl_budget=0.25))
    policy = orchestration_config(said).routing_policy
    assert isinstance(policy, CacheAware)
    assert policy.itl_budget == 0.25
    assert Policy().itl_budget == ITL_BUDGET
