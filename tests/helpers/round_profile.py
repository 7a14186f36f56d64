"""A device profile with round figures."""

import json

from partway.propagation.cost.profile import DeviceProfile

FLAT = {"name": "flat", "source": "a test", "devices": None, "bandwidth": 1e9, "latency": 1e-6, "launch": 1e-5}
NODE = {"name": "node", "source": "a test", "devices": 8, "bandwidth": 1e11, "latency": 2e-6, "launch": 5e-6}
DATA = {
    "name": "round",
    "peak": {"float64": 5e11, "float32": 1e12, "bfloat16": 4e12, "float16": 2e12},
    "memory": 1e10,
    "memory_bandwidth": 1e11,
    "overhead": 0,
    "sources": {"peak": "a test", "memory": "a test", "overhead": "a test"},
    "levels": [FLAT],
}


def profile_with(**changes):
    """The profile with some other fields."""
    return DeviceProfile.model_validate_json(json.dumps({**DATA, **changes}))


ROUND = profile_with()
PAIRS = profile_with(levels=[{**NODE, "devices": 2}, FLAT])
"""Nodes of 2, between which large all_reduces go in steps."""
