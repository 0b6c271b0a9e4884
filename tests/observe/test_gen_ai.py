"""The names are those of the installed conventions; what a body, a usage and an answer tell is told by them."""

from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

from pdproxy.observe import gen_ai
from pdproxy.request import Endpoint
from pdproxy.usage import Usage


def test_every_name_is_one_of_the_conventions() -> None:
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    ours = {value for value in vars(gen_ai).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    ours |= {name for name, _ in gen_ai.SAMPLING.values()}
    assert len(ours) > 15
    assert ours <= known
    assert gen_ai.ERROR_TYPE == error_attributes.ERROR_TYPE


def test_every_endpoint_has_a_well_known_operation() -> None:
    assert set(gen_ai.OPERATIONS) == set(Endpoint)
    known = {kind.value for kind in gen_ai_attributes.GenAiOperationNameValues}
    assert set(gen_ai.OPERATIONS.values()) <= known


def test_a_body_is_told_as_far_as_it_is_well_formed() -> None:
    body = {"max_tokens": 7, "temperature": 1, "top_p": "x", "top_k": True, "seed": 2**70, "stop": ["secret"]}
    assert gen_ai.request_attributes(body, 2, stream=True) == {
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 1.0,
    }
    assert gen_ai.request_attributes({"max_output_tokens": 3}, 1, stream=False) == {
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 3,
    }


def test_a_models_name_is_cut() -> None:
    told = gen_ai.operation_attributes(Endpoint.CHAT, "m" + "x" * 500)["gen_ai.request.model"]
    assert told == "m" + "x" * 199


def test_what_is_not_known_is_not_told() -> None:
    assert gen_ai.usage_attributes(Usage(5, None, 0)) == {
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


def test_id_and_model_are_found_in_the_first_events() -> None:
    created = b'event: response.created\ndata: {"response": {"id": "resp_1", "object": "response", "model": "m"}}\n\n'
    assert gen_ai.id_and_model(created) == ("resp_1", "m")
    assert gen_ai.id_and_model(b'data: {"text":"\\"id\\":\\"x\\""}\n\n') == ("", "")
