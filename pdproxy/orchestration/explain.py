"""The plan that would be made for a request, and why: nothing is sent, held or counted."""

from collections.abc import Iterable

import msgspec

from pdproxy.errors import ClientError
from pdproxy.legs.lax_fields import UnreadableField
from pdproxy.legs.parse import checked_fields, model_in, reading, scrub, split
from pdproxy.legs.shape import shape
from pdproxy.legs.turns import PromptReader, in_turns
from pdproxy.nodes.node import PoolState, Role
from pdproxy.orchestration.client_errors import no_node_error, only_model, unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.planning.cache_aware import CacheAware, Comparison
from pdproxy.planning.cost import Cost, Estimate
from pdproxy.planning.plan import Candidates, plan
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput, UnknownModel
from pdproxy.request import ClientRequest, Endpoint, HeldBody, Json, SubRequest


async def explain(context: OrchestrationContext, endpoint: Endpoint, raw: bytes) -> dict[str, object]:
    """The plan of a body that clients would send to an endpoint, its first prompt where it has several.

    Nodes that cost nearly the same would take turns; the plan shown is that of the first turn.

    Raises:
        ClientError: what is wrong with the body, or why there is no plan.
    """
    sub_request = await _sub_request(context, endpoint, scrub(await in_turns(reading(raw))))
    source = context.prefix_source
    prefix = None if source is None else await source.look_up(sub_request)
    model, form = sub_request.request.model, sub_request.shape
    needs = PlanInput(
        model, form.local, prefix=prefix, tokens=form.prompt_tokens,
        names_rank=endpoint is not Endpoint.RESPONSES,
    )  # fmt: skip
    pool_state, policy = context.pool.state(), context.plan_policy
    try:
        chosen = plan(pool_state, needs, policy, 0)
    except UnknownModel as error:
        raise unknown_model_error(error) from error
    except NoNode as error:
        raise no_node_error(error) from error
    known = {} if prefix is None else {"source": prefix.source.value}
    return {**_plan_facts(chosen), **known, "candidates": _candidates(policy.routing, pool_state, needs)}


async def _sub_request(context: OrchestrationContext, endpoint: Endpoint, body: dict[str, object]) -> SubRequest:
    try:
        model = model_in(endpoint, body) or only_model(context.pool.state())
        await in_turns(checked_fields(endpoint, body))
    except UnreadableField as error:
        text = f"{error}: a decode node is asked to refuse the request."
        raise ClientError(400, text, param=error.name, code="invalid_value") from error
    now, bodies = context.clock.now(), split(endpoint, body)
    request = ClientRequest("debug", endpoint, HeldBody[Json](body), (), model, False, 0, now, now, lambda: False)
    facts = await PromptReader().read(bodies[0])
    return SubRequest(request, HeldBody[Json](bodies[0]), shape(endpoint, bodies[0], facts), "debug", text=facts.text)


def _plan_facts(chosen: Plan) -> dict[str, object]:
    facts: dict[str, object] = {
        "prefill": None if chosen.prefill is None else {"node": chosen.prefill.name, "rank": chosen.prefill_rank},
        "decode": {"node": chosen.decode.name, "rank": chosen.decode_rank},
        "local": chosen.local,
    }
    return facts | chosen.facts()


def _candidates(routing: object, pool_state: PoolState, needs: PlanInput) -> dict[str, object]:
    """By what they would do, the cheapest first; of policies that know no costs, the load of each node."""
    candidates = Candidates(pool_state, needs)
    if not isinstance(routing, CacheAware):
        return {role.value: [{"node": v.node.name, "load": v.load} for v in candidates.open(role)] for role in Role}
    compared = Comparison(routing, candidates)

    def costs(cost: Cost, role: Role) -> list[dict[str, object]]:
        return _shown(compared.all_estimates(cost, candidates.open(role), compared.hits(role)))

    return {
        "prefill": costs(compared.prefill, Role.PREFILL),
        "decode": costs(compared.hand_over, Role.DECODE),
        "decode_alone": costs(compared.local(), Role.DECODE),
    }


def _shown(estimates: Iterable[Estimate]) -> list[dict[str, object]]:
    return [
        {
            "node": each.view.name,
            "rank": each.place.rank,
            **msgspec.structs.asdict(each.hit),
            "queued_tokens": each.place.queued,
            "legs": each.place.legs,
            "seconds": round(each.seconds, 4),
            "score": round(each.score, 4),
        }
        for each in sorted(estimates, key=lambda each: each.score)
    ]


def endpoint_named(path: str) -> Endpoint:
    """The endpoint of a path; a ClientError for another one."""
    try:
        return Endpoint(path)
    except ValueError as error:
        raise ClientError(400, f"`endpoint` must be one of {', '.join(Endpoint)}.", param="endpoint") from error
