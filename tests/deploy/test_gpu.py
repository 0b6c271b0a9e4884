"""The run-book for one GPU or two: its judgements, its commands and its archive. Nothing is started here."""

import argparse
import json
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from deploy import gpu
from deploy.bench.rounds import BenchError
from deploy.gpu import ADVICE, Run, learn, nodes_of, options_of, pack, question, secrets_of, started, without_secrets
from deploy.local.model.quiz import recite
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.ports import HOST
from deploy.local.readiness import NotReadyError
from deploy.local.supervise import Part, Process, Supervisor
from tests.e2e.process_faults import ProcessFault

ASKED = {"model": "m", "prompt": "?", "max_tokens": 96}
KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HUB = "hf_" + "Ab1" * 11


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.delenv("RESUME_ARGS", raising=False)
    return options_of(["--model", "org/model", "--revision", "a" * 40, "--folder", str(tmp_path / "run")])


@pytest.fixture
def run(options: argparse.Namespace) -> Run:
    made = Run(options, Supervisor(options.folder / "logs"))
    made.write("settings.txt", "")
    return made


def held(packed: Path) -> dict[str, bytes]:
    """The files of an archive by their names."""
    with tarfile.open(packed) as archive:
        return {each.name: source.read() for each in archive if (source := archive.extractfile(each)) is not None}


class Engine:
    """Answers with tokens of which each led by so many nats, as many as are asked for."""

    def __init__(self, leads: Sequence[float]) -> None:
        self.leads, self.asked = leads, list[Mapping[str, Any]]()

    def whole(self, _url: str, asked: Mapping[str, Any], **more: object) -> Mapping[str, Any]:
        self.asked.append({**asked, **more})
        leads = self.leads[: asked["max_tokens"]]
        best = [{"a": -0.1, "b": -0.1 - lead} for lead in leads]
        return {"choices": [{"text": "".join("abcdef"[: len(leads)]), "logprobs": {"top_logprobs": best}}]}


class TestAnswers:
    """The part of an answer that must be the same, and when an answer counts as wrong."""

    @pytest.mark.parametrize(
        ("leads", "tokens", "text"),
        [([5.0, 2.0, 0.6], 3, "abc"), ([5.0, 2.0, 0.4, 9.0], 2, "ab"), ([0.1, 9.0], 1, "a"), ([], 1, "")],
    )
    def test_an_answer_is_learned_up_to_the_first_token_that_rounding_may_change(
        self, monkeypatch: pytest.MonkeyPatch, leads: Sequence[float], tokens: int, text: str
    ) -> None:
        engine = Engine(leads)
        monkeypatch.setattr(gpu, "whole", engine.whole)
        assert learn("u", ASKED) == ({**ASKED, "max_tokens": tokens}, text)
        assert {each["cache_salt"] for each in engine.asked} == {"learned"}, "its cache has nothing of it later"

    @pytest.mark.parametrize(
        ("answers", "holds"),
        [
            (["one", "two"], True),
            (["one", "tw"], False),
            (["one", "two three"], False),
            (["one", ""], False),
            (["one", BenchError("gone")], False),
        ],
    )
    def test_streams_must_come_to_their_end_with_the_one_engines_text(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, answers: Sequence[str | Exception], holds: bool
    ) -> None:
        def follow(_url: str, asked: Mapping[str, Any], pieces: list[tuple[float, str]]) -> None:
            answer = answers[asked["at"]]
            pieces += [(0.0, ""), (1.0, "two" if isinstance(answer, Exception) else answer), (1.5, "")]
            if isinstance(answer, Exception):
                raise answer

        monkeypatch.setattr(gpu, "follow", follow)
        known = [({"at": at, "max_tokens": 8}, right) for at, right in enumerate(["one", "two"])]
        assert run.attempt("kills", lambda: run.compare("case", known, 2, lambda _: None)) is holds
        [check] = run.results["kills"]
        assert check["detail"].startswith(f"{1 + holds} of 2 the same, longest stall 1.0 s")
        assert ("one engine says 'two'" in check["detail"]) is not holds

    @pytest.mark.parametrize(("tokens", "holds"), [([8, 7], True), ([8, 7, 7], False)])
    def test_answers_that_tell_nothing_do_not_pass(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, tokens: Sequence[int], holds: bool
    ) -> None:
        monkeypatch.setattr(gpu, "follow", lambda _url, _asked, pieces: pieces.extend([(0.0, ""), (1.0, "right")]))
        known = [({"max_tokens": each}, "right") for each in tokens]
        assert run.attempt("answers", lambda: run.compare("case", known, 1, lambda _: None)) is holds

    def test_prompts_are_the_tiny_models_and_grow_beyond_them(self) -> None:
        assert question("m", 7, 300, 8)["prompt"] == recite(7, 300, 8).prompt()
        short, long = (len(question("m", 7, tokens, 8)["prompt"]) for tokens in (2000, 8000))
        assert 3.5 < long / short < 4.5
        assert question("m", 7, 8000, 8) != question("m", 8, 8000, 8)


class TestNodes:
    """How nodes are started. That their arguments are compose.yaml's is held by `test_arguments`."""

    def test_each_node_has_its_gpu_role_and_key(self, options: argparse.Namespace) -> None:
        options.gpus = ["3", "1", "1"]
        specs = nodes_of(options, KEY)
        assert [spec.name for spec in specs] == ["prefill", "decode-0", "decode-1"]
        lines, told = zip(*(started(options, spec) for spec in specs), strict=True)
        assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == ["3", "1", "1"]
        assert [line[line.index("--gpu-memory-utilization") + 1] for line in lines] == ["0.900", "0.450", "0.450"]
        roles = [json.loads(line[line.index("--kv-transfer-config") + 1])["kv_role"] for line in lines]
        assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]
        assert len({line[line.index("--port") + 1] for line in lines}) == 3
        assert {each["PDPROXY_TICKET_KEYS"] for each in told} == {KEY}

    def test_nodes_publish_where_the_proxy_asks_for_them(self, options: argparse.Namespace) -> None:
        """On a GPU the proxy got no KV event of nodes that had been given no address."""
        told = [started(options, spec)[1] for spec in nodes_of(options, KEY)]
        assert {each["VLLM_HOST_IP"] for each in told} == {HOST}
        assert {each["VLLM_NIXL_SIDE_CHANNEL_HOST"] for each in told} == {HOST}

    def test_a_models_flags_come_last_and_it_may_have_no_mamba_layers(
        self, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options.flags, [spec, _] = ["--max-model-len=64"], nodes_of(options, KEY)
        assert "--prefix-match-unit=16" in started(options, spec)[0]
        monkeypatch.setenv("RESUME_ARGS", "")
        assert started(options, spec)[0][-1] == "--max-model-len=64"
        assert "--prefix-match-unit=16" not in started(options, spec)[0]

    def test_a_dry_run_is_of_the_nodes_of_the_demo(self, tmp_path: Path) -> None:
        options = options_of(["--cpu", "--folder", str(tmp_path / "x")])
        prefill, decode = nodes_of(options, KEY)
        assert prefill.model == decode.model == NodeSpec("", Role.PREFILL, 0, 0).model
        assert started(options, decode)[1]["PDPROXY_TICKET_KEYS"] == KEY


class TestArchive:
    """The archive has everything that a run left, and no secret of it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        run = tmp_path / "run-1"
        (run / "logs").mkdir(parents=True)
        log = f"started with {KEY}\nauthorization: Bearer abcdefgh12345678\n{HUB}\n"
        (run / "logs" / "prefill.1.log").write_text(log)
        (run / "summary.txt").write_text("all is well\n")
        (run / "elsewhere.txt").symlink_to("/etc/hostname")
        (run / "core").write_bytes(b"\0" * 10)
        return run

    def test_files_of_known_kinds_are_taken_and_secrets_left_out(self, folder: Path) -> None:
        to = folder.with_name("run-1.tar.gz")
        names = pack(folder, to, [KEY.encode()])
        assert names == ["run-1/logs/prefill.1.log", "run-1/summary.txt"]
        log, summary = held(to).values()
        assert summary == b"all is well\n"
        assert log.startswith(b"started with [left out]\n")
        assert not any(each.encode() in log for each in (KEY, HUB, "abcdefgh12345678"))

    def test_an_archive_that_would_hold_a_secret_is_not_left(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu, "without_secrets", lambda content, _: content)
        with pytest.raises(ValueError, match="a secret would be in the archive"):
            pack(folder, folder.with_name("run-1.tar.gz"), [KEY.encode()])
        assert [path.name for path in folder.parent.iterdir()] == ["run-1"]

    def test_names_of_files_are_searched_too(self, folder: Path) -> None:
        (folder / f"{KEY}.txt").write_text("")
        with pytest.raises(ValueError, match="a secret would be in the archive"):
            pack(folder, folder.with_name("run-1.tar.gz"), [KEY.encode()])

    def test_secrets_are_found_by_the_names_of_variables(self, tmp_path: Path) -> None:
        keys = tmp_path / "api.keys"
        keys.write_text("# clients\nfirst-client-key team-a 5\nsecond-client-key\n")
        values = [value.decode() for value in secrets_of({
            "HF_TOKEN": HUB, "PDPROXY_TICKET_KEYS": "one-ticket-key,another-ticket-key",
            "PDPROXY_KEYS_FILE": str(keys), "HTTPS_PROXY": "http://user:a-long-password@proxy:3128",
            "VLLM_API_KEY": "short", "HOME": "/home/somebody", "GIT_AUTHOR_NAME": "Some Body Else",
        })]  # fmt: skip
        assert {HUB, "one-ticket-key", "another-ticket-key", "first-client-key", "second-client-key"} <= set(values)
        assert "a-long-password" in values
        assert not set(values) & {"short", "/home/somebody", "Some Body Else", "team-a", "#"}
        assert values == sorted(values, key=len, reverse=True), "one that holds another is replaced first"

    @pytest.mark.parametrize(
        "secret",
        [HUB, "sk-proj-0123456789abcdef0", "Bearer a1b2c3d4e5f6g7h8", "https://me:p4ssw0rd@host/x",
         "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----"],
    )  # fmt: skip
    def test_what_looks_secret_is_left_out(self, secret: str) -> None:
        kept = without_secrets(f"before {secret} after".encode(), []).decode()
        assert kept.startswith("before ")
        assert kept.endswith(" after")
        assert not any(part in kept for part in (HUB, "0123456789abcdef0", "a1b2c3d4e5f6g7h8", "p4ssw0rd", "MIIE"))

    @pytest.mark.parametrize(
        "plain", ["tcp://127.0.0.1:5600", "http://127.0.0.1:8000/v1?x=a@b", "sk-tiny", "the bearer is"]
    )
    def test_what_is_no_secret_stays(self, plain: str) -> None:
        assert without_secrets(plain.encode(), []) == plain.encode()


class TestRun:
    """A run's course, and its command line."""

    def test_a_machine_that_is_not_fit_starts_nothing_and_is_archived(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(gpu, "run", lambda *_: (False, "Traceback …\nImportError: no nixl"))
        monkeypatch.setattr(gpu, "nodes_of", None)
        logs = run.options.folder / "logs"
        logs.mkdir()
        line = "[17.5] [vm:22:0]  ucp_worker.c:1997 UCX  INFO    02b7 intra-node cfg#0 rma(cuda_ipc/cuda)\n"
        (logs / "decode-0.1.log").write_text(f"started\n{line}{line}")
        assert not run.go()
        said = capsys.readouterr().out
        assert "  FAILED  packages and GPUs: ImportError: no nixl. What to do: pip install nixl" in said
        assert "not all holds: preflight, start, " in said
        files = held(run.options.folder.with_name("run.tar.gz"))
        assert {"run/results.json", "run/settings.txt", "run/summary.txt", "run/nvidia-smi.txt"} <= files.keys()
        assert files["run/versions.txt"].startswith(b"UCX between nodes: intra-node cfg#0 rma(cuda_ipc/cuda)\n")

    def test_what_ran_is_told_without_git_and_of_the_packages_that_are_imported(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for folder, version in (("first", "2.14.0"), ("second", "2.11.0")):
            (about := tmp_path / folder / "twice-0.dist-info").mkdir(parents=True)
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
        (only := tmp_path / "bin").mkdir()
        (only / "sh").symlink_to("/bin/sh")
        monkeypatch.setenv("PATH", str(only))
        assert run.attempt("collect", run.collect)
        versions = held(run.options.folder.with_name("run.tar.gz"))["run/versions.txt"].decode()
        assert "\ntwice: 2.14.0\n" in versions
        assert "git: " in versions.partition("\ncommit: ")[2].partition("\n")[0]

    def test_a_step_that_breaks_off_keeps_what_it_found_and_says_what_to_do(
        self, run: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def breaks() -> None:
            run.check("held", True, "well")
            raise NotReadyError("not up after 9 s: prefill node:\n  | out of memory")

        assert not run.attempt("kills", breaks)
        kept = json.loads((run.options.folder / "results.json").read_text())["kills"]
        assert [check["holds"] for check in kept] == [True, False]
        assert f"out of memory. What to do: {ADVICE['kills']}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("counted", "text", "holds"),
        [
            ([1.0], "right", True),
            ([1.0], "wrong", False),
            ([0.0, 0.0, 2.0], "right", True),
            ([0.0] * 9, "right", False),
        ],
    )
    def test_an_attack_must_be_counted_and_leave_the_answer_right(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, counted: list[float], text: str, holds: bool
    ) -> None:
        def becomes_true(condition: Callable[[], bool]) -> bool:
            return any(condition() for _ in counted)

        looks = iter(counted)
        monkeypatch.setattr(gpu, "whole", lambda *_, **__: {"choices": [{"text": text}]})
        monkeypatch.setattr(gpu, "becomes_true", becomes_true)
        run.urls["decode-0"] = "u"
        step = run.attempt("attacks", lambda: run.attack("a", (ASKED, "right"), {}, lambda: next(looks)))
        assert step is holds

    @pytest.mark.parametrize(("role", "struck"), [(Role.DECODE, "decode-1"), (Role.PREFILL, "prefill")])
    def test_the_node_that_fails_has_streams(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, role: Role, struck: str
    ) -> None:
        """The proxy may use one of two decode nodes alone, as where the other one was slow at its first reads."""
        parts = {name: Part(name, Path(name), cast(Process, None)) for name in ("prefill", "decode-0", "decode-1")}
        for name, part in parts.items():
            run.nodes[name] = Node(NodeSpec(name, Role(name.partition("-")[0]), 0, 0), part)
        run.urls["proxy"] = "http://proxy"
        legs = {"prefill": 1.0, "decode-0": 0.0, "decode-1": 8.0}
        monkeypatch.setattr(gpu, "read", lambda _url, _name, node: legs[node])
        fallen = list[str]()
        monkeypatch.setattr(gpu, "strike", lambda part, _fault: fallen.append(part.name))
        run.strike_under_way(role, ProcessFault.STOPPED, [[(0.0, "")] * 5])
        assert fallen == [struck]

    @pytest.mark.parametrize(
        ("told", "said"),
        [
            ([], "--cpu --model is required"),
            (["--cpu", "--model", "m"], "not allowed with"),
            (["--model", "org/model"], "give --revision the commit"),
            (["--model", "org/model", "--revision", "main"], "give --revision the commit"),
            (["--cpu", "--gpus", "0"], "one for each decode node"),
            (["--cpu", "--folder", "/tmp"], "give each run a new folder"),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, told: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            options_of(told)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err

    def test_a_model_may_be_a_folder_and_flags_follow_two_dashes(self, tmp_path: Path) -> None:
        told = [
            "--model",
            str(tmp_path),
            "--gpus",
            "1",
            "1",
            "--lengths",
            "100",
            "200",
            "--folder",
            str(tmp_path / "x"),
        ]
        options = options_of([*told, "--", "--max-model-len", "64"])
        assert (options.gpus, options.lengths, options.flags) == (["1", "1"], [100, 200], ["--max-model-len", "64"])
