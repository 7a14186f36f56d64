"""What installs the operator, and the commands that write and check yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sources import sources
from typer.testing import CliRunner

from partway.commands.cli import app
from partway.operator import manifests
from partway.strategy import RuntimeStateError

EVERYWHERE = {
    "pods": ["create", "delete", "list", "watch"], "services": ["create", "delete", "list", "watch"],
    "secrets": ["create"], "events": ["create"], "partwayjobs": ["get", "list", "watch", "delete"],
    "partwayjobs/status": ["update"],
}  # fmt: skip


def rules(role: dict[str, Any]) -> dict[str, list[str]]:
    return {rule["resources"][0]: rule["verbs"] for rule in role["rules"]}


def roles(*watched: str) -> dict[tuple[str, str | None, str], dict[str, Any]]:
    """What the manifests allow, and to whom, by kind, namespace and name."""
    objects = [each for each in manifests.installation("ns", "image", watched) if "rbac" in each["apiVersion"]]
    return {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each for each in objects}


def test_the_operator_may_do_no_more_than_it_does():
    found = roles()
    assert rules(found["ClusterRole", None, "partway-operator"]) == EVERYWHERE
    deployment = manifests.installation("ns", "image")[-1]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["args"][:4] == ["operator", "run", "--lease", "ns/partway-operator"]


def test_it_may_use_its_own_lease_alone_and_in_its_namespace():
    lease = roles()["Role", "ns", "partway-operator-lease"]
    own = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert lease["rules"] == [
        {**own, "verbs": ["create"]}, {**own, "resourceNames": ["partway-operator"], "verbs": ["get", "update"]},
    ]  # fmt: skip
    binding = roles()["RoleBinding", "ns", "partway-operator-lease"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", "partway-operator-lease")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "partway-operator", "namespace": "ns"}]


def test_an_operator_of_some_namespaces_may_do_nothing_in_others():
    found = roles("one", "two")
    assert not [key for key in found if key[0].startswith("Cluster")]
    for namespace in ("one", "two"):
        assert rules(found["Role", namespace, "partway-operator"]) == EVERYWHERE
        assert found["RoleBinding", namespace, "partway-operator"]["roleRef"]["kind"] == "Role"
    said = run("manifests", "--watch", "one", "--watch", "two").output
    container = list(yaml.safe_load_all(said))[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-2:] == ["--namespace=one", "--namespace=two"]


def test_the_operator_is_ready_while_it_watches_and_ends_when_it_cannot_for_long():
    container = manifests.installation("ns", "image")[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": 8080}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": 8080}
    assert container["livenessProbe"]["failureThreshold"] == 30


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["operator", *arguments])


def test_manifests_are_yaml_without_aliases():
    said = run("manifests", "--namespace", "mine", "--image", "registry/operator:1").output
    kinds = [each["kind"] for each in yaml.safe_load_all(said)]
    assert kinds == [
        "Namespace", "CustomResourceDefinition", "ServiceAccount", "Role", "RoleBinding", "ClusterRole",
        "ClusterRoleBinding", "Deployment",
    ]  # fmt: skip
    assert not re.search(r"[&*]id\d", said)
    assert "registry/operator:1" in said


def test_a_job_is_written_and_has_nothing_wrong(tmp_path: Path):
    said = run("job", "examples/Train_It.py", "--workers", "3", "--servers", "2", "--image", "x", "--", "--epochs", "3")
    assert said.exit_code == 0, said.output
    job = yaml.safe_load(said.output)
    assert job["metadata"]["name"] == "train-it"
    counts = {role: each["replicas"] for role, each in job["spec"]["replicaSpecs"].items()}
    assert counts == {"Scheduler": 1, "PS": 2, "Worker": 3}
    command = job["spec"]["replicaSpecs"]["PS"]["template"]["spec"]["containers"][0]["command"]
    assert command == ["python", "examples/Train_It.py", "--epochs", "3"]
    path = tmp_path / "job.yaml"
    path.write_text(said.output)
    checked = run("check", str(path))
    assert (checked.exit_code, checked.output) == (0, "nothing is wrong with it\n")


def test_a_job_of_one_worker_needs_nobody_else():
    job = yaml.safe_load(run("job", "train.py", "--image", "x").output)
    assert list(job["spec"]["replicaSpecs"]) == ["Worker"]


def test_what_is_wrong_is_said_with_the_file(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**manifests.job("a.py", [], 2, 0, "x"), "kind": "MSJob"}))
    said = run("check", str(path))
    assert said.exit_code == 1
    assert said.output == f"{path}: kind is 'MSJob'; it must be PartwayJob\n"


def test_a_name_that_cannot_be_one_is_an_error():
    said = run("job", "7.py", "--image", "x")
    assert said.exit_code == 2
    assert "partway operator job: metadata.name is '7'; it must be a name of hosts" in said.output


def test_the_operator_without_a_cluster_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    said = run("run")
    assert said.exit_code == 2
    assert "partway operator run: no Kubernetes cluster is configured" in said.output


@pytest.mark.parametrize(
    ("module", "said"), [("yaml", "yaml needs PyYAML"), ("kubernetes", "needs Kubernetes' client")]
)
def test_what_is_missing_names_the_extra(module: str, said: str, monkeypatch: pytest.MonkeyPatch):
    from partway.operator.cluster import Cluster

    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(RuntimeStateError, match=re.escape(said) + r".*pip install '\.\[k8s\]' in Partway's checkout"):
        Cluster.connected() if module == "kubernetes" else manifests.yaml()


def test_nothing_else_imports_the_operator():
    """It is for clusters alone: neither `import partway` nor any other module needs it."""
    others = [path for path in sources().values() if path.parent.name != "operator" and path.name != "cli.py"]
    assert len(others) > 100
    assert [path for path in others if "partway.operator" in path.read_text(encoding="utf-8")] == []
