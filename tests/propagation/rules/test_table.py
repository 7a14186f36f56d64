"""Every row of the rule table, proven: each option of each operator gives PyTorch's value and gradients.

The cases are in `cases/`, a module for each family of `propagation/rules/`.
"""

import random
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
import torch.nn.functional as F
from cases import case, cases_by_family, definite, index, real, tensors_of
from strided import strided

import partway as pw
from partway.propagation import rules
from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import shape
from partway.propagation.ops.python.hooked import HOOKS
from partway.propagation.ops.random_numbers import draw
from partway.propagation.problem.formulate import formulate
from partway.propagation.program.lower import lower
from partway.propagation.rules import table
from partway.propagation.rules.layers import experts, grouped_matmul
from partway.propagation.rules.rule import axis_options
from partway.propagation.rules.table import ROWS, rule_of
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Layout, Mesh, Replicate, Shard

aten = torch.ops.aten
CASES = [one for cases in cases_by_family().values() for one in cases]


def name_of(one):
    shapes = "-".join("x".join(map(str, spec[1])) for spec in one.args)
    return f"{str(one.target).removeprefix('aten.')}-{shapes}"


quiet = pytest.mark.filterwarnings(
    "ignore:index_reduce.. is in beta",
    "ignore:The reduce argument of torch.scatter",
    "ignore:torch.cholesky is deprecated",
    "ignore:torch.triangular_solve is deprecated",
    "ignore:torch.searchsorted.*non-contiguous",
    "ignore:torch.(qr|lu|lu_solve|chain_matmul) is deprecated",
    "ignore:Using torch.cross without specifying the dim",
)


OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
NOT_IN_OLD = {  # torch.export cannot capture the quantiles, aminmax has no derivative
    aten.aminmax.default, aten.nanquantile.default, aten.nanquantile.scalar, aten.quantile.default, aten.quantile.scalar
}  # fmt: skip


def all_cases():
    """Of each row one case by default; its others are for `make conformance`."""
    seen, cases = set(), []
    for one in CASES:
        again = one.like_others or one.target in seen
        seen.add(one.target)
        marks = [pytest.mark.slow] * again
        if one.target in NOT_IN_OLD:
            marks.append(pytest.mark.skipif(OLD, reason="torch 2.11 itself cannot do it"))
        cases.append(pytest.param(one, marks=marks, id=name_of(one)))
    return cases


def strided_call(one):
    """The function and the operands of a case, which are views of stored tensors; the gradient is transposed."""
    plain = tensors_of(one)
    if one.target in VIEWED:
        return one.fn, plain
    *_, (_, fn, stored) = strided(one.fn, plain, {}, len(one.splits))
    try:
        fn(*stored)
    except RuntimeError as error:  # take_along_dim and kron take views of some strides only
        if "view size is not compatible" not in str(error):
            raise
        return one.fn, plain
    return fn, stored


# What puts strided operands together is made of the first of these, and PyTorch takes the last ones dense only.
VIEWED = {
    aten.alias.default, aten.clone.default, aten.expand.default, aten.permute.default, aten.slice.Tensor,
    aten.native_group_norm.default, aten.view_as_complex.default,
}  # fmt: skip


@quiet
@pytest.mark.parametrize("one", all_cases())
def test_every_option_computes_the_value_and_the_gradients_of_strided_operands(one, lab):
    fn, args = strided_call(one)
    graph = capture(fn, args, {})
    vertices = lab.check_options(graph, fn, args, one.target, lab.LINE, 12, random.Random(0))
    assert vertices, "the function does not call the operator"
    options = axis_options(vertices[0].rule)
    assert {option.factor for option in options} - {None} == set(one.splits.split())
    assert sum("P" in map(str, option.results) for option in options if option.factor is None) == one.linear


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("one", all_cases())
def test_every_option_computes_the_value_and_the_gradients(one, lab):
    args = tensors_of(one)
    lab.check_options(capture(one.fn, args, {}), one.fn, args, one.target, lab.LINE, 12, random.Random(0))


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("one", all_cases())
def test_options_on_two_axes_compute_the_value_and_the_gradients(one, lab):
    args = tensors_of(one)
    lab.check_options(capture(one.fn, args, {}), one.fn, args, one.target, lab.SQUARE, 3, random.Random(0))


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1], ids=["one", "none"])
@pytest.mark.parametrize("one", all_cases())
def test_ranks_of_one_element_or_of_none_compute_the_value_and_the_gradients(one, more, lab):
    check_sizes(one, more, lab)


def check_sizes(one, more, lab):
    """Each factor of each call of the operator, split over as many ranks as it has elements, and `more`."""
    args = tensors_of(one)
    expected = lab.value_and_gradients(lab.as_tuple(one.fn(*args)), [t for t in args if t.requires_grad])
    graph = capture(one.fn, args, {})
    tried = 0
    for size in sorted({n for node in calls_of(graph, one.target) for n in rule_of(node).sizes.values() if n > 1}):
        mesh = Mesh({"x": size + more})
        free = {port.name: (layouts_of(mesh, shape(port.node), size), "any") for port in graph.inputs}
        problem = formulate(graph, lab.settings_of(mesh, on_unknown_op="error"), free)
        for vertex in lab.vertices_of(problem, one.target):
            for i, option in enumerate(problem.vertices[vertex].options):
                if option.factors[0] is not None:
                    chosen = lab.choose(problem, vertex, [i])
                    text = f"{one.target} split along {option.factors[0]} on {mesh}"
                    lab.check_choice(chosen, dynamic_programming(chosen).choice, one.fn, args, expected, text)
                    tried += 1
    return tried


def calls_of(graph, target):
    return [node for node in graph.nodes if node.target is target]


def layouts_of(mesh, size, least):
    """Whole, or split along any dim of at least so many elements."""
    placements = [Replicate(), *(Shard(dim) for dim, n in enumerate(size) if n >= least)]
    return tuple(Layout(mesh, (placement,)) for placement in placements)


# calls that mean something else where a dim has one element, or as many as another one
AMBIGUOUS = [
    case(aten.linalg_cross.default, "", torch.cross, real(6, 3), real(6, 3)),
    case(aten.linalg_solve.default, "", torch.linalg.solve, definite(6, 3), real(3, 3)),
    case(aten.linalg_solve.default, "", torch.linalg.solve, definite(3, 3), real(3, 6)),
    case(aten.linalg_solve.default, "", torch.linalg.solve, definite(2, 3), real(3)),
    case(aten.linalg_solve_ex.default, "", lambda a, b: torch.linalg.solve_ex(a, b)[0], definite(6, 3), real(3, 3)),
    case(aten.squeeze.dims, "", lambda x: x.squeeze() * 2, real(2, 1, 4)),
    case(aten.squeeze.dims, "", lambda x: x.squeeze(0) * 2, real(2, 4)),
    case(aten.squeeze.dims, "", lambda x: x.squeeze((-1, 0)) * 2, real(2, 4, 1)),
    case(aten.squeeze.dims, "", lambda x: aten.squeeze_copy(x) * 2, real(2, 2)),
]


@quiet
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("one", [pytest.param(one, id=name_of(one)) for one in AMBIGUOUS])
def test_the_sizes_of_the_whole_say_what_a_call_means(one, lab):
    args = tensors_of(one)
    assert lab.check_options(capture(one.fn, args, {}), one.fn, args, one.target, lab.LINE, 12, random.Random(0))
    assert check_sizes(one, 0, lab)


def test_every_row_has_a_case():
    own_tests = {draw, *HOOKS, *experts.ROWS, *grouped_matmul.ROWS}
    covered = {one.target for one in CASES} | own_tests
    missing = [str(target) for target in ROWS if target not in covered]
    assert not missing, f"no case calls {', '.join(missing)}"


def families():
    """The modules of the families of operators."""
    packages = (import_module(f"{rules.__name__}.{info.name}") for info in iter_modules(rules.__path__) if info.ispkg)
    modules = (
        import_module(f"{package.__name__}.{info.name}")
        for package in packages
        for info in iter_modules(package.__path__)
    )
    return [m for m in modules if hasattr(m, "ROWS") or hasattr(m, "EXPANSIONS")]


def test_the_table_has_the_rows_and_expansions_of_all_families():
    assert {op for module in families() for op in getattr(module, "ROWS", {})} == set(ROWS)
    assert {op for module in families() for op in getattr(module, "EXPANSIONS", {})} == set(table.EXPANSIONS)


def test_an_operator_is_in_one_family():
    owners = {}
    for module in families():
        for op in {**getattr(module, "ROWS", {}), **getattr(module, "EXPANSIONS", {})}:
            assert owners.setdefault(op, module) is module, f"{op} is in {owners[op].__name__} and {module.__name__}"
    with pytest.raises(ValueError, match=r"two families of rules have aten\.abs\.default; leave each operator to one"):
        table.merged([{aten.abs.default: 1}, {aten.abs.default: 2, aten.neg.default: 3}])


def test_the_cases_of_a_family_are_of_its_operators():
    modules = {module.__name__.rpartition(".")[2]: module for module in families()}
    for family, cases in cases_by_family().items():
        rows = modules[family].ROWS
        others = {str(one.target) for one in cases if one.target in ROWS and one.target not in rows}
        assert not others, f"{', '.join(others)} belong into the cases of another family than {family}"


def test_a_row_that_nothing_reaches_is_not_kept():
    def f(x):
        return (
            aten.contiguous(x) + aten.chunk(x.to(torch.float32).double(), 2)[0].repeat(2, 1) + F.dropout(x, 0.5, False)
        )

    targets = {str(node.target) for node in capture(f, (torch.ones(4, 4),), {}).nodes}
    assert targets.isdisjoint(
        {"aten.contiguous.default", "aten.chunk.default", "aten.to.dtype", "aten.dropout.default"}
    )


# -- splits that a maximum and an embedding have


def placements_of(lab, fn, args, target, mesh):
    """The placements of the first result in every option of the call of `target`."""
    problem = lab.problem_of(fn, args, mesh)
    (vertex,) = lab.vertices_of(problem, target)
    return {str(option.results[0]) for option in problem.vertices[vertex].options}


def test_a_maximum_with_a_gradient_keeps_its_dim_whole(lab):
    x = torch.rand(4, 4, requires_grad=True)
    detached = placements_of(lab, lambda x: x.detach().amax(1) * x.sum(1), (x,), aten.amax.default, lab.LINE)
    assert detached == {"[x:S0]", "[x:Pmax]", "[x:R]", "[x:B]"}
    assert placements_of(lab, lambda x: x.amax(1), (x,), aten.amax.default, lab.LINE) == {"[x:S0]", "[x:R]", "[x:B]"}
    assert "[x:Pmax]" in placements_of(lab, lambda x: x.amax(1), (x.detach(),), aten.amax.default, lab.LINE)
    assert "[x:Pmax]" not in placements_of(lab, lambda x: x.amax(1), (x.detach() > 0.5,), aten.amax.default, lab.LINE)


def test_rows_are_cut_by_several_axes_in_mesh_order(lab):
    args = tensors_of(case(aten.embedding.default, "", F.embedding, index(8, 16), real(8, 4)))
    problem = lab.problem_of(F.embedding, args, lab.SQUARE)
    (vertex,) = lab.vertices_of(problem, aten.embedding.default)
    options = problem.vertices[vertex].options
    both = next(i for i, option in enumerate(options) if option.factors == ("v", "v"))
    problem = lab.choose(problem, vertex, [both])
    solution = dynamic_programming(problem)
    expected = lab.value_and_gradients([F.embedding(*args)], [args[1]])
    lab.check_choice(problem, solution.choice, F.embedding, args, expected, "rows on both axes")
    program = str(lower(problem, solution.choice))
    assert "partway.position.default(['dp', 'tp'], [2, 2])" in program
    assert "partway.part_index.default(input, position_default, [0, 2, 4, 6, 8])" in program


@pytest.mark.parametrize("wrong", [8, -1])
def test_an_index_that_no_part_has_is_an_error(lab, wrong):
    args = torch.tensor([0, wrong, 3, 5]), torch.rand(8, 4, requires_grad=True)
    problem = lab.problem_of(F.embedding, args, lab.LINE)
    (vertex,) = lab.vertices_of(problem, aten.embedding.default)
    split = [i for i, option in enumerate(problem.vertices[vertex].options) if option.factors == ("v",)]
    problem = lab.choose(problem, vertex, split)
    step = lab.compiled(problem, dynamic_programming(problem).choice)
    with pytest.raises(IndexError, match=f"index {wrong} is out of range of a dim of size 8"):
        step(lab.call_tensors(problem, F.embedding, args))


# Of integers that wrap around: what is computed of addends on each rank, and what of their sum.
WRAPPING = {
    "narrow, then wide": lambda x: x.sum(1).to(torch.uint8).to(torch.int64).sum(),
    "int32": lambda x: (x * 2**24).sum(1).to(torch.int32).to(torch.int64).sum(),
    "to a float": lambda x: x.sum(1).to(torch.uint8).to(torch.float64).sum(),
    "a wider sum": lambda x: x.to(torch.uint8).sum(1, dtype=torch.uint8).sum(),
    "times a fraction": lambda x: (x.to(torch.uint8).sum(1, dtype=torch.uint8) * 0.5).sum(),
    "divided": lambda x: (x.to(torch.int8).sum(1, dtype=torch.int8) / 2).sum(),
    "a truth value": lambda x: x.sum(1).to(torch.bool).sum(),
    "a mean of them": lambda x: F.avg_pool1d(x.sum(1).view(1, 1, -1), 3).sum(),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_integers_that_wrap_around_are_those_of_one_device(name):
    x = 50 * torch.randint(-1, 2, (1 << 12, 8), generator=torch.Generator().manual_seed(0))
    split = pw.shard(WRAPPING[name], mesh={"x": 4}, in_strategy=((None, "x"),))
    assert torch.equal(split(x), WRAPPING[name](x))


@pytest.mark.parametrize(
    ("given", "result", "expected"),
    [
        (torch.float64, torch.float16, True),
        (torch.complex64, torch.float32, True),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.uint8, True),
        (torch.int8, torch.uint8, True),
        (torch.uint8, torch.int16, False),
        (torch.int64, torch.float64, False),
        (torch.int64, torch.bool, False),
        (torch.bool, torch.int64, False),
        (torch.bool, torch.bool, False),
    ],
)
def test_addends_may_be_computed_with_where_dtypes_keep_their_sum(given, result, expected):
    assert table.add_up(given, result) is expected
