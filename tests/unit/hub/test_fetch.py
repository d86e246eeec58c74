"""hub/: names become local folders, against a mirror of the hub: what is fetched, kept, pinned, shared and refused."""

import json
import logging
import pathlib
import sys
from collections.abc import Iterator

import pytest

from megatron_rl import hub
from megatron_rl.config import Config, config_to_dict, load_config
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError
from megatron_rl.hub.fetch import lacks_weights
from megatron_rl.hub.names import HubName, Kind, name_of
from megatron_rl.hub.resolve import fetched_folder
from tests.hub_mirror import Mirror, commit, mirrored

SHARDS = {f"model-{n}-of-2.safetensors": bytes([n]) * 70_000 for n in (1, 2)}
INDEX = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
SMALL = {"config.json": b'{"model_type": "qwen2"}', "tokenizer.json": b"{}", "merges.txt": b"a b", "LICENSE": b"free"}
SMALL |= {"additional_chat_templates/other.jinja": b"{{ x }}", "generation_config.json": b"{ }"}
# What no run may fetch: pickles, code, other formats, a second copy in a folder.
OTHER = {"pytorch_model.bin": b"pickle", "modeling_own.py": b"raise SystemExit", "original/consolidated.00.pth": b"p",
         "original/params.json": b"{}", "onnx/model.onnx": b"o", "model.gguf": b"g"}  # fmt: skip
MODEL = SMALL | OTHER | {"model.safetensors": b"w" * 1000}
SHARDED = SMALL | OTHER | SHARDS | {"model.safetensors.index.json": INDEX, "consolidated.safetensors": b"c"}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: hard
  data_files: [{split: train, path: hard.parquet}]
---
"""


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"prompt": "%d", "answer": "%d"}\n' % (n, n + 1) for n in numbers)


SUMS = {"README.md": CARD, "main/train-1.jsonl": lines(3), "main/train-0.jsonl": lines(1, 2),
        "main/test-0.jsonl": lines(9), "hard.parquet": b""}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Mirror]:
    """Serve a mirror that this process's clients take for the hub: they read their variables when imported."""
    import datasets
    from huggingface_hub import constants

    with mirrored() as mirror, pytest.MonkeyPatch.context() as patch:
        points_to(patch, mirror.url)
        patch.setattr(datasets.config, "HF_ENDPOINT", mirror.url)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        yield mirror


def points_to(patch: pytest.MonkeyPatch, url: str) -> None:
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def mirror(served, monkeypatch, tmp_path) -> Mirror:
    """Give the test an empty cache, a working folder of its own, and the repositories anew."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.chdir(tmp_path)
    for one in (served.repos, served.heads, served.gated, served.cut, served.asked, served.tokens):
        one.clear()
    served.push("models", "me/tiny", MODEL)
    served.push("models", "me/sharded", SHARDED)
    served.push("datasets", "me/sums", SUMS)
    served.push("datasets", "me/plain", {"train.csv": b"prompt,answer\n1,2\n", "test.csv": b"prompt,answer\n3,4\n"})
    return served


def fetched(*overrides: str, run: str = "run", **given) -> Config:
    return hub.fetched(load_config(None, [*overrides, f"run.dir={run}", "run.deadline_s=60"]), **given)


def held(folder: str) -> set[str]:
    return {str(x.relative_to(folder)) for x in pathlib.Path(folder).rglob("*") if x.is_file()}


@pytest.mark.parametrize(
    ("value", "kind", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", Kind.MODEL, HubName(repo="Qwen/Qwen2.5-0.5B")),
        ("a/b@refs/pr/3", Kind.MODEL, HubName(repo="a/b", revision="refs/pr/3")),
        ("openai/gsm8k:main/test@e53f", Kind.DATA,
         HubName(repo="openai/gsm8k", subset="main", split="test", revision="e53f")),
        ("a/b:/test", Kind.DATA, HubName(repo="a/b", split="test")),
        ("a/b:main", Kind.DATA, HubName(repo="a/b", subset="main")),
        *((path, Kind.MODEL, None) for path in ("/a/b", "./a/b", "a/b/c", "a", "", "~/b", "../b", "a/.b")),
        *((path, Kind.DATA, None) for path in ("data/train.jsonl", "data/x.PARQUET", "data/*", "here/model")),
    ],
)  # fmt: skip
def test_a_name_is_told_from_a_path(value, kind, name, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/model").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        found = name_of(value, kind, "a.key")
    assert found == name and (name is None or str(name) == value)
    assert ("here/model is a path on this host; the hub is not asked" in caplog.text) == (value == "here/model")


def test_a_model_is_its_safetensors_configs_and_tokenizer_and_is_fetched_once(mirror):
    config = fetched("model.hf_path=me/tiny", "critic.hf_path=me/sharded", "model.tokenizer_path=me/sharded")
    assert held(config.model.hf_path) == {*SMALL, "model.safetensors"}
    assert held(config.critic.hf_path) == {*SMALL, *SHARDS, "model.safetensors.index.json"}
    assert config.critic.hf_path == config.model.tokenizer_path
    for name in (*SHARDS, "config.json"):
        assert pathlib.Path(config.critic.hf_path, name).read_bytes() == SHARDED[name]
    before = mirror.downloads()
    assert fetched("model.hf_path=me/tiny", "critic.hf_path=me/sharded", "model.tokenizer_path=me/sharded") == config
    assert mirror.downloads() == before and not set(before) & set(OTHER)
    assert not lacks_weights(config.model.hf_path) and not lacks_weights(config.critic.hf_path)
    assert hub.with_names(config).model.hf_path == f"me/tiny@{mirror.heads['models', 'me/tiny']}"
    assert hub.repo_of(config.model.hf_path) == "me/tiny" and hub.repo_of("/a/b") == "/a/b"
    assert fetched_folder(pathlib.Path("me/sharded"), "SOURCE") == pathlib.Path(config.critic.hf_path)


def test_a_dry_run_fetches_no_weights_and_writes_nothing(mirror):
    for name in ("me/tiny", "me/sharded"):
        config = fetched(f"model.hf_path={name}", weights=False, pins=False)
        assert held(config.model.hf_path) == set(SMALL) and lacks_weights(config.model.hf_path)
    config = fetched("model.hf_path=me/tiny", "model.init=random", pins=False)
    assert held(config.model.hf_path) == set(SMALL) and not pathlib.Path("run").exists()


@pytest.mark.parametrize(
    ("given", "rows", "named"),
    [
        ("data.train=me/sums:main", lines(1, 2, 3), "me/sums:main/train"),
        ("data.train=me/sums:main/test", lines(9), "me/sums:main/test"),
        ("eval.path=me/sums:main/test", lines(9), "me/sums:main/test"),
        ("data.train=me/plain", b'{"prompt": "1", "answer": "2"}', "me/plain:default/train"),
        ("eval.sets.x=me/plain:test", b'{"prompt": "3", "answer": "4"}', "me/plain:default/test"),
    ],
)
def test_a_split_of_data_is_its_rows_in_order(mirror, given, rows, named):
    config = fetched(given)
    (path,) = [*config.data.train, *config.eval.named_sets.values()]
    assert list(load_rows(path)) == [json.loads(line) for line in rows.splitlines()]
    asked, named = mirror.downloads(), f"{named}@{mirror.heads['datasets', named.partition(':')[0]]}"
    back = hub.with_names(config)  # as config.yaml holds it
    assert [*back.data.train, *back.eval.named_sets.values()] == [named]
    assert fetched(given) == config == hub.fetched(load_config(config_to_dict(back)))
    assert mirror.downloads() == asked


def test_a_run_that_resumes_reads_the_commits_that_it_began_with(mirror):
    given = ("model.hf_path=me/tiny", "data.train=[me/sums:main,me/plain]", "eval.path=me/sums:main/test")
    config = fetched(*given)
    mirror.push("models", "me/tiny", MODEL | {"config.json": b"{}"})
    mirror.push("datasets", "me/sums", SUMS | {"main/train-0.jsonl": lines(7)})
    assert fetched(*given) == config and json.loads(pathlib.Path("run/hub.json").read_text()) == {
        "models/me/tiny@main": commit(0), "datasets/me/sums@main": commit(0), "datasets/me/plain@main": commit(0)
    }  # fmt: skip
    for other in (fetched(*given, run="other"), fetched(*given, "checkpoint.resume=never")):
        assert pathlib.Path(other.model.hf_path).name == commit(1) and config.data.train[0] != other.data.train[0]
        assert [row["prompt"] for row in load_rows(other.data.train)] == ["7", "3", "1"]
    assert fetched(*given) != config  # the new start wrote its own
    assert fetched(f"model.hf_path=me/tiny@{commit(0)}", run="other").model == config.model


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("model.hf_path=me/none", ["'me/none' is no path on this host", "shows no model of that name", "HF_TOKEN"]),
        ("data.train=me/none", ["data.train[0]='me/none' is no path on this host", "shows no data set of that name"]),
        ("teacher.hf_path=me/gated", ["'me/gated' is gated: accept its terms at", "HF_TOKEN (HF_TOKEN is not set)"]),
        ("model.hf_path=me/tiny@v9", ["no revision 'v9' of it"]),
        ("model.hf_path=me/pickled", ["neither model.safetensors nor", "a pickle can run code"]),
        ("model.hf_path=me/tiny:main", ["a model on the hub is owner/name or owner/name@revision"]),
        ("model.hf_path=a..b/c", ["shows no model of that name"]),
        ("data.train=me/sums", ["name one of its configurations, main, hard, as in me/sums:main"]),
        ("data.train=me/sums:none", ["name one of its configurations, main, hard"]),
        ("eval.path=me/sums:main", ["name one of its splits, train, test, as in me/sums:main/test"]),
        ("data.train=me/sums:main/dev", ["name one of its splits, train, test"]),
        ("data.train=me/scripted", ["datasets finds no data there", "scripts are no longer supported"]),
        ("data.train=me/texts", ["'train.txt' is of no form that is read here (.jsonl, "]),
        ("data.train=me/away", ["datasets finds no data there", "don't belong to me/away"]),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence_with_the_way_out(mirror, given, words):
    mirror.push("models", "me/gated", MODEL)
    mirror.push("models", "me/pickled", SMALL | OTHER)
    mirror.push("datasets", "me/scripted", {"scripted.py": b"raise SystemExit", "train.jsonl": lines(1)})
    mirror.push("datasets", "me/texts", {"train.txt": b"a"})
    card = b"---\nconfigs:\n- {config_name: a, data_files: 'hf://datasets/me/plain/train.csv'}\n---\n"
    mirror.push("datasets", "me/away", {"README.md": card, "train.csv": b"prompt\n1\n"})
    mirror.gated.add("me/gated")
    with pytest.raises(ConfigError) as raised:
        fetched(given)
    assert all(word in str(raised.value) for word in words) and "\n" not in str(raised.value), str(raised.value)
    assert not set(mirror.downloads()) & {"pytorch_model.bin", "train.txt", "train.csv"}


def test_what_is_missing_or_damaged_here_is_named(mirror, monkeypatch):
    fetched("model.hf_path=me/tiny")
    pathlib.Path("run/hub.json").write_text(json.dumps({"models/me/tiny@main": "soon"}))
    with pytest.raises(ConfigError, match="run/hub.json: 'models/me/tiny@main' is 'soon', no commit; mend or remove"):
        fetched("model.hf_path=me/tiny")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"whose splits the package datasets knows.*'megatron_rl\[data\]'"):
        fetched("data.train=me/plain", run="other")


def test_a_token_opens_a_gated_model_and_stands_in_no_message(mirror, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    mirror.push("models", "me/gated", MODEL)
    mirror.gated.add("me/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_secret0123")
    config = fetched("model.hf_path=me/gated")
    assert mirror.tokens == {"Bearer hf_secret0123"} and held(config.model.hf_path) > {"model.safetensors"}
    with pytest.raises(ConfigError, match="shows no model") as raised:
        fetched("model.hf_path=me/none")
    assert "hf_secret0123" not in f"{raised.value} {caplog.text} {pathlib.Path('run/hub.json').read_text()}"


def test_a_download_that_is_cut_goes_on(mirror):
    mirror.cut |= set(SHARDS)
    config = fetched("model.hf_path=me/sharded")
    assert all(pathlib.Path(config.model.hf_path, name).read_bytes() == SHARDS[name] for name in SHARDS)
    assert [mirror.downloads()[name] for name in SHARDS] == [2, 2] and not mirror.cut


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "down"])
def test_without_a_network_the_cache_serves_what_it_holds(mirror, monkeypatch, how):
    whole = ("data.train=me/sums:main",) if "DATA" in how else ("data.train=me/sums:main", "model.hf_path=me/sharded")
    config, thin = fetched(*whole, pins=False), fetched("model.hf_path=me/tiny", weights=False, pins=False)
    asked = mirror.asked.total()
    if how == "down":
        points_to(monkeypatch, "http://127.0.0.1:9")
        words = "not whole in the cache .* cannot be reached .*; start again to go on, or copy the {} here"
    else:
        monkeypatch.setenv(how, "1")
        words = f"not whole in the cache .*, and {how} forbids the network; fetch it where .* .hf download me/"
    assert fetched(*whole, pins=False) == config == fetched(*whole)
    if "DATA" not in how:
        assert fetched("model.hf_path=me/tiny", weights=False) == thin
    if how == "HF_HUB_OFFLINE":  # huggingface_hub tries for 23 s to reach a server that is down for a file
        with pytest.raises(ConfigError, match=words.format("model")):
            fetched("model.hf_path=me/tiny")
    for absent in ("me/plain",) if how == "down" else ("me/plain", "me/sums:main/test"):
        with pytest.raises(ConfigError, match=words.format("data set")):
            fetched(f"data.train={absent}")
    assert mirror.asked.total() == asked


def on_a_rank(rank: int, world: int, url: str, folder: str, name: str) -> str:
    """Fetch a model as a rank of one node does; return its folder, or the message of its error."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        points_to(patch, url)
        patch.setattr(constants, "HF_HUB_CACHE", f"{folder}/cache")
        patch.setenv("LOCAL_RANK", str(rank))
        patch.chdir(folder)
        try:
            return fetched(f"model.hf_path={name}").model.hf_path
        except ConfigError as error:
            return str(error)


def test_of_two_ranks_one_fetches_and_both_read_or_fail(mirror, pool, tmp_path):
    first, second = pool.run(2, on_a_rank, mirror.url, str(tmp_path), "me/sharded", timeout_s=60)
    assert first == second and held(first) == {*SMALL, *SHARDS, "model.safetensors.index.json"}
    assert {mirror.downloads()[name] for name in (*SHARDS, *SMALL)} == {1}
    first, second = pool.run(2, on_a_rank, mirror.url, str(tmp_path), "me/none", timeout_s=60)
    assert first == second and "shows no model of that name" in first
