"""The shortest prefixes that are hit, as operators are told, against vLLM's own scheduler."""

import dataclasses
import itertools

import pytest

from deploy.bench.retention import Hits, Setting, measure
from pdproxy.nodes.cache_reuse import Reuse, reuse
from pdproxy.nodes.cache_settings import CacheSettings
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.node import Node, Role
from pdproxy.planning.prefix_index import PrefixIndex
from tests.connector.harness import BLOCK
from tests.vllm_compat.publishing_node import MODELS, Engine, Model

STEP = 3 * BLOCK + 5
"""Tokens in a step of the prefill; it ends at a whole block."""
KEPT = [name for name, model in MODELS.items() if model.retention == 0]
NAMES = itertools.count()


def told(model: Model) -> Reuse:
    """By what a node of the model publishes."""
    scheme, retention = model.scheme, 1 if model.retention is None else model.retention
    found = reuse(
        Node(
            "n",
            "http://n",
            (Role.PREFILL,),
            fingerprint={"all": "f"},
            prefix_match_unit=model.unit if model.unit < BLOCK else 0,
            hashing=Hashing("sha256", scheme.unit, BLOCK, b"", model.eagle, scheme.states),
            cache=CacheSettings(retention=retention, prefill_step=STEP),
        )
    )
    assert found is not None
    return found


def engine_of(model: Model) -> Engine:
    made = Engine(model, PrefixIndex(model.scheme), seed=next(NAMES))
    made.node.scheduler.max_num_scheduled_tokens = STEP
    return made


def hit(engine: Engine, prompt: list[int]) -> int:
    return engine.finds(None, prompt).resume


@pytest.mark.parametrize("name", KEPT)
def test_the_shortest_prompt_whose_next_turn_has_a_hit(name: str) -> None:
    shortest, engine = told(MODELS[name]).shortest_prompt, engine_of(MODELS[name])
    for length, has in ((shortest - 1, False), (shortest, True)):
        prompt = engine.text(length)
        engine.run(prompt)
        assert (hit(engine, [*prompt, *engine.text(60)]) > 0) is has, length


@pytest.mark.parametrize("name", [name for name in KEPT if len(MODELS[name].groups) > 1])
def test_the_shortest_prefix_that_prompts_can_share(name: str) -> None:
    """From the third one on; the second finds nothing."""
    shortest, engine = told(MODELS[name]).shortest_shared, engine_of(MODELS[name])
    for length, has in ((shortest - 1, False), (shortest, True)):
        prefix = engine.text(length)
        prompts = [[*prefix, *engine.text(60)] for _ in range(3)]
        hits = []
        for prompt in prompts:
            hits.append(hit(engine, prompt) > 0)
            engine.run(prompt)
        assert hits == [False, False, has], length


@pytest.mark.parametrize("retention", [None, BLOCK, 2 * BLOCK, 4 * BLOCK])
def test_states_are_kept_where_a_step_ends_at_a_multiple_of_the_interval(retention: int | None) -> None:
    model = dataclasses.replace(MODELS["hybrid"], retention=retention)
    every, engine = told(model).every, engine_of(model)
    prefix = engine.text(14 * BLOCK)
    engine.run([*prefix, *engine.text(4 * BLOCK)])
    found = hit(engine, [*prefix, *engine.text(60)])
    assert found == 14 * BLOCK // every * every
    assert every == {None: 3, BLOCK: 3, 2 * BLOCK: 6, 4 * BLOCK: 12}[retention] * BLOCK


@pytest.mark.parametrize(
    ("setting", "hits"),
    [
        (Setting(256, 0, 0, 8192), Hits((0, 0, 2816), 3072, 2816, 4)),
        (Setting(256, 0, 1024, 8192), Hits((0, 0, 2816), 3072, 2816, 4)),
        (Setting(256, 0, 1024, 2048), Hits((0, 2048, 2816), 3072, 2816, 5)),
        (Setting(256, 16, 256, 512), Hits((0, 2560, 2816), 3184, 2896, 12)),
    ],
)
def test_the_table_in_the_docs(setting: Setting, hits: Hits) -> None:
    assert measure(setting, shared=2900, rest=300) == hits
