"""Every field of vLLM's request models was looked at: a new version's new field fails here until it is, too.

The models are read out of the installed source, not imported: an engine takes seconds and gigabytes to import.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

from pdproxy.legs.parse import FORBIDDEN
from pdproxy.legs.rewrite import DROPPED, ONE_TOKEN
from pdproxy.request import Endpoint

MODELS = {
    Endpoint.COMPLETIONS: ("openai/completion/protocol.py", "CompletionRequest"),
    Endpoint.CHAT: ("openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    Endpoint.RESPONSES: ("openai/responses/protocol.py", "ResponsesRequest"),
    Endpoint.MESSAGES: ("anthropic/protocol.py", "AnthropicMessagesRequest"),
}
REFUSED = {"prompt_embeds", "previous_response_id"}
PLANNED_LOCALLY = {"use_beam_search"}
SHAPES_THE_PROMPT = {
    "model", "prompt", "messages", "input", "instructions", "system", "suffix", "previous_input_messages", "tools",
    "tool_choice", "parallel_tool_calls", "response_format", "text", "output_config", "thinking", "reasoning",
    "reasoning_effort", "include_reasoning", "chat_template", "chat_template_kwargs", "documents",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "media_io_kwargs", "mm_processor_kwargs",
    "truncate_prompt_tokens", "truncation_side", "truncation", "cache_salt", "vllm_xargs",
}  # fmt: skip
HARMLESS = {
    # how the one token is sampled, and what is checked of it: an invalid value is refused before the prefill runs
    "temperature", "top_p", "top_k", "min_p", "length_penalty", "skip_special_tokens",
    "spaces_between_special_tokens", "n",
    # whose request it is, and how soon it is served
    "priority", "session_id", "user", "metadata", "service_tier", "prompt_cache_key", "store",
    # read by render endpoints alone
    "mm_payload", "return_mm_kwargs",
}  # fmt: skip


def annotations(endpoint: Endpoint) -> dict[str, tuple[ast.expr, ast.expr | None]]:
    """The type and the default of each field, as they are written."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vLLM here to compare with")
    path, name = MODELS[endpoint]
    source = Path(spec.submodule_search_locations[0], "entrypoints", path).read_text()
    (model,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    assigned = [node for node in model.body if isinstance(node, ast.AnnAssign)]
    named = {node.target.id: node for node in assigned if isinstance(node.target, ast.Name)}
    return {name: (node.annotation, node.value) for name, node in named.items() if not name.startswith("_")}


def fields(endpoint: Endpoint) -> set[str]:
    return set(annotations(endpoint))


@pytest.mark.parametrize("endpoint", MODELS)
def test_every_field_has_its_place(endpoint: Endpoint) -> None:
    placed = [DROPPED, FORBIDDEN, REFUSED, PLANNED_LOCALLY, SHAPES_THE_PROMPT, HARMLESS, set(ONE_TOKEN[endpoint])]
    assert fields(endpoint) - set().union(*placed) == set()


def test_nothing_that_shapes_the_prompt_is_dropped() -> None:
    assert not DROPPED & (SHAPES_THE_PROMPT | HARMLESS)


@pytest.mark.parametrize("endpoint", MODELS)
def test_the_limits_that_are_set_exist(endpoint: Endpoint) -> None:
    assert set(ONE_TOKEN[endpoint]) <= fields(endpoint)
