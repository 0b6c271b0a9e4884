"""Which container engine is taken, and what is said where none can be; the engines are shell scripts here."""

from pathlib import Path

import pytest

from deploy import container_engine, images
from deploy.container_engine import ContainerEngine, ContainerEngineError, find
from deploy.images import ImageError
from deploy.local.paths import ROOT
from tests.deploy.compose import resolved
from tests.deploy.dockerfile import stages

ANSWERS = "exit 0"
HAS_NO_DAEMON = "echo 'Cannot connect to the daemon' >&2; exit 1"
HAS_NO_COMPOSE = """[ "$1" != compose ] || {
    echo "docker: unknown command: docker compose" >&2
    echo >&2
    echo "Run 'docker --help' for more information" >&2
    exit 1
}"""
"""As docker 28 says it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(container_engine, "COMPOSE", {"docker": ("docker", "compose"), "podman": ("podman-compose",)})
    monkeypatch.setattr(container_engine, "LOGS", tmp_path / "logs")
    return tmp_path


def install(folder: Path, command: str, script: str = ANSWERS) -> None:
    (folder / command).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / command).chmod(0o755)


class TestChoice:
    """`find`."""

    def test_docker_is_taken_where_both_answer(self, folder: Path) -> None:
        for command in ("docker", "podman", "podman-compose"):
            install(folder, command)
        assert find() == ContainerEngine("docker", ("docker", "compose"))
        assert find(["podman"]) == ContainerEngine("podman", ("podman-compose",))

    @pytest.mark.parametrize("docker", [HAS_NO_DAEMON, HAS_NO_COMPOSE])
    def test_podman_is_taken_where_docker_cannot_be_used(self, folder: Path, docker: str) -> None:
        install(folder, "docker", docker)
        install(folder, "podman")
        install(folder, "podman-compose")
        assert find().command == "podman"

    def test_the_error_says_what_is_missing_of_each(self, folder: Path) -> None:
        install(folder, "docker", HAS_NO_DAEMON)
        with pytest.raises(ContainerEngineError) as caught:
            find()
        lines = str(caught.value).splitlines()
        said = "docker ps --quiet ended with status 1: Cannot connect to the daemon"
        assert f"  docker: installed, but it does not answer: {said}" in lines
        assert "  podman: not installed" in lines

    def test_an_engine_without_compose_is_told_from_one_that_does_not_answer(self, folder: Path) -> None:
        install(folder, "docker", HAS_NO_COMPOSE)
        reason = (
            "docker: it answers, but has no compose: .* status 1: docker: unknown command: docker compose Run 'docker"
        )
        with pytest.raises(ContainerEngineError, match=reason):
            find(["docker"])

    def test_the_command_ends_with_that_error(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert images.main([]) == 1
        assert "podman: not installed" in capsys.readouterr().err


class TestContainer:
    """Commands about one container."""

    def test_its_log_is_kept_and_it_is_removed_where_a_check_fails(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        install(folder, "docker", f'echo "$1" >> {folder}/told; [ "$1" != logs ] || echo "no such model"')
        engine = find(["docker"])
        with pytest.raises(ContainerEngineError, match="it is not well"), engine.running("pdproxy"):
            raise ContainerEngineError("it is not well")
        assert "  | no such model" in capsys.readouterr().err
        assert (folder / "logs" / f"{container_engine.CHECKED}.log").read_text() == "no such model\n"
        assert (folder / "told").read_text().split()[-4:] == ["rm", "run", "logs", "rm"]

    def test_an_image_without_a_health_check_is_told(self, folder: Path) -> None:
        install(folder, "docker", "echo null")
        with pytest.raises(ContainerEngineError, match="no health check: build it with --format docker"):
            find(["docker"]).await_healthy("proxy", within=5)

    def test_one_that_ended_is_not_waited_for(self, folder: Path) -> None:
        install(
            folder,
            "docker",
            'case "$*" in exec*) exit 1;; *Healthcheck*) echo \'{"Test": ["CMD", "true"]}\';; '
            "*ExitCode*) echo 3;; *Running*) echo false;; esac",
        )
        with pytest.raises(ContainerEngineError, match="proxy has ended with status 3"):
            find(["docker"]).await_healthy("proxy", within=5)


def test_a_proxy_whose_build_found_no_compiler_is_refused(folder: Path) -> None:
    """The proxy serves without the scan, and takes more CPU: no other check sees that."""
    install(folder, "docker", 'case "$*" in *scan*) echo Python;; esac')
    with pytest.raises(ImageError, match="no compiled scan"):
        images.check_scan(find(["docker"]))
    install(folder, "docker", 'case "$*" in *scan*) echo C;; esac')
    images.check_scan(find(["docker"]))


class TestNames:
    """The command builds the images that compose.yaml runs."""

    def test_images_and_dockerfiles_are_those_of_the_profile(self) -> None:
        services = resolved("cpu")
        assert services.keys() == {*images.SERVICES, "admin-token", "cpu-env-check"}
        assert {each["image"]: each["build"]["dockerfile"] for each in services.values()} == images.DOCKERFILES

    def test_a_node_without_arguments_does_not_compile(self) -> None:
        """The image forbids dynamo, without which vLLM starts only eagerly."""
        last = stages(ROOT / images.DOCKERFILES[images.NODE])[-1]
        assert last.environment({})["TORCHDYNAMO_DISABLE"] == "1"
        assert "--enforce-eager" in last.listed("CMD")
