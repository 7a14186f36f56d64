"""The CustomResourceDefinition."""

from __future__ import annotations

from typing import Any

from partway.operator.crd import definition
from partway.operator.observed import Status


def test_the_definition_has_a_structural_schema():
    """As Kubernetes asks: each part has a type, and nothing is by reference."""

    def check(schema: dict[str, Any], where: str) -> None:
        assert "type" in schema, where
        assert not schema.keys() & {"$ref", "anyOf", "allOf", "oneOf", "title", "$defs"}, where
        for name, part in schema.get("properties", {}).items():
            check(part, f"{where}.{name}")
        for each in (schema.get("items"), schema.get("additionalProperties")):
            if isinstance(each, dict):
                check(each, where)

    (version,) = definition()["spec"]["versions"]
    check(version["schema"]["openAPIV3Schema"], "")
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.replicaSpecs.Worker.replicas"
    assert [each["name"] for each in version["additionalPrinterColumns"]] == ["Phase", "Ready", "Restarts", "Age"]


def test_kubectl_get_all_shows_jobs():
    assert definition()["spec"]["names"]["categories"] == ["all"]


def test_conditions_are_as_kubernetes_api_conventions_have_them():
    (version,) = definition()["spec"]["versions"]
    conditions = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    each = conditions["items"]
    assert each["required"] == ["type", "status", "reason", "message", "lastTransitionTime"]
    assert each["properties"].keys() == set(each["required"])


def test_the_status_of_the_definition_names_all_that_is_written():
    """What a schema does not name is dropped without a word."""
    (version,) = definition()["spec"]["versions"]
    known = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    written = Status("a", "b", selector="c", secret="d", start=1.0, end=1.0, restarted=1.0).to_api()
    assert written.keys() == known.keys()
