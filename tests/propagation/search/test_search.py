"""Every search mode: right programs, the bound that is proven, and a row of the table."""

import pytest
from search_problems import annotated_problem, mlp, mlp_tensors

from partway.propagation.search import search as module
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.search import SEARCHES, SearchMode, find, search
from partway.propagation.search.solution import verify_solution
from partway.strategy import REPLICATE, Layout, Mesh, Shard


def test_every_mode_has_a_row_and_only_the_exact_search_is_called_exact():
    assert set(SEARCHES) == set(SearchMode)
    assert [mode for mode, row in SEARCHES.items() if row.exact] == [SearchMode.DYNAMIC_PROGRAMMING]


@pytest.mark.parametrize("mode", list(SearchMode))
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_every_search_gives_a_plan_that_computes_the_right_thing(lab, mode, sizes):
    args = mlp_tensors()
    mesh = Mesh.of_sizes(sizes)
    split = Layout(mesh, (Shard(0), *[REPLICATE] * (len(sizes) - 1)))
    problem = lab.problem_of(mlp, args, mesh, {"x": ((split,), "by hand")})
    solution = verify_solution(problem, search(problem, mode))
    optimum = dynamic_programming(problem)
    assert optimum.proven
    assert optimum.cost == pytest.approx(optimum.bound)
    assert solution.cost >= optimum.cost - 1e-15
    assert solution.cost == problem.cost(solution.choice)
    at = next(i for i, v in enumerate(problem.vertices) if v.name == "x")
    assert problem.vertices[at].options[solution.choice[at]].results == (split,)
    tensors = lab.call_tensors(problem, mlp, args)
    lab.check_choice(problem, solution.choice, mlp, args, lab.value_and_gradients([mlp(*args)], tensors), str(mode))


@pytest.mark.parametrize("mode", list(SearchMode))
def test_what_costs_more_than_a_plan_on_another_mesh_is_searched_for_no_further(lab, mode, monkeypatch):
    problem = annotated_problem(lab)
    whole = search(problem, mode)
    assert whole.keeping is not None
    if SEARCHES[mode].exact:
        monkeypatch.setattr(module, "within_memory", None)
    else:
        monkeypatch.setattr(module, "dynamic_programming", None)
    below = whole.bound * (1 - 1e-9)  # sums in another order differ in their last digits
    found = verify_solution(problem, search(problem, mode, below=below))
    assert found.cost >= below
    assert found.keeping is None


def test_where_memory_may_not_suffice_a_mode_hears_of_the_exact_plan_first(lab, monkeypatch):
    problem = annotated_problem(lab)
    monkeypatch.setattr(module, "has_room", lambda *_: False)
    found = search(problem, SearchMode.SHARDING_PROPAGATION, below=0.0)
    assert found.keeping is not None
    assert found == search(
        problem, SearchMode.SHARDING_PROPAGATION, 0.0, find(problem, SearchMode.SHARDING_PROPAGATION)
    )


@pytest.mark.parametrize("mode", list(SearchMode))
def test_every_search_carries_the_bound_that_is_proven(lab, mode):
    problem = annotated_problem(lab)
    found, optimum = search(problem, mode), dynamic_programming(problem)
    assert found.bound == optimum.bound
    assert found.bound <= found.cost * (1 + 1e-12)
    assert found.proven == (found.cost <= optimum.cost * (1 + 1e-9))
