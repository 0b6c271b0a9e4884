"""LangChain's `ChatOpenAI`."""

import asyncio
from typing import Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_openai import ChatOpenAI
from openai import APIStatusError
from pydantic import BaseModel

from tests.e2e.clients.telling import Json, Task, refused, tell


class Pick(BaseModel):
    """The forced tool's parameters, as a class."""

    n: Literal[7]


class Checks:
    """One method for each part of the API."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._model = self.model()

    def model(self, **more: Any) -> ChatOpenAI:
        """The model, with the settings of one check."""
        asked: Json = {"model": self._task.model, "temperature": 0, "stream_usage": True, **more}
        return ChatOpenAI(base_url=f"{self._task.url}/v1", api_key="none", max_retries=0, **asked)

    def chat(self, check: str, kind: str, model: Any) -> None:
        """Ask twice: whole and streamed."""
        question = self._task.next_question(kind)
        tell(check, question, **said(model.invoke(question.messages)))
        question = self._task.next_question(kind)
        chunks: list[AIMessageChunk] = list(model.stream(question.messages))
        tell(f"{check}, streamed", question, **said(sum(chunks[1:], chunks[0])))

    def chats(self) -> None:
        """Answers of every kind."""
        tools, forced = self._task.tools, self._task.forced
        self.chat("chat", "recital", self._model)
        self.chat("reasoning", "thinking", self._model)
        self.chat("tools", "calling", self._model.bind_tools(tools))
        self.chat("reasoning and tools", "both", self._model.bind_tools(tools, tool_choice="auto"))
        self.chat("named tool", "forced", self._model.bind_tools([*tools, forced], tool_choice="pick"))
        self.chat("required tool", "forced", self._model.bind_tools([forced], tool_choice="required"))
        self.chat("responses", "recital", self.model(use_responses_api=True, store=False))

    def structured(self) -> None:
        """Answers as an object, by both methods of constraining the model that the nodes support."""
        for method in ("json_schema", "function_calling"):
            question = self._task.next_question("forced")
            got = self._model.with_structured_output(Pick, method=method).invoke(question.messages)
            tell(f"structured output, {method}", parsed=getattr(got, "n", None))

    def round_trip(self) -> None:
        """Send the tool's result back; the model answers."""
        question, model = self._task.next_question("calling"), self._model.bind_tools(self._task.tools)
        first = model.invoke(question.messages)
        answers = [ToolMessage(question.then, tool_call_id=call["id"]) for call in first.tool_calls]
        tell("tool's answer", question, then=model.invoke([*question.messages, first, *answers]).text)

    def errors(self) -> None:
        """The client's own exceptions."""
        for check, wrong in (("unknown model", {"model": "nobody"}), ("bad parameter", {"temperature": -1})):
            try:
                self.model(**wrong).invoke("hello")
            except APIStatusError as error:
                refused(check, error)

    async def asynchronous(self) -> None:
        """Several requests at once; a stream that the client leaves."""
        questions = [self._task.next_question("recital") for _ in range(3)]
        for number, (question, got) in enumerate(
            zip(questions, await self._model.abatch([each.messages for each in questions]), strict=True)
        ):
            tell(f"asynchronous {number}", question, **said(got))
        stream = self._model.astream(self._task.next_question("long").messages)
        first = await anext(stream)
        tell("leaves", chunk=type(first).__name__)
        await stream.aclose()


def said(message: AIMessage) -> Json:
    """The parts of a message, without reasoning."""
    counted = message.usage_metadata
    return {
        "text": message.text,
        "calls": [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls],
        "finish": message.response_metadata.get("finish_reason") or message.response_metadata.get("status"),
        "usage": [counted["input_tokens"], counted["output_tokens"]] if counted else None,
    }


if __name__ == "__main__":
    checks = Checks(Task())
    checks.chats()
    checks.structured()
    checks.round_trip()
    checks.errors()
    asyncio.run(checks.asynchronous())
