"""A release: one version in all places, the command that makes one, and the workflows that publish it."""

import datetime as dt
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.paths import ROOT
from deploy.release import CHANGELOG, PLACES, ReleaseError, Repository, chart, check, main, notes, prepare
from pdproxy import __version__
from tests.helm.engine import engine

TODAY = dt.date(2026, 1, 31)
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PUBLISHED = ("pdproxy", "connector", "helm", "deploy", "docs", "README.md", "compose.yaml", ".env.example")
"""Where something could name the version of a release."""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository with the files that a release writes, each as it is here, committed."""
    made = Repository(tmp_path / "checkout")
    for file in (*PLACES, CHANGELOG):
        (made.root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, made.root / file)
    made.git("init", "--quiet")
    for name, value in (("user.name", "A"), ("user.email", "a@example.org"), ("commit.gpgsign", "false")):
        made.git("config", name, value)
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "before")
    return made


def test_every_place_names_the_version_of_the_source() -> None:
    here = Repository(ROOT)
    assert here.version() == __version__
    assert {version for _, version in here.versions()} == {__version__}


def test_no_other_place_names_it() -> None:
    """Only lines that speak of pdproxy count: vLLM may reach the same number."""
    named = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.]*\d)")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", *PUBLISHED], capture_output=True, text=True, check=True)
    texts = {file: (ROOT / file).read_text(errors="replace") for file in listed.stdout.split()}
    lines = ((file, line) for file, text in texts.items() for line in text.splitlines())
    assert {file for file, line in lines if "pdproxy" in line and named.search(line)} <= PLACES.keys()


def test_a_release_is_one_command(repository: Repository) -> None:
    before = repository.sections()["Unreleased"]
    prepare(repository, "7.8.9", TODAY)
    assert {version for _, version in repository.versions()} == {"7.8.9"}
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("describe") == "v7.8.9"
    check(repository, "v7.8.9")
    assert notes(repository, "v7.8.9") == before
    assert "\n## Unreleased\n\n## 7.8.9 (2026-01-31)\n" in repository.read(CHANGELOG)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("v9.0.0", "'v9.0.0' is no version: use three numbers, such as 1.2.0."),
        ("9.0", "is no version"),
        ("9.0.0rc1", "is no version"),
        ("0.0.1", f"0.0.1 is not newer than {__version__}."),
    ],
)
def test_what_is_no_next_version_is_refused(repository: Repository, version: str, sentence: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(sentence)):
        prepare(repository, version, TODAY)
    assert repository.git("tag") == ""


def test_what_is_not_committed_is_not_released(repository: Repository) -> None:
    repository.write(CHANGELOG, repository.read(CHANGELOG) + "\nmore\n")
    with pytest.raises(ReleaseError, match="not committed"):
        prepare(repository, "9.0.0", TODAY)


def test_a_release_is_made_once_and_has_something_to_say(repository: Repository) -> None:
    prepare(repository, "9.0.0", TODAY)
    for version, sentence in (("9.0.0", "not newer"), ("9.0.1", "has nothing under '## Unreleased'")):
        with pytest.raises(ReleaseError, match=sentence):
            prepare(repository, version, TODAY)


def test_a_tag_that_is_not_the_version_ends_the_workflow(repository: Repository) -> None:
    prepare(repository, "9.0.0", TODAY)
    with pytest.raises(ReleaseError, match=r"the tag is v9\.0\.1, but pdproxy/__init__\.py names 9\.0\.0"):
        check(repository, "v9.0.1")
    repository.write("connector/__init__.py", '__version__ = "9.0.1"\n')
    with pytest.raises(ReleaseError, match=r"connector/__init__\.py names 9\.0\.1"):
        check(repository, "v9.0.0")


def test_a_version_that_was_never_released_has_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notes", "v99.0.0"]) == 1
    assert capsys.readouterr().err == "error: CHANGELOG.md has no section '99.0.0'.\n"


def test_the_published_chart_names_the_published_images(tmp_path: Path) -> None:
    chart(Repository(ROOT), "registry.example/owner", tmp_path / "pdproxy")
    with engine() as helm:
        rendered = helm.of(tmp_path / "pdproxy").render({})
    images = {image.strip('"') for text in rendered.values() for image in re.findall(r"image: (\S+)", text)}
    expected = {f"registry.example/owner/{image}:{__version__}" for image in ("pdproxy", "pdproxy-node")}
    assert images == expected


def test_the_published_chart_passes_the_workflows_check_and_is_packed_under_its_version(tmp_path: Path) -> None:
    folder = tmp_path / "pdproxy"
    chart(Repository(ROOT), "registry.example/owner", folder)
    with engine() as helm:
        helm = helm.of(folder)
        assert helm.lint(yaml.safe_load((folder / "examples/no-gpu.yaml").read_text())) == []
        archive = helm.package()
        assert helm.of(archive).render({}).keys() == helm.render({}).keys()
    assert archive == tmp_path / f"pdproxy-{__version__}.tgz"


class TestWorkflows:
    """Facts of the workflows that can be known without the service that runs them."""

    @staticmethod
    def jobs(file: Path) -> dict[str, Any]:
        return dict(yaml.safe_load(file.read_text())["jobs"])

    def test_the_checks_are_make_test_in_parts(self) -> None:
        [parts] = re.findall(r"(?m)^test: (.*?) ##", (ROOT / "Makefile").read_text())
        test = self.jobs(ROOT / ".github/workflows/checks.yml")["test"]
        assert test["strategy"]["matrix"]["part"] == parts.split()

    @pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
    def test_jobs_need_jobs_that_exist_and_scripts_can_be_read(self, file: Path) -> None:
        jobs = self.jobs(file)
        for job in jobs.values():
            needed = job.get("needs", [])
            assert set([needed] if isinstance(needed, str) else needed) <= jobs.keys()
            for script in (step.get("run", "") for step in job.get("steps", ())):
                done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
                assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
    def test_a_job_has_no_more_rights_than_it_names(self, file: Path) -> None:
        assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
        for step in (step for job in self.jobs(file).values() for step in job.get("steps", ())):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}
            assert "${{" not in step.get("run", ""), "what the event holds comes by the environment, quoted"

    @pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
    def test_a_pipe_fails_where_its_first_command_does(self, file: Path) -> None:
        """GitHub sets `pipefail` only where a workflow names the shell."""
        piped = [
            step for job in self.jobs(file).values() for step in job.get("steps", ()) if "|" in step.get("run", "")
        ]
        assert not piped or yaml.safe_load(file.read_text()).get("defaults") == {"run": {"shell": "bash"}}

    def test_the_chart_is_packed_by_the_helm_that_the_tests_render_with(self) -> None:
        [setup] = (
            step
            for step in self.jobs(ROOT / ".github/workflows/release.yml")["chart"]["steps"]
            if step.get("uses", "").startswith("azure/setup-helm@")
        )
        with engine() as helm:
            assert setup["with"]["version"] == helm.version()

    def test_an_owner_with_capital_letters_can_publish(self, tmp_path: Path) -> None:
        """Names of images and charts in a registry have none. The commands are stubs here."""
        told, output = tmp_path / "told", tmp_path / "output"
        for command in ("python", "helm", "cosign"):
            says = 'echo "Digest: sha256:1a" >&2' if command == "helm" else ":"
            stub = f'#!/bin/sh\necho "{command} $*" >> {told}\ncat > /dev/null\n{says}\n'
            (tmp_path / command).write_text(stub)
            (tmp_path / command).chmod(0o755)
        jobs = self.jobs(ROOT / ".github/workflows/release.yml")
        scripts = [step.get("run", "") for job in ("images", "chart") for step in jobs[job]["steps"]]
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin", "RUNNER_TEMP": "/temp", "GITHUB_OUTPUT": str(output), "TAG": "v1.2.3",
            "REGISTRY": "ghcr.io", "OWNER": "An-Owner", "IMAGE": "pdproxy", "ACTOR": "someone", "TOKEN": "secret",
        }  # fmt: skip
        for script in (script for script in scripts if "OWNER" in script):
            bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
            subprocess.run(bash, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=30, check=True)
        assert output.read_text().split() == ["image=ghcr.io/an-owner/pdproxy", "version=1.2.3"]
        lines = told.read_text().splitlines()
        assert "python -m deploy.release chart ghcr.io/an-owner /temp/pdproxy" in lines
        assert "helm push /temp/pdproxy-1.2.3.tgz oci://ghcr.io/an-owner/charts" in lines
        assert "cosign sign --yes ghcr.io/an-owner/charts/pdproxy@sha256:1a" in lines

    def test_every_image_is_published(self) -> None:
        images = self.jobs(ROOT / ".github/workflows/release.yml")["images"]["strategy"]["matrix"]["include"]
        files = {each["file"] for each in images}
        assert files == {file.stem for file in (ROOT / "deploy/docker").glob("*.Dockerfile")}
