"""Tables of a page: they add up to the plan, and names in them are text."""

from __future__ import annotations

import re

import pytest

from partway.show.page import tables
from partway.show.page.facts import Said, said
from partway.strategy.basics.units import human, lasting

HOSTILE = '</script><img src=x onerror="alert(1)">\u202e\x00'


def text(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_seconds_of_the_bar_add_up_to_the_step(plan):
    found = text(tables.costs(plan))
    computing = sum(o.seconds for o in plan.operators)
    assert f"computing {lasting(computing)}" in found
    assert f"backward collectives over dp {lasting(_time(plan, ('dp',), 'backward'))}" in found


def _time(plan, axes, phase):
    return sum(c.predicted_time for c in plan.collectives if c.axes == axes and c.phase == phase)


def test_each_kind_has_its_count_and_bytes(plan):
    found = text(tables.costs(plan))
    for kind, axes, phase in {(c.kind, c.axes, c.phase) for c in plan.collectives}:
        cs = [c for c in plan.collectives if (c.kind, c.axes, c.phase) == (kind, axes, phase)]
        assert f"{kind} {', '.join(axes)} {phase} {len(cs)} {human(sum(c.wire_bytes for c in cs))}" in found


def test_modules_have_all_operators(plan):
    rows = re.findall(
        r"<tr><td>(?:<button[^>]*>)?([^<]*)(?:</button>)?</td><td class=\"n\">(\d+)</td>", tables.costs(plan)
    )
    modules = {name: int(count) for name, count in rows}
    assert sum(modules[name] for name in ("up", "down", "outside of modules")) == len(plan.operators)


def test_the_dearest_collective_is_first_with_its_cause(plan):
    known = said(plan, plan._origin.alternatives, 2)
    found = text(tables.dearest(plan, known))
    dearest = max(plan.collectives, key=lambda c: c.predicted_time)
    assert found.index(f"{dearest.kind} over {', '.join(dearest.axes)} of {dearest.tensor}") < 300
    assert "caused by" in found


def test_memory_is_that_of_the_plan(plan):
    found = text(tables.memory(plan.memory))
    assert human(plan.memory.total) in found
    assert f"parameters {human(plan.memory.parameters)}" in found


def test_annotations_and_what_was_inferred(plan):
    found = text(tables.annotated(plan, said(plan, plan._origin.alternatives, 8)))
    assert "up.weight parameter (&#x27;tp&#x27;, None) dp:R tp:S0" in found
    assert "over the optimum without it" in found or "costs nothing" in found
    assert "down.bias parameter float32[512]" in found
    assert "Nothing was annotated" in tables.annotated(_without(plan), Said())


def _without(plan):
    none = {"annotation": ""}
    return plan.model_copy(
        update={
            "inputs": tuple(t.model_copy(update=none) for t in plan.inputs),
            "outputs": tuple(t.model_copy(update=none) for t in plan.outputs),
        }
    )


def test_a_plan_of_nothing_says_so(plan):
    empty = plan.model_copy(update={"operators": (), "collectives": (), "inputs": (), "outputs": ()})
    found = text(tables.costs(empty) + tables.dearest(empty, Said()) + tables.annotated(empty, Said()))
    assert "No collective: nothing is sent." in found
    assert "Nothing was annotated." in found


@pytest.mark.parametrize("field", ["name", "module", "source", "annotation"])
def test_names_are_text(plan, field):
    operators = tuple(o.model_copy(update={field: f"{HOSTILE}{i}"}) for i, o in enumerate(plan.operators))
    inputs = tuple(
        t.model_copy(update={"name": f"{HOSTILE}{i}", "annotation": HOSTILE}) for i, t in enumerate(plan.inputs)
    )
    hostile = plan.model_copy(update={"operators": operators, "inputs": inputs})
    page = tables.costs(hostile) + tables.annotated(hostile, Said(of_annotations={HOSTILE: HOSTILE}))
    page += tables.dearest(hostile, Said({0: [HOSTILE]}))
    assert "<img" not in page
    assert "</script>" not in page
    assert "\x00" not in page
    assert "\u202e" not in page


def test_the_certificate_says_what_is_proven(plan):
    found = text(tables.certificate(plan))
    assert "dynamic_programming: the optimum, proven." in found
    assert "no plan under these annotations costs less" in found
    unknown = plan.model_copy(update={"unknown_operators": ("mine.op",)})
    assert "mine.op: every device computes all of them" in text(tables.certificate(unknown))
