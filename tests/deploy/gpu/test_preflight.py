"""What the preflight makes of machines: of what nvidia-smi, torch and UCX say, and of a model's name."""

from dataclasses import replace
from pathlib import Path

import pytest

from deploy.gpu.options import Options, on_gpus
from deploy.gpu.preflight import (
    check_environment,
    check_gpus,
    check_model,
    check_packages,
    check_proxy,
    check_transports,
    gpus_of,
    said,
    transports_of,
)
from deploy.gpu.results import Check

LISTING = """0, NVIDIA H100 80GB HBM3, 81559, 81008, 575.57.08, 9.0
1, NVIDIA H100 80GB HBM3, 81559, 40000, 575.57.08, 9.0
"""
UCX_SAYS = (
    "[1795439423.4:0]  ucp_context.c:1508 UCX  WARN  transport 'which' is not available, "
    "please use one or more of: cma, cuda_copy, cuda_ipc, rc_mlx5, tcp\nNIXL INFO agent: x\n"
)
CUDA = "a warning of torch\n13.0 2\n"


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return on_gpus(tmp_path, "org/model", "0123456789abcdef" * 2 + "01234567")


def failing(checks: list[Check]) -> list[str]:
    assert all(check.holds or check.advice for check in checks), "a check that fails says what to do"
    return [check.name for check in checks if not check.holds]


def test_the_listing_is_read() -> None:
    assert [(gpu.index, gpu.total, gpu.free, gpu.driver) for gpu in gpus_of(LISTING)] == [
        ("0", 81559, 81008, "575.57.08"),
        ("1", 81559, 40000, "575.57.08"),
    ]


def test_memory_that_others_use_is_seen(options: Options) -> None:
    checks = list(check_gpus(options, LISTING, CUDA))
    assert "memory of GPU 1" in failing(checks)
    assert "memory of GPU 0" not in failing(checks)
    [memory] = [check for check in checks if check.name == "memory of GPU 1"]
    assert "40,000 of 81,559 MiB are free" in memory.line()
    assert "73,403 are asked for" in memory.line()
    assert "memory of GPU 1" not in failing(list(check_gpus(replace(options, gpu_memory=0.4), LISTING, CUDA)))


@pytest.mark.parametrize(
    ("prefill", "decode", "holds"), [("0", ("1",), True), ("0", ("0",), False), ("0", ("2",), False)]
)
def test_two_gpus_that_are_there_are_wanted(
    options: Options, prefill: str, decode: tuple[str, ...], *, holds: bool
) -> None:
    checks = list(check_gpus(replace(options, prefill_gpu=prefill, decode_gpus=decode), LISTING, CUDA))
    assert ("GPUs" not in failing(checks)) is holds


@pytest.mark.parametrize("listing", ["nvidia-smi: no such file", "No devices were found"])
def test_a_machine_without_gpus_is_told_so_once(options: Options, listing: str) -> None:
    [check] = check_gpus(options, listing, CUDA)
    assert not check.holds
    assert listing in check.line()


@pytest.mark.parametrize("cuda", ["none 0", "13.0 1", "Traceback …\nImportError: no torch"])
def test_torch_must_see_the_gpus(options: Options, cuda: str) -> None:
    assert "torch and CUDA" in failing(list(check_gpus(options, LISTING, cuda)))
    assert "torch and CUDA" not in failing(list(check_gpus(options, LISTING, CUDA)))


def test_ucx_tells_its_transports() -> None:
    assert transports_of(UCX_SAYS) == ["cma", "cuda_copy", "cuda_ipc", "rc_mlx5", "tcp"]
    assert check_transports(transports_of(UCX_SAYS), ("cuda_copy",)).holds
    assert failing([check_transports(["tcp"], ("cuda_copy",))]) == ["UCX"]
    assert "did not answer" in check_transports(transports_of("Segmentation fault"), ("tcp",)).line()


@pytest.mark.parametrize(
    ("model", "revision", "holds"),
    [
        ("org/model", "0" * 40, True),
        ("org/model", "main", False),
        ("org/model", "", False),
        ("{folder}/whole", "", True),
        ("{folder}/empty", "", False),
        ("{folder}/nowhere", "", False),
    ],
)
def test_a_model_is_a_folder_or_a_commit(tmp_path: Path, model: str, revision: str, *, holds: bool) -> None:
    for name in ("whole", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    check = check_model(on_gpus(tmp_path, model.format(folder=tmp_path), revision))
    assert check.holds is holds
    assert not failing([check]) or check.advice


def test_packages_are_asked_for_by_version(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.33.0", "nixl": "1.5.1", "pdproxy": "0.1.0"}
    monkeypatch.setattr("deploy.gpu.preflight.installed", lambda name: versions.get(name, ""))
    assert not set(failing(list(check_packages(options)))) & {"vLLM", "NIXL"}
    versions.update(vllm="0.31.1", nixl="")
    checks = list(check_packages(options))
    assert {"vLLM", "NIXL"} <= set(failing(checks))
    assert "nixl is not installed" in " ".join(check.line() for check in checks)


def test_a_proxy_that_lacks_a_package_is_told_which() -> None:
    check = check_proxy("Traceback …\nModuleNotFoundError: No module named 'dns'\n")
    assert "No module named 'dns'" in check.line()
    assert failing([check])
    assert check_proxy("all\n").holds


def test_settings_that_lead_the_proxy_elsewhere_are_found() -> None:
    assert check_environment({"PDPROXY_LOG_LEVEL": "debug", "HF_TOKEN": "x", "PDPROXY_POLICY_RETRIES": "1"}).holds
    check = check_environment({"PDPROXY_KEYS_FILE": "/k", "PDPROXY_LISTEN_PORT": "1"})
    assert failing([check])
    assert "unset PDPROXY_KEYS_FILE and PDPROXY_LISTEN_PORT" in check.line()


def test_a_command_that_cannot_run_says_so() -> None:
    assert said(["no-such-command-here"]).startswith("no-such-command-here: ")
    assert said(["sh", "-c", "echo out; echo err >&2; exit 3"]) == "out\nerr\n"
