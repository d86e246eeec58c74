"""tools/release.py names each thing by which a wheel and an sdist are not the release of their tree."""

from __future__ import annotations

import io
import pathlib
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable

import pytest
import release

HOME = "https://example.org/project"
PAGE = f"[a]({HOME}/blob/main/docs/a.md) ![b]({HOME}/raw/main/b.png) [c](#c) [d](https://example.org/d)"
METADATA = f"""Metadata-Version: 2.4
Name: megatron_rl
Version: 1.2.3
Summary: s
Author: a
Keywords: k
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Description-Content-Type: text/markdown
Project-URL: Homepage, {HOME}

{PAGE}
"""
TREE = {
    "megatron_rl/__init__.py": '__version__ = "1.2.3"\n',
    "megatron_rl/py.typed": "",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-11-28)\n\n## 1.2.2 (2026-11-01)\n",
    "README.md": "![b](b.png)\n",
    "docs/a.md": "",
    "b.png": "",
    "setup.py": "",
}
LOCAL = ("version_faults", "tag_faults", "tree_faults", "link_faults", "content_faults", "metadata_faults")


def git(root: pathlib.Path, *words: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def pack(root: pathlib.Path, tree: dict[str, str], metadata: str) -> release.Release:
    """Write wheel and sdist of a tree as setuptools does, and return them with it."""
    dist = root.parent / "dist"
    dist.mkdir(exist_ok=True)
    package = {name: text for name, text in tree.items() if name.startswith("megatron_rl/")}
    info = {"METADATA": metadata, "licenses/LICENSE": "", "RECORD": ""}
    with zipfile.ZipFile(dist / "megatron_rl-1.2.3-py3-none-any.whl", "w") as wheel:
        for name, text in {**package, **{f"megatron_rl-1.2.3.dist-info/{x}": y for x, y in info.items()}}.items():
            wheel.writestr(name, text)
    with tarfile.open(dist / "megatron_rl-1.2.3.tar.gz", "w:gz") as sdist:
        for name, text in {**package, "setup.py": "", "PKG-INFO": metadata, "setup.cfg": ""}.items():
            member = tarfile.TarInfo(f"megatron_rl-1.2.3/{name}")
            member.size = len(text.encode())
            sdist.addfile(member, io.BytesIO(text.encode()))
    return release.Release.in_folder(root, dist)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("release") / "tree"
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root.parent, "init", "--quiet", "tree")
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "-m", "all")
    return root


def tag_elsewhere(root: pathlib.Path) -> None:
    git(root, "tag", "v1.2.3")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "more")


def untracked(root: pathlib.Path) -> None:
    (root / "left.txt").touch()


def older_heading(root: pathlib.Path) -> None:
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Next\n")


# What is done to the tree, what is packed other than it, the metadata's change, and what is said.
FAULTS: dict[str, tuple[Callable[[pathlib.Path], None] | None, dict, tuple[str, str], str]] = {
    "nothing": (None, {}, ("", ""), ""),
    "tag": (tag_elsewhere, {}, ("", ""), "the tag v1.2.3 is at"),
    "untracked": (untracked, {}, ("", ""), "these files differ from the commit: left.txt"),
    "heading": (older_heading, {}, ("", ""), "the newest heading of CHANGELOG.md is 'Next'"),
    "older": (None, {}, ("Version: 1.2.3", "Version: 1.2.2"), "dist/ holds 1.2.2, megatron_rl/__init__.py says 1.2.3"),
    "more": (None, {"megatron_rl/left.py": ""}, ("", ""), "the wheel has megatron_rl/left.py, which is not tracked"),
    "other": (None, {"megatron_rl/py.typed": "x"}, ("", ""), "megatron_rl/py.typed of the wheel is not the tree's"),
    "relative": (None, {}, ("[c](#c)", "[c](docs/a.md)"), "the package's page has the relative link docs/a.md"),
    "dead": (None, {}, ("main/docs/a.md", "main/docs/z.md"), "docs/z.md, which is no tracked file"),
    "licence": (None, {}, ("License-File: LICENSE", "License-File: COPYING"), "the wheel has no licence file COPYING"),
    "field": (None, {}, ("Author: a\n", ""), "the metadata has no Author"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_a_release_without_one_passes(committed, tmp_path, fault: str) -> None:
    change, packed, (before, after), said = FAULTS[fault]
    root = shutil.copytree(committed, tmp_path / "tree")
    if change:
        change(root)
    made = pack(root, TREE | packed, METADATA.replace(before, after) if before else METADATA)
    faults = [found for name in LOCAL for found in getattr(release, name)(made)]
    assert not faults if fault == "nothing" else said and any(said in found for found in faults), faults


def test_the_tag_of_this_commit_is_no_fault(committed, tmp_path) -> None:
    root = shutil.copytree(committed, tmp_path / "tree")
    git(root, "tag", "-a", "-m", "1.2.3", "v1.2.3")
    assert not [*release.tag_faults(pack(root, TREE, METADATA))]


def test_a_file_that_the_package_lacks_and_a_second_wheel_are_named(committed, tmp_path) -> None:
    root = shutil.copytree(committed, tmp_path / "tree")
    made = pack(root, {name: text for name, text in TREE.items() if name != "megatron_rl/py.typed"}, METADATA)
    said = {*release.content_faults(made), *release.metadata_faults(made)}
    assert {"the wheel lacks megatron_rl/py.typed", "the sdist lacks megatron_rl/py.typed"} < said and len(said) == 3
    shutil.copy(made.wheel, made.wheel.with_name("megatron_rl-1.2.2-py3-none-any.whl"))
    with pytest.raises(release.Failed, match="2 wheels and 1 sdists, not one of each"):
        release.Release.in_folder(root, made.wheel.parent)
    assert {release.CHECKS[name].__name__ for name in release.CHECKS} > set(LOCAL)
