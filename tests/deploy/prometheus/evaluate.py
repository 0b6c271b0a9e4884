"""What a PromQL expression is worth at a moment, by Prometheus' rules."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tests.deploy.prometheus.functions import counted, divided, quantile
from tests.deploy.prometheus.storage import NAME, Labels, Storage
from tests.deploy.prometheus.syntax import parse
from tests.deploy.prometheus.tree import Aggregation, Binary, Call, Expression, Number, Selector, Unsupported

Vector: TypeAlias = Mapping[Labels, float]
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divided,
}
GATHER: Mapping[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max, "min": min, "count": len}


def evaluate(text: str, storage: Storage, at: float) -> Vector:
    """The vector that a query gives.

    Raises:
        Unsupported: no query that this evaluator knows, or one whose worth is no vector.
    """
    worth = _worth(parse(text), storage, at)
    if isinstance(worth, float):
        raise Unsupported("a number is no vector")
    return worth


def _worth(tree: Expression, storage: Storage, at: float) -> Vector | float:
    match tree:
        case Number(value):
            return value
        case Selector(window=None):
            return storage.now(tree, at)
        case Aggregation():
            return _gathered(tree, _vector(tree.of, storage, at))
        case Call():
            return _called(tree, storage, at)
        case Binary("or", left, right):
            first, second = _vector(left, storage, at), _vector(right, storage, at)
            known = {_nameless(labels) for labels in first}
            return {**first, **{labels: each for labels, each in second.items() if _nameless(labels) not in known}}
        case Binary():
            return _combined(tree.sign, _worth(tree.left, storage, at), _worth(tree.right, storage, at))
        case _:
            raise Unsupported(f"a window of samples is no vector: {tree}")


def _vector(tree: Expression, storage: Storage, at: float) -> Vector:
    worth = _worth(tree, storage, at)
    if isinstance(worth, float):
        raise Unsupported(f"a number where a vector should be: {tree}")
    return worth


def _called(call: Call, storage: Storage, at: float) -> Vector:
    match call:
        case Call("rate" | "increase", (Selector(window=float(window)) as wanted,)):
            spans = {
                labels: counted(samples, at - window, at) for labels, samples in storage.within(wanted, at, window)
            }
            per = window if call.function == "rate" else 1.0
            return {_nameless(labels): span / per for labels, span in spans.items() if span is not None}
        case Call("histogram_quantile", (Number(share), buckets)):
            return quantile(share, _vector(buckets, storage, at))
        case _:
            raise Unsupported(f"function {call.function}")


def _gathered(tree: Aggregation, vector: Vector) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset(pair for pair in labels if pair[0] in tree.by), []).append(value)
    return {labels: float(GATHER[tree.how](values)) for labels, values in groups.items()}


def _combined(sign: str, left: Vector | float, right: Vector | float) -> Vector | float:
    if isinstance(left, float) and isinstance(right, float):
        return ARITHMETIC[sign](left, right)
    if isinstance(left, float):
        raise Unsupported("a number on the left of a vector")
    if isinstance(right, float):
        pairs = {labels: (value, right) for labels, value in left.items()}
    else:
        others = {_nameless(labels): value for labels, value in right.items()}
        pairs = {
            labels: (value, others[_nameless(labels)]) for labels, value in left.items() if _nameless(labels) in others
        }
    if sign in COMPARISONS:
        return {labels: ours for labels, (ours, theirs) in pairs.items() if COMPARISONS[sign](ours, theirs)}
    return {_nameless(labels): ARITHMETIC[sign](ours, theirs) for labels, (ours, theirs) in pairs.items()}


def _nameless(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != NAME)
