"""The images' files keep their rules: pins, layers, no secrets, no root; what they copy and call exists.

What asks the package index is in tests/extras/test_image_pins.py; a build is `make image-trial`.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.dockerfile import Dockerfile, apt_packages, kept, pip_lines, read, shell_commands
from tests.patience import HANG_S, patient
from tests.tools import ROOT
from tests.tools.slurm_stand_ins import write_program

GPU, CPU = "docker/Dockerfile", "docker/Dockerfile.cpu"
FILES = {name: read((ROOT / name).read_text()) for name in (GPU, CPU)}
SETUP = (ROOT / "setup.py").read_text()
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
BOUND_S = patient(HANG_S)
# Beside console scripts: commands by their apt package, those of every Debian's essential packages, and bash's own.
PROVIDED = {"python3": "python3", "pip": "python3-venv", "tini": "tini", "git": "git", "curl": "curl"}
ESSENTIAL = {"apt-get", "bash", "df", "env", "id", "install", "mktemp", "rm", "tail", "useradd"}
BUILT_IN = {"[", "echo", "exec", "export", "if", "set"}
LABELS = {"title", "description", "licenses", "source", "version", "revision", "created"}
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEYS?$", re.I)
# a key of Hugging Face's or OpenAI's, or a password in an address
SECRET = re.compile(r"\bhf_\w{8}|\bsk-\w{8}|://[^/\s]*:[^/\s]*@")


@functools.cache
def tracked() -> frozenset[str]:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]
    return frozenset(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n"))


@functools.cache
def sent() -> frozenset[str]:
    """The tracked files that .dockerignore leaves for a build."""
    return frozenset(kept(tracked() - {""}, (ROOT / ".dockerignore").read_text()))


def lock_of(file: Dockerfile) -> dict[str, str]:
    """Return the pins of the file that the image installs with -r."""
    (name,) = {pathlib.PurePath(lock).name for run in file.of("RUN") for line in pip_lines(run) for lock in line.locks}
    lines = (ROOT / "docker" / name).read_text().split()
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines) > 40
    return pins


def moving_bases(file: Dockerfile) -> Iterator[str]:
    stages = {each.rest.rpartition(" AS ")[2] for each in file.of("FROM")}
    for each in file.of("FROM"):
        written = each.rest.partition(" AS ")[0]
        image = file.filled(written)
        if image in stages:
            continue
        if not re.fullmatch(r"[\w./-]+:[\w.-]*[\w-]+", image) or re.search(r":(latest|stable|devel|rolling)\b", image):
            yield f"{image}: no tag, or one that names no release"
        digest = re.search(r"\$\{(\w+_DIGEST)\}$", written)
        if digest is None or file.defaults.get(digest[1]) != "":
            yield f"{image}: no place for a digest"


def careless_apt(file: Dockerfile) -> Iterator[str]:
    for run in file.of("RUN"):
        commands = shell_commands(run.rest)
        if ["apt-get", "install"] not in [words[:2] for words in commands]:
            continue
        wanted = (["apt-get", "update"], ["rm", "-rf", "/var/lib/apt/lists/*"])
        yield from (f"line {run.line}: no {' '.join(words)}" for words in wanted if words not in commands)
        if "--no-install-recommends" not in run.rest:
            yield f"line {run.line}: no --no-install-recommends"


def users_of_root(file: Dockerfile) -> Iterator[str]:
    words = [each.word for each in file.last_stage]
    users = [each.rest for each in file.last_stage if each.word == "USER"]
    # a number: Kubernetes' runAsNonRoot cannot look a name up
    if not users or not re.fullmatch(r"[1-9]\d*", users[-1]):
        yield f"USER {users}"
    elif "RUN" in words[words.index("USER") :]:
        yield "a RUN behind USER"


def fetched_files(file: Dockerfile) -> Iterator[str]:
    yield from (f"line {each.line}: ADD; COPY what is there, pip or apt what is not" for each in file.of("ADD"))
    for run in file.of("RUN"):
        calls = {words[0] for words in shell_commands(run.rest)} & {"curl", "wget", "sudo"}
        yield from (f"line {run.line}: {name}" for name in calls)


def secrets(file: Dockerfile) -> Iterator[str]:
    for each in file.of("ENV", "ARG", "LABEL"):
        names = [word.partition("=")[0] for word in re.findall(r"[\w.]+=(?:\"[^\"]*\"|\S*)|^\w+$", each.rest)]
        yield from (f"line {each.line}: {name}" for name in names if SECRET_NAME.search(name))
    yield from (f"line {each.line}: a secret" for each in file.instructions if SECRET.search(each.rest))


def missing_labels(file: Dockerfile) -> Iterator[str]:
    text = "\n".join(each.rest for each in file.last_stage if each.word == "LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    yield from LABELS - set(labels)
    for label, name in (("version", "VERSION"), ("revision", "REVISION"), ("created", "CREATED")):
        if labels.get(label) != f"${{{name}}}" or name not in file.defaults:
            yield f"{label} is no build argument"
    repository = re.search(r'REPOSITORY = "(.+?)"', SETUP)[1]
    licence = re.search(r'license(?:_expression)?="(.+?)"', SETUP)[1]
    if (labels.get("source"), labels.get("licenses")) != (repository, licence):
        yield f"source or licenses are not setup.py's {repository}, {licence}"


def sources(file: Dockerfile) -> set[str]:
    copies = [each for each in file.of("COPY") if not any(flag.startswith("--from") for flag in each.flags)]
    return {source for each in copies for source in each.rest.split()[:-1]}


def missing_sources(file: Dockerfile) -> Iterator[str]:
    for source in sources(file):
        inside = [name for name in tracked() if name == source or name.startswith(f"{source}/")]
        if not inside:
            yield f"{source}: not in the repository"
        elif not set(inside) <= sent():
            yield f"{source}: .dockerignore leaves out {sorted(set(inside) - sent())[:3]}"


def late_layers(file: Dockerfile) -> Iterator[str]:
    """Name a step that a change of the package, or of the commit, repeats without need."""
    steps = file.last_stage
    package = [n for n, each in enumerate(steps) if each.word == "COPY" and "megatron_rl" in each.rest.split()]
    runs = [n for n, each in enumerate(steps) if each.word == "RUN"]
    heavy = [n for n in runs if "-r /opt/pins" in steps[n].rest or "apt-get" in steps[n].rest]
    arguments = [n for n, each in enumerate(steps) if each.rest.split("=")[0] in ("VERSION", "REVISION", "CREATED")]
    if not package or not heavy or min(package) < max(heavy):
        yield "the package is copied before the lock is installed"
    if len(arguments) != 3 or min(arguments) < max(runs):
        yield "VERSION, REVISION or CREATED stand before a RUN"


def loose_pins(file: Dockerfile) -> Iterator[str]:
    for run in file.of("RUN"):
        for line in pip_lines(run):
            held = {"--no-index"} & set(line.flags) or line.constraints
            loose = [word for word in line.requirements if "==" not in word and "${APEX}" not in word]
            if loose and not held:
                yield f"line {run.line}: pip {line.verb} {' '.join(loose)}"
            if not any(word.startswith("--no-cache-dir") for word in line.flags) and not any(
                "target=/root/.cache/pip" in flag for flag in run.flags
            ):
                yield f"line {run.line}: pip's cache stays in the layer"


def unknown_commands(file: Dockerfile) -> Iterator[str]:
    packages = apt_packages(file)
    scripts = set(re.findall(r'"([\w-]+) = megatron_rl[.\w]*:\w+"', SETUP))
    assert {"megatron-rl", "megatron_rl-doctor"} <= scripts
    places = {each.rest.split()[-1]: each.rest.split()[0] for each in file.of("COPY")}
    called = {words[0] for run in file.of("RUN") for words in shell_commands(run.rest)}
    script = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*", "", ENTRYPOINT.read_text(), flags=re.M))
    script = re.sub(r"\becho .*?(?= \|\| |$)", "echo ", script, flags=re.M)
    called |= set(re.findall(r"(?:^|\$\(|[|&;] |\bif (?:! )?|\bthen )\s*([a-z[][\w.-]*)(?= )", script, re.M))
    started = [re.findall(r'"([^"]+)"', each.rest) for each in file.of("ENTRYPOINT", "CMD")]
    called |= {words[0] for words in started}
    called |= {word for words in started for word in words if re.match(r"/usr/", word)}
    called |= set(re.findall(r"exec (\w+) ", " ".join(word for words in started for word in words)))
    for name in called:
        known = name in BUILT_IN | ESSENTIAL | scripts or PROVIDED.get(pathlib.PurePath(name).name) in packages
        if not known and not (name in places and os.access(ROOT / places[name], os.X_OK)):
            yield name
    scripts_called = {word for words in started for word in re.findall(r"/opt/megatron_rl/(\S+\.sh)", " ".join(words))}
    yield from (name for name in scripts_called if name not in sent())


LAWS = (
    *(moving_bases, careless_apt, users_of_root, fetched_files, secrets, missing_labels),
    *(missing_sources, late_layers, loose_pins, unknown_commands),
)
# A text of docker/Dockerfile, what replaces it, and the law that sees it.
PINS_COPIED = "COPY constraints-gpu.txt docker/requirements-gpu.txt /opt/pins/"
FAULTS = (
    ("ubuntu24.04${BASE_DIGEST}", "ubuntu24.04", moving_bases),
    ("cuda:${CUDA}-base-ubuntu24.04", "cuda:latest", moving_bases),
    ("    && rm -rf /var/lib/apt/lists/*", "    && true", careless_apt),
    ("install -y --no-install-recommends g++", "install -y g++", careless_apt),
    ("USER 10001", "USER root", users_of_root),
    ("USER 10001", "USER megatron", users_of_root),
    ("WORKDIR /workspace", "ADD https://example.org/a.tar.gz /opt/", fetched_files),
    ("ARG MAX_JOBS=8", "ARG HF_TOKEN=", secrets),
    ("PYTHONUNBUFFERED=1", "WANDB_API_KEY=1", secrets),
    ("wheel==0.48.0", "wheel==0.48.0 --extra-index-url https://me:word@example.org", secrets),
    ('image.licenses="Apache-2.0"', 'image.licenses="MIT"', missing_labels),
    ("COPY tools /opt", "COPY tests /opt", missing_sources),
    ("COPY examples /opt", "COPY exemplars /opt", missing_sources),
    (PINS_COPIED, PINS_COPIED.replace("docker/", "megatron_rl docker/"), late_layers),
    ("ARG CUDA_APT=13-0", "ARG REVISION=", late_layers),
    ("pip==26.3", "pip", loose_pins),
    ("pip install --no-cache-dir --no-index --no-deps", "pip install --no-index --no-deps", loose_pins),
    ('"megatron-rl", "--help"', '"megatron_rl", "--help"', unknown_commands),
    ("python3-venv tini", "python3-venv", unknown_commands),
    ("/usr/local/bin/entrypoint\n", "/usr/local/bin/entry\n", unknown_commands),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_both_images_are_free_of(law: Callable[[Dockerfile], Iterator[str]]) -> None:
    faults = [f"{name}: {fault}" for name, file in FILES.items() for fault in law(file)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("before", "after", "law"), FAULTS)
def test_a_planted_fault_is_seen_by_its_law(
    before: str, after: str, law: Callable[[Dockerfile], Iterator[str]]
) -> None:
    assert before in FILES[GPU].text
    assert list(law(read(FILES[GPU].text.replace(before, after))))


def test_a_build_reads_what_the_images_copy_and_nothing_else() -> None:
    copied = {name for file in FILES.values() for source in sources(file) for name in tracked()
              if name == source or name.startswith(f"{source}/")}  # fmt: skip
    assert sent() == copied
    # files of a working tree that no image may hold
    left_out = [".git/config", ".env", "runs/a/checkpoints/b", ".venv/bin/python", "megatron_rl/__pycache__/a.pyc"]
    ignore = (ROOT / ".dockerignore").read_text()
    assert not kept([*left_out, "examples/gsm8k/__pycache__/a.pyc", "constraints.txt.orig"], ignore)


def names_asked_for(extras: list[str], python: str) -> set[str]:
    """Return the packages that setup.py asks for with these extras."""
    lists = [re.search(r"    install_requires=\[(.*?)\n    \]", SETUP, re.S)[1]]
    lists += [re.search(rf'^        "{extra}": \[(.*?)\],$', SETUP, re.S | re.M)[1] for extra in extras]
    names = set(re.findall(r'"([\w-]+)(?:\[\w+\])?[><=!]', "\n".join(lists)))
    return names - ({"triton"} if python == "3.11" else set())  # its marker


@pytest.mark.parametrize(
    ("name", "pins", "python", "core"),
    [(GPU, "constraints-gpu.txt", "3.12", ">="), (CPU, "constraints.txt", "3.11", "<")],
)
def test_the_lock_holds_the_pins_and_all_that_the_package_asks_for(
    name: str, pins: str, python: str, core: str
) -> None:
    lock, text = lock_of(FILES[name]), (ROOT / pins).read_text()
    held = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", text, re.M))
    held["megatron-core"] = re.search(rf'^megatron-core==([\w.]+); python_version {core} "3.12"', text, re.M)[1]
    common = set(held) & set(lock)
    assert {"torch", "transformers", "megatron-core"} <= common
    assert {key: lock[key].partition("+")[0] for key in common} == {key: held[key] for key in common}
    asked = [word for run in FILES[name].of("RUN") for line in pip_lines(run) for word in line.requirements]
    (package,) = [word for word in asked if word.startswith("/opt/megatron_rl")]
    names = names_asked_for(re.findall(r"[\w-]+", package.partition("[")[2]), python)
    assert len(names) > 10 and names <= set(lock), names - set(lock)


def test_one_release_of_cuda_in_base_packages_and_torch() -> None:
    file = FILES[GPU]
    release = file.defaults["CUDA"].rpartition(".")[0]
    assert file.defaults["CUDA_APT"] == release.replace(".", "-")
    assert lock_of(file)["nvidia-cuda-runtime"].startswith(f"{release}.")
    assert {each.rest.partition("-")[0] for each in file.of("FROM")} == {"nvidia/cuda:${CUDA}"}


def test_make_writes_the_locks_with_the_image_s_extras() -> None:
    recipe = re.search(r"^image-lock:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    extras = re.search(r"^IMAGE_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert f"[{','.join(extras)}]'" in FILES[GPU].text and "$(IMAGE_EXTRAS)" in recipe
    names = ("constraints-gpu.txt", "constraints.txt", "docker/requirements-gpu.txt", "docker/requirements-cpu.txt")
    assert all(f" {name}" in recipe for name in names)


def enter(tmp_path: pathlib.Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Start the entry point with a stand-in for megatron-rl, which says how it was called and ends with 75."""
    write_program(tmp_path / "bin", "megatron-rl", '#!/usr/bin/env bash\necho "megatron-rl $* in $HOME"\nexit 75\n')
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
    command = ["bash", str(ENTRYPOINT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False)


@pytest.mark.process
def test_the_entry_point_becomes_the_command(tmp_path: pathlib.Path) -> None:
    for given, said in (((), ""), (("--help",), "--help"), (("megatron-rl", "a b"), "a b")):
        done = enter(tmp_path, *given)
        assert (done.returncode, done.stdout, done.stderr) == (75, f"megatron-rl {said} in {tmp_path}\n", "")
    done = enter(tmp_path, "bash", "-c", 'echo "$1"; exit 3', "name", "two words")
    assert (done.returncode, done.stdout) == (3, "two words\n")
    done = enter(tmp_path, HOME="/nowhere")
    home = done.stdout.split()[-1]
    assert done.returncode == 75 and pathlib.Path(home).is_dir() and f"caches go to {home}" in done.stderr
    pathlib.Path(home).rmdir()


@pytest.mark.process
def test_the_scripts_are_sound_bash() -> None:
    for script in sorted((ROOT / "docker").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=BOUND_S)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(script)], check=True, timeout=BOUND_S)


@pytest.mark.process
def test_a_host_without_a_builder_is_told_what_to_install(tmp_path: pathlib.Path) -> None:
    def build(*arguments: str) -> subprocess.CompletedProcess:
        command = [str(tmp_path / "bin/bash"), str(ROOT / "docker/build.sh"), GPU, *arguments]
        environment = {"PATH": str(tmp_path / "bin")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False)

    write_program(tmp_path / "bin", "docker", "#!/usr/bin/env bash\necho 'Cannot connect to the daemon' >&2\nexit 1\n")
    for name in ("bash", "dirname", "git", "sed"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = build()
    assert done.returncode == 1 and "docker does not work: Cannot connect to the daemon" in done.stderr
    assert "no podman" in done.stderr and "no buildah" in done.stderr
    write_program(tmp_path / "bin", "podman", '#!/usr/bin/env bash\necho "podman $*"\n')
    done = build("--build-arg", "A=b c")
    (call,) = [line for line in done.stdout.split("\n") if line.startswith("podman build")]
    assert done.returncode == 0 and f"-f {GPU}" in call and "--build-arg A=b c" in call and "-t megatron_rl:" in call
    assert re.search(r"--build-arg VERSION=\d+\.\d+\.\d+ --build-arg REVISION=[0-9a-f]{40}", call)
