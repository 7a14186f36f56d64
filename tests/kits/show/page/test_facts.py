"""What a page is told beside its plan: crossings as networkx has them, parts as the layouts have them."""

from __future__ import annotations

import pytest

import partway as pw
from partway.show.page.facts import Said, facts, pattern, said
from partway.strategy import StrategyError


def title(plan: pw.Plan, node: int) -> str:
    names = [o.name for o in plan.operators]
    names += [f"input {t.name}" for t in plan.inputs] + [f"output {t.name}" for t in plan.outputs]
    return names[node]


def test_each_collective_crosses_the_edge_that_networkx_has_it_at(plan):
    told = facts(plan, Said())
    assert told["graph"] == ""
    edges = [(a, b, data) for a, b, data in plan.to_networkx().edges(data=True) if data["collectives"]]
    expected = sorted((a, b, str(c)) for a, b, data in edges for c in data["collectives"])
    crossings = zip(told["crossings"], plan.collectives, strict=True)
    assert expected == sorted((title(plan, at[0]), title(plan, at[1]), str(c)) for at, c in crossings)
    assert len(expected) == len(plan.collectives) > 0


def test_layouts_say_what_a_device_holds(plan):
    told = facts(plan, Said())["layouts"]
    for t in (*plan.inputs, *plan.outputs):
        found = told[f"{t.dtype}{list(t.shape)} {' '.join(t.codes)}"]
        local = plan.layout_of(t.codes).local_shape(t.shape)
        assert found["local"] == f"{t.dtype}{list(local)}"
        assert found["svg"].startswith("<svg")
        assert found["words"].count(";") == len(plan.axes) - 1
    for o in plan.operators:
        for kind, codes in zip(o.types, o.results, strict=True):
            assert f"{kind} {' '.join(codes)}" in told


def test_parameters_are_in_the_group_of_their_module(plan):
    told = facts(plan, Said())
    names = {t.name: told["groups"][group][2] for t, group in zip(plan.inputs, told["of_inputs"], strict=True)}
    assert names["up.weight"] == "up"
    assert names["down.bias"] == "down"
    assert names["x"] == ""


def test_a_plan_of_an_earlier_version_has_no_crossings_and_says_why(of_the_version_before):
    told = facts(of_the_version_before, Said())
    assert told["crossings"] == []
    assert "did not keep which tensors each operator reads" in told["graph"]


def test_what_is_said_is_what_explain_says(plan):
    known = said(plan, plan._origin.alternatives, 3)
    assert len(known.of_collectives) == 3
    explained = plan.explain("*", alternatives=len(plan.collectives))
    for lines in known.of_collectives.values():
        assert all(line in explained for line in lines)
    assert known.of_annotations["up.weight"] in plan.explain("up.weight")
    dearest = max(plan.collectives, key=lambda c: c.predicted_time)
    assert plan.collectives[next(iter(known.of_collectives))].predicted_time == dearest.predicted_time
    assert known.otherwise.startswith("It is not among the 3 that cost most; save_html(..., alternatives=")


def test_of_a_plan_that_was_loaded_nothing_is_known_and_the_page_says_why(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    known = said(pw.Plan.load(tmp_path / "plan.json"), None, 8)
    assert not known.of_collectives
    assert known.otherwise.startswith("The plan was read from a file: what caused a collective")
    assert said(plan, None, 0).otherwise == "What caused it was not asked for: save_html(..., alternatives=8) asks."


@pytest.mark.parametrize("count", [-1, True, "8", None])
def test_a_count_that_is_none_is_refused(plan, count):
    with pytest.raises(
        StrategyError, match=r"alternatives is .*; write for how many collectives .*: 0 \(none\) or more"
    ):
        said(plan, None, count)


def test_a_tensor_that_cannot_be_drawn_is_said_in_words(plan):
    inputs = tuple(t.model_copy(update={"shape": (0, *t.shape[1:])}) if t.name == "x" else t for t in plan.inputs)
    told = facts(plan.model_copy(update={"inputs": inputs}), Said())["layouts"]
    empty = next(kind for kind in told if kind.startswith("float32[0, 512]"))
    assert told[empty] == {"local": "float32[0, 512]"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h.0.attn", "h.*.attn"),
        ("addmm_3", "addmm"),
        ("conv2d", "conv2d"),
        ("layer1.weight", "layer1.weight"),
        ("0", "*"),
    ],
)
def test_patterns_of_repeated_names(name, expected):
    assert pattern(name) == expected
