"""What the tests of planning share: a call planned and run on simulated ranks, and one strategy tried at a time. They
have this module as the fixture `lab`, with the meshes that most of them use."""

import dataclasses

import torch

from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.graph.graph import differentiated
from partway.propagation.graph.port import Role
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import Settings, VertexKind
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.program.program import verify_program
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.solution import verify_solution
from partway.runtime.executors.simulate import Simulator
from partway.runtime.loaded import Loaded
from partway.strategy import Mesh

LINE = Mesh({"x": 2})
SQUARE = Mesh({"dp": 2, "tp": 2})


def settings_of(mesh, **changes):
    return Settings(mesh, profile_of("cpu"), WEIGHTS[Level.COMMUNICATION], **{"fully_use_devices": False, **changes})


def problem_of(
    fn, args, mesh, allowed=None, kwargs=None, batch_norm_parts=1, random_numbers=RandomNumbers.TORCH, **changes
):
    """The search problem of one call; an operator without a rule is an error, unless `changes` say otherwise. Random
    numbers are PyTorch's, to be compared with it."""
    changes = {"on_unknown_op": "error", **changes}
    graph = capture(fn, args, kwargs or {}, CaptureOptions(batch_norm_parts, random_numbers))
    return formulate(graph, settings_of(mesh, **changes), allowed or {})


def choose(problem, vertex, options):
    """`problem` with the options of one vertex cut down to the given ones."""
    old = problem.vertices[vertex]
    new = dataclasses.replace(old, options=old.options.take(list(options)))
    return dataclasses.replace(problem, vertices=(*problem.vertices[:vertex], new, *problem.vertices[vertex + 1 :]))


def compiled(problem, choice, wanted=None):
    """The program of `choice`, ready to run on simulated ranks."""
    program = verify_program(lower(problem, choice))
    wanted = differentiated(problem.graph) if wanted is None else wanted
    return Loaded(differentiate(program, wanted), Simulator(problem.settings.mesh), lambda w: None)


def vertices_of(problem, target):
    """The positions of the vertices that call the operator `target`."""
    return [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.OPERATOR and v.node.target is target]


def call_tensors(problem, fn, args):
    """The tensors of the program's inputs for a call with `args` (tensors only)."""
    given = iter(args)
    found = []
    for port in problem.graph.inputs:
        if port.role is Role.INPUT:
            found.append(next(given))
        elif port.role is Role.CONSTANT:
            found.append(problem.graph.constants[port.name])
        elif port.role is Role.PARAMETER:
            found.append(fn.get_parameter(port.name))
        else:
            found.append(fn.get_buffer(port.name))
    return found


def value_and_gradients(outputs, tensors):
    """The outputs, and the gradients of their sum weighed with fixed numbers."""
    generator = torch.Generator().manual_seed(1)
    able = [o for o in outputs if o.requires_grad]
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in able]
    leaves = [t for t in tensors if t.requires_grad]
    gradients = torch.autograd.grad(able, leaves, weights, allow_unused=True) if able and leaves else ()
    return [*(o.detach() for o in outputs), *gradients]


def as_tuple(result):
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def assert_same(found, expected, message="", tolerance=1e-10):
    """Values and gradients are equal; a gradient that is None is one of zeros."""
    assert len(found) == len(expected), message
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a is None or b is None:
            nonzero = a if b is None else b
            assert nonzero is None or not nonzero.any(), f"{message}: value {i} is None on one side"
            continue
        assert a.shape == b.shape, f"{message}: value {i} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"{message}: value {i} is {a.dtype}, not {b.dtype}"
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text, i=i: f"{message}: value {i}: {text}"
        )


def check_choice(problem, choice, fn, args, expected, message):
    step = compiled(problem, choice)
    tensors = call_tensors(problem, fn, args)
    found = value_and_gradients(step(tensors), [t for t in tensors if t.requires_grad])
    assert_same(found, expected, message)


def check_optimum(graph, fn, args, mesh, allowed=None):
    """Run the best plan of the graph of `fn` and compare it with plain PyTorch. Returns the problem and solution."""
    problem = formulate(graph, settings_of(mesh, on_unknown_op="error"), allowed or {})
    solution = verify_solution(problem, dynamic_programming(problem))
    tensors = call_tensors(problem, fn, args)
    leaves = [t for t in tensors if t.requires_grad]
    expected = value_and_gradients(as_tuple(fn(*args)), leaves)
    check_choice(problem, solution.choice, fn, args, expected, str(fn))
    return problem, solution


def check_options(graph, fn, args, target, mesh, limit, choices):
    """Try the options of every call of `target`, at most `limit` drawn with `choices`, against plain PyTorch.

    Returns the vertices. All the rest of the graph takes what is cheapest.
    """
    problem = formulate(graph, settings_of(mesh, on_unknown_op="error"), {})
    expected = value_and_gradients(as_tuple(fn(*args)), [t for t in args if t.requires_grad])
    found = vertices_of(problem, target)
    for vertex in found:
        options = range(len(problem.vertices[vertex].options))
        if len(options) > limit:
            options = sorted(choices.sample(options, limit))
        for option in options:
            restricted = choose(problem, vertex, [option])
            solution = verify_solution(restricted, dynamic_programming(restricted))
            text = f"{target} as {restricted.vertices[vertex].options[0]} on {mesh}"
            check_choice(restricted, solution.choice, fn, args, expected, text)
    return [problem.vertices[i] for i in found]
