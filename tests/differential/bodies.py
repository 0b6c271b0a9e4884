"""A good request for each endpoint: a question that the tiny model surely answers in one way."""

from collections.abc import Mapping
from typing import Any

from deploy.local.model.quiz import Quiz
from deploy.local.node import SERVED_NAME
from pdproxy.request import Endpoint


def good_bodies(question: Quiz) -> Mapping[Endpoint, Mapping[str, Any]]:
    """By endpoint; greedy."""
    common = {"model": SERVED_NAME, "temperature": 0}
    messages = question.messages()
    return {
        Endpoint.CHAT: {**common, "messages": messages, "max_tokens": 6},
        Endpoint.COMPLETIONS: {**common, "prompt": question.prompt(), "max_tokens": 6},
        Endpoint.RESPONSES: {**common, "input": messages, "max_output_tokens": 6},
        Endpoint.MESSAGES: {**common, "messages": messages, "max_tokens": 6},
    }
