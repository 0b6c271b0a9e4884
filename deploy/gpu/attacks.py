"""Attacks: tickets that are changed, made up, another prompt's, used twice, expired; junk on the side channel.

Sent past the proxy, as somebody would who can reach a decode node. Each must leave the answer as it is, be counted for
its own reason, and leave nothing behind.
"""

import copy
import random
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.gpu.asking import Known, Params, Verdict, complete, learn, long_prompt, prefill, release
from deploy.gpu.fleet import Fleet
from deploy.gpu.metrics import holds, watch
from deploy.gpu.options import Options
from deploy.gpu.results import Check
from deploy.local.ports import HOST

LINES = 8
COUNT = 7
MOST_TOKENS = 96
TOLD_WITHIN_S = 60.0
JUNK_MESSAGES = 20
SERIOUS = "a node that acts on this is not safe: open an issue, with the archive"


@dataclass(frozen=True)
class Forgery:
    """A wrong ticket, and the reasons of which one must be given for its refusal."""

    name: str
    ticket: Params
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """The nodes, and questions with known answers; the first two are of one length."""

    fleet: Fleet
    known: Sequence[Known]

    def prefill(self, known: Known, **more: object) -> Params:
        """A good ticket."""
        return prefill(self.fleet.prefill.url, self.fleet.options.served_name, known.prompt, **more)

    def answers_right(self, known: Known, ticket: Params) -> bool:
        """Whether the decode node's answer is the known one, or differs where that tells nothing."""
        name = self.fleet.options.served_name
        text = complete(self.fleet.decode.url, name, known.prompt, MOST_TOKENS, ticket).text
        return known.compare(text) is not Verdict.WRONG


def learn_answers(url: str, options: Options) -> list[Known]:
    """Of one engine: questions that no other step asks, so that no cache has them. Raises httpx.HTTPError."""
    length = min(options.lengths)
    prompts = [long_prompt(90_000 + at, length, LINES) for at in range(2 * COUNT)]
    return learn(url, options.served_name, prompts, COUNT, MOST_TOKENS)


def forgeries(ticket: Params, others: Params) -> Iterator[Forgery]:
    """Wrong tickets made of a good one, and another prompt's. Nodes have a key here, so every change is a forgery."""
    yield Forgery("of another prompt", others, ("digest", "number"))
    yield Forgery("signed by somebody else", _ours(ticket, signature=secrets.token_hex(32)), ("bad_signature",))
    yield Forgery("not signed", _ours(ticket, signature=None), ("unsigned",))
    yield Forgery(
        "with the blocks of another request", {**ticket, "remote_request_id": "cmpl-another-0"}, ("bad_signature",)
    )
    yield Forgery("with the address of another host", {**ticket, "remote_host": "192.0.2.1"}, ("bad_signature",))
    yield Forgery("for more readers", _ours(ticket, readers=1000), ("bad_signature",))
    yield Forgery(
        "without our part", {name: each for name, each in ticket.items() if name != "pdproxy"}, ("missing_field",)
    )
    yield Forgery("of a later version", _ours(ticket, v=99), ("unknown_version",))


def _ours(ticket: Params, **changes: object) -> Params:
    changed = copy.deepcopy(ticket)
    changed["pdproxy"].update(changes)
    return changed


def check_attacks(fleet: Fleet, known: Sequence[Known]) -> Iterator[Check]:
    """All of them, the one that has to wait for a lease's end first. Raises httpx.HTTPError and ValueError."""
    scene = Scene(fleet, known)
    expired = watch(fleet.prefill.url, "leases_ended", how="expired")
    late = scene.prefill(known[0])
    yield from refused(scene, known[1], known[2])
    yield replayed(scene, known[3])
    yield released(scene, known[4])
    yield smuggled(scene, known[5])
    yield junk(scene, known[6])
    within = fleet.options.lease_seconds + TOLD_WITHIN_S
    ended = expired.reaches(1, within)
    yield Check(
        "a lease ends by itself", ended, f"within {within:g} s" if ended else "the blocks are still held", SERIOUS
    )
    yield not_read("an expired ticket", scene, known[0], late)


def refused(scene: Scene, known: Known, other: Known) -> Iterator[Check]:
    """Each forgery is refused for its own reason. One good ticket, of which nobody reads, is released in the end."""
    name, others_name = secrets.token_hex(16), secrets.token_hex(16)
    good = scene.prefill(known, pdproxy_hand_over=name)
    others = scene.prefill(other, pdproxy_hand_over=others_name)
    for forgery in forgeries(good, others):
        seen = [watch(scene.fleet.decode.url, "refused", reason=reason) for reason in forgery.reasons]
        right = scene.answers_right(known, forgery.ticket)
        counted = holds(lambda seen=seen: sum(each.grown() for each in seen) >= 1, TOLD_WITHIN_S)  # type: ignore[misc]
        said = f"{'refused' if counted else 'NOT refused'} ({' or '.join(forgery.reasons)})"
        detail = f"{said}, {_answer(right=right)}"
        yield Check(f"a ticket {forgery.name}", right and counted, detail, SERIOUS)
    for each in (name, others_name):
        release(scene.fleet.prefill.url, scene.fleet.options.served_name, each)


def replayed(scene: Scene, known: Known) -> Check:
    """What a ticket named is read once."""
    ticket, verified = scene.prefill(known), watch(scene.fleet.decode.url, "reads", outcome="verified")
    first = scene.answers_right(known, ticket)
    read_once = verified.reaches(1, TOLD_WITHIN_S)
    again = scene.answers_right(known, ticket)
    reads = verified.grown()
    detail = f"blocks read {reads:g} times for two uses, {_answer(right=first and again)}"
    return Check("a ticket used twice", first and again and read_once and reads == 1, detail, SERIOUS)


def released(scene: Scene, known: Known) -> Check:
    """A ticket whose blocks were given back is not read."""
    name = secrets.token_hex(16)
    ticket = scene.prefill(known, pdproxy_hand_over=name)
    ended = watch(scene.fleet.prefill.url, "leases_ended", how="released")
    release(scene.fleet.prefill.url, scene.fleet.options.served_name, name)
    ended.reaches(1, TOLD_WITHIN_S)
    return not_read("a ticket after its release", scene, known, ticket)


def not_read(name: str, scene: Scene, known: Known, ticket: Params) -> Check:
    """The prefill node says that it does not hold it, and the decode node computes."""
    verified = watch(scene.fleet.decode.url, "reads", outcome="verified")
    seen = watch(scene.fleet.decode.url, "reads", outcome="not_held")
    right = scene.answers_right(known, ticket)
    noticed = seen.reaches(1, TOLD_WITHIN_S)
    detail = f"{'found out' if noticed else 'NOT found out'} (not_held), {_answer(right=right)}"
    return Check(name, right and noticed and verified.grown() == 0, detail, SERIOUS)


def smuggled(scene: Scene, known: Known) -> Check:
    """What a client puts into its request, the proxy does not pass on."""
    fleet, refusals = scene.fleet, watch(scene.fleet.decode.url, "refused")
    forged = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1}
    name = fleet.options.served_name
    text = complete(fleet.front.url, name, known.prompt, MOST_TOKENS, forged).text
    right = known.compare(text) is not Verdict.WRONG
    detail = f"{refusals.grown():g} reached the node, {_answer(right=right)}"
    return Check("a client's ticket through the proxy", right and refusals.grown() == 0, detail, SERIOUS)


def junk(scene: Scene, known: Known) -> Check:
    """The prefill node's side channel is sent noise, and goes on."""
    source = random.Random(1)
    for _ in range(JUNK_MESSAGES):
        with socket.create_connection((HOST, scene.fleet.prefill.spec.side_channel_port), TOLD_WITHIN_S) as raw:
            raw.sendall(source.randbytes(300))
    verified = watch(scene.fleet.decode.url, "reads", outcome="verified")
    right = scene.answers_right(known, scene.prefill(known))
    honest = verified.reaches(1, TOLD_WITHIN_S)
    detail = f"an honest hand-over afterwards is {'verified' if honest else 'NOT verified'}, {_answer(right=right)}"
    return Check("noise on the side channel", right and honest, detail, SERIOUS)


def _answer(*, right: bool) -> str:
    return "answer right" if right else "answer WRONG"
