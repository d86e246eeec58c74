"""Build a release of the commit, or check the one in dist/ before anybody uploads it (docs/releasing.md).

Examples:
  python tools/release.py build      # dist/: the sdist, and the wheel made from it; `make dist` does this
  python tools/release.py check      # a line for each thing that a release must be; `make release-check` does this

Needs git and uv, and asks the package index: for setuptools to build with, for twine, and for what the wheel requires.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "megatron_rl/"
PYTHONS = ("3.11", "3.12")  # those that constraints.txt pins a Megatron-Core for
PLATFORM = "x86_64-manylinux_2_28"
# What setuptools writes into an sdist beside the tracked files.
WRITTEN = re.compile(r"PKG-INFO|setup\.cfg|megatron_rl\.egg-info/.*")
DEADLINE_S = 600  # of one program; the index answers in seconds


class Failed(RuntimeError):
    """Says which program failed, and how."""


def said_by(command: Sequence[str], folder: pathlib.Path, *, given: str | None = None, **environment: str) -> str:
    """Return what a command printed; raises Failed with its last lines if it did not end with 0.

    given: the text on its standard input. environment: variables to add.
    """
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, input=given, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False, umask=0o022,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{' '.join(command[:6])} …: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def uv(*words: str) -> list[str]:
    return [sys.executable, "-m", "uv", *words]


def git(root: pathlib.Path, *words: str) -> str:
    return said_by(["git", *words], root).rstrip("\n")


def build_wheel(source: pathlib.Path, out: pathlib.Path, *kinds: str, epoch: str) -> None:
    """Build the distributions of ``source`` into ``out``, in an environment of setuptools alone.

    kinds: uv's options, ``--wheel`` for the wheel of the source itself; none for the sdist and its
        wheel.
    epoch: seconds since 1970 that every file of the wheel is dated by.
    """
    words = uv("build", "--quiet", "--python", sys.executable, "--out-dir", str(out), *kinds, str(source))
    said_by(words, source, SOURCE_DATE_EPOCH=epoch)


def build(root: pathlib.Path, out: pathlib.Path) -> None:
    """Build sdist and wheel of the commit, not of what lies beside it, into ``out``; remove older ones there.

    An egg-info of an older build in the tree would name files for the sdist, so the source is
    git's own copy. The wheel's files are dated by the commit: two builds are equal to the bit.
    """
    for old in [*out.glob("*.whl"), *out.glob("*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "source"
        git(root, "archive", "--format=tar", f"--output={folder}/source.tar", "HEAD")
        with tarfile.open(f"{folder}/source.tar") as archive:
            archive.extractall(source, filter="data")
        build_wheel(source, out, epoch=git(root, "log", "-1", "--format=%ct"))
    if changed := git(root, "status", "--porcelain"):
        print(f"warning: not of the commit, and so not in {out}:\n{changed}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Holds the tree of a release and its two distributions."""

    root: pathlib.Path
    wheel: pathlib.Path
    sdist: pathlib.Path

    @staticmethod
    def in_folder(root: pathlib.Path, dist: pathlib.Path) -> Release:
        """Find the two distributions in ``dist``; raises Failed if there are not exactly one of each."""
        wheels, sdists = [*dist.glob("*.whl")], [*dist.glob("*.tar.gz")]
        if len(wheels) != 1 or len(sdists) != 1:
            raise Failed(f"{dist} holds {len(wheels)} wheels and {len(sdists)} sdists, not one of each; make dist")
        return Release(root=root, wheel=wheels[0].resolve(), sdist=sdists[0].resolve())

    def files(self) -> tuple[pathlib.Path, pathlib.Path]:
        return self.sdist, self.wheel

    @property
    def version(self) -> str:
        text = (self.root / PACKAGE / "__init__.py").read_text(encoding="utf-8")
        return re.search(r'__version__ = "(.+?)"', text).group(1)

    def tracked(self) -> set[str]:
        return {name for name in git(self.root, "ls-files", "-z").split("\0") if name}

    def packed(self) -> dict[str, bytes]:
        """Return the wheel's files by name."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def metadata(self) -> Message:
        (text,) = (content for name, content in self.packed().items() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(text.decode())


def version_faults(release: Release) -> Iterator[str]:
    head = re.search(r"^## (.*)$", (release.root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    if not re.fullmatch(rf"{re.escape(release.version)} \(\d{{4}}-\d\d-\d\d\)", head):
        yield f"the newest heading of CHANGELOG.md is {head!r}, not '{release.version} (its date)'"
    if (built := release.metadata()["Version"]) != release.version:
        yield f"dist/ holds {built}, megatron_rl/__init__.py says {release.version}; make dist"


def tag_faults(release: Release) -> Iterator[str]:
    tag = f"v{release.version}"
    if git(release.root, "tag", "--list", tag):
        tagged, head = (git(release.root, "rev-parse", f"{name}^{{commit}}") for name in (tag, "HEAD"))
        if tagged != head:
            yield f"the tag {tag} is at {tagged[:8]}, and this is {head[:8]}; raise the version in {PACKAGE}__init__.py"


def tree_faults(release: Release) -> Iterator[str]:
    if changed := git(release.root, "status", "--porcelain"):
        yield f"these files differ from the commit: {' '.join(line[3:] for line in changed.splitlines()[:8])}"


def link_faults(release: Release) -> Iterator[str]:
    """Yield each link of the package's page, and each picture of the README, that leads to no tracked file."""
    metadata, tracked = release.metadata(), release.tracked()
    home = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", [])).get("Homepage", "no Homepage")
    for link in re.findall(r"\]\(([^)\s]*)\)", metadata.get_payload()):
        place = re.fullmatch(rf"{re.escape(home)}/(?:raw|blob)/main/([^#]+)(?:#.*)?", link)
        if link.startswith(home) and (not place or place[1] not in tracked):
            yield f"the package's page links to {link}, which is no tracked file"
        elif not re.match(r"https://|#", link):
            yield f"the package's page has the relative link {link}; for_a_package_page of setup.py missed it"
    for picture in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", (release.root / "README.md").read_text(encoding="utf-8")):
        if picture not in tracked:
            yield f"README.md shows {picture}, which is not tracked"


def content_faults(release: Release) -> Iterator[str]:
    """Yield each file by which wheel or sdist differ from the tracked files."""
    tracked, packed = release.tracked(), release.packed()
    ours = {name for name in packed if ".dist-info/" not in name}
    package = {name for name in tracked if name.startswith(PACKAGE)}
    yield from (f"the wheel lacks {name}" for name in sorted(package - ours))
    yield from (f"the wheel has {name}, which is not tracked" for name in sorted(ours - package))
    for name in sorted(ours & package):
        if packed[name] != (release.root / name).read_bytes():
            yield f"{name} of the wheel is not the tree's; make dist"
    with tarfile.open(release.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    yield from (f"the sdist lacks {name}" for name in sorted(package - names))
    yield from (f"the sdist has {x}, which is not tracked" for x in sorted(names - tracked) if not WRITTEN.fullmatch(x))


def rebuild_faults(release: Release) -> Iterator[str]:
    """Yield a fault if the wheel that the sdist gives now is another one, to the byte."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(release.sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = pathlib.Path(folder).iterdir()
        epoch = git(release.root, "log", "-1", "--format=%ct")
        build_wheel(source, pathlib.Path(folder) / "out", "--wheel", epoch=epoch)
        (again,) = (pathlib.Path(folder) / "out").glob("*.whl")
        if again.read_bytes() != release.wheel.read_bytes():
            yield f"the sdist builds another {again.name} than dist/ holds, or of another commit; make dist"


def metadata_faults(release: Release) -> Iterator[str]:
    """Yield what a reader would miss in the metadata: a field, the licence's text, the mark of a typed package."""
    metadata, packed = release.metadata(), release.packed()
    for field in ("Summary", "Author", "Keywords", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not metadata[field]:
            yield f"the metadata has no {field}"
    for name in metadata.get_all("License-File", ["(none)"]):
        if not any(path.endswith(f".dist-info/licenses/{name}") for path in packed):
            yield f"the wheel has no licence file {name}"
    if f"{PACKAGE}py.typed" not in packed:
        yield f"the wheel has no {PACKAGE}py.typed, by which type checkers read its types"


def index_faults(release: Release) -> Iterator[str]:
    """Yield what the package index would refuse: by twine, and by the list of the classifiers that it knows."""
    known = said_by(uv("tool", "run", "--quiet", "trove-classifiers"), release.root).splitlines()
    for classifier in release.metadata().get_all("Classifier", []):
        if classifier not in known:
            yield f"the package index knows no classifier {classifier!r}"
    try:
        said_by(uv("tool", "run", "--quiet", "twine", "check", "--strict", *map(str, release.files())), release.root)
    except Failed as error:
        yield str(error)


def requirement_faults(release: Release) -> Iterator[str]:
    """Yield a fault for each Python on which the wheel and constraints.txt have no solution."""
    for python in PYTHONS:
        words = uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", "-", "-c", "constraints.txt",
                   "--python-version", python, "--python-platform", PLATFORM)  # fmt: skip
        try:
            said_by(words, release.root, given=f"megatron_rl @ {release.wheel.as_uri()}\n")
        except Failed as error:
            yield f"with constraints.txt on Python {python}: {error}"


CHECKS: dict[str, Callable[[Release], Iterator[str]]] = {
    "version and CHANGELOG.md agree": version_faults,
    "the version's tag is free, or this commit's": tag_faults,
    "the tree is the commit": tree_faults,
    "the page's links and pictures lead to files": link_faults,
    "wheel and sdist hold the tracked files": content_faults,
    "the sdist builds the wheel, to the byte": rebuild_faults,
    "metadata, licence and py.typed are there": metadata_faults,
    "the package index takes them (twine, classifiers)": index_faults,
    "requirements resolve with constraints.txt": requirement_faults,
}


def check(release: Release) -> int:
    """Print a line for each check and each of its faults; return the number of faults."""
    count = 0
    for name, faults_of in CHECKS.items():
        faults = list(faults_of(release))
        count += len(faults)
        print(
            "\n".join([f"{'FAULT' if faults else 'ok':7}{name}", *(f"       {fault}" for fault in faults)]), flush=True
        )
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("build", "check"), help="build the commit into dist/, or check what is there")
    parser.add_argument("--dist", type=pathlib.Path, default=ROOT / "dist", help="default: dist/ of the repository")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "build":
            build(ROOT, options.dist)
            release = Release.in_folder(ROOT, options.dist)
            print("\n".join(map(str, release.files())))
            return 0
        return 1 if check(Release.in_folder(ROOT, options.dist)) else 0
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
