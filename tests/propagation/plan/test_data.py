"""What a plan holds: its parts, their totals, and the certificate."""

import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.plan.data import Certificate
from partway.strategy import Layout, Mesh, Replicate, Shard


def test_the_totals_are_those_of_the_parts(plan):
    assert plan.memory.parameters == 4 * (512 * 2048 * 2 // 4 + 2048 // 4 + 512 // 4)
    assert plan.memory.gradients == plan.memory.parameters  # when the peak is at `up`, which comes last
    assert plan.memory.optimizer == 2 * plan.memory.parameters
    assert plan.memory.inputs == 4 * 1024 * 512 // 2
    memory = plan.memory
    kept = memory.activations + memory.again + memory.working
    assert memory.total == 3 * memory.parameters + memory.gradients + memory.inputs + kept
    assert (memory.phase, memory.at) == ("backward", "linear")
    assert plan.wire_bytes == sum(c.wire_bytes for c in plan.collectives)
    assert plan.predicted_time == pytest.approx(
        sum(o.seconds for o in plan.operators) + sum(c.predicted_time for c in plan.collectives) + plan.optimizer_time
    )


def test_the_parameters_at_rest(plan):
    mesh = Mesh({"dp": 2, "tp": 4})
    assert plan.mesh == mesh
    assert plan.parameters["up.weight"] == Layout(mesh, (Replicate(), Shard(0)))
    assert plan.parameters["down.weight"] == Layout(mesh, (Replicate(), Shard(1)))


def test_a_plan_cannot_be_changed(plan):
    with pytest.raises(ValueError, match="frozen"):
        plan.axes = ("x",)


LIMITED = {"memory_limit": 8e9, "binding": True}


@pytest.mark.parametrize(
    ("mode", "bound", "more", "gap", "text"),
    [
        ("dynamic_programming", 2.0, {"proven": True}, 0.0, ": the optimum, proven"),
        ("dynamic_programming", 1.6, {}, 0.25, ": at most 25.0 % above the optimum"),
        ("sharding_propagation", None, {}, None, ": no bound"),
        ("sharding_propagation", 0.0, {}, None, ": no bound"),
        ("sharding_propagation", 1.6, {}, 0.25, ": at most 25.0 % above the optimum"),
        ("recursive_programming", 1.6, {"attained": True}, 0.25, ": 25.0 % above the optimum"),
        ("recursive_programming", 2.0, {"proven": True, "attained": True}, 0.0, ": the optimum, proven"),
        ("dynamic_programming", 2.0, {"proven": True, "memory_limit": 8e9}, 0.0, ": the optimum, proven"),
        (
            "dynamic_programming",
            2.0,
            {"proven": True, **LIMITED},
            0.0,
            " within memory_limit 8 GB: the optimum, proven",
        ),
        (
            "dynamic_programming",
            1.6,
            LIMITED,
            0.25,
            " within memory_limit 8 GB: at most 25.0 % above the optimum (the duality gap)",
        ),
        ("sharding_propagation", 1.6, LIMITED, 0.25, " within memory_limit 8 GB: at most 25.0 % above the optimum"),
        (
            "dynamic_programming",
            2.0,
            {"proven": True, "other_meshes": 3, "bound_elsewhere": 2.5},
            0.0,
            ": the optimum, proven on this mesh, and on 3 other meshes",
        ),
        (
            "dynamic_programming",
            2.0,
            {"proven": True, "other_meshes": 1, "bound_elsewhere": 1.9},
            0.0,
            ": the optimum, proven on this mesh; on 1 other mesh a plan costs at most 5.0 % less",
        ),
        (
            "recursive_programming",
            1.6,
            {"other_meshes": 2},
            0.25,
            ": at most 25.0 % above the optimum on this mesh; of 2 other meshes only plans of this mode are known",
        ),
        (
            "dynamic_programming",
            2.0,
            {"proven": True, "other_meshes": 1, "bound_elsewhere": 2.0, "ends": 1.2, "ends_bound": 1.0},
            0.0,
            ": the optimum, proven on this mesh, and on 1 other mesh; the step ends after 1.2 s, at most 20.0 % later "
            "than any on this mesh",
        ),
    ],
)
def test_a_certificate_says_what_is_known(mode, bound, more, gap, text):
    found = Certificate(**{"mode": mode, "cost": 2.0, "bound": bound, "proven": False, "width": 2, **more})
    assert str(found) == mode + text
    assert found.gap == pytest.approx(gap)


def test_another_search_stands_beside_the_optimum():
    def plan_by(mode):
        with torch.device("meta"), pw.auto_parallel_context(search_mode=mode):
            module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 8))
            return pw.compile(module, (torch.empty(64, 64),), mesh={"dp": 2, "tp": 4}).plan

    best, other = plan_by("dynamic_programming").certificate, plan_by("recursive_programming").certificate
    assert best.proven
    assert other.attained
    assert other.bound == pytest.approx(best.cost, rel=1e-12)
    assert other.gap == pytest.approx(other.cost / best.cost - 1)
