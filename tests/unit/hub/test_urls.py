"""What a URL names is copied once, whole and without code, and is the URL again in a configuration that is written."""

import json
import pathlib

import pytest

from megatron_rl.config import load_config
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError
from megatron_rl.hub import settings
from megatron_rl.hub.fetch import lacks_weights
from megatron_rl.hub.names import Kind, url_of_path
from megatron_rl.hub.urls import copy_of
from megatron_rl.storage.location import location
from tests.workers.inputs import ROOT

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "LICENSE": b"free",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "onnx/model.onnx": b"copy",
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Give an empty folder of memory://, and an empty cache of copies."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    place = location(f"memory://{tmp_path.name}")
    yield place
    place.remove_tree()


def put(place, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (place / name).write_bytes(content)


def rows(*answers: int) -> bytes:
    return b"".join(json.dumps({"prompt": "p", "answer": x}).encode() + b"\n" for x in answers)


def data_of(url: str) -> str:
    return copy_of(Kind.DATA, url, "data.train", weights=False)


def test_a_models_copy_holds_its_files_and_neither_pickle_nor_code(store) -> None:
    put(store / "model", MODEL)
    small = pathlib.Path(copy_of(Kind.MODEL, f"{store}/model", "model.hf_path", weights=False))
    whole = pathlib.Path(copy_of(Kind.MODEL, f"{store}/model", "model.hf_path", weights=True))
    names = ["LICENSE", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(x.name for x in whole.iterdir()) == names
    assert sorted(x.name for x in small.iterdir()) == [x for x in names if x != "model.safetensors"]
    assert (whole / "model.safetensors").read_bytes() == b"weights"
    assert lacks_weights(small) and not lacks_weights(whole)
    assert url_of_path(str(whole)) == url_of_path(str(small)) == f"{store}/model"


def test_an_object_a_pattern_and_a_folder_are_read_as_those_of_the_disk(store) -> None:
    put(store, {"a/one.jsonl": rows(1, 2), "a/two.jsonl": rows(3), "a/note.txt": b"not matched", "b/x.jsonl": rows(9)})
    assert [x["answer"] for x in load_rows(data_of(f"{store}/a/one.jsonl"))] == [1, 2]
    found = load_rows(data_of(f"{store}/a/*.jsonl"))
    assert [x["answer"] for x in found] == [1, 2, 3] and found.place(2).endswith("two.jsonl:1")
    assert sorted(x.name for x in pathlib.Path(data_of(f"{store}/b")).iterdir()) == ["x.jsonl"]


def test_a_copy_is_made_once_and_again_when_the_object_changes(store, monkeypatch) -> None:
    put(store, {"x.jsonl": rows(1)})
    first = data_of(f"{store}/x.jsonl")
    monkeypatch.setattr("megatron_rl.hub.urls._copy", lambda *_: pytest.fail("copied again"))
    assert data_of(f"{store}/x.jsonl") == first
    monkeypatch.undo()
    put(store, {"x.jsonl": rows(1, 2)})
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(pathlib.Path(first).parents[4]))
    second = data_of(f"{store}/x.jsonl")
    assert second != first and len(load_rows(second)) == 2 and len(load_rows(first)) == 1


def test_a_copy_that_breaks_off_is_not_there(store, monkeypatch) -> None:
    put(store, {"a.jsonl": rows(1), "b.jsonl": rows(2)})
    cat = store.system.cat_file

    def breaks(key: str, **span) -> bytes:
        if key.endswith("b.jsonl"):
            raise ConnectionResetError(104, "Connection reset by peer")
        return cat(key, **span)

    monkeypatch.setattr(store.system, "cat_file", breaks)
    with pytest.raises(ConfigError, match=r"^data.train='memory://.*/\*.jsonl' cannot be read: .*reset by peer"):
        data_of(f"{store}/*.jsonl")
    monkeypatch.setattr(store.system, "cat_file", cat)
    assert len(load_rows(data_of(f"{store}/*.jsonl"))) == 2


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (Kind.DATA, "none.jsonl", "there is no such object, and none matches"),
        (Kind.DATA, "*.parquet", "there is no such object, and none matches"),
        (Kind.MODEL, "model", "there is no config.json; name the folder of a Hugging Face model"),
    ],
)
def test_what_is_missing_is_said_by_its_setting(store, kind, name: str, said: str) -> None:
    put(store, {"x.jsonl": rows(1), "model/model.safetensors": b""})
    with pytest.raises(ConfigError, match=rf"^some\.key='memory://.*{said}"):
        copy_of(kind, f"{store}/{name}", "some.key", weights=True)


def test_a_configuration_gets_copies_and_is_written_with_its_urls(store, tmp_path) -> None:
    put(store, {"train/1.jsonl": rows(1), "test.jsonl": rows(2), **{f"model/{k}": v for k, v in MODEL.items()}})
    given = [f"model.hf_path={store}/model", f"data.train={store}/train/*.jsonl", f"eval.path={store}/test.jsonl"]
    config = load_config(ROOT / "examples" / "quickstart" / "quickstart.yaml", [*given, f"run.dir={tmp_path}"])
    fetched = settings.fetched(config)
    assert (pathlib.Path(fetched.model.hf_path) / "config.json").is_file()
    assert [x["answer"] for x in load_rows(fetched.data.train)] == [1]
    again = settings.with_names(fetched)
    assert (again.model.hf_path, again.data.train, again.eval.path) == (
        *(f"{store}/model", (f"{store}/train/*.jsonl",), f"{store}/test.jsonl"),
    )
