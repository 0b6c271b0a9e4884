"""How few prompt tokens a trace could cost: a bound that nothing can beat, and a plan that knows all caches. Pure."""

from collections import Counter

from deploy.bench.hybrid_cache import CacheShape, HashedPrompt, HybridCache
from deploy.bench.traces import Trace, hashed


def least_computed(trace: Trace, shape: CacheShape) -> int:
    """Tokens that must be computed whatever the policy, the number of nodes and the size of their caches.

    Each distinct block (or unit, where there is one) at least once, as if one endless cache held attention and a state
    at every boundary from the moment on that a first request computes it; and of each prompt what follows the last
    boundary before its last token, which no cache can hold for it.
    """
    step, needed, ends, tails = shape.step, set[int](), Counter[int](), 0
    for request in trace.requests:
        prompt = hashed(request.prompt, step)
        needed.update(prompt.hashes)
        if prompt.tokens % step:
            tails += prompt.tokens % step
        else:
            ends[prompt.hashes[-1]] += 1  # its last block is computed though it is cached: one token of it is needed
    return step * sum(max(1, ends[each]) for each in needed) + tails


def greedy(trace: Trace, shape: CacheShape, prefills: int) -> int:
    """Tokens computed where each prompt, in the trace's order, goes to the node that can resume it furthest.

    Load and time are ignored; of equal ones the node that has computed least gets it.
    """
    nodes, computed = [HybridCache(shape) for _ in range(prefills)], [0] * prefills
    for prompt in _in_order(trace, shape.step):
        hits = [node.hit(prompt).resume for node in nodes]
        best = min(range(prefills), key=lambda place: (-hits[place], computed[place]))
        computed[best] += nodes[best].compute(prompt)
    return sum(computed)


def _in_order(trace: Trace, step: int) -> list[HashedPrompt]:
    """Prompts by the times at which they would come if no request took time."""
    times = list[float]()
    for request in trace.requests:
        times.append(request.at + (0.0 if request.after is None else times[request.after]))
    order = sorted(range(len(times)), key=times.__getitem__)
    return [hashed(trace.requests[number].prompt, step) for number in order]
