"""A decode leg that is sent before its ticket waits without holding anything, and reads as soon as it has it."""

import re

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import PREFIX_MATCH_UNIT, SERVED_NAME
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import LENGTH, complete, hand_over, prefill
from tests.e2e.metrics_reader import Watch, read, watch
from tests.e2e.waiting import WAITING, deliver, post, sent, until, wait_params

pytestmark = pytest.mark.e2e

USAGE = "vllm:kv_cache_usage_perc"
WAIT = "a-wait-of-these-tests"


EFFECTS = (("direct", "first"), ("proxy", "none"))


def addresses(url: str) -> list[str]:
    """Where a node's engines take tickets."""
    exposition = httpx.get(f"{url}/metrics", timeout=REQUEST_TIMEOUT_S, trust_env=False).text
    return re.findall(r'pdproxy_connector_ticket_address{.*address="([^"]*)"', exposition)


def ended(url: str, how: str) -> Watch:
    """Waits that end so, from now on."""
    return watch(url, "ticket_waits", outcome=how)


def test_nodes_say_whether_they_let_requests_wait(pair: Pair) -> None:
    assert read(pair.decode.url, "pdproxy_connector_info", rendezvous="true") == 1
    assert read(pair.prefill.url, "pdproxy_connector_info", rendezvous="false") == 1


def test_it_holds_nothing_while_it_waits_and_reads_when_its_ticket_comes(pair: Pair) -> None:
    question, other = quiz(3100, LENGTH), quiz(3101, 300)
    take = pair.decode.url
    verified, pulled = watch(take, "reads", outcome="verified"), watch(take, "prompt_tokens", source="pulled")
    computed, waits = watch(take, "prompt_tokens", source="computed"), ended(take, "ticket")
    with sent(take, question.prompt()) as [leg]:
        assert read(take, USAGE) == 0
        assert read(take, "vllm:num_requests_waiting") == 1
        assert complete(take, other.prompt()).text == other.answer
        before, ticket = computed.grown(), prefill(pair.prefill.url, question.prompt())
        assert not leg.answer.done()
        leg.deliver(ticket)
        assert leg.done().text == question.answer
        leg.deliver(ticket)
    verified.reaches(1)
    pulled.reaches(0.9 * LENGTH)
    assert (waits.grown(), verified.grown()) == (1, 1)
    assert computed.grown() - before <= PREFIX_MATCH_UNIT
    until(take, WAITING, 0)
    hand_over(pair.prefill.url, take, quiz(3102, LENGTH))


def test_a_ticket_may_come_before_its_request(pair: Pair) -> None:
    question = quiz(3110, LENGTH)
    verified, waits = watch(pair.decode.url, "reads", outcome="verified"), ended(pair.decode.url, "ticket")
    assert deliver(pair.decode.url, WAIT, prefill(pair.prefill.url, question.prompt())).status_code == 202
    assert complete(pair.decode.url, question.prompt(), params=wait_params(WAIT)).text == question.answer
    verified.reaches(1)
    assert waits.grown() == 1


def test_it_computes_when_there_is_no_ticket(pair: Pair) -> None:
    question = quiz(3120, LENGTH)
    computed, waits = watch(pair.decode.url, "prompt_tokens", source="computed"), ended(pair.decode.url, "no_ticket")
    with sent(pair.decode.url, question.prompt()) as [leg]:
        leg.deliver(None)
        assert leg.done().text == question.answer
    computed.reaches(0.9 * LENGTH)
    assert waits.grown() == 1


def test_it_computes_at_its_deadline_and_a_late_ticket_goes_back(pair: Pair) -> None:
    question = quiz(3130, LENGTH)
    waits, returned = ended(pair.decode.url, "deadline"), watch(pair.prefill.url, "leases_ended", how="read")
    with sent(pair.decode.url, question.prompt(), seconds=1) as [leg]:
        assert leg.done().text == question.answer
        assert waits.grown() == 1
        leg.deliver(prefill(pair.prefill.url, question.prompt()))
    returned.reaches(1)
    until(pair.prefill.url, USAGE, 0)


def test_another_prompt_s_ticket_is_refused_and_computed(pair: Pair) -> None:
    question, other = quiz(3140, LENGTH), quiz(3141, LENGTH)
    waits, digests = ended(pair.decode.url, "refused"), watch(pair.decode.url, "refused", reason="digest")
    ticket = prefill(pair.prefill.url, other.prompt())
    with sent(pair.decode.url, question.prompt()) as [leg]:
        leg.deliver(ticket)
        assert leg.done().text == question.answer
    waits.reaches(1)
    assert digests.grown() == 1
    assert complete(pair.decode.url, other.prompt(), params=ticket).text == other.answer


def test_nothing_is_held_for_a_client_that_left(pair: Pair) -> None:
    question = quiz(3150, LENGTH)
    gone, returned = ended(pair.decode.url, "gone"), watch(pair.prefill.url, "leases_ended", how="read")
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "kv_transfer_params": wait_params(f"{WAIT}-gone")}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=1.0, trust_env=False)
    gone.reaches(1)
    until(pair.decode.url, WAITING, 0)
    assert deliver(pair.decode.url, f"{WAIT}-gone", prefill(pair.prefill.url, question.prompt())).status_code == 202
    returned.reaches(1)
    for node in (pair.prefill, pair.decode):
        until(node.url, USAGE, 0)


def test_one_delivery_serves_all_samples_of_a_request(pair: Pair) -> None:
    question, wait = quiz(3160, LENGTH), f"{WAIT}-samples"
    read_or_had = [watch(pair.decode.url, "reads", outcome="verified"), watch(pair.decode.url, "unused_tickets")]
    computed = watch(pair.decode.url, "prompt_tokens", source="computed")
    ticket = prefill(pair.prefill.url, question.prompt(), pdproxy_readers=2)
    deliver(pair.decode.url, wait, ticket)
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0.01, "n": 2}
    body["kv_transfer_params"] = wait_params(wait)
    answer = httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    assert [choice["text"] for choice in answer.json()["choices"]] == [question.answer] * 2
    computed.reaches(2)
    assert sum(each.grown() for each in read_or_had) == 2, "the second may find in the cache what the first has read"
    assert computed.grown() <= 2 * PREFIX_MATCH_UNIT


@pytest.mark.parametrize(
    "body",
    [
        {"id": "short", "kv_transfer_params": None},
        {"id": WAIT},
        {"id": WAIT, "kv_transfer_params": [1]},
        {"id": WAIT, "kv_transfer_params": {"remote_port": 1 << 90}},
        [],
        {"id": WAIT, "kv_transfer_params": {"x": "y" * (4 << 20)}},
    ],
    ids=["id", "no-ticket", "list", "number", "no-object", "long"],
)
def test_what_is_no_delivery_is_refused_in_openai_s_shape(pair: Pair, body: object) -> None:
    answer = post(pair.decode.url, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)


def test_a_prefill_node_takes_no_deliveries(pair: Pair) -> None:
    assert deliver(pair.prefill.url, WAIT, None).status_code == 404


def test_the_prefill_node_sends_its_ticket_itself(pair: Pair) -> None:
    question, (take, give) = quiz(3180, LENGTH), (pair.decode.url, pair.prefill.url)
    first, none = (watch(take, "ticket_deliveries", way=way, effect=effect) for way, effect in EFFECTS)
    sent_there, verified = watch(give, "tickets_sent", outcome="taken"), watch(take, "reads", outcome="verified")
    [address] = addresses(take)
    with sent(take, question.prompt()) as [leg]:
        to = {"id": leg.wait, "addresses": [address]}
        ticket = prefill(give, question.prompt(), pdproxy_send_ticket=to)
        assert leg.done().text == question.answer
        leg.deliver(ticket)
    for url in (take, give):
        complete(url, "?", 1)  # an idle engine tells what it counted with its next step
    for each in (first, none, sent_there, verified):
        each.reaches(1)
    assert read(take, WAITING) == 0
    for node in (pair.prefill, pair.decode):
        until(node.url, USAGE, 0)


def test_a_prefill_node_that_cannot_send_it_gives_the_ticket_all_the_same(pair: Pair) -> None:
    question, refused = quiz(3190, LENGTH), watch(pair.prefill.url, "tickets_sent", outcome="bad_address")
    with sent(pair.decode.url, question.prompt()) as [leg]:
        to = {"id": leg.wait, "addresses": ["no address"]}
        leg.deliver(prefill(pair.prefill.url, question.prompt(), pdproxy_send_ticket=to))
        assert leg.done().text == question.answer
    complete(pair.prefill.url, "?", 1)
    refused.reaches(1)


def test_a_client_cannot_deliver_by_a_request_of_its_own(pair: Pair) -> None:
    question, refused = quiz(3170, LENGTH), watch(pair.decode.url, "refused", reason="unsuitable_request")
    with sent(pair.decode.url, question.prompt()) as [leg]:
        forged = {"pdproxy_deliver": {"id": leg.wait, "ticket": None}}
        complete(pair.decode.url, "?", 1, forged)
        refused.reaches(1)
        assert read(pair.decode.url, WAITING) == 1
        leg.deliver(prefill(pair.prefill.url, question.prompt()))
        assert leg.done().text == question.answer
