"""Make a release (`make release VERSION=1.2.0`), and take the steps of the workflow that publishes it.

The version's source is `pdproxy/__init__.py`. All `PLACES` repeat it, since what reads those files cannot look
elsewhere. `prepare` writes them all, and a test says when one disagrees.

    prepare VERSION          write the version and the changelog's heading, commit, and tag the commit
    check TAG                fail unless the tag, every place and the changelog name one version
    notes TAG                print the changelog's section of that release
    chart REGISTRY FOLDER    copy the chart, with the names of images that are in a registry
"""

import argparse
import datetime as dt
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.paths import ROOT

PYTHON_SOURCE = r'(?m)^__version__ = "([^"]+)"$'
IMAGE_TAG = r"\bpdproxy(?:-cpu-node|-node)?:([0-9][^\s&]*)"
PLACES = {
    "pdproxy/__init__.py": (PYTHON_SOURCE,),
    "connector/__init__.py": (PYTHON_SOURCE,),
    "helm/pdproxy/Chart.yaml": (r"(?m)^version: (.+)$", r"(?m)^appVersion: (.+)$"),
    "helm/pdproxy/values.yaml": (r'repository: pdproxy-node, tag: "([^"]+)"',),
    "helm/pdproxy/README.md": (IMAGE_TAG,),
    "helm/pdproxy/ci/full-values.yaml": (r'repository: registry.example/pdproxy, tag: "([^"]+)"',),
    "helm/pdproxy/examples/no-gpu.yaml": (IMAGE_TAG, r"repository: pdproxy-cpu-node, tag: ([0-9][^ ]*)"),
}
"""File → patterns, each with the version as its one group. The first file is the source."""
SOURCE = next(iter(PLACES))
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## Unreleased\n"
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""The form of a version that Python, Helm and images all accept: three numbers."""
CHART = "helm/pdproxy"
REPOSITORY = re.compile(r"\{ repository: (pdproxy(?:-node)?),")


class ReleaseError(Exception):
    """The release cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Repository:
    """A checkout of the project."""

    root: Path

    def read(self, file: str) -> str:
        return (self.root / file).read_text(encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        (self.root / file).write_text(text, encoding="utf-8")

    def git(self, *words: str) -> str:
        """Git's output. Raises ReleaseError with what git said."""
        done = subprocess.run(["git", "-C", str(self.root), *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ReleaseError(f"git {words[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    def versions(self) -> Iterator[tuple[str, str]]:
        """Each place that names the version: its file, and what is there. Raises ReleaseError where a place is gone."""
        for file, patterns in PLACES.items():
            for pattern in patterns:
                found = re.findall(pattern, self.read(file))
                if not found:
                    raise ReleaseError(f"{file}: nothing matches {pattern!r}: mend PLACES in deploy/release.py.")
                yield from ((file, each) for each in found)

    def version(self) -> str:
        """The version that the source names."""
        return next(version for file, version in self.versions() if file == SOURCE)

    def set_version(self, version: str) -> None:
        """Write it in all places."""
        for file, patterns in PLACES.items():
            text = self.read(file)
            for pattern in patterns:
                text = re.sub(pattern, lambda found: found[0].replace(found[1], version), text)
            self.write(file, text)

    def sections(self) -> Mapping[str, str]:
        """The changelog's releases, by version: the text below each heading."""
        _, *parts = re.split(r"(?m)^## ", self.read(CHANGELOG))
        split = (part.partition("\n") for part in parts)
        return {heading.split()[0]: text.strip() for heading, _, text in split}


def require_version(text: str) -> tuple[int, ...]:
    """The three numbers. Raises ReleaseError for anything else."""
    if not VERSION.fullmatch(text):
        raise ReleaseError(f"{text!r} is no version: use three numbers, such as 1.2.0.")
    return tuple(int(part) for part in text.split("."))


def prepare(repository: Repository, version: str, today: dt.date) -> None:
    """Commit and tag a release. Raises ReleaseError before anything is written where it cannot be made."""
    released = repository.sections().keys() - {"Unreleased"}
    if require_version(version) < require_version(repository.version()) or version in released:
        raise ReleaseError(f"{version} is not newer than {repository.version()}.")
    if repository.git("status", "--porcelain"):
        raise ReleaseError("there are changes that are not committed: commit or stash them.")
    if repository.git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} is there already.")
    if not repository.sections().get("Unreleased"):
        raise ReleaseError(f"{CHANGELOG} has nothing under {UNRELEASED.strip()!r}: write what a user notices.")
    repository.set_version(version)
    heading = f"{UNRELEASED}\n## {version} ({today.isoformat()})\n"
    repository.write(CHANGELOG, repository.read(CHANGELOG).replace(UNRELEASED, heading, 1))
    repository.git("commit", "--all", "--message", f"Release {version}")
    repository.git("tag", "--annotate", f"v{version}", "--message", f"Release {version}")


def check(repository: Repository, tag: str) -> None:
    """Raise ReleaseError unless a tag, every place and the changelog name one version."""
    version = tag.removeprefix("v")
    require_version(version)
    other = [f"{file} names {found}" for file, found in repository.versions() if found != version]
    if other:
        raise ReleaseError(f"the tag is {tag}, but " + ", ".join(dict.fromkeys(other)) + ".")
    notes(repository, tag)


def notes(repository: Repository, tag: str) -> str:
    """The changelog's notes on a release. Raises ReleaseError where there are none."""
    text = repository.sections().get(tag.removeprefix("v"), "")
    if not text:
        raise ReleaseError(f"{CHANGELOG} has no section {tag.removeprefix('v')!r}.")
    return text


def chart(repository: Repository, registry: str, folder: Path) -> None:
    """Copy the chart to a folder, and put the registry before its images. Raises ReleaseError."""
    shutil.copytree(repository.root / CHART, folder)
    values = folder / "values.yaml"
    named, count = REPOSITORY.subn(rf"{{ repository: {registry}/\1,", values.read_text(encoding="utf-8"))
    if count != 2:
        raise ReleaseError(f"{CHART}/values.yaml names {count} images of ours, and should name two.")
    values.write_text(named, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("version")
    commands.add_parser("check").add_argument("tag")
    commands.add_parser("notes").add_argument("tag")
    copying = commands.add_parser("chart")
    copying.add_argument("registry")
    copying.add_argument("folder", type=Path)
    asked = parser.parse_args(arguments)
    repository = Repository(ROOT)
    try:
        match asked.command:
            case "prepare":
                prepare(repository, asked.version, dt.datetime.now(dt.UTC).date())
                print(f"Committed and tagged. To publish: git push --atomic origin HEAD v{asked.version}")
            case "check":
                check(repository, asked.tag)
            case "notes":
                print(notes(repository, asked.tag))
            case "chart":
                chart(repository, asked.registry, asked.folder)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
