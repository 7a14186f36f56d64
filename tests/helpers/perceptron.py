"""Fixtures of tests of plans: the plan of a perceptron on two axes."""

import json

import pytest
import torch
from torch import nn

import partway as pw


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)).unsqueeze(0).squeeze(0))


@pytest.fixture(scope="session")
def plan():
    with torch.device("meta"):
        module, x = MLP(), torch.empty(1024, 512, requires_grad=True)
    return pw.compile(
        module,
        (x,),
        mesh={"dp": 2, "tp": 4},
        in_strategy=(("dp", None),),
        out_strategy=(("dp", None),),
        parameter_plan={"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")},
    ).plan


@pytest.fixture
def of_the_version_before(plan, tmp_path):
    """The plan as an earlier version wrote it, without the producers of operands."""
    data = json.loads(plan.model_dump_json())
    for each in (*data["inputs"], *data["operators"], *data["outputs"]):
        for field in ("producer", "producers", "held_bytes", "types"):
            each.pop(field, None)
    (tmp_path / "before.json").write_text(json.dumps(data))
    return pw.Plan.load(tmp_path / "before.json")
