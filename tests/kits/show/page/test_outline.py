"""The tree of a plan's modules: every operator once, repeated layers as one, no more children than one looks at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import partway as pw
from partway.propagation.plan.data import PlanData
from partway.show.page.outline import MOST, Group, outline


def of_layers(plan: PlanData, widths: list[int]) -> PlanData:
    """A plan of layers of these widths, each of two modules, one after another, and a head."""
    one = plan.operators[0]
    paths = [(f"layers.{i}.{name}", width) for i, width in enumerate(widths) for name in ("up", "down")]
    made = [(path, f"float32[16, {width}]") for path, width in paths] + [("head", "float32[16, 8]")]
    operators = tuple(
        one.model_copy(update={"name": f"op_{i}", "module": path, "result": result})
        for i, (path, result) in enumerate(made)
    )
    return plan.model_copy(update={"operators": operators, "collectives": ()})


def planned(module: nn.Module) -> pw.Plan:
    with torch.device("meta"):
        x = torch.empty(16, 64)
    module = module.to("meta")
    return pw.compile(module, (x,), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),)).plan


def groups(group: Group) -> Iterator[Group]:
    yield group
    for child in group.children:
        if isinstance(child, Group):
            yield from groups(child)


def numbers(group: Group) -> list[int]:
    return [n for each in groups(group) for n in each.children if isinstance(n, int)]


def labels(group: Group) -> list[str]:
    return [child.label if isinstance(child, Group) else "operator" for child in group.children]


def test_layers_that_are_alike_are_one_stack(plan_data: PlanData):
    tree = outline(of_layers(plan_data, [128] * 5))
    stack = next(each for each in groups(tree) if each.kind == "stack")
    assert (stack.name, stack.label) == ("layers.0 – layers.4", "layers.0 – 4")
    assert [child.name for child in stack.children] == [f"layers.{i}" for i in range(5)]
    assert labels(tree)[:2] == ["layers.0 – 4", "head"]


def test_layers_of_another_width_are_not_of_the_stack(plan_data: PlanData):
    tree = outline(of_layers(plan_data, [128, 128, 256, 128, 128]))
    layers = next(each for each in groups(tree) if each.name == "layers")
    assert labels(layers) == ["0 – 1", "2", "3 – 4"]
    assert [child.kind for child in layers.children] == ["stack", "module", "stack"]


def test_many_layers_are_runs_of_a_stack(plan_data: PlanData):
    tree = outline(of_layers(plan_data, [128] * (MOST + 5)))
    stack = next(each for each in groups(tree) if each.kind == "stack")
    assert "run" in {child.kind for child in stack.children}
    assert len(stack.children) <= MOST
    inside = [each.name for each in groups(stack) if each.kind == "module" and each.name.count(".") == 1]
    assert inside == [f"layers.{i}" for i in range(MOST + 5)]


def test_collectives_tell_layers_apart(plan: pw.Plan, plan_data: PlanData):
    layered = of_layers(plan_data, [128] * 4)
    sent = plan.collectives[0]
    sent = dataclasses.replace(sent, where="op_5", tensor="op_4")  # of layer 2
    tree = outline(layered.model_copy(update={"collectives": (sent,)}))
    assert labels(next(each for each in groups(tree) if each.name == "layers")) == ["0 – 1", "2", "3"]


def test_modules_of_other_names_are_no_layers_though_they_are_alike(plan_data: PlanData):
    tree = outline(of_layers(plan_data, [128]))
    layer = next(each for each in groups(tree) if each.name == "layers.0")
    assert labels(layer) == ["up", "down"]


def test_a_module_that_is_called_twice_is_one_group():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.shared(self.other(self.shared(x))).sum()

    tree = outline(planned(Twice()))
    assert [each.name for each in groups(tree) if each.name == "shared"] == ["shared"]
    assert len(next(each for each in groups(tree) if each.name == "shared").children) == 2


def test_a_chain_of_modules_is_one():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))

        def forward(self, x):
            return self.body(x).sum()

    tree = outline(planned(Inner()))
    assert labels(tree)[0] == "body.0"


def test_a_plan_of_nothing_is_an_empty_tree(plan):
    empty = plan.model_copy(update={"operators": (), "collectives": (), "inputs": (), "outputs": ()})
    assert outline(empty) == Group("module", "", "", ())


PATHS = st.lists(st.sampled_from(["", "a", "a.0", "a.1", "a.0.b", "c.d.e", "c", "x"]), max_size=150)


@given(paths=PATHS)
def test_every_operator_is_in_it_once_and_groups_stay_small(plan_data: PlanData, paths: list[str]):
    one = plan_data.operators[0]
    made = tuple(one.model_copy(update={"name": f"op_{i}", "module": path}) for i, path in enumerate(paths))
    tree = outline(plan_data.model_copy(update={"operators": made, "collectives": ()}))
    assert sorted(numbers(tree)) == list(range(len(paths)))
    assert all(len(group.children) <= MOST for group in groups(tree))
    for group in groups(tree):
        firsts = [child if isinstance(child, int) else child.first for child in group.children]
        assert firsts == sorted(firsts)
        for number in numbers(group) if group.kind == "module" else ():
            assert f"{paths[number]}.".startswith(f"{group.name}." if group.name else "")
