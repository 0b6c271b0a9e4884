"""Nodes, queue and the live page's state of all workers as one: what is counted is summed, what differs is named.

Each argument maps the number of a worker to what it answered, as parsed JSON.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

Answers = Mapping[int, dict[str, Any]]

COUNTED = frozenset({"active", "footprint"})
"""Fields of a node that each worker has for its own requests."""
OF_ITS_OWN = frozenset({"caches", "prefix_cache", "share"})
"""Fields that each worker has at its own time: small differences say nothing, and the first worker's are shown."""
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
    nodes = _merged_list({worker: answer["nodes"] for worker, answer in answers.items()})
    return {"nodes": nodes, "queue": _merged_queue([answer["queue"] for answer in answers.values()])}


def merged_state(answers: Answers) -> dict[str, Any]:
    """``GET /ui/state``: of all workers together; ready where one is."""
    every = list(answers.values())
    return {
        "ready": next((each["ready"] for each in every if each["ready"] == "ready"), every[0]["ready"]),
        "nodes": _merged_list({worker: answer["nodes"] for worker, answer in answers.items()}),
        "on_the_way": sum(each["on_the_way"] for each in every),
        "requests": _youngest(request for each in every for request in each["requests"]),
        "hits": _by("way", (row for each in every for row in each["hits"])),
        "planned_hits": _by("role", (row for each in every for row in each["planned_hits"])),
        "plans": _sum(each["plans"] for each in every),
        "failures": sorted((row for each in every for row in each["failures"]), key=lambda row: row["ago"])[:SHOWN],
    }


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
