"""The Kubernetes manifests of a run, which `megatron-rl new --kubernetes` writes."""

from __future__ import annotations

import argparse
import pathlib
import posixpath
import re
import string
from dataclasses import dataclass

from megatron_rl.commands.pod.place import PORT
from megatron_rl.errors import ConfigError, quoted

TEMPLATES = pathlib.Path(__file__).resolve().parent / "templates" / "kubernetes"
KINDS = ("job", "pytorchjob", "trainjob", "vllm")
LABEL = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")  # DNS-1035, which services and PyTorchJobs require
IMAGE = re.compile(r"[\w./:@+-]+")
RESOURCE = re.compile(r"[a-z0-9.-]+/[\w.-]+")
WORKSPACE = "/workspace"  # the folder in which the pods start
MOST_NAME = 40  # with -vllm-<number>, -models and an index it stays a label of 63 characters
GRACE_S, SHUTDOWN_S = 900, 840  # seconds from SIGTERM to SIGKILL; seconds that a pod's ranks wait for one another
PRESTOP_S = 600  # seconds that a server goes on after it is told to leave
SERVER_PORT = 8000
TRAINER_PORT = 29500  # the port of Kubeflow's Trainer (kubeflow/trainer v2.3.0, pkg/constants)
EXIT_AGAIN_OF_OPERATOR = 143  # PyTorchJob's ExitCode policy restarts pods that end with 128 or more
CPUS_A_GPU, MEMORY_GIB_A_GPU = 8, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Describes the pods that a run is given on Kubernetes.

    kind: ``job``, ``pytorchjob`` or ``trainjob``; or ``vllm``, a Job for the trainer beside a
        StatefulSet of vLLM servers.
    image: the container image, with a tag or a digest.
    nodes: the number of trainer pods, each on a node of its own.
    gpus: the number of GPUs, and of ranks, in each pod.
    vllm_nodes: the number of server pods.
    vllm_tp: the number of GPUs of each vLLM server.
    rdma: the resource name of the RDMA device plugin; "" for none.
    storage_class: a storage class with ReadWriteMany; "" for the cluster's default.

    Raises ConfigError for a value that the cluster would refuse.
    """

    kind: str
    image: str
    nodes: int = 2
    gpus: int = 8
    vllm_nodes: int = 1
    vllm_tp: int = 1
    rdma: str = ""
    storage_class: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kubernetes {quoted(self.kind)} is none of {', '.join(KINDS)}")
        if not IMAGE.fullmatch(self.image):
            raise ConfigError(
                f"--image {quoted(self.image)} is no image; it is as registry.example/team/megatron_rl:0.9"
            )
        for option, value, most in (
            ("--nodes", self.nodes, 4096),
            ("--gpus-per-node", self.gpus, 64),
            ("--vllm-nodes", self.vllm_nodes, 4096),
            ("--vllm-tp", self.vllm_tp, self.gpus),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value} is out of range; it is 1 to {most}")
        if self.rdma and not RESOURCE.fullmatch(self.rdma):
            raise ConfigError(
                f"--rdma {quoted(self.rdma)} is no resource's name; kubectl describe node lists those of a node, as "
                "rdma/hca_shared_devices_a"
            )
        if self.storage_class and not re.fullmatch("[a-z0-9.-]+", self.storage_class):
            raise ConfigError(
                f"--storage-class {quoted(self.storage_class)} is no class's name; kubectl get storageclass lists them"
            )


def name_of(run: str) -> str:
    """Return a run's name as a valid Kubernetes label: ``My_run`` becomes ``my-run``.

    Raises ConfigError if no valid label can be made of it.
    """
    name = re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")
    if not LABEL.fullmatch(name) or len(name) > MOST_NAME:
        raise ConfigError(
            f"the folder's name {quoted(run)} makes {quoted(name)}, which no job can have; it begins with a letter and "
            f"has at most {MOST_NAME} letters, digits and -"
        )
    return name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-rl new`` that describe a cluster."""
    group = parser.add_argument_group("on Kubernetes (docs/kubernetes.md)")
    group.add_argument(
        "--kubernetes",
        choices=KINDS,
        help="write manifests: an Indexed Job, Kubeflow's PyTorchJob or TrainJob, or a Job beside vLLM servers",
    )
    group.add_argument("--image", help="of the pods, with a tag or a digest")
    group.add_argument("--nodes", type=int, metavar="N", help="the trainer's pods, a node each (default 2)")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a pod (default 8)")
    group.add_argument("--vllm-nodes", type=int, metavar="N", help="the servers' pods (default 1)")
    group.add_argument("--vllm-tp", type=int, metavar="N", help="GPUs of a server (default 1)")
    group.add_argument("--rdma", metavar="RESOURCE", help="of the RDMA device plugin, as rdma/hca_shared_devices_a")
    group.add_argument("--storage-class", metavar="NAME", help="with ReadWriteMany; default: the cluster's")


def cluster_of(options: argparse.Namespace) -> Cluster | None:
    """Return the cluster that the options describe; None without ``--kubernetes``.

    Raises ConfigError if an option is given without another that it needs, or if no Kubernetes job
    can have the run's name.
    """
    fields = {
        "image": options.image,
        "nodes": options.nodes,
        "gpus": options.gpus_per_node,
        "vllm_nodes": options.vllm_nodes,
        "vllm_tp": options.vllm_tp,
        "rdma": options.rdma,
        "storage_class": options.storage_class,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if options.kubernetes is None:
        if given:
            option = {"gpus": "gpus-per-node"}.get(name := next(iter(given)), name.replace("_", "-"))
            raise ConfigError(f"--{option} describes pods; add --kubernetes {'|'.join(KINDS)}")
        return None
    if options.kubernetes != "vllm" and {"vllm_nodes", "vllm_tp"} & set(given):
        raise ConfigError("--vllm-nodes and --vllm-tp describe servers; --kubernetes vllm writes them")
    if not options.image:
        raise ConfigError("--kubernetes needs --image: what the pods run, as registry.example/megatron_rl:0.9")
    if not options.model:
        raise ConfigError(
            "--kubernetes needs --model: a folder as the pods see it, as /models/my-qwen3, or a name on the hub, as "
            "Qwen/Qwen2.5-7B-Instruct"
        )
    name_of(_run_of(options))
    return Cluster(kind=options.kubernetes, **given)


def write_manifests(options: argparse.Namespace, cluster: Cluster) -> None:
    """Write ``kustomization.yaml`` and ``kubernetes/*.yaml`` into the existing folder of a new run."""
    folder = options.folder.rstrip("/")
    texts = manifests(folder, _run_of(options), options.model, cluster, own_prompts=options.prompts is None)
    (pathlib.Path(folder) / "kubernetes").mkdir()
    for name, text in texts.items():
        (pathlib.Path(folder) / name).write_text(text, encoding="utf-8")


def _run_of(options: argparse.Namespace) -> str:
    return pathlib.Path(options.folder).name


def manifests(folder: str, run: str, model: str, cluster: Cluster, *, own_prompts: bool) -> dict[str, str]:
    """Return {path in the run's folder: text} of ``kustomization.yaml`` and the manifests.

    folder: the run's folder, as the run's files name it.
    run: the run's name.
    model: a folder that the pods see, or a name on the hub.
    own_prompts: whether ``prompts.jsonl`` lies in the folder.
    """
    # The values of the template fields.
    name = name_of(run)
    config_path = posixpath.normpath(posixpath.join(WORKSPACE, folder))
    values: dict[str, object] = {
        **{"name": name, "folder": folder, "config_path": config_path, "model": model},
        **{"image": cluster.image, "nodes": cluster.nodes, "gpus": cluster.gpus},
        **{"grace_s": GRACE_S, "shutdown_s": SHUTDOWN_S},
        **{"cpus": CPUS_A_GPU * cluster.gpus, "memory": f"{MEMORY_GIB_A_GPU * cluster.gpus}Gi"},
        "rdma": f'{cluster.rdma}: "1"'
        if cluster.rdma
        else "# rdma/hca_shared_devices_a: 1   # of an RDMA device plugin",
        "storage_class": f"storageClassName: {cluster.storage_class}"
        if cluster.storage_class
        else "# storageClassName: shared   # the default class often has ReadWriteOnce alone",
    }
    values |= _pod_values(name, cluster)
    values["pod"] = _fill("pod", values)
    # The resources of this kind of cluster.
    resources = {"storage": values, "policy": values}
    if cluster.kind == "pytorchjob":
        workers = _fill("workers", {**values, "workers": cluster.nodes - 1}) if cluster.nodes > 1 else ""
        resources["pytorchjob"] = {**values, "workers": workers}
    elif cluster.kind == "trainjob":
        resources["trainjob"] = {**values, "restarts": _fill("restarts", values)}
    else:
        resources["service"] = values
        resources["job"] = {**values, "restarts": _fill("restarts", values)}
    if cluster.kind == "vllm":
        resources["vllm"] = {**values, **_server_values(cluster)}
    keys = ["HF_TOKEN", "WANDB_API_KEY", *(["VLLM_API_KEY"] if cluster.kind == "vllm" else [])]
    listed = {
        **values,
        "resources": "\n".join(f"- kubernetes/{each}.yaml" for each in resources if each not in ("storage", "policy")),
        "files": "- prompts.jsonl" if own_prompts else "",
        "secret_keys": " ".join(f"--from-literal={key}=…" for key in keys),
    }
    texts = {f"kubernetes/{each}.yaml": _fill(each, given) for each, given in resources.items()}
    return {"kustomization.yaml": _fill("kustomization", listed), **texts}


def _pod_values(name: str, cluster: Cluster) -> dict[str, object]:
    """Return {field of the manifest's template: value} for the fields that depend on ``cluster.kind``.

    name: the run's name as a Kubernetes label.
    """
    port, place = PORT, []
    match cluster.kind:
        case "pytorchjob":
            restart, container, port_name = "", "pytorch", "pytorchjob-port"
            place = [("EXIT_AGAIN", EXIT_AGAIN_OF_OPERATOR)]  # in place of 75
        case "trainjob":
            restart, container, port_name, port = "restartPolicy: Never", "node", "torchrun", TRAINER_PORT
        case _:
            restart, container, port_name = f"subdomain: {name}\nrestartPolicy: Never", "trainer", "torchrun"
            place = [
                ("NNODES", cluster.nodes),
                ("HEAD", f"{name}-0.{name}"),
                ("PROCESSES", cluster.gpus),
                ("PORT", PORT),
            ]
    serves = cluster.kind == "vllm"
    return {
        **{"restart": restart, "container": container, "port_name": port_name},
        **{"port": port, "meeting_port": port + 1},
        "place": "\n".join(f'- name: {variable}\n  value: "{value}"' for variable, value in place),
        "keys": _key(name, "VLLM_API_KEY") if serves else "",
        "arguments": "\n".join(f"- {word}" for word in _server_arguments(name, cluster)) if serves else "",
    }


def _server_arguments(name: str, cluster: Cluster) -> list[str]:
    """Return the trainer's command-line settings that name the vLLM servers and their API key.

    name: the run's name as a Kubernetes label, with which the servers' host names begin.
    """
    replicas = cluster.gpus // cluster.vllm_tp
    servers = [
        f"http://{name}-vllm-{pod}.{name}-vllm:{SERVER_PORT + replica}"
        for pod in range(cluster.vllm_nodes)
        for replica in range(replicas)
    ]
    return [
        "rollout.engine=vllm",
        f'"rollout.servers=[{",".join(servers)}]"',
        "rollout.api_key_env=VLLM_API_KEY",
        "rollout.start_s=1800",
    ]


def _server_values(cluster: Cluster) -> dict[str, object]:
    replicas = cluster.gpus // cluster.vllm_tp
    ports = [(f"server-{replica}", SERVER_PORT + replica) for replica in range(replicas)]
    return {
        **{"vllm_nodes": cluster.vllm_nodes, "vllm_tp": cluster.vllm_tp, "replicas": replicas},
        **{"server_port": SERVER_PORT, "prestop_s": PRESTOP_S, "grace_s": PRESTOP_S + 60},
        "server_ports": "\n".join(f"- name: {name}\n  containerPort: {port}" for name, port in ports),
        "server_service_ports": "\n".join(
            f"- name: {name}\n  port: {port}\n  targetPort: {name}" for name, port in ports
        ),
    }


def _key(name: str, key: str) -> str:
    return f"- name: {key}\n  valueFrom:\n    secretKeyRef:\n      name: {name}-keys\n      key: {key}"


def _fill(template: str, values: dict[str, object]) -> str:
    """Return the text of ``kubernetes/<template>.yaml`` with its ``{field}`` placeholders replaced by ``values``.

    A field alone on a line may have a value of several lines. Each of them is indented like the
    field. If the value is empty, the line is removed.
    """
    lines = []
    for line in (TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8").splitlines():
        alone = re.fullmatch(r"( *)\{(\w+)\}", line)
        if alone:
            lines += [f"{alone[1]}{each}".rstrip() for each in str(values[alone[2]]).splitlines()]
        else:
            lines.append(string.Formatter().vformat(line, (), values))
    return "\n".join(lines) + "\n"
