"""The known-answer test against fake nodes: what it asks, what it concludes, what it leaves behind."""

import dataclasses
import itertools
from typing import Any

import pytest

from pdproxy.nodes.node import Bars, Node, Role
from pdproxy.nodes.proof import ProofResult
from pdproxy.observe.labels import Proof
from pdproxy.orchestration.known_answer import BUDGET, TOKENS, KnownAnswer
from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import UNREADABLE, FakeNode, Seen
from tests.orchestration.cluster import FakeCluster, Got
from tests.orchestration.prompts import body_for

HEADERS = (("authorization", "Bearer operator"),)


TOLD = (
    ("peer_unreachable", "[Errno 111] Connection refused", "d0 cannot reach p0 at 127.0.0.1:5600: set NODE_ADDRESS"),
    ("digest", "the ticket is for another prompt", "d0 makes another prompt of a request than p0"),
    ("of a newer release", "what?", "d0 does not read the tickets of p0 (of a newer release) (what?)"),
)


class Pair(FakeCluster):
    """One prefill and one decode node, and the test."""

    def __init__(self) -> None:
        super().__init__(prefills=1, decodes=1)
        self.test = KnownAnswer(self.context, lambda: HEADERS, itertools.count())
        self.prefill, self.decode = self.prefills[0], self.decodes[0]

    def nodes_of_pool(self, **more: Any) -> tuple[Node, Node]:
        prefill, decode = (self.pool.view(name).node for name in ("p0", "d0"))
        return dataclasses.replace(prefill, **more), dataclasses.replace(decode, **more)

    async def test_pair(self, **more: Any) -> ProofResult:
        """Make the test and settle; ``more`` are fields of both nodes."""
        result = await self.test.ask(*self.nodes_of_pool(**more))
        await self.context.background.aclose()
        await self.settle()
        return result

    async def ask_as_client(self) -> Got:
        return await self.ask(Endpoint.COMPLETIONS, body_for(Endpoint.COMPLETIONS, stream=False))

    def counted(self, proof: Proof) -> float:
        return self.count("pdproxy_known_answer_tests_total", result=proof)


def completions(node: FakeNode) -> list[Seen]:
    return [seen for seen in node.legs() if seen.path == "/v1/completions"]


async def test_a_right_pair_passes() -> None:
    pair = Pair()
    result = await pair.test_pair()
    assert result.proof is Proof.PASSED
    assert "differ by 0 nats (root mean square over 8 tokens; allowed are 0.25)" in result.why
    assert pair.counted(Proof.PASSED) == 1
    assert pair.fabric.pulled == 2, "a completion and a chat"
    assert pair.fabric.released == set()


async def test_the_same_prompt_goes_to_both_and_no_cache_helps() -> None:
    pair = Pair()
    await pair.test_pair()
    alone, again, handed = (seen.body for seen in completions(pair.decode))
    (prefilled,) = (seen.body for seen in completions(pair.prefill))
    assert again["prompt"] == handed["prompt"] == prefilled["prompt"] == [*alone["prompt"], again["prompt"][-1]]
    assert prefilled["cache_salt"] == handed["cache_salt"]
    assert len({alone["cache_salt"], handed["cache_salt"]}) == 2
    assert alone["cache_salt"] == again["cache_salt"]
    assert (alone["max_tokens"], again["max_tokens"], handed["max_tokens"]) == (TOKENS + 1, TOKENS, TOKENS)
    assert prefilled["kv_transfer_params"]["do_remote_decode"] is True
    assert all(seen.headers[0] == HEADERS[0] for node in pair.nodes for seen in node.seen)


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ({}, 1100, 1300),
        ({"block_size": 16}, 200, 256),
        ({"block_size": 1056}, 2500, 2640),
        ({"block_size": 1056, "max_model_len": 700}, 600, 690),
    ],
)
async def test_the_prompt_has_several_blocks_and_a_part_of_one(told: dict[str, int], least: int, most: int) -> None:
    pair = Pair()
    await pair.test_pair(**told)
    assert least <= len(completions(pair.decode)[0].body["prompt"]) <= most


async def test_a_chat_is_handed_over_too() -> None:
    pair = Pair()
    await pair.test_pair()
    (prefilled,), (handed,) = ([seen for seen in node.legs() if seen.path == Endpoint.CHAT] for node in pair.nodes)
    assert prefilled.body["messages"] == handed.body["messages"]
    assert prefilled.body["kv_transfer_params"]["do_remote_decode"] is True
    assert handed.body["kv_transfer_params"]["do_remote_prefill"] is True
    assert pair.fabric.held == {}


@pytest.mark.parametrize("odd", Role)
@pytest.mark.parametrize(
    ("template", "said"), [("another", "is the first to differ"), (None, "one begins as the other")]
)
async def test_nodes_that_make_other_prompts_of_a_chat_fail(odd: Role, template: str | None, said: str) -> None:
    """Their completions are right, and every chat would be computed twice."""
    pair = Pair()
    (pair.prefill if odd is Role.PREFILL else pair.decode).template = template
    result = await pair.test_pair()
    assert result.proof is Proof.FAILED
    assert said in result.why
    assert "start both with the same --tokenizer, --tokenizer-mode, --chat-template" in result.why
    assert not [seen for node in pair.nodes for seen in node.legs() if seen.path == Endpoint.CHAT]


async def test_a_model_without_a_chat_template_is_asked_no_chat() -> None:
    pair = Pair()
    pair.prefill.template = pair.decode.template = None
    assert (await pair.test_pair()).proof is Proof.PASSED
    assert not [seen for node in pair.nodes for seen in node.legs() if seen.path == Endpoint.CHAT]


async def test_a_chat_that_is_computed_all_the_same_is_not_handed_over() -> None:
    pair = Pair()
    respond = pair.decode.respond

    def deaf_to_chats(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Any:
        pair.fabric.deaf = path == Endpoint.CHAT
        return respond(path, raw, headers)

    pair.decode.respond = deaf_to_chats  # type: ignore[method-assign]
    result = await pair.test_pair()
    assert result.proof is Proof.NOT_HANDED_OVER
    assert "computed the prompt itself" in result.why


@pytest.mark.parametrize("wrong", [2, 5, UNREADABLE])
async def test_nodes_that_read_bytes_differently_fail(wrong: int) -> None:
    pair = Pair()
    pair.prefill.dialect = wrong
    result = await pair.test_pair()
    assert result.proof is Proof.FAILED
    assert len(completions(pair.prefill)) == 2, "a failure counts only if another prompt fails too"
    assert pair.counted(Proof.FAILED) == 1
    assert ("400" if wrong == UNREADABLE else "allowed are") in result.why


async def test_a_model_whose_answers_depend_on_rounding_proves_nothing() -> None:
    pair = Pair()
    pair.prefill.dialect, pair.decode.rounding = 30, 4
    result = await pair.test_pair()
    assert result.proof is Proof.UNANSWERED
    assert "shows too little" in result.why


async def test_one_failure_does_not_count() -> None:
    pair = Pair()
    pair.prefill.dialect = 3
    once = pair.test._once

    async def then_mended(prefill: Node, decode: Node) -> ProofResult:
        result = await once(prefill, decode)
        pair.prefill.dialect = 0
        return result

    pair.test._once = then_mended  # type: ignore[method-assign]
    assert (await pair.test_pair()).proof is Proof.PASSED
    assert pair.counted(Proof.FAILED) == 0


async def test_a_decode_node_that_computes_all_the_same_hands_nothing_over() -> None:
    """One without pdproxy's connector, which does not tell why."""
    pair = Pair()
    pair.fabric.deaf = True
    result = await pair.test_pair()
    assert result.proof is Proof.NOT_HANDED_OVER
    assert result.why.startswith("d0 computed the prompt itself though it had a ticket of p0, to be read at ")
    assert len(pair.fabric.released) == 2, "it counts only if it happens twice"
    assert pair.counted(Proof.NOT_HANDED_OVER) == 1


@pytest.mark.parametrize(("cause", "why", "said"), TOLD)
async def test_a_decode_node_tells_why(cause: str, why: str, said: str) -> None:
    pair = Pair()
    pair.fabric.deaf, pair.fabric.told, pair.fabric.address = True, {"cause": cause, "why": why}, "127.0.0.1"
    result = await pair.test_pair()
    assert result.proof is Proof.NOT_HANDED_OVER
    assert said in result.why
    (leg,) = [seen.body["kv_transfer_params"] for seen in completions(pair.decode)[2:3]]
    assert leg["pdproxy_explain"] is True
    warmed = await pair.test.warm(*pair.nodes_of_pool())
    assert (warmed.proof, warmed.why) == (Proof.NOT_HANDED_OVER, result.why)
    await pair.settle()


async def test_what_the_decode_node_tells_counts_more_than_its_usage() -> None:
    """Its usage may say nothing."""
    pair = Pair()
    pair.fabric.told = {"cause": "verified", "why": ""}
    assert (await pair.test_pair()).proof is Proof.PASSED
    pair.fabric.told = {"cause": "no_progress", "why": ""}
    result = await pair.test_pair()
    assert result.proof is Proof.NOT_HANDED_OVER
    assert "UCX_NET_DEVICES" in result.why


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "fault",
    [
        InjectedFault(FaultKind.REFUSE),
        InjectedFault(FaultKind.HANG),
        InjectedFault(FaultKind.RESET),
        InjectedFault(FaultKind.STALL, at=0),
        InjectedFault(FaultKind.STATUS, status=500),
        InjectedFault(FaultKind.GARBAGE, at=0),
        InjectedFault(FaultKind.ABORT),
        InjectedFault(FaultKind.NO_TICKET),
    ],
)
async def test_a_faulty_node_leaves_the_test_unanswered(role: Role, fault: InjectedFault) -> None:
    pair = Pair()
    (pair.prefill if role is Role.PREFILL else pair.decode).fault = fault
    result = await pair.test_pair()
    if fault.kind is FaultKind.NO_TICKET and role is Role.DECODE:
        assert result.proof is Proof.PASSED
        return
    assert result.proof is Proof.UNANSWERED
    assert ("p0" if role is Role.PREFILL else "d0") in result.why
    assert pair.fabric.held == {}


@pytest.mark.parametrize(
    ("fault", "releases"),
    [
        (InjectedFault(FaultKind.REFUSE), 0),
        (InjectedFault(FaultKind.STATUS, status=400), 0),
        (InjectedFault(FaultKind.NO_TICKET), 0),
        (InjectedFault(FaultKind.RESET), 1),
    ],
)
async def test_only_a_node_that_may_hold_something_gets_a_release(fault: InjectedFault, releases: int) -> None:
    pair = Pair()
    pair.prefill.fault = fault
    await pair.test_pair()
    assert sum(pair.count("pdproxy_releases_total", outcome=outcome) for outcome in ("done", "failed")) == releases


async def test_a_decode_node_that_fails_with_the_ticket_leaves_nothing_held() -> None:
    pair = Pair()
    respond = pair.prefill.respond

    def then_break(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Any:
        pair.decode.fault = InjectedFault(FaultKind.STATUS, status=503)
        return respond(path, raw, headers)

    pair.prefill.respond = then_break  # type: ignore[method-assign]
    result = await pair.test_pair()
    assert result.proof is Proof.UNANSWERED
    assert len(pair.fabric.released) == 1


@pytest.mark.parametrize("slow", [26, 31])
async def test_it_ends_in_time(slow: int) -> None:
    """Two calls that take so long, then one that never ends, if it is made at all."""
    pair = Pair()
    started, respond = pair.clock.now(), pair.decode.respond

    def slowly(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Any:
        if path == "/tokenize":
            pair.clock.advance(slow)
        else:
            pair.decode.fault = InjectedFault(FaultKind.STALL, at=0)
        return respond(path, raw, headers)

    pair.decode.respond = slowly  # type: ignore[method-assign]
    assert (await pair.test_pair()).proof is Proof.UNANSWERED
    assert pair.clock.now() - started <= max(BUDGET, 2 * slow)


async def test_a_node_without_a_tokenizer_gets_token_ids() -> None:
    pair = Pair()
    respond = pair.decode.respond

    def without_text(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Any:
        script = respond(path, raw, headers)
        return dataclasses.replace(script, status=404, pieces=(b"{}",)) if path == "/tokenize" else script

    pair.decode.respond = without_text  # type: ignore[method-assign]
    assert (await pair.test_pair()).proof is Proof.PASSED
    prompt = completions(pair.decode)[0].body["prompt"]
    assert all(8 <= token < 250 for token in prompt)


async def test_a_warm_up_asks_for_one_token_and_compares_nothing() -> None:
    pair = Pair()
    pair.prefill.dialect = 9
    assert (await pair.test.warm(*pair.nodes_of_pool())).proof is Proof.PASSED
    await pair.settle()
    assert [len(completions(node)) for node in pair.nodes] == [1, 1]
    assert completions(pair.decode)[0].body["max_tokens"] == 1
    assert not any(pair.counted(proof) for proof in Proof)


async def test_a_failed_warm_up_releases_on_every_rank() -> None:
    pair = Pair()
    pair.decode.fault = InjectedFault(FaultKind.STATUS, status=500)
    assert (await pair.test.warm(*pair.nodes_of_pool(ranks=2))).proof is Proof.UNANSWERED
    await pair.context.background.aclose()
    released = [dict(seen.headers).get("x-data-parallel-rank") for seen in pair.prefill.seen[1:]]
    assert released == ["0", "1"]
    await pair.settle()


async def test_a_barred_pair_answers_right_from_the_decode_node_alone() -> None:
    """Clients' answers from a barred pair."""
    pair = Pair()
    pair.prefill.dialect = 3
    result = await pair.test_pair()
    pair.pool.bar(Bars({("p0", "d0"): result.why}))
    before = len(completions(pair.prefill))
    got = await pair.ask_as_client()
    assert got.route == "local"
    assert len(completions(pair.prefill)) == before
    assert pair.count("pdproxy_local_total", reason="barred_pair") == 1
