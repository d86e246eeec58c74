"""The manifests of a run on Kubernetes: the published schemas take them, and their names and numbers agree."""

import argparse
import copy
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

from megatron_rl.cli import TRAINER, read_arguments
from megatron_rl.commands import command, serve_vllm
from megatron_rl.commands.kubernetes import KINDS, Cluster, manifests, name_of
from megatron_rl.commands.pod.command import trainer_words
from megatron_rl.commands.pod.place import place_of
from megatron_rl.errors import ConfigError
from tests.kubernetes.manifests import VERSIONS, faults, job_of, read, refused, replicas, templates, variables
from tests.patience import HANG_S, patient
from tests.tools import load_script

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
examples = load_script("tools/kubernetes_examples.py")
FOLDERS, IMAGE, MODEL = examples.FOLDERS, examples.IMAGE, examples.MODEL


def example(kind: str) -> pathlib.Path:
    return EXAMPLES / FOLDERS[kind]


def rendered(folder: pathlib.Path, **given: object) -> tuple[dict, list[dict]]:
    texts = manifests("my_run", "my_run", MODEL, Cluster(image=IMAGE, **given), own_prompts=True)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read(folder)


def files(root: pathlib.Path) -> dict[pathlib.Path, str]:
    folders = [root / "examples" / "kubernetes" / name for name in FOLDERS.values()]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(root): path.read_text() for path in paths}


def test_the_examples_are_what_new_writes(tmp_path: pathlib.Path) -> None:
    """`make docs` writes them."""
    examples.write(tmp_path)
    assert files(tmp_path) == files(ROOT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_schemas_take_every_manifest(kind: str, tmp_path: pathlib.Path) -> None:
    _, documents = read(example(kind))
    _, others = rendered(tmp_path, kind=kind, rdma="rdma/hca_shared_devices_a", storage_class="shared")
    for document, version in [*((each, VERSIONS[0]) for each in documents), *((each, VERSIONS[1]) for each in others)]:
        assert refused(document, version) == "", document["kind"]


def pod_of(document: dict) -> dict:
    return templates(document)[0]["spec"]


def test_the_schemas_refuse_planted_faults() -> None:
    """One wrong letter, a wrong type, a field at a wrong place: each is refused, in every kind of pod."""
    for kind in KINDS:
        _, documents = read(example(kind))
        for document in filter(templates, documents):
            for plant in (
                lambda pod: pod.update(terminationGracePeriodSecond=1),
                lambda pod: pod.update(terminationGracePeriodSeconds="900"),
                lambda pod: pod["containers"][0].update(runAsNonRoot=True),
                lambda pod: pod["containers"][0]["env"][0].update(value=2),
                lambda pod: pod["volumes"][0].update(emptyDir={"medium": "Memory", "size": "1Gi"}),
            ):
                other = copy.deepcopy(document)
                plant(pod_of(other))
                assert refused(other, VERSIONS[-1]), document["kind"]
    (job,) = [each for each in read(example("job"))[1] if each["kind"] == "Job"]
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = [2]
    assert "value" in refused(job, VERSIONS[-1])
    (job,) = [each for each in read(example("pytorchjob"))[1] if each["kind"] == "PyTorchJob"]
    job["spec"]["backoffLimit"] = 3  # that belongs to runPolicy
    replicas(job)[0]["replicas"] = "1"
    assert refused(job, VERSIONS[-1]) == (
        "PyTorchJob.spec.pytorchReplicaSpecs.Master.replicas is '1' and no int; PyTorchJob.spec.backoffLimit is unknown"
    )
    runtime, train = (named(read(example("trainjob"))[1], kind) for kind in ("TrainingRuntime", "TrainJob"))
    train["spec"]["trainer"]["nodes"] = 2
    assert refused(train, VERSIONS[-1]) == "TrainJob.spec.trainer.nodes is unknown"
    job_of(runtime)["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] = ["2"]
    assert refused(runtime, VERSIONS[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_numbers_agree(kind: str, tmp_path: pathlib.Path) -> None:
    assert faults(*read(example(kind))) == []
    servers = dict(vllm_nodes=3, vllm_tp=2) if kind == "vllm" else {}
    for number, (nodes, gpus) in enumerate([(1, 2), (64, 8)]):
        assert faults(*rendered(tmp_path / str(number), kind=kind, nodes=nodes, gpus=gpus, **servers)) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds an overlay, is not installed")
def test_an_overlay_changes_what_it_names_and_leaves_the_rest_whole() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(EXAMPLES / "overlay")], capture_output=True, text=True,
                          timeout=patient(HANG_S), check=True)  # fmt: skip
    documents = list(yaml.safe_load_all(done.stdout))
    maps = [{"name": each["metadata"]["name"]} for each in documents if each["kind"] == "ConfigMap"]
    assert faults({"configMapGenerator": maps}, documents) == []
    assert {refused(document, VERSIONS[-1]) for document in documents} == {""}
    job = named(documents, "Job")
    assert (job["spec"]["completions"], job["metadata"]["namespace"]) == (4, "my-team")
    assert pod_of(job)["containers"][0]["image"] == "registry.my-team.example/megatron_rl:0.9-te"


def named(documents: list[dict], kind: str) -> dict:
    (found,) = [each for each in documents if each["kind"] == kind]
    return found


def change_variable(document: dict, name: str, value: str) -> None:
    for template in templates(document):
        (variable,) = [each for each in template["spec"]["containers"][0]["env"] if each["name"] == name]
        variable["value"] = value


def test_planted_disagreements_are_found() -> None:
    def rule(number: int):
        return lambda documents: named(documents, "Job")["spec"]["podFailurePolicy"]["rules"].pop(number)

    def variable(kind: str, name: str, value: str):
        return lambda documents: change_variable(named(documents, kind), name, value)

    def pod(kind: str, **fields: object):
        return lambda documents: pod_of(named(documents, kind)).update(fields)

    def spec(kind: str, **fields: object):
        return lambda documents: named(documents, kind)["spec"].update(fields)

    planted = [
        ("job", spec("Job", completions=3), "completions, parallelism and"),
        ("job", variable("Job", "NNODES", "4"), "completions, parallelism and NNODES"),
        ("job", variable("Job", "HEAD", "indexed-job-1.indexed-job"), "not the stable name of pod 0"),
        ("job", variable("Job", "PROCESSES", "4"), "not the number of GPUs"),
        ("job", variable("Job", "PORT", "29500"), "not the container's ports"),
        ("job", variable("Job", "HOME", "/root"), "cannot be written"),
        ("job", rule(0), "exit code 2 "),
        ("job", rule(1), "exit code 75"),
        ("job", rule(2), "disrupted: True"),
        ("job", pod("Job", terminationGracePeriodSeconds=30), "grace 30 s is not above torchrun's"),
        ("job", pod("Job", restartPolicy="OnFailure"), "restartPolicy Never"),
        ("job", pod("Job", subdomain="other"), "not the stable name"),
        ("job", pod("Job", volumes=[]), "no volume runs"),
        ("job", lambda documents: documents.remove(named(documents, "Service")), "not the stable name"),
        ("job", lambda documents: documents.pop(0), "no claim indexed-job-runs"),
        ("pytorchjob", variable("PyTorchJob", "EXIT_AGAIN", "75"), "ExitCode starts pods again from 128 on"),
        ("pytorchjob", pod("PyTorchJob", restartPolicy="Never"), "the restart policy is the replica's"),
        ("trainjob", spec("TrainJob", trainer={"numNodes": 3, "numProcPerNode": 8}), "other numbers of nodes"),
        ("trainjob", spec("TrainJob", runtimeRef={"name": "torch-distributed"}), "no runtime torch-distributed"),
        ("vllm", spec("StatefulSet", replicas=2), "the trainer is told of"),
        ("vllm", spec("StatefulSet", serviceName="x"), "no service x"),
        ("vllm", pod("StatefulSet", terminationGracePeriodSeconds=60), "not above preStop's"),
    ]  # fmt: skip
    for kind, plant, told in planted:
        kustomization, documents = read(example(kind))
        plant(documents)
        assert any(told in fault for fault in faults(kustomization, documents)), told
    kustomization, documents = read(example("job"))
    kustomization["configMapGenerator"] = []
    assert faults(kustomization, documents) == ["indexed-job: no ConfigMap indexed-job-config"]


def added_variables(kind: str, pod: int) -> dict[str, str]:
    """What the controller adds to a pod of the example (kubeflow/trainer v1.9.4, envvar.go; v2.3.0, torch.go)."""
    index = {"JOB_COMPLETION_INDEX": str(pod)}
    if kind == "trainjob":
        own = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": str(pod), "PET_MASTER_PORT": "29500"}
        return index | own | {"PET_MASTER_ADDR": "trainjob-node-0-0.trainjob"}
    if kind != "pytorchjob":
        return index
    head, port = "pytorchjob-master-0", "29400"
    return {"PYTHONUNBUFFERED": "1", "MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": head,
            "PET_MASTER_ADDR": head, "WORLD_SIZE": "16", "RANK": str(pod), "PET_NODE_RANK": str(pod),
            "PET_NPROC_PER_NODE": "8", "PET_NNODES": "2"}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_of_a_pod_is_one_that_our_command_line_reads(kind: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)  # where the example's folder lies as in a pod's /workspace
    job = named(read(example(kind))[1], {"pytorchjob": "PyTorchJob", "trainjob": "TrainingRuntime"}.get(kind, "Job"))
    heads = {"pytorchjob": "pytorchjob-master-0", "trainjob": "trainjob-node-0-0.trainjob"}
    for pod, template in enumerate([templates(job)[0], templates(job)[-1]]):
        (container,) = template["spec"]["containers"]
        assert container["command"] == ["python", "-m", command.VERBS["pod"].module]
        place = place_of(variables(container, added_variables(kind, pod)))
        head = heads.get(kind, f"{FOLDERS[kind]}-0.{FOLDERS[kind]}")
        assert (place.node, place.num_nodes, place.processes, place.head) == (pod, 2, 8, head)
        assert [place.port, place.meeting_port] == [each["containerPort"] for each in container["ports"]]
        assert place.exit_again == (143 if kind == "pytorchjob" else 75)
        config, _ = read_arguments(trainer_words(place, container["args"]), TRAINER)
        assert str(config.run.path) == f"/runs/{FOLDERS[kind]}" and config.checkpoint.save_every_rollouts == 10
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        assert f"{container['workingDir']}/{example(kind).relative_to(ROOT)}" in mounted
        assert len(config.rollout.servers) == (8 if kind == "vllm" else 0)


def test_the_command_of_a_server_is_one_that_serve_vllm_reads() -> None:
    (container,) = pod_of(named(read(example("vllm"))[1], "StatefulSet"))["containers"]
    assert container["command"] == ["megatron-rl", "serve-vllm"]
    options, extra = serve_vllm.parse(container["args"])
    assert isinstance(options, argparse.Namespace) and extra == []
    assert (options.model, options.replicas, options.tensor_parallel_size) == (MODEL, 8, 1)
    assert options.api_key_env in {variable["name"] for variable in container["env"]}


def test_words_that_no_cluster_takes_are_refused(tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ["--kubernetes", "job", "--image", IMAGE, "--model", MODEL]
    for folder, words, told in (
        ("my_run", whole[:2] + whole[4:], "needs --image"),
        ("my_run", whole[:4], "needs --model"),
        ("my_run", ["--nodes", "4"], "add --kubernetes"),
        ("my_run", [*whole, "--vllm-nodes", "1"], "--kubernetes vllm"),
        ("my_run", [*whole, "--nodes", "0"], "--nodes 0 is out of range"),
        ("my_run", [*whole, "--rdma", "hca"], "no resource's name"),
        ("my_run", [*whole, "--storage-class", "a b"], "no class's name"),
        ("my_run", [*whole[:3], "a b", *whole[4:]], "is no image"),
        ("7_runs", whole, "begins with a letter"),
        ("a" * 41, whole, "at most 40"),
    ):
        assert command.main(["new", folder, *words]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / folder).exists()
    with pytest.raises(ConfigError, match="--vllm-tp 16 is out of range; it is 1 to 8"):
        Cluster(kind="vllm", image=IMAGE, vllm_tp=16)
    assert name_of("My_run.2") == "my-run-2"


@pytest.mark.long(seconds=20)
@pytest.mark.process
def test_a_pods_dry_run_forecasts_the_job(arithmetic: pathlib.Path) -> None:
    (container,) = pod_of(named(read(example("job"))[1], "Job"))["containers"]
    own = variables(container, {"JOB_COMPLETION_INDEX": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    words = [*container["command"][1:], *container["args"], "--dry-run"]
    inputs = [f"model.hf_path={arithmetic}/model", f"data.train={arithmetic}/train.jsonl", "data.max_prompt_tokens=16",
              "rollout.max_response_tokens=4"]  # fmt: skip
    done = subprocess.run([sys.executable, *words, *inputs], cwd=ROOT, env=own, capture_output=True, text=True,
                          timeout=patient(2 * HANG_S), check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "indexed-job on 16 GPUs" in done.stdout
