"""A reasoning parser and a tool parser for the tiny model; vLLM loads them through its plugin flags.

The model recites lists, so names in a list are the marks, as `</think>` and `<tool_call>` are for other models. Text up
to THINKING_END is reasoning. The lines between CALL_BEGINS and CALL_ENDS are the arguments of a tool call:

    valta 702\\n         the tool: number 702, modulo the number of tools in the request
    bento 193\\n         arguments: {"bento": "193",
    corlia 055\\n         "corlia": "055"
    valsi 616\\n         }

Both keep state over the stream, as real parsers do: names come first, arguments piece by piece. A parser that sees only
the second half of a stream gives another result.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParser, ToolParserManager

from deploy.local.model.quiz import CUE

THINKING_END = "valvin"
CALL_BEGINS = "valta"
CALL_ENDS = "valsi"
"""The last names of the vocabulary; each is one token."""

NAME = "quiz"
MODULE = "tests.e2e.quiz_parsers"
FLAGS = (
    *("--reasoning-parser-plugin", MODULE, "--reasoning-parser", NAME),
    *("--tool-parser-plugin", MODULE, "--tool-call-parser", NAME, "--enable-auto-tool-choice"),
)
"""Flags of a node."""


@ReasoningParserManager.register_module(NAME)
class QuizReasoningParser(ReasoningParser):
    """Text before THINKING_END is reasoning. A prompt without that name asks for no reasoning."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._end: int = self.vocab[THINKING_END]
        self._cue: int = self.vocab[f"Ġ{CUE.strip()}"]

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the text after these prompt ids is no reasoning."""
        ids = list(input_ids)
        answer = ids[len(ids) - ids[::-1].index(self._cue) :] if self._cue in ids else ids
        return self._end in answer or self._end not in ids

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the newest ids contain the end mark."""
        return self._end in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids after the end mark."""
        return input_ids[input_ids.index(self._end) + 1 :] if self._end in input_ids else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many ids of an answer come before the end mark."""
        ids = list(token_ids)
        return ids.index(self._end) if self._end in ids else 0

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Reasoning and content of a whole answer."""
        reasoning, end, content = model_output.partition(THINKING_END)
        return (reasoning, content or None) if end else (None, model_output)

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *token_ids: Sequence[int]
    ) -> DeltaMessage | None:
        """The newest text as reasoning, up to the end mark."""
        reasoning, _, content = delta_text.partition(THINKING_END)
        if not reasoning and not content:
            return None
        return DeltaMessage(reasoning=reasoning or None, content=content or None)


class Part(Enum):
    """The kinds of pieces in an answer."""

    CONTENT = "content"
    TOOL = "tool"
    """The number that selects the tool of a call."""

    ARGUMENTS = "arguments"


@dataclass
class LineReader:
    """Reads an answer piece by piece. A line's name is held back until it is complete."""

    calling: bool = False
    _name: str = ""
    _in_name: bool = True
    _number: str = ""
    _kind: Part | None = Part.CONTENT
    """The part that the number in this line belongs to; None: dropped."""

    _arguments: int = field(default=0)

    def feed(self, text: str) -> Iterator[tuple[Part, str]]:
        """The parts that this text completes."""
        for character in text:
            yield from self._named(character) if self._in_name else self._numbered(character)

    def _named(self, character: str) -> Iterator[tuple[Part, str]]:
        if character != " ":
            self._name += character
            return
        name, self._name, self._in_name, self._number = self._name, "", False, ""
        if self.calling:
            yield from self._argument(name)
        elif name == CALL_BEGINS:
            self.calling, self._arguments, self._kind = True, 0, Part.TOOL
        else:
            self._kind = Part.CONTENT
            yield Part.CONTENT, f"{name} "

    def _argument(self, name: str) -> Iterator[tuple[Part, str]]:
        if name == CALL_ENDS:
            self.calling, self._kind = False, None
            yield Part.ARGUMENTS, "}" if self._arguments else "{}"
            return
        self._kind = Part.ARGUMENTS
        self._arguments += 1
        yield Part.ARGUMENTS, f'{"{" if self._arguments == 1 else ", "}"{name}": "'

    def _numbered(self, character: str) -> Iterator[tuple[Part, str]]:
        self._in_name = character == "\n"
        match self._kind:
            case Part.CONTENT:
                yield Part.CONTENT, character
            case Part.ARGUMENTS:
                yield Part.ARGUMENTS, '"' if self._in_name else character
            case Part.TOOL if self._in_name:
                yield Part.TOOL, self._number
        self._number += character


@ToolParserManager.register_module(NAME)
class QuizToolParser(ToolParser):
    """The lines between CALL_BEGINS and CALL_ENDS are calls; text around them stays content."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self._reader = LineReader()

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids_and_request: Any
    ) -> DeltaMessage | None:
        """The content and the call arguments in the newest text."""
        content, calls = "", list[DeltaToolCall]()
        for part, text in self._reader.feed(delta_text):
            match part:
                case Part.CONTENT:
                    content += text
                case Part.TOOL:
                    calls.append(self._opened(text))
                case Part.ARGUMENTS:
                    self._add(calls, text)
        if not content and not calls:
            return None
        return DeltaMessage(content=content or None, tool_calls=calls)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Content and calls of a whole answer."""
        content, calls = "", list[ToolCall]()
        for part, text in LineReader().feed(model_output):
            match part:
                case Part.CONTENT:
                    content += text
                case Part.TOOL:
                    calls.append(ToolCall(function=FunctionCall(name=self._tool(text), arguments="")))
                case Part.ARGUMENTS:
                    calls[-1].function.arguments += text
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def _opened(self, number: str) -> DeltaToolCall:
        self.current_tool_id += 1
        function = DeltaFunctionCall(name=self._tool(number), arguments="")
        return DeltaToolCall(
            index=self.current_tool_id, id=make_tool_call_id(), type="function", function=function.model_dump()
        )

    def _add(self, calls: list[DeltaToolCall], text: str) -> None:
        """Add text to the arguments of the open call; one delta for each call."""
        if calls and calls[-1].index == self.current_tool_id:
            function = calls[-1].function
            function.arguments = (function.arguments or "") + text
            return
        added = DeltaFunctionCall(arguments=text).model_dump(exclude_none=True)
        calls.append(DeltaToolCall(index=self.current_tool_id, function=added))

    def _tool(self, number: str) -> str:
        names = [tool.function.name if hasattr(tool, "function") else tool.name for tool in self.tools]
        return str(names[int(number) % len(names)]) if names else f"tool_{number}"
