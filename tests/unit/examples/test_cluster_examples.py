"""The examples for clusters, as their schedulers would read them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace

jsonschema = pytest.importorskip("jsonschema", reason="comes with the extra `ray`")

ROOT = Path(__file__).parents[3]
SBATCH = ROOT / "examples/slurm/train.sbatch"
RAYJOB = ROOT / "examples/kuberay/rayjob.yaml"
SCHEMA = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text(encoding="utf-8"))

# Of sbatch(1), SLURM 24.05: those that a script may need, and whether they take a value.
NEEDS_VALUE = {
    *("account", "array", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task"),
    *("dependency", "error", "export", "gpus", "gpus-per-node", "gpus-per-task", "job-name"),
    *("mail-type", "mail-user", "mem", "mem-per-cpu", "mem-per-gpu", "nodelist", "nodes", "ntasks"),
    *("ntasks-per-node", "open-mode", "output", "partition", "qos", "reservation", "signal"),
    *("time", "time-min", "exclude", "gres", "switches", "tmp"),
}
NO_VALUE = {"exclusive", "hold", "no-requeue", "overcommit", "parsable", "requeue", "wait"}


def sbatch_problems(script: str) -> list[str]:
    problems, is_over = [], False
    for number, line in enumerate(script.splitlines(), 1):
        if line.startswith("#SBATCH"):
            if is_over:
                problems.append(f"line {number}: SLURM reads no option behind the first command")
            found = re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line)
            name = found and found[1]
            if found is None or (name in NO_VALUE) == bool(found[2]):
                problems.append(f"line {number}: {line}")
            elif name not in NO_VALUE | NEEDS_VALUE:
                problems.append(f"line {number}: sbatch knows no --{name}")
        elif line.strip() and not line.startswith("#"):
            is_over = True
    return problems


def schema_problems(job: Any) -> list[str]:  # noqa: ANN401 - whatever YAML holds
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(job)]


def rayjob() -> Any:  # noqa: ANN401 - as above
    return yaml.safe_load(RAYJOB.read_text(encoding="utf-8"))


def test_the_slurm_script_is_one_that_bash_and_sbatch_read() -> None:
    assert sbatch_problems(SBATCH.read_text(encoding="utf-8")) == []
    subprocess.run(["/bin/bash", "-n", SBATCH], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "--exclude=SC1091", SBATCH], check=True)


@pytest.mark.parametrize(
    "planted",
    [
        "#SBATCH --node=3\n",
        "#SBATCH --nodes 3\n",
        "#SBATCH --requeue=yes\n",
        "#SBATCH --time\n",
        "set -e\n#SBATCH --nodes=3\n",
    ],
)
def test_what_sbatch_would_not_read_is_seen(planted: str) -> None:
    assert len(sbatch_problems("#!/bin/bash\n" + planted)) == 1


def test_the_rayjob_has_only_fields_that_kuberay_and_kubernetes_know() -> None:
    assert schema_problems(rayjob()) == []


def test_every_mount_of_the_rayjob_names_a_volume_of_its_pod() -> None:
    cluster = rayjob()["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for spec in (pod["template"]["spec"] for pod in pods):
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {m["name"] for c in spec["containers"] for m in c["volumeMounts"]} == volumes


def test_the_rayjob_names_this_headrace_and_the_ray_that_is_pinned() -> None:
    cluster = rayjob()["spec"]["rayClusterSpec"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={cluster['rayVersion']}\n" in pins
    image = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert image.endswith(f":{headrace.__version__}")


def test_the_rayjob_waits_for_as_many_machines_as_it_has() -> None:
    spec = rayjob()["spec"]
    num_pods = 1 + sum(g["replicas"] for g in spec["rayClusterSpec"]["workerGroupSpecs"])
    assert f"--nodes {num_pods}'" in spec["entrypoint"]


def _misspelt(job: Any) -> None:  # noqa: ANN401 - as above
    job["spec"]["entryPoint"] = job["spec"].pop("entrypoint")


def _unquoted(job: Any) -> None:  # noqa: ANN401 - as above
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 4


def _no_image(job: Any) -> None:  # noqa: ANN401 - as above
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    del group["template"]["spec"]["containers"][0]["image"]


def _no_number(job: Any) -> None:  # noqa: ANN401 - as above
    del job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]


@pytest.mark.parametrize("plant", [_misspelt, _unquoted, _no_image, _no_number])
def test_a_fault_planted_into_the_rayjob_is_seen(plant: Callable[[Any], None]) -> None:
    job = copy.deepcopy(rayjob())
    plant(job)
    assert len(schema_problems(job)) == 1
