"""Whether an engine with requests still steps."""

import pytest

from pdproxy.nodes.health_check import read_engine_progress


def reading(running: float, steps: int, usage: float = 0.5) -> bytes:
    """The lines that matter among some that do not, as vLLM writes them."""
    return "\n".join(
        [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}',
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {usage}',
            f'vllm:iteration_tokens_total_count{{engine="0",model_name="tiny"}} {steps}.0',
            f"process_cpu_seconds_total {steps * 3.5 + usage}",
        ]
    ).encode()


@pytest.mark.parametrize("body", [b"", b"# nothing here\n", b"vllm:num_requests_running{} x\n", b"\xff\xfe"])
def test_statistics_that_are_off_say_nothing(body: bytes) -> None:
    assert read_engine_progress(body, None, 0) is None


def test_engines_behind_one_server_are_added_up() -> None:
    body = b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
    progress = read_engine_progress(body, None, 0)
    assert progress is not None
    assert progress.running == 5


@pytest.mark.parametrize(
    ("then", "still"),
    [
        (reading(1, 7), 30.0),
        (reading(1, 8), 0.0),
        (reading(2, 7), 0.0),
        (reading(1, 7, usage=0.6), 0.0),
    ],
)
def test_only_a_reading_that_does_not_change_is_still(then: bytes, still: float) -> None:
    first = read_engine_progress(reading(1, 7), None, 100)
    second = read_engine_progress(then, first, 130)
    assert first is not None
    assert second is not None
    assert second.still_seconds(130) == still


def test_an_engine_with_nothing_to_do_may_stand_still() -> None:
    idle = read_engine_progress(reading(0, 7), read_engine_progress(reading(0, 7), None, 100), 1000)
    assert idle is not None
    assert idle.still_seconds(1000) == 0
