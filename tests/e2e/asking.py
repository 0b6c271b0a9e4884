"""Ask a model through OpenAI's client: completions or chat, whole or streamed."""

import enum
from collections.abc import AsyncIterable
from typing import Any, cast

from openai import AsyncOpenAI

from deploy.local.model.quiz import Quiz
from deploy.local.node import SERVED_NAME


class Way(enum.StrEnum):
    """The API of a question, and whether its answer is streamed."""

    COMPLETION = "completion"
    COMPLETION_STREAM = "completion, streamed"
    CHAT = "chat"
    CHAT_STREAM = "chat, streamed"


async def answer(client: AsyncOpenAI, way: Way, question: Quiz, max_tokens: int = 8) -> str:
    """The answer's text, at temperature 0."""
    fixed: dict[str, Any] = {"model": SERVED_NAME, "temperature": 0, "max_tokens": max_tokens}
    match way:
        case Way.COMPLETION:
            whole = await client.completions.create(prompt=question.prompt(), **fixed)
            return str(whole.choices[0].text)
        case Way.CHAT:
            said = await client.chat.completions.create(messages=cast(Any, question.messages()), **fixed)
            return said.choices[0].message.content or ""
        case Way.COMPLETION_STREAM:
            stream = await client.completions.create(prompt=question.prompt(), stream=True, **fixed)
            return await joined(choice.text async for part in stream for choice in part.choices)
        case Way.CHAT_STREAM:
            parts = await client.chat.completions.create(messages=cast(Any, question.messages()), stream=True, **fixed)
            return await joined(choice.delta.content or "" async for part in parts for choice in part.choices)


async def joined(pieces: AsyncIterable[str]) -> str:
    """All pieces as one text."""
    return "".join([piece async for piece in pieces])
