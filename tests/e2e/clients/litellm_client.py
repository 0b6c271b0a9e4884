"""LiteLLM, as a library."""

import asyncio
from typing import Any

import litellm

from tests.e2e.clients.telling import Json, Task, named, refused, streamed, tell, usage, whole


class Checks:
    """One method for each part of the API."""

    def __init__(self, task: Task) -> None:
        self._task = task
        where: Json = {"api_base": f"{task.url}/v1", "api_key": "none", "max_retries": 0}
        self._fixed: Json = {"model": f"openai/{task.model}", "temperature": 0, **where}

    def chat(self, check: str, kind: str, **more: Any) -> None:
        """Ask twice: whole and streamed."""
        asked = {**self._fixed, **more}
        question = self._task.next_question(kind)
        tell(check, question, **whole(litellm.completion(messages=question.messages, **asked)))
        question = self._task.next_question(kind)
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        tell(
            f"{check}, streamed",
            question,
            **streamed(litellm.completion(messages=question.messages, **counted, **asked)),
        )

    def chats(self) -> None:
        """Answers of every kind, also through LiteLLM's own provider for vLLM."""
        tools, forced = self._task.tools, self._task.forced
        self.chat("chat", "recital")
        self.chat("vLLM's provider", "thinking", model=f"hosted_vllm/{self._task.model}")
        self.chat("reasoning", "thinking")
        self.chat("tools", "calling", tools=tools)
        self.chat("reasoning and tools", "both", tools=tools, tool_choice="auto")
        self.chat("named tool", "forced", tools=[*tools, forced], tool_choice=named(forced))
        self.chat("required tool", "forced", tools=[forced], tool_choice="required")

    async def asynchronous(self) -> None:
        """A stream of `acompletion`."""
        question = self._task.next_question("recital")
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await litellm.acompletion(messages=question.messages, **counted, **self._fixed)
        tell("asynchronous", question, **streamed([chunk async for chunk in chunks]))

    def others(self) -> None:
        """Legacy completions, responses, errors."""
        question = self._task.next_question("recital")
        text = litellm.text_completion(
            prompt=question.prompt,
            max_tokens=400,
            **{**self._fixed, "model": f"text-completion-openai/{self._task.model}"},
        )
        tell("completion", question, text=text.choices[0].text, usage=usage(text.usage))
        question = self._task.next_question("recital")
        got = litellm.responses(input=question.messages, store=False, **self._fixed)
        tell("responses", question, text=got.output_text, usage=usage(got.usage, "input_tokens", "output_tokens"))
        hello = [{"role": "user", "content": "hello"}]
        for check, wrong in (("unknown model", {"model": "openai/nobody"}), ("bad parameter", {"temperature": -1})):
            for way in (False, True):
                try:
                    litellm.completion(messages=hello, stream=way, **{**self._fixed, **wrong})
                except (litellm.NotFoundError, litellm.BadRequestError) as error:
                    refused(f"{check}{', streamed' if way else ''}", error)

    async def leave(self) -> None:
        """Leave a stream at its first chunk."""
        question = self._task.next_question("long")
        chunks = await litellm.acompletion(messages=question.messages, stream=True, **self._fixed)
        async for chunk in chunks:
            tell("leaves", choices=len(chunk.choices))
            break
        await chunks.aclose()


async def in_one_loop(checks: Checks) -> None:
    await checks.asynchronous()
    await checks.leave()


if __name__ == "__main__":
    checks = Checks(Task())
    checks.chats()
    checks.others()
    asyncio.run(in_one_loop(checks))
