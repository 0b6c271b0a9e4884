"""OpenAI's client for Python."""

import asyncio
import json
from typing import Any, Literal

from openai import APIStatusError, AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.e2e.clients.telling import Json, Task, named, refused, streamed, tell, usage, whole

COUNTED = {"include_usage": True}


class Pick(BaseModel):
    """The forced tool's parameters, as a class."""

    n: Literal[7]


class Checks:
    """One method for each part of the API."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Any: the types are checked with another version.
        self._client: Any = OpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0)
        self._fixed: Json = {"model": task.model, "temperature": 0}

    def chat(self, check: str, kind: str, **more: Any) -> None:
        """Ask twice: whole and streamed."""
        asked, create = {**self._fixed, **more}, self._client.chat.completions.create
        question = self._task.next_question(kind)
        tell(check, question, **whole(create(messages=question.messages, **asked)))
        question = self._task.next_question(kind)
        chunks = create(messages=question.messages, stream=True, stream_options=COUNTED, **asked)
        tell(f"{check}, streamed", question, **streamed(chunks))

    def chats(self) -> None:
        """Answers of every kind."""
        tools, forced = self._task.tools, self._task.forced
        self.chat("chat", "recital")
        self.chat("reasoning", "thinking")
        self.chat("tools", "calling", tools=tools)
        self.chat("reasoning and tools", "both", tools=tools, tool_choice="auto")
        self.chat("named tool", "forced", tools=[*tools, forced], tool_choice=named(forced))
        self.chat("required tool", "forced", tools=[forced], tool_choice="required")

    def helpers(self) -> None:
        """The client's own helpers for parsing answers."""
        question = self._task.next_question("forced")
        parsed = self._client.chat.completions.parse(messages=question.messages, response_format=Pick, **self._fixed)
        tell("parse", parsed=getattr(parsed.choices[0].message.parsed, "n", None))
        question = self._task.next_question("both")
        with self._client.chat.completions.stream(
            messages=question.messages, tools=self._task.tools, stream_options=COUNTED, **self._fixed
        ) as stream:
            tell("stream helper", question, **whole(stream.get_final_completion()))

    def round_trip(self) -> None:
        """Send the tool's result back; the model answers."""
        question = self._task.next_question("calling")
        asked: Json = {"tools": self._task.tools, **self._fixed}
        message = self._client.chat.completions.create(messages=question.messages, **asked).choices[0].message
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": question.then} for call in message.tool_calls or []
        ]
        messages: Any = [*question.messages, message, *answers]
        got = self._client.chat.completions.create(messages=messages, **asked)
        tell("tool's answer", question, then=got.choices[0].message.content)

    def completions(self) -> None:
        """The legacy API."""
        asked, create = {**self._fixed, "max_tokens": 400}, self._client.completions.create
        question = self._task.next_question("recital")
        got = create(prompt=question.prompt, **asked)
        told: Json = {"text": got.choices[0].text, "finish": got.choices[0].finish_reason, "usage": usage(got.usage)}
        tell("completion", question, **told)
        question, text = self._task.next_question("recital"), ""
        for chunk in create(prompt=question.prompt, stream=True, stream_options=COUNTED, **asked):
            text += "".join(choice.text for choice in chunk.choices)
            counted = chunk.usage
        tell("completion, streamed", question, text=text, usage=usage(counted))

    def responses(self) -> None:
        """The Responses API."""
        create = self._client.responses.create
        tools = [{"type": "function", **tool["function"]} for tool in (*self._task.tools, self._task.forced)]
        named = {"type": "function", "name": self._task.forced["function"]["name"]}
        for check, kind, more in (
            ("responses", "recital", {}),
            ("responses, reasoning and tools", "both", {"tools": tools[:-1]}),
            ("responses, named tool", "forced", {"tools": tools, "tool_choice": named}),
        ):
            asked: Json = {**self._fixed, "store": False, **more}
            question = self._task.next_question(kind)
            tell(check, question, **response(create(input=question.messages, **asked)))
            question, last = self._task.next_question(kind), None
            seen: list[str] = []
            for event in create(input=question.messages, stream=True, **asked):
                seen += [event.type] if event.type not in seen else []
                last = getattr(event, "response", None)
            tell(f"{check}, streamed", question, **response(last), events=seen)

    def others(self) -> None:
        """Models, errors, a stream that the client leaves."""
        tell("models", models=[model.id for model in self._client.models.list()])
        messages: Any = [{"role": "user", "content": "hello"}]
        for check, wrong in (("unknown model", {"model": "nobody"}), ("bad parameter", {"temperature": -1})):
            for way in (False, True):
                try:
                    self._client.chat.completions.create(messages=messages, stream=way, **{**self._fixed, **wrong})
                except APIStatusError as error:
                    refused(f"{check}{', streamed' if way else ''}", error)
        try:
            self._client.embeddings.create(model=self._task.model, input="hello")
        except APIStatusError as error:
            refused("embeddings", error)
        question = self._task.next_question("long")
        with self._client.chat.completions.create(messages=question.messages, stream=True, **self._fixed) as stream:
            tell("leaves", choices=len(next(iter(stream)).choices))

    async def in_parallel(self) -> None:
        """The asynchronous client, several streams at once."""
        async with AsyncOpenAI(base_url=f"{self._task.url}/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            questions = [self._task.next_question("recital") for _ in range(4)]

            async def said(messages: Any) -> Json:
                chunks = await create(messages=messages, stream=True, stream_options=COUNTED, **self._fixed)
                return streamed([chunk async for chunk in chunks])

            told = await asyncio.gather(*(said(question.messages) for question in questions))
        for number, (question, got) in enumerate(zip(questions, told, strict=True)):
            tell(f"asynchronous {number}", question, **got)


def response(got: Any) -> Json:
    """The parts of an answer of the Responses API."""
    thought = [part.text for item in got.output if item.type == "reasoning" for part in item.content or []]
    calls = [item for item in got.output if item.type == "function_call"]
    return {
        "text": got.output_text,
        "reasoning": "".join(thought),
        "calls": [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls],
        "finish": got.status,
        "usage": usage(got.usage, "input_tokens", "output_tokens"),
    }


if __name__ == "__main__":
    checks = Checks(Task())
    checks.chats()
    checks.helpers()
    checks.round_trip()
    checks.completions()
    checks.responses()
    checks.others()
    asyncio.run(checks.in_parallel())
