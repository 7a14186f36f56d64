"""The house keeps its order: each module has a test of its name, each room says what it is, public names have
docstrings.

The sources themselves are read, so that a new module is covered without being listed anywhere.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import state
import tiers
from sources import functions_of, sources, tree_of

TESTS = Path(__file__).parent
CHECKOUT = Path(os.environ.get("PARTWAY_CHECKOUT", TESTS.parent))

# A test, and the modules without one of their own names that it covers.
COVERED = """
propagation/capture/test_masks.py                propagation/capture/rewrites: masks
propagation/plan/test_plan_files.py              propagation/plan: forms
api/compiler/test_captures.py                    propagation/plan: stored_graph
runtime/test_loaded.py                           runtime/ranks: doing
runtime/test_loaded.py                           runtime: random_state
models/test_accumulation.py                      runtime/executors: waiting
models/test_accumulation.py                      propagation/program: accumulate
runtime/test_actions.py                          runtime/executors: couriers
api/ops/test_operators.py                        runtime: by_hand
api/ops/test_groups.py                           runtime: groups
runtime/launching/test_security.py               runtime/launching: job
runtime/tensors/test_replaced.py                 runtime/tensors: tracked
runtime/ranks/test_watch.py                      runtime/ranks: world
api/test_bad_input.py                            partway/requests: request
api/options/test_context.py                      partway/options: algo base parallel
ecosystem/test_one_behaviour.py                  partway/engine: state_dicts
ecosystem/test_around.py                         runtime/tensors: split_operators
kits/operator/test_kubernetes_outages.py         kits/operator: lease
kits/checkpoints/test_checkpoints.py             kits/checkpoints: contents manifest progress ranks
kits/integrations/test_frameworks.py             kits/integrations: accelerate lightning peft transformers
kits/checkpoints/test_inference_layouts.py       kits/checkpoints: per_rank rank_files
api/compiler/test_driver.py                      partway/compiler: capture_call compiled
api/compiler/test_driver.py                      partway/requests: plan_inputs
api/compiler/test_driver.py                      partway/annotations: annotate
api/compiler/test_graphs_saving.py               partway/compiler: graphs_record
api/compiler/test_graphs_saving.py               propagation/graph: printer
kits/checking/test_programs.py                   kits/checking: checker matching measured ranks reasons records
kits/checking/test_reports.py                    kits/checking: report
api/engine/test_planned.py                       partway/reuse: courses replanning
api/engine/test_threads.py                       partway/engine: engine
api/engine/test_threads.py                       partway/compiler: planning_lock
kits/measure/test_bench.py                       kits/measure: workloads
kits/measure/test_calibrate.py                   kits/measure: clock collectives
kits/measure/test_operators.py                   kits/measure: probes
models/test_second_derivatives.py                propagation/ops: constants
models/test_second_derivatives.py                propagation/program: derivative
models/test_second_derivatives.py                runtime/tensors: batched transformed
models/test_step_overhead.py                     partway/engine: runner
models/test_step_overhead.py                     kits/measure: contenders
models/test_constraints.py                       partway/annotations: constrain
models/test_flat_devices.py                      partway/compiler: meshes
models/test_features.py                          partway/engine: sharded
models/test_features.py                          partway: sharding
models/test_gloo_features.py                     partway/engine: rank_facts
models/test_own_parts.py                         partway/annotations: given
models/test_own_parts.py                         runtime/tensors: own_parts
models/test_gloo_dtensors.py                     partway/requests: dtensors
models/test_materialize.py                       partway/engine: materialize
models/test_materialize.py                       propagation/capture: initialisers
models/test_contents.py                          partway/reuse: kinds
models/test_state.py                             partway/reuse: code_names effects libraries
models/test_state.py                             partway/reuse: reachable state
kits/data/test_views.py                          kits/data: random_views view window
kits/data/test_reader.py                         kits/data: epoch extras source tiff_source zarr_source
kits/data/test_web_decode.py                     kits/data: web web_pipeline
strategy/test_notation.py                        strategy/basics: choice
test_layers.py                                   strategy/basics: kits
strategy/test_validate.py                        strategy: errors
models/test_interrupts.py                        strategy/basics: blocks
models/test_hooks.py                             propagation/capture: hooks
propagation/capture/test_capture.py              propagation/capture/rewrites: cleanup overlap
propagation/capture/test_capture.py              propagation/capture/export: failures tracing
propagation/capture/test_capture.py              propagation/graph: port
models/test_courses.py                           propagation/capture/export: questions
models/test_courses.py                           propagation/graph: question
models/test_data_dependent_sizes.py              propagation/capture/export: data_sizes
models/test_numbers.py                           propagation/capture/rewrites: covariance
models/test_numbers.py                           propagation/capture/export: numbers
propagation/capture/rewrites/test_control_flow.py propagation/ops/python: functions
propagation/memory/test_keeping.py               propagation/memory: reader
propagation/memory/test_gradients.py             propagation/memory: paths
propagation/pipeline/test_play.py                propagation/pipeline: actions
propagation/ops/test_indexing.py                 propagation/ops: cross_entropy
propagation/rules/test_table.py                  propagation/ops: ctc dtypes keyed padded_convolution registration
propagation/rules/test_table.py                  propagation/ops/python: hooked
propagation/rules/test_table.py                  propagation/rules/tensors: along fourier hooks linear_algebra pointwise
propagation/rules/test_table.py                  propagation/rules: builder dims row
propagation/rules/test_table.py                  propagation/rules/layers: embedding_bag pools
runtime/executors/test_simulate.py               propagation/ops: collectives
runtime/executors/test_simulate.py               runtime/code: assemble
models/test_given_plans.py                       propagation/plan: replay
api/reuse/test_cache.py                          propagation/plan: stored
propagation/plan/test_data.py                    propagation/plan: plan
models/test_models.py                            propagation/plan: make
models/test_apart.py                             propagation/program: apart
propagation/program/test_lower.py                propagation/program: collective program
models/test_options.py                           propagation/program: gradients
propagation/program/test_differentiate.py        propagation/program: segments
propagation/rules/test_expand.py                 propagation/rules: local_forms
api/requests/test_user_rules.py                  propagation/rules: custom
test_torch_internals.py                          propagation: torch_internals
test_torch_internals.py                          runtime: torch_internals
fusion/test_modes.py                             fusion: policy
fusion/test_fuse.py                              fusion: members
runtime/code/test_sections.py                    runtime/code: straight_line
runtime/code/test_recorders.py                   runtime/code: loaded_graph
models/test_inductor.py                          runtime/code: inductor
runtime/executors/test_execute.py                runtime/code: memory
kits/ps/test_clusters.py                         kits/ps: jobs live saving workers
kits/ps/test_clusters.py                         kits/ps/service: client cluster
runtime/launching/test_security.py               runtime/launching: interfaces
api/ops/test_manual.py                           propagation/capture/manual: by_rank manual_capture permutations
api/ops/test_manual.py                           propagation/problem: manual_option
api/ops/test_manual.py                           propagation/manual: flows manual variance writing
api/ops/test_manual.py                           propagation/ops: by_hand
api/ops/test_manual.py                           propagation/ops/python: manual
api/ops/test_manual.py                           strategy: place
api/ops/test_manual.py                           partway/annotations: manual_layouts
"""


def covered() -> Iterator[tuple[str, str]]:
    """Each row of the table as (test, module)."""
    for line in COVERED.split("\n")[1:-1]:
        test, rest = line.split(maxsplit=1)
        for part in rest.split("; "):
            folder, names = part.split(": ")
            yield from ((test, f"{folder}/{name}.py") for name in names.split())


MODULES = sources()


def twin(module: str) -> Path:
    """The test of a module's name in the folder that mirrors its own: tests of partway/ are in tests/api."""
    folder, _, name = module.rpartition("/")
    return TESTS / folder.replace("partway", "api") / f"test_{name}"


def test_each_module_has_a_test_of_its_name_or_is_covered_by_others() -> None:
    without = {module for module in MODULES if not module.endswith("__init__.py") and not twin(module).exists()}
    named = {module for _, module in covered()}
    assert sorted(without - named) == []
    assert sorted(named - without) == []  # they have one by now, or are gone
    assert [test for test, _ in covered() if not (TESTS / test).exists()] == []


@pytest.mark.parametrize("room", [module for module in MODULES if module.endswith("__init__.py")])
def test_a_room_says_what_it_is(room: str) -> None:
    assert ast.get_docstring(tree_of(MODULES[room]))


def test_a_class_name_stands_for_one_thing() -> None:
    """But for `Broadcast`, MindSpore's operator in `pw.ops.classes` and the placement."""
    names = Counter(
        node.name for path in MODULES.values() for node in tree_of(path).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == ["Broadcast"]


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    for statement in body:
        if isinstance(statement, Definition) and not statement.name.startswith("_"):
            yield statement


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """All classes of the packages by name, which several may have."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def bases(owner: ast.ClassDef) -> set[str]:
    named = [base.value if isinstance(base, ast.Subscript) else base for base in owner.bases]
    return {ast.unparse(base) for base in named}


def documented(method: str, owner: ast.ClassDef, protocols: list[ast.ClassDef]) -> bool:
    """Whether a class, one that it extends or a protocol of its file says what a method is; `forward` is PyTorch's."""
    if any(
        node.name == method and ast.get_docstring(node) for each in (owner, *protocols) for node in public(each.body)
    ):
        return True
    above = [each for name in bases(owner) - {owner.name} for each in classes().get(name, [])]
    return (method == "forward" and bool(owner.bases)) or any(documented(method, each, []) for each in above)


def undocumented(path: Path) -> Iterator[str]:
    """The public functions, classes and methods of a file that have no docstring."""
    body = tree_of(path).body
    protocols = [node for node in body if isinstance(node, ast.ClassDef) and "Protocol" in bases(node)]
    for node in public(body):
        if not ast.get_docstring(node) and not any(ast.unparse(one) == "overload" for one in node.decorator_list):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{m.name}" for m in public(node.body) if not documented(m.name, node, protocols))


def test_all_that_is_public_has_a_docstring() -> None:
    assert [f"{module}: {name}" for module, path in MODULES.items() for name in undocumented(path)] == []


# -- State


def listed_state() -> dict[str, frozenset[str]]:
    """What CONTRIBUTING.md lists, by module."""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = itertools.dropwhile(lambda line: not line.startswith("| state of the process"), text.splitlines())
    cells = [line.split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), rows)][2:]
    return {where.strip(" `"): frozenset(names.strip(" `").split("`, `")) for _, names, where, *_ in cells}


def test_state_is_where_contributing_lists_it_and_in_ten_modules_at_most() -> None:
    found, listed = [
        {f"{module}: {name}" for module, names in kept.items() for name in names}
        for kept in (state.state(), listed_state())
    ]
    assert sorted(found - listed) == []
    assert sorted(listed - found) == []  # they are gone
    assert len(listed_state()) <= 10


def test_a_cache_has_a_bound() -> None:
    assert [f"{module}: {name}" for module, path in state.CORE.items() for name in state.unbounded_caches(path)] == []


def test_state_of_every_kind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "planted.py"
    source.write_text(PLANTED)
    monkeypatch.setitem(state.CORE, "partway/planted.py", source)
    spec = importlib.util.spec_from_file_location("partway.planted", source)
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    monkeypatch.setitem(sys.modules, "partway.planted", planted)
    assert state.state()["partway/planted.py"] == {"added", "count", "field", "kept", "lock", "number", "own", "scope"}
    assert [*state.unbounded_caches(source)] == ["cached", "forever", "also = functools.cache(print)"]


PLANTED = """
import functools, itertools, threading
from contextvars import ContextVar
class Own:
    def __init__(self): self.value = 0
class Nothing: pass
constant, table, nothing = {1: 2}, [3], Nothing()
added, kept, number, own, field = [], {}, 0, Own(), Nothing()
count, lock, scope = itertools.count(), threading.Lock(), ContextVar("scope")
for i in range(3): table.append(i)
def write(constant):
    global number
    number += 1
    constant[0] = table[0]
    added.append(1)
    kept[0] = 1
    field.value = 1
@functools.cache
def cached(): pass
@functools.lru_cache(maxsize=None)
def forever(): pass
@functools.lru_cache(maxsize=4)
def bounded():
    @functools.cache
    def inner(): pass
also = functools.cache(print)
"""


# -- Statements that are hard to read


def test_an_object_changes_its_class_in_few_places() -> None:
    """Where users hold the object already: a module that is sharded, a parameter that is replaced, a DTensor of
    theirs."""
    places = [
        module
        for module, path in state.CORE.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    ]
    assert sorted(places) == [
        "partway/sharding.py",
        "runtime/tensors/replaced.py",
        "runtime/tensors/split_tensor.py",
    ]


MOST_BY_POSITION = 9


def test_no_call_has_so_many_arguments_by_position_that_a_reader_has_to_count() -> None:
    """A call with a starred argument has a number that the text does not say."""
    calls = [
        f"{module}:{node.lineno}: {ast.unparse(node.func)} has {len(node.args)}"
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION
        if not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]
    assert calls == []


def test_what_is_long_is_there() -> None:
    """A test of another name would be in `make test` again, unnoticed."""
    tests = {name.partition("[")[0] for name in tiers.long()}
    paths = {file: TESTS.parent / file for file in (name.partition("::")[0] for name in tests)}
    there = {f"{file}::{name}" for file, path in paths.items() if path.exists() for name in functions_of(path)}
    assert sorted(tests - there) == []


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_tests_with_pools_of_ranks_are_on_half_of_the_workers(request: pytest.FixtureRequest) -> None:
    pooled = {item.nodeid for item in request.session.items if "pools" in getattr(item, "fixturenames", ())}
    groups = {name.rpartition("@")[2] for name in pooled}
    assert all(group.startswith("ranks ") for group in groups)
    assert len(groups) <= max(1, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) // 2)


def test_few_calls_keep_a_layout_of_their_own() -> None:
    """Tables do, whose rows would no longer be lines."""
    kept = [
        module for module, path in MODULES.items() for line in path.read_text().splitlines() if "# fmt: skip" in line
    ]
    assert len(kept) <= 60, Counter(kept).most_common(5)


def test_a_room_has_at_most_16_modules() -> None:
    rooms = Counter(module.rpartition("/")[0] for module in MODULES)
    assert [room for room, modules in rooms.items() if modules > 16] == []
