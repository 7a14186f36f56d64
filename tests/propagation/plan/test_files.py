"""Plans as files."""

import json

import pytest

from partway.propagation.plan.data import Certificate
from partway.propagation.plan.plan import Plan
from partway.strategy import StrategyError


def test_a_plan_is_the_same_after_saving_and_loading(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert loaded.collectives == plan.collectives
    assert loaded.collectives[0].kind.communicates
    assert loaded.parameters == plan.parameters
    assert str(loaded.explain("*", alternatives=0)) == str(plan.explain("*", alternatives=0))


def test_a_plan_without_a_bound_is_saved(plan, tmp_path):
    unknown = plan.model_copy(
        update={"certificate": Certificate(mode="sharding_propagation", cost=1.0, bound=None, proven=False, width=1)}
    )
    unknown.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == unknown


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', "not json"])
def test_a_file_that_holds_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(StrategyError, match="holds no plan of this version"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StrategyError, match=r"could not read a plan from .*No such file"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_of_the_version_before_is_read(plan, of_the_version_before):
    assert not of_the_version_before.has_producers
    assert str(of_the_version_before) == str(plan)
    assert of_the_version_before.parameters == plan.parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o["producers"].pop(), "operator 'relu' has 1 operand and 0 producers"),
        (lambda o: o["producers"][0].update(name="nobody"), "operator 'relu' reads 'nobody', which nothing produces"),
        (lambda o: o["producers"][0].update(result=1), r"operator 'relu' reads 'linear\[1\]', which nothing produces"),
        (lambda o: o["producers"][0].update(name="linear_1"), "operator 'relu' reads 'linear_1', which nothing"),
    ],
)
def test_an_operator_that_reads_what_nothing_produces_is_refused(plan, tmp_path, change, message):
    data = json.loads(plan.model_dump_json())
    change(next(o for o in data["operators"] if o["name"] == "relu"))
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(StrategyError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_an_output_that_nothing_produces_is_refused(plan, tmp_path):
    data = json.loads(plan.model_dump_json())
    data["outputs"][0]["producer"]["name"] = "nobody"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(StrategyError, match="output 'result' is 'nobody', which nothing produces"):
        Plan.load(tmp_path / "plan.json")
