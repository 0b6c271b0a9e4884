"""The calling thread keeps its cores; threads started meanwhile keep what they were given."""

from __future__ import annotations

import os
import threading

import pytest

from connector.worker_base import preserve_cpu_affinity


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_the_thread_gets_its_cores_back_also_after_an_error() -> None:
    before = os.sched_getaffinity(0)
    inherited: set[int] = set()

    def pin() -> None:
        os.sched_setaffinity(0, {max(before)})
        thread = threading.Thread(target=lambda: inherited.update(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        raise RuntimeError("what vLLM does, and then fails")

    with pytest.raises(RuntimeError), preserve_cpu_affinity():
        pin()
    assert os.sched_getaffinity(0) == before
    assert inherited == {max(before)}
