"""Anthropic's client for Python."""

from typing import Any

from anthropic import Anthropic, APIStatusError

from tests.e2e.clients.telling import Json, Question, Task, refused, tell, usage

MOST_TOKENS = 1000


class Checks:
    """One method for each part of the API."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # Any: the types are checked with another version.
        self._client: Any = Anthropic(base_url=task.url, api_key="none", max_retries=0)
        self._fixed: Json = {"model": task.model, "max_tokens": MOST_TOKENS, "extra_body": {"temperature": 0}}

    def message(self, check: str, kind: str, **more: Any) -> None:
        """Ask three times: whole, streamed, and streamed through the client's helper."""
        asked, messages = {**self._fixed, **more}, self._client.messages
        question = self._task.next_question(kind)
        tell(check, question, **said(messages.create(messages=question.messages, **asked)))
        question = self._task.next_question(kind)
        with messages.stream(messages=question.messages, **asked) as stream:
            tell(f"{check}, stream helper", question, **said(stream.get_final_message()))
        question = self._task.next_question(kind)
        seen: list[str] = []
        for event in messages.create(messages=question.messages, stream=True, **asked):
            seen += [event.type] if event.type not in seen else []
        tell(f"{check}, streamed", events=seen)

    def messages(self) -> None:
        """Answers of every kind."""
        tools = [self.tool(each) for each in self._task.tools]
        forced = self.tool(self._task.forced)
        self.message("message", "recital")
        self.message("reasoning", "thinking")
        self.message("tools", "calling", tools=tools)
        self.message("reasoning and tools", "both", tools=tools, tool_choice={"type": "auto"})
        named = {"type": "tool", "name": forced["name"]}
        self.message("named tool", "forced", tools=[*tools, forced], tool_choice=named)
        self.message("any tool", "forced", tools=[forced], tool_choice={"type": "any"})

    def tool(self, described: Json) -> Json:
        """The same tool in Anthropic's shape."""
        return {"name": described["function"]["name"], "input_schema": described["function"]["parameters"]}

    def round_trip(self) -> None:
        """Send the tool's result back; the model answers."""
        question = self._task.next_question("calling")
        tools = [self.tool(each) for each in self._task.tools]
        create = self._client.messages.create
        first = create(messages=question.messages, tools=tools, **self._fixed)
        uses = [block for block in first.content if block.type == "tool_use"]
        answers = [{"type": "tool_result", "tool_use_id": use.id, "content": question.then} for use in uses]
        turns: Any = [
            *question.messages,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": answers},
        ]
        tell("tool's answer", question, then=said(create(messages=turns, tools=tools, **self._fixed))["text"])

    def others(self) -> None:
        """Token counts, a system prompt, errors, a stream that the client leaves."""
        question = self._task.next_question("recital")
        counted = self._client.messages.count_tokens(model=self._task.model, messages=question.messages)
        tell("count_tokens", tokens=counted.input_tokens)
        hello: Any = [{"role": "user", "content": "hello"}]
        for check, wrong in (("unknown model", {"model": "nobody"}), ("bad parameter", {"max_tokens": -1})):
            for way in (False, True):
                try:
                    self._client.messages.create(messages=hello, stream=way, **{**self._fixed, **wrong})
                except APIStatusError as error:
                    refused(f"{check}{', streamed' if way else ''}", error)
        self.leave(self._task.next_question("long"))

    def leave(self, question: Question) -> None:
        """Close a stream at its first delta."""
        with self._client.messages.stream(messages=question.messages, **self._fixed) as stream:
            tell("leaves", deltas=len(next(stream.text_stream)) > 0)


def said(message: Any) -> Json:
    """The parts of a message."""
    blocks = message.content
    return {
        "text": "".join(block.text for block in blocks if block.type == "text"),
        "reasoning": "".join(block.thinking for block in blocks if block.type == "thinking"),
        "calls": [{"name": block.name, "arguments": block.input} for block in blocks if block.type == "tool_use"],
        "finish": message.stop_reason,
        "usage": usage(message.usage, "input_tokens", "output_tokens"),
    }


if __name__ == "__main__":
    checks = Checks(Task())
    checks.messages()
    checks.round_trip()
    checks.others()
