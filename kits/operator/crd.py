"""The CustomResourceDefinition, made from the fields of spec.py."""

from __future__ import annotations

from typing import Any

from partway.operator.spec import GROUP, KIND, PLURAL, SHORT, VERSION, WORKER, Spec

_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "metadata": _ANYTHING,
        "spec": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                        "required": ["name", "image"],
                        "properties": {"name": {"type": "string"}, "image": {"type": "string", "minLength": 1}},
                    },
                }
            },
        },
    },
}
_TIME = {"type": "string", "format": "date-time"}
_STATUS = {
    "type": "object",
    "properties": {
        "phase": {"type": "string"},
        "ready": {"type": "string"},
        "observedGeneration": {"type": "integer"},
        "startTime": _TIME,
        "completionTime": _TIME,
        "lastRestartTime": _TIME,
        "restarts": {"type": "integer"},
        "attempt": {"type": "integer"},
        "attempts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "complete": {"type": "boolean"},
        "workers": {"type": "integer"},
        "size": {"type": "integer"},
        "selector": {"type": "string"},
        "secret": {"type": "string"},
        "replicaStatuses": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "conditions": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type", "status", "reason", "message", "lastTransitionTime"],
                "properties": {
                    "type": {"type": "string"},
                    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                    "reason": {"type": "string"},
                    "message": {"type": "string"},
                    "lastTransitionTime": _TIME,
                },
            },
        },
    },
}
_COLUMNS = {
    "Phase": ("string", ".status.phase"),
    "Ready": ("string", ".status.ready"),
    "Restarts": ("integer", ".status.restarts"),
    "Age": ("date", ".metadata.creationTimestamp"),
}


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition, with a structural schema."""
    spec = Spec.model_json_schema()
    schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": _structural(spec, spec["$defs"]), "status": _STATUS},
    }
    workers = f".spec.replicaSpecs.{WORKER}.replicas"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": workers,
                            "statusReplicasPath": ".status.workers",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path} for name, (kind, path) in _COLUMNS.items()
                    ],
                }
            ],
        },
    }


def _structural(schema: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Convert pydantic's schema of a part to Kubernetes' form: no references, and no null for optional fields."""
    if "$ref" in schema:
        schema = {**parts[schema["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in schema.items() if k != "$ref"}}
    if "anyOf" in schema:
        (own,) = [each for each in schema["anyOf"] if each.get("type") != "null"]
        schema = {**own, **{k: v for k, v in schema.items() if k not in ("anyOf", "default")}}
        return _structural(schema, parts)
    kept = {k: v for k, v in schema.items() if k in ("type", "enum", "minimum", "maximum", "description", "required")}
    if isinstance(schema.get("default"), bool | int | str):
        kept["default"] = schema["default"]
    if "properties" in schema:
        kept["properties"] = {
            name: _template(each) if name == "template" else _structural(each, parts)
            for name, each in schema["properties"].items()
        }
    return kept


def _template(schema: dict[str, Any]) -> dict[str, Any]:
    return {**_POD, "description": schema["description"]}
