"""A family without a table goes through megatron-bridge, by the same command.

That needs a GPU, so a stand-in is called.
"""

from __future__ import annotations

import importlib.machinery
import json
import pathlib
import sys
import types

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import convert_checkpoint


class StandIn:
    """Stands in for ``megatron.bridge.AutoBridge`` 0.3.1, and notes the calls that it gets."""

    calls: list[tuple] = []

    @classmethod
    def can_handle(cls, path: str) -> bool:
        return json.loads((pathlib.Path(path) / "config.json").read_text())["model_type"] == "gemma2"

    @classmethod
    def import_ckpt(cls, hf_model_id: str, megatron_path: str, **kwargs) -> None:
        cls.calls.append(("import", hf_model_id, megatron_path, kwargs))

    @classmethod
    def from_hf_pretrained(cls, path: str) -> StandIn:
        cls.calls.append(("from", path))
        return cls()

    def export_ckpt(self, megatron_path: str, hf_path: str, show_progress: bool = True) -> None:
        self.calls.append(("export", megatron_path, hf_path, show_progress))


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    module = types.ModuleType("megatron.bridge")
    module.AutoBridge, module.__spec__ = StandIn, importlib.machinery.ModuleSpec("megatron.bridge", None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    StandIn.calls = []
    return StandIn


def folder_of(path: pathlib.Path, family: str) -> pathlib.Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    return path


def test_import_and_export_call_the_bridge(
    bridge, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hf, out = folder_of(tmp_path / "hf", "gemma2"), tmp_path / "out"
    assert convert_checkpoint.main(["import", str(hf), str(out), "--dtype", "bfloat16"]) == 0
    assert convert_checkpoint.main(["export", str(out), str(tmp_path / "back"), "--hf", str(hf), "--quiet"]) == 0
    assert bridge.calls == [
        ("import", str(hf), str(out), {"torch_dtype": torch.bfloat16}),
        ("from", str(hf)),
        ("export", str(out), str(tmp_path / "back"), False),
    ]
    assert capsys.readouterr().out.count("by megatron-bridge") == 2


@pytest.mark.parametrize(
    ("family", "gpu", "extra", "said"),
    [
        ("gemma2", False, (), "there is no GPU"),
        ("gemma2", True, ("--tp", "2"), "leave them out"),
        ("mamba2", True, (), "neither our tables nor the megatron-bridge"),
    ],
)
def test_what_the_bridge_cannot_do_is_said(
    bridge, tmp_path, monkeypatch, capsys, family: str, gpu: bool, extra: tuple, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert (
        convert_checkpoint.main(["import", str(folder_of(tmp_path / "hf", family)), str(tmp_path / "out"), *extra]) == 2
    )
    assert said in capsys.readouterr().err and not bridge.calls


def test_without_the_bridge_the_error_says_what_is_missing_and_how_to_get_it(tmp_path: pathlib.Path, capsys) -> None:
    assert convert_checkpoint.main(["import", str(folder_of(tmp_path / "hf", "gemma2")), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "soft-capped attention scores" in said and "megatron_rl[bridge]" in said
