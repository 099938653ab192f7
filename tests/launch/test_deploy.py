"""The files of deploy/: manifests by their structure, and the variables that they set, as gt.launch.launchers reads them."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import yaml

from gt import env
from gt.launch import launchers
from gt.launch.launchers import JobPlace
from tests.helpers import ROOT

KUBERNETES, SLURM = ROOT / "deploy/kubernetes", ROOT / "deploy/slurm"
SECRET = ("/secrets/gt", "/dev/shm")
# Fields of the APIs, as far as the manifests use them; an unknown one is a mistake that kubectl would refuse
JOBSET = {"network", "successPolicy", "failurePolicy", "replicatedJobs"}
JOB = {"completionMode", "parallelism", "completions", "backoffLimit", "template"}
POD = {"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes"}
CONTAINER = {"name", "image", "command", "args", "env", "ports", "resources", "securityContext", "volumeMounts"}
RAYJOB = {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((KUBERNETES / name).read_text())


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The container of a pod whose fields are known, and whose volumes are all there."""
    (container,) = pod["containers"]
    assert set(pod) <= POD and set(container) <= CONTAINER
    assert {mount["name"] for mount in container.get("volumeMounts", ())} == {v["name"] for v in pod.get("volumes", ())}
    return container


def test_the_jobset_sets_what_each_rank_needs() -> None:
    whole = manifest("jobset.yaml")
    assert (whole["apiVersion"], whole["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = whole["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert set(spec) == JOBSET and set(job) == JOB and job["completionMode"] == "Indexed"
    container = container_of(job["template"]["spec"])
    variables = {row["name"]: row["value"] for row in container["env"]}
    assert all(isinstance(value, str) for value in variables.values())
    size = job["completions"]
    assert job["parallelism"] == size == int(variables["WORLD_SIZE"]) and spec["network"]["publishNotReadyAddresses"]
    host = f"{whole['metadata']['name']}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    port = container["ports"][0]["containerPort"]
    for rank in range(size):
        environment = {**variables, "JOB_COMPLETION_INDEX": str(rank)}
        of_launcher = {key: value for key, value in environment.items() if key in launchers.VARIABLES}
        assert launchers.place(of_launcher) == JobPlace("an indexed Kubernetes job", rank, size, 0, 1, host, port)
    own = {name for name in variables if name.startswith("GT_")}
    assert own <= {variable.name for variable in env.VARIABLES}
    assert float(variables["GT_GRACE"]) < job["template"]["spec"]["terminationGracePeriodSeconds"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
    token, shared = (volumes[mounts[path]] for path in SECRET)
    assert variables["GT_TOKEN_FILE"] == f"{SECRET[0]}/token" and token["secret"]["defaultMode"] == 0o400
    assert shared["emptyDir"]["medium"] == "Memory"


def test_the_rayjob_has_the_fields_of_its_kind() -> None:
    whole = manifest("rayjob.yaml")
    assert (whole["apiVersion"], whole["kind"]) == ("ray.io/v1", "RayJob")
    cluster = whole["spec"]["rayClusterSpec"]
    assert set(whole["spec"]) <= RAYJOB and set(cluster) == CLUSTER
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert set(group) <= GROUP and all(isinstance(value, str) for value in group["rayStartParams"].values())
        container_of(group["template"]["spec"])
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in cluster["workerGroupSpecs"])


def test_batch_files_are_bash_and_take_their_arguments() -> None:
    files = sorted(SLURM.glob("*.sbatch"))
    assert [path.name for path in files] == ["serve.sbatch", "train.sbatch"]
    for path in files:
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = path.read_text().splitlines()
        options = [line for line in lines if line.startswith("#SBATCH ")]
        first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
        assert all(lines.index(line) < first for line in options), "sbatch reads no option behind a command"
        names = {re.match(r"#SBATCH --([\w-]+)", line)[1] for line in options}
        assert {"job-name", "nodes", "ntasks-per-node", "gres", "time", "output"} <= names
        assert set(re.findall(r"\bGT_\w+", path.read_text())) <= {v.name for v in env.VARIABLES}
    text = (SLURM / "train.sbatch").read_text()
    assert "STEPS=${1:-12000}" in text and "WARMUP=${2:-100}" in text and "LR=${3:-2e-5}" in text
    assert "#SBATCH --signal=TERM@" in text and "#SBATCH --requeue" in text
