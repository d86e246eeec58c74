"""The fields of Kubeflow's jobs that the tests know are those of the models that Kubeflow publishes."""

import ast
import pathlib
import subprocess
import sys
import zipfile

import pytest

from tests.kubernetes.manifests import PYTORCHJOB, RUNTIME, TRAINJOB
from tests.patience import patient

# A release, the constant of a model's class that lists its fields, and what the tests know of each model.
RELEASES = {
    "kubeflow-training==1.9.4": (
        "attribute_map",
        {
            "kubeflow/training/models/kubeflow_org_v1_py_torch_job_spec": PYTORCHJOB,
            "kubeflow/training/models/kubeflow_org_v1_run_policy": PYTORCHJOB["runPolicy"],
            "kubeflow/training/models/kubeflow_org_v1_replica_spec": PYTORCHJOB["pytorchReplicaSpecs"]["Worker"],
        },
    ),
    "kubeflow-trainer-api==2.3.0": (
        "__properties",
        {
            "kubeflow_trainer_api/models/trainer_v1alpha1_train_job_spec": TRAINJOB,
            "kubeflow_trainer_api/models/trainer_v1alpha1_trainer": TRAINJOB["trainer"],
            "kubeflow_trainer_api/models/trainer_v1alpha1_runtime_ref": TRAINJOB["runtimeRef"],
            "kubeflow_trainer_api/models/trainer_v1alpha1_training_runtime_spec": RUNTIME,
            "kubeflow_trainer_api/models/trainer_v1alpha1_ml_policy": RUNTIME["mlPolicy"],
            "kubeflow_trainer_api/models/trainer_v1alpha1_job_set_template_spec": RUNTIME["template"],
        },
    ),
}


@pytest.mark.network
@pytest.mark.parametrize("release", RELEASES)
def test_the_fields_are_those_of_the_published_models(release: str, tmp_path: pathlib.Path) -> None:
    constant, models = RELEASES[release]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), release]
    done = subprocess.run(download, capture_output=True, text=True, timeout=patient(300), check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        for model, fields in models.items():
            (found,) = [
                ast.literal_eval(node.value)
                for node in ast.walk(ast.parse(files.read(f"{model}.py")))
                if isinstance(node, ast.Assign | ast.AnnAssign)
                and ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]) == constant
            ]
            assert set(found.values() if isinstance(found, dict) else found) == set(fields), model
