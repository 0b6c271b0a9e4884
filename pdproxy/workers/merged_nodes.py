"""Nodes, queue and the live page's state of all workers as one: what is counted is summed, what differs is named.

Each argument maps the number of a worker to what it answered, as parsed JSON.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

Answers = Mapping[int, dict[str, Any]]

COUNTED = frozenset({"active", "footprint"})
"""Fields of a node that each worker has for its own requests."""
OF_ITS_OWN = frozenset({"caches", "prefix_cache", "share"})
"""Fields that each worker has at its own time: small differences say nothing, and the first worker's are shown."""
CAUSES = ("nothing", "load", "node", "proxy")
"""Of an incident (`admin.incident.Cause`), the gravest last."""
MOST_NAMES = 3
SHOWN = 50
"""Requests and failures of the live page that are shown one by one."""


def merged_node(answers: Answers) -> dict[str, Any]:
    """One node: with the sums of what runs there, else as the first worker has it.

    Where workers differ, ``differs`` has for each such field what each of them has, by its number.
    """
    workers = list(answers)
    node = dict(answers[workers[0]])
    for field in COUNTED & node.keys():
        node[field] = _sum(answers[worker][field] for worker in workers)
    same = node.keys() - COUNTED - OF_ITS_OWN
    differs = {
        field: {str(worker): answers[worker].get(field) for worker in workers}
        for field in sorted(same)
        if any(answers[worker].get(field) != node[field] for worker in workers)
    }
    return {**node, "differs": differs} if differs else node


def merged_nodes(answers: Answers) -> dict[str, Any]:
    """``GET /nodes``: every node that any worker knows, and the queue."""
    every = list(answers.values())
    return {
        "nodes": _merged_list({worker: answer["nodes"] for worker, answer in answers.items()}),
        "cohorts": _merged_cohorts([each["cohorts"] for each in every]),
        "queue": _merged_queue([each["queue"] for each in every]),
    }


def merged_state(answers: Answers) -> dict[str, Any]:
    """``GET /ui/state``: of all workers together; ready where one is."""
    every = list(answers.values())
    return {
        "ready": next((each["ready"] for each in every if each["ready"] == "ready"), every[0]["ready"]),
        "nodes": _merged_list({worker: answer["nodes"] for worker, answer in answers.items()}),
        "incident": _merged_incident([each["incident"] for each in every]),
        "advice": _merged_advice([each["advice"] for each in every]),
        "cohorts": _merged_cohorts([each["cohorts"] for each in every]),
        "on_the_way": sum(each["on_the_way"] for each in every),
        "requests": _youngest(request for each in every for request in each["requests"]),
        "hits": _by("way", (row for each in every for row in each["hits"])),
        "planned_hits": _by("role", (row for each in every for row in each["planned_hits"])),
        "plans": _sum(each["plans"] for each in every),
        "failures": sorted((row for each in every for row in each["failures"]), key=lambda row: row["ago"])[:SHOWN],
    }


def merged_leave(answers: Answers) -> dict[str, Any]:
    """``GET /may-leave``: a node may go where all workers say so."""
    return min(answers.values(), key=lambda answer: bool(answer["leave"]))


def _merged_incident(incidents: list[dict[str, Any]]) -> dict[str, Any]:
    """The gravest cause; what each worker saw; ``since``: from the first of them on."""
    began = [each["since"] for each in incidents if each["since"] is not None]
    hits = [each["hit"] for each in incidents]
    counted = {name: sum(hit[name] for hit in hits) for name, value in hits[0].items() if isinstance(value, int)}
    named = {name: _most(hit[name] for hit in hits) for name in hits[0].keys() - counted.keys()}
    return {
        "cause": max((each["cause"] for each in incidents), key=CAUSES.index),
        "nodes": list(dict.fromkeys(itertools.chain(*(each["nodes"] for each in incidents)))),
        "what": list(dict.fromkeys(itertools.chain(*(each["what"] for each in incidents)))),
        "since": max(began, default=None),
        "hit": counted | named,
    }


def _most(counts: Iterable[list[tuple[str, int]]]) -> list[tuple[str, int]]:
    found: collections.Counter[str] = collections.Counter()
    for name, count in itertools.chain(*counts):
        found[name] += count
    return found.most_common(MOST_NAMES)


def _merged_advice(advice: list[dict[str, Any]]) -> dict[str, Any]:
    """Needed nodes added up, as those of several proxies are; the limit is that of the worker that needs most."""
    added = ("prefill", "decode", "prefill_mean", "decode_mean")
    each_carries = [each["streams_each"] for each in advice if each["streams_each"] is not None]
    return {
        **{name: sum(each[name] for each in advice) for name in added},
        "limit": max(advice, key=lambda each: float(each["decode"]))["limit"],
        "streams_each": sum(each_carries) or None,
        "minutes": max(each["minutes"] for each in advice),
    }


def _merged_cohorts(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Nodes as the first worker that knows the cohort has them; complete where it is for all that do."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for cohort in itertools.chain(*lists):
        by_name.setdefault(cohort["name"], []).append(cohort)
    every = sum(cohort["requests"] for cohort in itertools.chain(*lists))
    return [
        {
            **same[0],
            "complete": all(each["complete"] for each in same),
            "requests": (asked := sum(each["requests"] for each in same)),
            "share": asked / every if every else 0.0,
        }
        for same in by_name.values()
    ]


def _merged_queue(queues: list[dict[str, Any]]) -> dict[str, Any]:
    """``seconds``: of the slowest; None where no worker knows."""
    seconds = [queue["seconds"] for queue in queues if queue["seconds"] is not None]
    return {**_sum({**queue, "seconds": 0} for queue in queues), "seconds": max(seconds, default=None)}


def _merged_list(lists: Mapping[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for worker, nodes in lists.items():
        for node in nodes:
            by_name.setdefault(node["name"], {})[worker] = node
    return [_of_those_that_know(found, lists) for found in by_name.values()]


def _of_those_that_know(found: Answers, workers: Iterable[int]) -> dict[str, Any]:
    """``unknown_to``: workers that do not have the node."""
    without = [worker for worker in workers if worker not in found]
    return {**merged_node(found), "unknown_to": without} if without else merged_node(found)


def _youngest(requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(requests, key=lambda request: sum(request["seconds"].values()))[:SHOWN]


def _by(key: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the same value at a key, summed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[key], []).append({name: value for name, value in row.items() if name != key})
    return [{key: name, **_sum(same)} for name, same in found.items()]


def _sum(values: Iterable[Any]) -> Any:
    """Numbers added up; objects field by field, where one without a field has 0."""
    every = list(values)
    if isinstance(every[0], dict):
        return {field: _sum(each.get(field, 0) for each in every) for field in dict.fromkeys(itertools.chain(*every))}
    return sum(every)
