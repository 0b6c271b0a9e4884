"""A decode node resumes conversations by itself, after hand-overs that end where vLLM keeps a state."""

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import PREFIX_MATCH_UNIT
from tests.e2e.conftest import Pair
from tests.e2e.legs import complete, hand_over
from tests.e2e.metrics_reader import read, watch

pytestmark = pytest.mark.e2e

TURNS = 6
BLOCK = 256


def test_both_nodes_say_at_which_unit(pair: Pair) -> None:
    for node in (pair.prefill, pair.decode):
        parts = {"part": "prefix_match_unit", "value": str(PREFIX_MATCH_UNIT)}
        assert read(node.url, "pdproxy_connector_fingerprint", **parts) == 1


def test_a_chat_s_later_turns_need_no_ticket(pair: Pair) -> None:
    """The decode node computes less than a third of the tokens of turns 2 to 6; without boundaries it computed all."""
    talk = quiz(3101, 650)
    hand_over(pair.prefill.url, pair.decode.url, talk.at_turn(1))
    computed = watch(pair.decode.url, "prompt_tokens", source="computed")
    asked = 0
    for turn in range(2, TURNS + 1):
        answered = complete(pair.decode.url, talk.at_turn(turn).prompt())
        assert answered.text == talk.at_turn(turn).answer
        asked += answered.prompt
    computed.reaches(1)
    print(f"of {asked} tokens of turns 2 to {TURNS} {computed.grown():g} were computed")
    assert computed.grown() <= 0.3 * asked


@pytest.mark.parametrize("length", [660, 700, 766, 1500])
def test_any_length_leaves_a_state_to_go_on_from(pair: Pair, length: int) -> None:
    """Lengths 660 to 766 are included: vLLM 0.32's CPU build keeps no state for them unless it gets the block size."""
    paper = quiz(3200 + length, length)
    hand_over(pair.prefill.url, pair.decode.url, paper)
    for node in (pair.decode, pair.prefill):
        follow_up = complete(node.url, paper.at_turn(2).prompt())
        assert follow_up.text == paper.at_turn(2).answer
        assert follow_up.cached > length - 3 * PREFIX_MATCH_UNIT, node.spec.name


def test_it_goes_on_as_one_node_would(pair: Pair) -> None:
    """Greedy tokens and log-probabilities are equal from a state that was read and from one computed here."""
    talk = quiz(3301, 900)
    hand_over(pair.prefill.url, pair.decode.url, talk.at_turn(1))
    second = talk.at_turn(2)
    resumed, alone = complete(pair.decode.url, second.prompt()), complete(pair.prefill.url, second.prompt())
    assert resumed.cached > 800
    assert resumed.text == alone.text == second.answer
    assert resumed.logprobs == pytest.approx(alone.logprobs, abs=0.05)


def test_a_hit_as_long_as_the_ticket_still_gets_its_state(pair: Pair) -> None:
    """Turn 1 after turn 6, as when a user edits an old message: its attention is cached, the state at its end is not.
    The state is read, with the last block of attention."""
    talk = quiz(3401, 4 * BLOCK + 6)
    hand_over(pair.prefill.url, pair.decode.url, talk.at_turn(TURNS))
    pulled = watch(pair.decode.url, "prompt_tokens", source="pulled")
    hand_over(pair.prefill.url, pair.decode.url, talk.at_turn(1))
    assert pulled.grown() == BLOCK
    again = complete(pair.decode.url, talk.at_turn(1).prompt())
    assert (again.text, again.cached) == (talk.at_turn(1).answer, 4 * BLOCK)
