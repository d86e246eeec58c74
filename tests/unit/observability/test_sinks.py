"""The real TensorBoard, W&B (offline) and MLflow (files) get a run's numbers, completions and configuration."""

import json
import pathlib
import shutil
import struct
import sys

import pytest

from megatron_rl.config import MetricsConfig
from megatron_rl.errors import ConfigError
from megatron_rl.observability.completions import Completion
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.sinks import IDS_FILE

CONFIG = {"run": {"name": "x", "seed": 3}, "reward": {"functions": ["math"]}, "eval": {"path": None}}
HOSTILE = "\x1b[2J</pre>\n```\n# title"
FILES = (("metrics.jsonl", 1), ("completions.jsonl", 2))


def row(step: int, **metrics: float) -> dict[str, object]:
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    return {"step": step, "step_kind": "REAL", "phase": "rl", "train/applied": 1.0} | named


def completions(source: str = "train") -> list[Completion]:
    facts = dict(finish_reason="stop", response_tokens=2, weight_version=3, prompt="3+4=", response=HOSTILE)
    rewards = [dict(sample=f"1@0#{i}", reward=x, rewards={"math": x}) for i, x in enumerate((1.0, None))]
    return [Completion(source=source, answer=None, **each, **facts) for each in rewards]


def test_tensorboard_gets_numbers_and_texts(tmp_path):
    """Scalars come back exactly; completions and the configuration are blocks of code, which no text can end."""
    from tensorboard.backend.event_processing import event_accumulator as accumulator
    from tensorboard.util import tensor_util

    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=True), 2, True, config=CONFIG) as writer:
        for step in (3, 4):
            writer.write(row(step, reward__mean=step / 8), completions())
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.375), (4, 0.5)]
    shown = events.Tensors("completions/train/text_summary")
    assert [each.step for each in shown] == [3, 4]
    text = tensor_util.make_ndarray(shown[0].tensor_proto).item().decode()
    assert "    1@0#0: reward 1, 2 tokens, stop\n      prompt   | 3+4=\n      response | \\x1b[2J</pre>\n" in text
    assert all(line == "    " or line.startswith("    ") for line in text.split("\n"))
    (config,) = events.Tensors("config/text_summary")
    assert json.loads(tensor_util.make_ndarray(config.tensor_proto).item()) == {**CONFIG, "total_steps": 2}


def wandb_records(run_dir: pathlib.Path) -> list[list]:
    """Return the records of each offline run in the folder: blocks of 32 KiB of (checksum, length, kind, part)."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        data, at, whole, records = path.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # the whole record, or the last part of one
                records.append(Record.FromString(whole))
                whole = b""
        runs.append(records)
    return runs


@pytest.mark.process
def test_wandb_offline_gets_all_and_the_same_run_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (the extra wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings, state = MetricsConfig(wandb_project="p"), None
    for step in (1, 2):
        with MetricsWriter(tmp_path, settings, 2, True, state, config=CONFIG) as writer:
            writer.write(row(step, eval__x__0=step / 8), completions())
            state = writer.state()
    first, second = wandb_records(tmp_path)
    number = json.loads((tmp_path / IDS_FILE).read_text())["wandb"]
    for records, step in ((first, 1), (second, 2)):
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert run.run_id == number and run.project == "p"
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {name: config[name] for name in CONFIG} == CONFIG and config["total_steps"] == 2
        history = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
        items = [item for part in history for item in part]
        merged = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        assert (merged["_step"], merged["eval/x/0"], merged["phase"]) == (step, step / 8, "rl")
        table = json.loads((next(tmp_path.glob(f"wandb/*/files/{merged['completions/train/path']}"))).read_text())
        columns = "sample prompt response answer reward advantage finish_reason response_tokens math"
        assert table["columns"] == columns.split()
        assert table["data"][0] == [*("1@0#0", "3+4=", HOSTILE.replace("\x1b", "\\x1b"), "", 1.0), None, "stop", 2, 1.0]
        assert table["data"][1][4] is None


@pytest.fixture
def mlflow_runs(tmp_path, monkeypatch):
    """Point MLflow at a file store; return a function that returns the experiment's runs and the client."""
    pytest.importorskip("mlflow", reason="mlflow is not installed (the extra mlflow)")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    import mlflow

    def found() -> tuple[list, object]:
        client = mlflow.MlflowClient()
        return client.search_runs([client.get_experiment_by_name("e").experiment_id]), client

    return found


def test_mlflow_gets_all_and_the_same_run_goes_on(tmp_path, mlflow_runs):
    """MLflow gets numbers, parameters, files and texts; steps that a resumed run takes again are not sent again."""
    run_dir, settings = tmp_path / "run", MetricsConfig(mlflow_experiment="e")
    with MetricsWriter(run_dir, settings, 3, True, config=CONFIG) as writer:
        writer.write(row(1), completions())
        state = writer.state()
        writer.write(row(2, **{"eval__x__mean@1": 0.25}), completions("eval/x"))
    lines = [(run_dir / name).read_text().splitlines(True)[:keep] for name, keep in FILES]  # as a checkpoint's cut does
    for (name, _), kept in zip(FILES, lines, strict=True):
        (run_dir / name).write_text("".join(kept))
    with MetricsWriter(run_dir, settings, 3, True, state, config={**CONFIG, "changed": 1}) as writer:
        writer.write(row(2, **{"eval__x__mean@1": 0.25}), completions("eval/x"))
        writer.write(row(3))
    (run,), client = mlflow_runs()
    assert run.info.run_id == json.loads((run_dir / IDS_FILE).read_text())["mlflow"]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    params = {"run.name": "x", "run.seed": "3", "reward.functions": '["math"]', "eval.path": "null"}
    assert run.data.params == params | {"total_steps": "3"}
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/applied")] == [1, 2, 3]
    assert [each.value for each in client.get_metric_history(run.info.run_id, "eval/x/mean_at_1")] == [0.25]
    files = pathlib.Path(run.info.artifact_uri.removeprefix("file://"))
    assert all((files / name).read_text() == (run_dir / name).read_text() for name, _ in FILES)
    assert "\\x1b[2J</pre>" in (files / "completions/eval/x/step_00000002.txt").read_text()


def test_mlflow_says_that_a_run_failed_and_one_that_does_not_start_is_one_sentence(tmp_path, mlflow_runs, monkeypatch):
    settings = MetricsConfig(mlflow_experiment="e")
    with pytest.raises(RuntimeError), MetricsWriter(tmp_path / "run", settings, 1, True) as writer:
        writer.write(row(1))
        raise RuntimeError("in the middle")
    (run,), _ = mlflow_runs()
    assert run.info.status == "FAILED"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    with pytest.raises(ConfigError, match="mlflow_experiment='e': MLflow does not start: .*MLFLOW_TRACKING_URI"):
        MetricsWriter(tmp_path, MetricsConfig(mlflow_experiment="e"), 1, True)


def test_a_server_that_takes_nothing_more_is_said_once(tmp_path, mlflow_runs, caplog):
    """A run goes on where MLflow does not, and its own files have everything."""
    with MetricsWriter(tmp_path / "run", MetricsConfig(mlflow_experiment="e"), 3, True) as writer:
        shutil.rmtree(tmp_path / "mlruns")
        (tmp_path / "mlruns").write_text("no folder")
        for step in (1, 2, 3):
            writer.write(row(step))
    assert caplog.text.count("MLflow did not take a call") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("package", "setting"), [("wandb", "wandb_project"), ("mlflow", "mlflow_experiment")])
def test_a_missing_package_names_the_command(tmp_path, monkeypatch, package, setting):
    monkeypatch.setitem(sys.modules, package, None)
    said = f"metrics.{setting}='x' and {package} cannot be imported; pip install {package}"
    with pytest.raises(ConfigError, match=said):
        MetricsWriter(tmp_path, MetricsConfig(**{setting: "x"}), 1, True)
