"""Reads manifests as a cluster would: against the published schemas, and against one another.

`kubernetes-validate` ships the schemas of Kubernetes' own OpenAPI; its strict form refuses unknown fields. Of
Kubeflow's jobs, FIELDS holds what the schemas of their definitions have (kubeflow/trainer v1.9.4 and v2.3.0,
manifests/base/crds); the pods and the Job in them are checked as Kubernetes' own. tests/extras/test_kubeflow.py
compares FIELDS with the models that Kubeflow has on PyPI.
"""

import pathlib
from collections.abc import Iterator, Mapping

import kubernetes_validate
import yaml

VERSIONS = ("1.31", "1.37")  # the oldest that the manifests are for, and the newest that is published
# A field and the fields below it; a type ends it.
PYTORCHJOB: dict = {
    "elasticPolicy": dict,
    "nprocPerNode": str,
    "pytorchReplicaSpecs": {
        role: {"replicas": int, "restartPolicy": str, "template": dict} for role in ("Master", "Worker")
    },
    "runPolicy": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "cleanPodPolicy": str,
        "managedBy": str,
        "schedulingPolicy": dict,
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
TRAINJOB: dict = {
    "activeDeadlineSeconds": int,
    "initializer": dict,
    "managedBy": str,
    "runtimePatches": list,
    "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
    "suspend": bool,
    "trainer": {
        "args": list,
        "command": list,
        "env": list,
        "image": str,
        "numNodes": int,
        "numProcPerNode": int,
        "resourcesPerNode": dict,
    },
}
RUNTIME: dict = {
    "mlPolicy": {"flux": dict, "jax": dict, "mpi": dict, "numNodes": int, "torch": dict, "xgboost": dict},
    "podGroupPolicy": dict,
    "template": {"metadata": dict, "spec": {"replicatedJobs": list}},
}
FIELDS = {
    kind: {"apiVersion": str, "kind": str, "metadata": dict, "spec": spec}
    for kind, spec in {"PyTorchJob": PYTORCHJOB, "TrainJob": TRAINJOB, "TrainingRuntime": RUNTIME}.items()
}
RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
CONFIG_EXIT, AGAIN_EXIT = 2, 75


def read(folder: pathlib.Path) -> tuple[dict, list[dict]]:
    """Return a run's kustomization and its resources, in order."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return kustomization, [
        document for name in kustomization["resources"] for document in yaml.safe_load_all((folder / name).read_text())
    ]


def refused(document: dict, version: str) -> str:
    """Return why a cluster of this version refuses a document by its schema; "" if it takes it."""
    kind = document["kind"]
    if kind in FIELDS:
        unknown = "; ".join(_unknown(document, FIELDS[kind], kind))
        within = [dict(apiVersion="v1", kind="PodTemplate", template=template) for template in templates(document)]
        if kind == "TrainingRuntime":
            within = [dict(apiVersion="batch/v1", kind="Job", spec=job_of(document))]
        return unknown or next(filter(None, (refused(each, version) for each in within)), "")
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def _unknown(value: object, fields: object, where: str) -> Iterator[str]:
    if not isinstance(fields, dict):
        if not isinstance(value, fields):
            yield f"{where} is {value!r} and no {fields.__name__}"
        return
    for name, below in value.items():
        if name not in fields:
            yield f"{where}.{name} is unknown"
        else:
            yield from _unknown(below, fields[name], f"{where}.{name}")


def replicas(pytorchjob: dict) -> list[dict]:
    return list(pytorchjob["spec"]["pytorchReplicaSpecs"].values())


def job_of(runtime: dict) -> dict:
    """Return the spec of the Job that a runtime's JobSet makes."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def templates(document: dict) -> list[dict]:
    """Return the templates of a document's pods."""
    match document["kind"]:
        case "PyTorchJob":
            return [each["template"] for each in replicas(document)]
        case "Job" | "StatefulSet":
            return [document["spec"]["template"]]
        case "TrainingRuntime":
            return [job_of(document)["template"]]
    return []


def variables(container: dict, indexed: Mapping[str, str]) -> dict[str, str]:
    """Return a container's environment as the kubelet would make it; ``indexed`` has what a controller adds."""
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return {**own, **indexed}


def faults(kustomization: dict, documents: list[dict]) -> list[str]:
    """Return what a cluster takes and what would not run: names that nothing has, numbers that disagree."""
    found = []
    for document in documents:
        for template in templates(document):
            found += _unresolved(template, document, kustomization, documents)
            found += _unlike(template)
        if document["kind"] == "Job":
            found += _job_faults(document, documents)
        if document["kind"] == "PyTorchJob":
            found += _pytorchjob_faults(document)
        if document["kind"] == "TrainingRuntime":
            found += _trainjob_faults(document, documents)
        if document["kind"] == "StatefulSet":
            found += _set_faults(document, documents)
    return found


def _named(documents: list[dict], kind: str) -> dict[str, dict]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def _unresolved(template: dict, document: dict, kustomization: dict, documents: list[dict]) -> Iterator[str]:
    """Yield each claim, map, secret and volume that a pod names and nothing makes."""
    spec, name = template["spec"], document["metadata"]["name"]
    instance = document["metadata"]["labels"]["app.kubernetes.io/instance"]
    maps = {each["name"] for each in kustomization["configMapGenerator"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in _named(documents, "PersistentVolumeClaim"):
            yield f"{name}: no claim {claim}"
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            yield f"{name}: no ConfigMap {volume['configMap']['name']}"
    for container in spec["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] not in volumes:
                yield f"{name}: no volume {mount['name']}"
        for variable in container["env"]:
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            if secret is not None and secret["name"] != f"{instance}-keys":
                yield f"{name}: the secret {secret['name']} is not the one that kustomization.yaml tells to make"
            if secret is not None and secret["key"] != variable["name"]:
                yield f"{name}: {variable['name']} has the key {secret['key']}"
    if template["metadata"]["labels"]["app.kubernetes.io/instance"] != instance:
        yield f"{name}: its pods are of another instance"


def _unlike(template: dict) -> Iterator[str]:
    """Yield what a pod should have whatever it runs: times in order, no root, memory for /dev/shm, whole GPUs."""
    spec = template["spec"]
    for container in spec["containers"]:
        own = variables(container, {})
        grace = spec["terminationGracePeriodSeconds"]
        wait = int(own.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 0))
        sleeps = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        if not 0 <= wait < grace:
            yield f"grace {grace} s is not above torchrun's {wait} s"
        if not int(sleeps[1]) < grace:
            yield f"grace {grace} s is not above preStop's {sleeps[1]} s"
        if not spec["securityContext"]["runAsNonRoot"] or container["securityContext"]["allowPrivilegeEscalation"]:
            yield "it runs as root, or may become root"
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        if not {"/dev/shm", own["HOME"]} <= writable:
            yield f"/dev/shm or HOME={own['HOME']} cannot be written"
        resources = container["resources"]
        if resources["requests"]["memory"] != resources["limits"]["memory"]:
            yield "memory is requested and limited differently"
        ports = [port["containerPort"] for port in container["ports"]]
        if len(set(ports)) != len(ports):
            yield f"ports {ports} are not distinct"


def _job_faults(job: dict, documents: list[dict]) -> Iterator[str]:
    """Yield what the API server would refuse beyond the schema (batch validation), and what our launcher would."""
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    own = variables(container, {})
    nodes = {spec["completions"], spec["parallelism"], int(own["NNODES"])}
    if len(nodes) != 1:
        yield f"completions, parallelism and NNODES are {sorted(nodes)}"
    yield from _restart_faults(spec, spec["completions"])
    if len(f"{name}-{spec['completions'] - 1}") > 63:
        yield f"the host name {name}-{spec['completions'] - 1} has over 63 characters"
    service = _named(documents, "Service").get(pod["subdomain"])
    if service is None or own["HEAD"] != f"{name}-0.{pod['subdomain']}":
        yield f"HEAD={own['HEAD']} is not the stable name of pod 0 of {name} behind {pod['subdomain']}"
        return
    yield from _service_faults(service, spec["template"])
    if own["PROCESSES"] != str(container["resources"]["limits"]["nvidia.com/gpu"]):
        yield f"PROCESSES={own['PROCESSES']} is not the number of GPUs"
    if {int(own["PORT"]), int(own["PORT"]) + 1} != {port["containerPort"] for port in container["ports"]}:
        yield f"PORT={own['PORT']} and the one after it are not the container's ports"


def _restart_faults(spec: dict, nodes: int) -> Iterator[str]:
    """Yield what is wrong with the part of a Job that starts its pods again."""
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    if spec["completionMode"] != "Indexed" or pod["restartPolicy"] != "Never":
        yield "backoffLimitPerIndex and podFailurePolicy want Indexed and restartPolicy Never"
    if spec["podReplacementPolicy"] != "Failed":
        yield "podFailurePolicy wants podReplacementPolicy Failed"
    if not 0 <= spec["maxFailedIndexes"] <= nodes:
        yield "maxFailedIndexes is above completions"
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {})
        if codes.get("containerName", container["name"]) != container["name"]:
            yield f"a rule is about the container {codes['containerName']}"
        if codes and codes["values"] != sorted(set(codes["values"])) or 0 in codes.get("values", []):
            yield f"a rule's exit codes {codes['values']} are not distinct, ordered and above 0"
    for code, disrupted, wanted in (
        (CONFIG_EXIT, False, "FailJob"),
        (AGAIN_EXIT, False, "Ignore"),
        (1, False, "Count"),
        (137, False, "Count"),
        (137, True, "Ignore"),
    ):
        if (action := action_on(spec, code, disrupted=disrupted)) != wanted:
            yield f"exit code {code} (disrupted: {disrupted}) is answered by {action}"


def _trainjob_faults(runtime: dict, documents: list[dict]) -> Iterator[str]:
    """Yield what Trainer v2 would not join: names by which it finds pods and containers, numbers that disagree."""
    spec = runtime["spec"]
    (replicated,) = spec["template"]["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    yield from _restart_faults(job, spec["mlPolicy"]["numNodes"])
    (container,) = job["template"]["spec"]["containers"]
    ancestor = replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    if (replicated["name"], container["name"], ancestor) != ("node", "node", "trainer"):
        yield "Trainer wants a job and a container named node, of the step trainer"
    (train,) = _named(documents, "TrainJob").values()
    if train["spec"]["runtimeRef"]["name"] != runtime["metadata"]["name"]:
        yield f"no runtime {train['spec']['runtimeRef']['name']}"
    if train["spec"]["trainer"]["numNodes"] != spec["mlPolicy"]["numNodes"]:
        yield "the TrainJob and its runtime have other numbers of nodes"
    if train["spec"]["trainer"]["numProcPerNode"] != container["resources"]["limits"]["nvidia.com/gpu"]:
        yield "numProcPerNode is not the number of GPUs"


def _service_faults(service: dict, template: dict) -> Iterator[str]:
    spec, labels = service["spec"], template["metadata"]["labels"]
    if spec["clusterIP"] != "None" or not spec["publishNotReadyAddresses"]:
        yield f"{service['metadata']['name']} gives no names to pods that are not ready"
    if not spec["selector"].items() <= labels.items():
        yield f"{service['metadata']['name']} selects {spec['selector']}, and the pods have {labels}"
    ports = {port["name"]: port["containerPort"] for each in template["spec"]["containers"] for port in each["ports"]}
    if {port["targetPort"]: port["port"] for port in spec["ports"]} != ports:
        yield f"{service['metadata']['name']} has other ports than the pods' {ports}"


def action_on(spec: dict, code: int, *, disrupted: bool) -> str:
    """Return what a Job does about a failed pod: the action of the first rule that matches, else Count."""
    (container,) = spec["template"]["spec"]["containers"]
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]
            within = code in codes["values"]
            if code and codes["containerName"] == container["name"] and within == (codes["operator"] == "In"):
                return rule["action"]
        elif disrupted and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]:
            return rule["action"]
    return "Count"


def _pytorchjob_faults(job: dict) -> Iterator[str]:
    """Yield what the operator's webhook refuses (kubeflow/trainer v1.9.4, pytorchjob_webhook.go), and our launcher."""
    roles = job["spec"]["pytorchReplicaSpecs"]
    if roles["Master"]["replicas"] != 1 or "Worker" in roles and roles["Worker"]["replicas"] < 1:
        yield "a PyTorchJob has one master and at least one worker"
    for role, each in roles.items():
        (container,) = each["template"]["spec"]["containers"]
        own = variables(container, {})
        if container["name"] != "pytorch":
            yield f"{role}: the operator wants a container named pytorch"
        if each["restartPolicy"] not in RESTART_POLICIES or "restartPolicy" in each["template"]["spec"]:
            yield f"{role}: the restart policy is the replica's, and one of {RESTART_POLICIES}"
        if each["restartPolicy"] != "ExitCode" or int(own["EXIT_AGAIN"]) < 128 or CONFIG_EXIT >= 128:
            yield f"{role}: ExitCode starts pods again from 128 on, and EXIT_AGAIN is {own['EXIT_AGAIN']}"
        if "pytorchjob-port" not in {port["name"] for port in container["ports"]}:
            yield f"{role}: the operator wants a port named pytorchjob-port"
        if job["spec"]["nprocPerNode"] != str(container["resources"]["limits"]["nvidia.com/gpu"]):
            yield f"{role}: nprocPerNode is not the number of GPUs"
    if len({str(each["template"]) for each in roles.values()}) != 1:
        yield "master and workers differ"


def _set_faults(stateful: dict, documents: list[dict]) -> Iterator[str]:
    """Yield the servers that the trainer names and the set has not, and the other way round."""
    spec, name = stateful["spec"], stateful["metadata"]["name"]
    service = _named(documents, "Service").get(spec["serviceName"])
    if service is None:
        yield f"{name}: no service {spec['serviceName']}"
        return
    yield from _service_faults(service, spec["template"])
    if not spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items():
        yield f"{name} selects other pods than its own"
    (container,) = spec["template"]["spec"]["containers"]
    ports = [port["containerPort"] for port in container["ports"]]
    probes = {container[each]["httpGet"]["port"] for each in ("startupProbe", "readinessProbe", "livenessProbe")}
    if probes != {ports[0]}:
        yield f"{name}: probes ask the ports {sorted(probes)}, and the first server has {ports[0]}"
    has = {f"http://{name}-{pod}.{spec['serviceName']}:{port}" for pod in range(spec["replicas"]) for port in ports}
    (job,) = _named(documents, "Job").values()
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    (told,) = [each for each in trainer["args"] if each.startswith("rollout.servers=")]
    if set(told.removeprefix("rollout.servers=[").removesuffix("]").split(",")) != has:
        yield f"{name} has the servers {sorted(has)}, and the trainer is told of {told}"
