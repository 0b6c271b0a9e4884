"""Token counts of prompts that another child loaded, on vLLM's real scheduler: they add up."""

from pathlib import Path

import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

from connector.counters import Counters
from connector.decode_reads import PromptTokens, TokenAccounting
from connector.stats import LEVELS
from tests.connector.harness import BLOCK, DENSE, make_node, prompt, take_ticket
from tests.connector.tiers.harness import Several, loaded, make_several, pull, shelve, tier

pytestmark = pytest.mark.usefixtures("every_pace")

TOKENS = prompt(10 * BLOCK + 5)


@pytest.fixture
def node(tmp_path: Path) -> Several:
    shelve(tmp_path, TOKENS, 10)
    return make_several([pull(), tier(tmp_path)])


def test_what_a_tier_loaded_was_not_computed(node: Several) -> None:
    """Counted when the load is over, not when it is planned."""
    node.add("d", TOKENS)
    node.step()
    assert node.counts("prompt_tokens") == {}
    node.step(loaded("d"))
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"loaded": 10 * BLOCK, "computed": 5}
    assert len(node.side._token_accounting) == 0


def test_a_local_hit_below_a_tier_s_load_is_counted_apart(tmp_path: Path) -> None:
    node = make_several([pull(), tier(tmp_path)], DENSE)
    shelve(tmp_path, TOKENS, 10)
    node.add("before", TOKENS[: 3 * BLOCK])
    node.run_out("before")
    node.add("d", TOKENS)
    node.step()
    node.step(loaded("d"))
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"hit": 3 * BLOCK, "loaded": 7 * BLOCK, "computed": 3 * BLOCK + 5}


def test_a_load_that_failed_was_computed(node: Several) -> None:
    node.add("d", TOKENS)
    node.step()
    node.step(loaded("d", failed=["d"]))
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"computed": len(TOKENS)}
    assert len(node.side._token_accounting) == 0


def test_a_ticket_that_failed_and_the_tier_after_it_are_one_prompt(node: Several) -> None:
    ticket = take_ticket(make_node("kv_producer", engine_id="engine-p"), TOKENS)
    node.add("d", TOKENS, ticket)
    node.step()
    node.step(node.pulled("d", failed=["d"]))
    node.step()
    assert node.loads() == ["d"]
    node.step(loaded("d"))
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"loaded": 10 * BLOCK, "computed": 5}


def test_a_load_within_a_step_counts_at_the_request_s_end(tmp_path: Path) -> None:
    shelve(tmp_path, TOKENS, 10)
    node = make_several([pull(), tier(tmp_path, kind="InstantTier")], DENSE)
    node.add("d", TOKENS)
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"loaded": 10 * BLOCK, "computed": 5}


def test_the_part_of_a_load_that_failed_was_computed(tmp_path: Path) -> None:
    """Where one group holds every token, vLLM keeps what came before the first bad block."""
    shelve(tmp_path, TOKENS, 10)
    node = make_several([pull(), tier(tmp_path)], DENSE)
    node.add("d", TOKENS)
    node.step()
    blocks = node.scheduler.kv_cache_manager.get_block_ids("d")[0]
    node.step(KVConnectorOutput(finished_recving={"d"}, invalid_block_ids={blocks[6]}))
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"loaded": 6 * BLOCK, "computed": 4 * BLOCK + 5}


def test_an_aborted_load_counts_nothing(node: Several) -> None:
    node.add("d", TOKENS)
    node.step()
    node.abort("d")
    node.step(loaded("d"))
    assert node.counts("prompt_tokens") == {}
    assert len(node.side._token_accounting) == 0


def test_nothing_is_counted_twice() -> None:
    counters = Counters()
    accounting = TokenAccounting(counters)
    accounting.expect("d", PromptTokens(16, 0, 5, loaded=32))
    for _ in range(2):
        accounting.on_loaded("d", 48)
    accounting.expect("read", PromptTokens(16, 32, 5))
    accounting.on_loaded("read", 48)
    assert len(accounting) == 1, "a read of ours has a verdict of its own"
    assert {labels[0]: count for _, labels, count in counters.drain().counts} == {
        "hit": 16,
        "loaded": 32,
        "computed": 5,
    }


def test_an_idle_engine_steps_once_to_export_its_capacity(node: Several) -> None:
    """A child's wish for a step reaches vLLM through the choosing connector, and so do its figures."""
    assert node.scheduler.has_requests()
    outputs = node.scheduler.update_from_output(node.scheduler.schedule(), EMPTY_MODEL_RUNNER_OUTPUT)
    sent = outputs[0].scheduler_stats
    assert sent is not None
    assert sent.kv_connector_stats is not None
    assert {name for name, *_ in sent.kv_connector_stats["pull"]["stats"][LEVELS]} == {
        "capacity_tokens",
        "capacity_sequences",
        "capacity_binding",
        "hashing",
    }
    assert not node.scheduler.has_requests()
