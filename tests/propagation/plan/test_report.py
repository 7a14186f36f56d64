"""A plan as a table."""

from partway.propagation.plan import report
from partway.strategy.placement import BROADCAST, PARTIAL, REPLICATE, Kind, Shard


def test_the_table_of_a_plan(plan):
    assert str(plan.table()).splitlines() == [
        "plan on dp=2, tp=4",
        " operator      strategy      layout   collectives                                    sent   predicted",
        "──────────────────────────────────────────────────────────────────────────────────────────────────────",
        " up linear     dp:_1 tp:n    S0S1     backward all_reduce(tp), 2 all_reduce(dp)   2.62 MB       67 us",
        " relu          dp:f0 tp:f1   S0S1                                                             5.51 us",
        " down linear   dp:_1 tp:k    S0P      backward 2 all_reduce(dp)                   1.05 MB     46.8 us",
        " result                      S0R      all_reduce(tp)                              1.57 MB     20.2 us",
        "1 collectives forward, 5 backward; one rank sends 5.25 MB a step; predicted 145 us",
        "on one device: 11.5 MB at most, in the backward of linear: parameters 2.1 MB, gradients 2.1 MB, optimizer 4.2 "
        "MB, inputs 1.05 MB, working 2.1 MB; memory_limit 75.2 GB",
        "search: dynamic_programming: the optimum, proven",
        "strategy: axis:factor, the index of the formula that the devices on the axis share; axis:R, they share none",
        "layout: of its result, a placement for each axis: S split along that dim, R whole on every device, P addends "
        "of the value, one on each device",
        "collectives: all_reduce adds up the addends, for every device",
        "sent: bytes of one device in a step, forward and backward",
        "predicted: the time of the operator and of its collectives",
    ]
    assert plan.table(rows=0).splitlines()[-1].startswith("search: ")  # nothing is shown that has to be said
    assert str(plan) == str(plan.table())
    assert repr(plan.table()) == str(plan.table())


def test_a_plan_whose_operators_were_renamed_is_shown(plan):
    renamed = plan.model_copy(
        update={"operators": tuple(o.model_copy(update={"operator": "mine"}) for o in plan.operators)}
    )
    assert " up mine " in str(renamed.table())


def test_views_are_in_the_table_when_every_operator_is_asked_for(plan):
    rows = str(plan.table(every=True)).splitlines()
    assert len(rows) == len(str(plan.table()).splitlines()) + 2
    assert sum("squeeze" in row for row in rows) == 2


def test_every_collective_and_placement_has_words():
    assert set(report._DOES) == {kind for kind in Kind if kind.communicates}
    assert {str(placement)[0] for placement in (Shard(0), REPLICATE, BROADCAST, PARTIAL)} < set(report._PLACEMENTS)
