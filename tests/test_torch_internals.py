"""What Partway relies on of PyTorch's private names, one test each: a new PyTorch names here what it broke.

`test_layers.py` checks that nothing else uses private names, and the first test here that each has one of its own.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import _foreach_supported_types as optim_types
from torch.utils._foreach_utils import _foreach_supported_types as util_types

from partway.propagation import torch_internals as planning
from partway.runtime import torch_internals as running

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")  # torch.export's own


@pytest.mark.parametrize(("module", "word"), [(planning, "planning"), (running, "running")])
def test_every_name_has_a_test(module: Any, word: str) -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in module.__all__ if f"{word}.{name}" not in text] == []


def test_a_version_counts_writes_in_place() -> None:
    x = torch.zeros(2)
    before = planning.version_of(x)
    x.add_(1)
    assert planning.version_of(x) == before + 1
    x.detach().add_(1)  # shared with what is detached
    assert planning.version_of(x) == before + 2
    x.data.add_(1)  # and not with what `.data` gives
    assert planning.version_of(x) == before + 2


def test_operations_have_numbers_that_their_backward_passes_know() -> None:
    x = torch.ones(2, requires_grad=True)
    y, seen = x.exp(), []
    z = y * 2
    assert planning.sequence_number(y.grad_fn) < planning.sequence_number(z.grad_fn)
    assert planning.sequence_number_now() is None

    class Seen(planning.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(planning.sequence_number_now())
            return func(*args, **(kwargs or {}))

    with Seen():
        z.sum().backward()
    assert {planning.sequence_number(y.grad_fn), planning.sequence_number(z.grad_fn)} <= set(seen)
    assert seen[0] is None


class Halved(nn.Module):
    """Counts on an even number of rows, of which there are more than four."""

    def forward(self, x: Tensor) -> Tensor:
        return x[: x.shape[0] // 2] if x.shape[0] > 4 and x.shape[0] % 2 == 0 else x


def test_a_size_that_torch_export_does_not_know_has_symbols_guards_and_a_range() -> None:
    exported = torch.export.export(
        Halved(), (torch.zeros(6, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False
    )
    nodes = exported.graph.nodes
    given = next(node.meta["val"] for node in nodes if node.op == "placeholder")
    returned = next(node for node in nodes if node.op == "output").args[0][0].meta["val"]
    rows, columns = given.shape
    symbol = planning.symbol_of(rows)
    assert symbol is not None
    assert planning.symbol_of(columns) is planning.symbol_of(returned.shape[0]) is None
    assert planning.symbols_in(rows) == planning.symbols_in(returned.shape[0]) == {symbol}
    assert planning.symbols_in(columns) == planning.symbols_in(3) == set()
    assert planning.at_symbols(returned.shape[0], {symbol: 10}) == 5
    assert planning.at_symbols(3, {symbol: 10}) == 3
    least, most = planning.range_of(rows, symbol)
    assert least == 5
    assert most > 10**6
    guards = [guard for guard in planning.guards_of(rows) if guard.free_symbols == {symbol}]
    assert all(bool(guard.xreplace({symbol: 8})) for guard in guards)
    assert not all(bool(guard.xreplace({symbol: 7})) for guard in guards)
    like = planning.fake_like(given, [8, 3], [3, 1])
    assert isinstance(like, planning.FakeTensor)
    assert (like.shape, like.stride(), like.dtype) == ((8, 3), (3, 1), given.dtype)


def test_results_of_fake_tensors_are_forgotten_where_there_are_too_many() -> None:
    with planning.FakeTensorMode():
        for size in range(3, 9):
            torch.zeros(size) + 1
    assert planning.FakeTensorMode.cache_info().size > 4
    planning.bound_fake_results(10**9)
    assert planning.FakeTensorMode.cache_info().size > 4
    planning.bound_fake_results(4)
    assert planning.FakeTensorMode.cache_info().size == 0


def test_tensors_that_share_memory_have_one_storage_key() -> None:
    x, other = torch.zeros(4), torch.zeros(4)
    assert planning.storage_key(x) == planning.storage_key(x[1:].view(3, 1))
    assert planning.storage_key(x) != planning.storage_key(other)
    with planning.FakeTensorMode():
        fake = torch.zeros(4)
        assert planning.storage_key(fake) == planning.storage_key(fake.view(2, 2))
        assert planning.storage_key(fake) != planning.storage_key(torch.zeros(4))


def test_a_schema_names_arguments_aliases_and_results() -> None:
    schema = planning.schema_of(aten.add_.Tensor)
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write
    assert schema.arguments[2].kwarg_only
    assert schema.arguments[2].has_default_value()
    assert schema.arguments[2].default_value == 1
    assert schema.is_mutable
    assert not planning.schema_of(aten.add.Tensor).is_mutable
    assert (schema.name, planning.overload_name_of(aten.add_.Tensor)) == ("aten::add_", "Tensor")
    assert str(planning.schema_of(aten.split.Tensor).returns[0].type) == "List[Tensor]"
    assert planning.schema_of(aten.view.default).arguments[0].alias_info is not None


def test_an_operator_is_an_op_overload_with_tags_and_a_namespace() -> None:
    assert isinstance(aten.add.Tensor, planning.OpOverload)
    assert isinstance(aten.add, planning.OpOverloadPacket)
    assert torch.Tag.pointwise in aten.add.Tensor.tags
    assert torch.Tag.nondeterministic_seeded in aten.bernoulli.default.tags
    assert aten.add.Tensor.namespace == "aten"


def test_a_graph_may_be_compiled_when_it_first_runs() -> None:
    with planning.compiled_when_run():
        traced = planning.make_fx(lambda x: x.sin() + 1)(torch.ones(2))
    assert type(traced) is not fx.GraphModule
    assert isinstance(traced, fx.GraphModule)
    assert torch.equal(traced(torch.zeros(3)), torch.ones(3))
    assert type(planning.make_fx(torch.sin)(torch.ones(2))).__mro__[1] is fx.GraphModule


def test_a_module_of_a_graph_is_compiled_when_it_first_runs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.sin.default, (x,)))
    module = planning.graph_module(nn.Module(), graph)
    assert isinstance(module, fx.GraphModule)
    assert torch.equal(module(torch.zeros(3)), torch.zeros(3))


def test_composite_operators_are_told_from_others() -> None:
    assert planning.is_composite(aten.dropout.default)
    assert not planning.is_composite(aten.mm.default)
    assert planning.makes_memory(aten.mm.default)
    assert not planning.makes_memory(aten.view.default)
    assert not planning.makes_memory(aten.dropout.default)


def test_every_operator_has_a_name_in_the_registry() -> None:
    assert {"aten::add.Tensor", "aten::mm"} <= set(planning.all_operator_names())


def test_fake_tensors_have_shapes_and_no_data() -> None:
    with planning.FakeTensorMode():
        x = torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(x, planning.FakeTensor)
    assert (x.shape, x.stride()) == ((2, 4), (4, 1))
    with pytest.raises(planning.data_dependent), planning.FakeTensorMode():
        torch.ones(1).item()


def test_an_operator_without_a_fake_implementation_is_named_by_its_error() -> None:
    library = torch.library.Library("partway_canary", "FRAGMENT")
    library.define("bare(Tensor x) -> Tensor")
    with pytest.raises(planning.UnsupportedOperatorException), planning.FakeTensorMode():
        torch.ops.partway_canary.bare(torch.ones(2))


def test_containers_are_flattened_in_order() -> None:
    leaves, spec = planning.tree_flatten({"a": [1, (2, None)], "b": 3})
    assert isinstance(spec, planning.TreeSpec)
    assert leaves == [1, 2, None, 3]
    assert planning.tree_unflatten([4, 5, 6, 7], spec) == {"a": [4, (5, 6)], "b": 7}
    assert planning.tree_map(lambda leaf: leaf, {"a": (1,)}) == {"a": (1,)}
    assert planning.tree_leaves({"a": (1, [2]), "b": 3}) == [1, 2, 3]


def test_a_container_is_made_of_its_type_context_and_children() -> None:
    _, spec = planning.tree_flatten({"a": [1, (2, None)], "b": 3})
    leaf = planning.tree_flatten(0)[1]

    def remade(spec: planning.TreeSpec) -> planning.TreeSpec:
        return leaf if spec.is_leaf() else planning.TreeSpec(spec.type, spec.context, [*map(remade, spec.children())])

    assert remade(spec) == spec
    assert planning.tree_unflatten([4, 5, 6, 7], remade(spec)) == {"a": [4, (5, 6)], "b": 7}


def test_transformed_and_batched_tensors_are_told() -> None:
    seen: list[tuple[bool, bool]] = []

    def f(x: Tensor) -> Tensor:
        seen.append((planning.is_transformed(x), planning.is_batched(x)))
        return x * 2

    torch.func.vmap(f)(torch.ones(3))
    assert seen == [(True, True)]
    assert not planning.is_transformed(torch.ones(1))


def test_what_a_transform_wraps_is_found_and_whether_one_is_on() -> None:
    x, found = torch.ones(3), list[Tensor]()

    def f(wrapped: Tensor) -> Tensor:
        assert planning.in_transform()
        found.append(planning.untransformed(wrapped))
        return wrapped.sum()

    torch.func.grad(torch.func.grad(f))(x[0])
    assert not planning.in_transform()
    assert [type(one) for one in found] == [Tensor]
    assert found[0].data_ptr() == x.data_ptr()
    assert not planning.is_transformed(found[0])
    assert planning.untransformed(x) is x


def test_batches_of_tangents_are_taken_apart_and_made_again() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[Tensor]()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            assert planning.is_batched(gradient)
            with running.outside_batching([gradient]) as level:
                seen.append(running.remove_batch_dim(gradient, level, 1, 0))
                twice = 2 * seen[-1] + torch.rand(()) * 0  # which batching forbids
                return running.add_batch_dim(twice, 0, level)

    rows = torch.eye(2)
    (found,) = torch.autograd.grad(Twice.apply(x), x, rows, is_grads_batched=True)  # type: ignore[no-untyped-call]
    assert torch.equal(found, 2 * rows)
    assert torch.equal(seen[0], rows)


def asks_subclasses() -> bool:
    """Whether PyTorch asks a subclass of DTensor what `detach` gives."""
    seen = []

    class Asked(DTensor):
        __slots__ = ()

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return args[0]

    mesh = init_device_mesh("cpu", (2,))
    spec = running.dtensor_spec(mesh, (Replicate(),), (2,), torch.float32)
    Asked.__new__(Asked, torch.zeros(2), spec, requires_grad=False).detach()
    return bool(seen)


@pytest.mark.gloo
def test_subclasses_of_dtensor_are_asked_what_operators_give(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, asks_subclasses) == [running.ASKS_SUBCLASSES] * 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_operators_of_their_steps(kind: Any) -> None:
    layer, x = kind(3, 4, 2), torch.randn(5, 2, 3)
    name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]
    hidden = torch.zeros(2, 2, 4)
    states = (hidden, hidden) if kind is nn.LSTM else hidden
    steps = planning.steps_of_layers()[getattr(torch.ops.aten, name).input]
    with torch.no_grad():
        y, *_ = steps(x, states, list(layer.parameters()), True, 2, 0.0, True, False, False)
        torch.testing.assert_close(y, layer(x)[0])


def test_modes_are_listed_and_left_out() -> None:
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2 if func is torch.add else func(*args, **(kwargs or {}))

    class Counting(planning.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    with Doubling() as doubling, Counting() as counting:
        assert planning.function_modes() == [doubling]
        assert planning.dispatch_modes() == [counting]
        assert torch.add(x, x) == 4
        before = counting.count
        with planning.without_modes():
            assert torch.add(x, x) == 2
        with planning.without_dispatch_modes():
            torch.add(x, x)
        assert counting.count == before
    assert planning.function_modes() == []
    assert planning.dispatch_modes() == []


def test_classes_of_tensors_can_be_left_out() -> None:
    class Seen(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, *args: Any) -> Any:
            cls.calls += 1
            return super().__torch_function__(*args)

    x = torch.ones(2).as_subclass(Seen)
    with planning.DisableTorchFunction():
        assert x.shape == (2,)
        assert (x + 1).sum() == 4
    assert Seen.calls == 0
    assert x.shape == (2,)
    assert Seen.calls == 1


def test_autograd_records_inside_an_operator() -> None:
    seen = []

    @torch.library.custom_op("partway_canary::inside", mutates_args=())
    def inside(x: Tensor) -> Tensor:
        with planning.with_autograd():
            leaf = x.detach().requires_grad_()
            seen.append(torch.autograd.grad((leaf * leaf).sum(), leaf)[0])
        return x.clone()

    inside(torch.tensor([3.0]))
    assert seen == [torch.tensor([6.0])]
    assert planning.defined_by(inside) is torch.ops.partway_canary.inside.default
    assert isinstance(inside, planning.CustomOpDef)


def test_no_grad_goes_through_one_function() -> None:
    calls: list[Any] = []

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Noting(), torch.no_grad():
        pass
    assert planning.set_grad_enabled in calls


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward", "backward_pre"])
def test_hooks_of_modules_are_dicts_by_the_ids_of_their_handles(kind: str) -> None:
    module = nn.Linear(1, 1)
    name = {"backward": "full_backward", "backward_pre": "full_backward_pre"}.get(kind, kind)
    handle = getattr(module, f"register_{name}_hook")(print)
    assert planning.hooks_in(module, kind) == {handle.id: print}
    assert (module, "") not in planning.module_hooks(module)
    everywhere = getattr(nn.modules.module, f"register_module_{name}_hook")(print)
    try:
        assert planning.global_hooks(kind)[everywhere.id] is print
    finally:
        everywhere.remove()
    if kind in ("forward_pre", "forward"):
        handle = getattr(module, f"register_{name}_hook")(print, with_kwargs=True)
        assert planning.hook_flags(module, kind) == {handle.id: True}


def test_backward_hooks_of_the_old_kind_are_told() -> None:
    module = nn.Linear(1, 1)
    assert not planning.has_old_backward_hooks(module)
    module.register_backward_hook(print)
    assert planning.has_old_backward_hooks(module)


def test_distributed_hooks_can_be_taken_from_a_module() -> None:
    module = nn.Linear(1, 1)
    for kind in ("forward_pre", "forward"):
        getattr(module, f"register_{kind}_hook")(print, with_kwargs=True)
        getattr(module, f"register_{kind}_hook")(repr)
    assert list(planning.forward_pre_hooks_in(module).values()) == [print, repr]
    planning.remove_hooks(module, lambda hook: hook is print)
    for kind in ("forward_pre", "forward"):
        assert list(planning.hooks_in(module, kind).values()) == [repr]
        assert not planning.hook_flags(module, kind)


def test_private_attributes_of_a_tensor_are_properties_that_modes_see() -> None:
    assert all(hasattr(getattr(Tensor, name), "__get__") for name in planning.PRIVATE_STATE)


def test_a_module_keeps_what_is_its_own_in_three_dicts() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = planning.modules_in(module)["0"]
    assert set(planning.parameters_in(norm)) == {"weight", "bias"}
    assert set(planning.buffers_in(norm)) == {"running_mean", "running_var", "num_batches_tracked"}
    planning.buffers_in(norm)["running_mean"] = new = torch.ones(2)
    assert norm.running_mean is new
    planning.parameters_in(norm)["weight"] = weight = nn.Parameter(torch.ones(2))
    assert norm.weight is weight


def test_conversions_of_a_module_go_through_one_method() -> None:
    class Model(nn.Module):
        asked = 0

        def _apply(self, fn: Any, recurse: bool = True) -> Model:
            self.asked += 1
            return self

    model = Model()
    model.to(torch.float64)
    assert model.asked == 1
    assert planning.CONVERT == "_apply"


def test_a_module_that_is_compiled_in_place_calls_what_the_attribute_holds() -> None:
    model: Any = nn.Linear(2, 2)
    assert planning.compiled_call_of(model) is None
    model.compile(backend="eager")
    assert planning.compiled_call_of(model) is vars(model)[planning.COMPILED_CALL]
    vars(model)[planning.COMPILED_CALL] = lambda x: "compiled"
    assert model(torch.ones(2)) == "compiled"
    vars(model).pop(planning.COMPILED_CALL)
    assert isinstance(model(torch.ones(2)), torch.Tensor)


def test_a_batch_norm_refuses_an_input_of_another_rank() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        planning.check_input_dim(nn.BatchNorm2d(1), torch.ones(2, 1))


def test_whether_distributions_validate_can_be_asked() -> None:
    torch.distributions.Distribution.set_default_validate_args(False)
    assert not planning.distributions_validate()
    torch.distributions.Distribution.set_default_validate_args(True)
    assert planning.distributions_validate()
    assert planning.was_told_to_validate(torch.distributions.Normal(0.0, 1.0, validate_args=False))
    assert not planning.was_told_to_validate(torch.distributions.Normal(0.0, 1.0))


def test_a_trace_has_a_call_for_each_operator() -> None:
    traced = planning.make_fx(lambda x: x.sin() + 1)(torch.ones(2))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [
        aten.sin.default,
        aten.add.Tensor,
    ]


def test_an_exported_program_is_decomposed_but_for_the_operators_that_are_to_stay(
    exported: torch.export.ExportedProgram,
) -> None:
    table = torch.export.default_decompositions()
    del table[aten.linear.default]  # it stays what it is
    composite, _ = planning.split_decompositions(dict(table))
    linear = {aten.linear.default: composite[aten.linear.default]}
    kept, written = (planning.decompose(exported, stays, {}) for stays in (linear, {}))
    assert aten.linear.default in {node.target for node in kept.graph.nodes}
    assert aten.addmm.default in {node.target for node in written.graph.nodes}


def test_a_single_call_is_traced_as_in_a_program_that_is_decomposed(exported: torch.export.ExportedProgram) -> None:
    inputs = exported.graph.find_nodes(op="placeholder")
    call = next(iter(exported.graph.find_nodes(op="call_function", target=aten.linear.default)))
    tensors = [node.meta["val"] for node in call.all_input_nodes]
    whole = planning.decompose(exported, {}, {})
    with planning.tracing_calls(inputs[0].meta["val"].fake_mode, {}, {}) as trace:
        graph = trace(aten.linear.default, tensors, call)
        with pytest.raises(ValueError, match="writes to an operand"):
            trace(lambda x, *_: x.add_(1), tensors, call)
    traced = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in traced] == [node.target for node in whole.graph.nodes if node.op == "call_function"]
    assert all(node.meta["nn_module_stack"] == call.meta["nn_module_stack"] for node in traced)


def test_what_a_traced_node_takes_over_is_known() -> None:
    graph = fx.Graph()
    traced, old, new = (graph.placeholder(name) for name in ("traced", "old", "new"))
    old.meta = {"stack_trace": "old", "custom": {"old": 1}, "val": 0}
    new.meta = {"stack_trace": "new", "nn_module_stack": {"new": 1}, "val": 1}
    traced.meta = {**old.meta, "val": 2, "original_aten": aten.sin.default, "from_node": "old"}
    assert planning.moved_meta(traced, old, new) == {
        "stack_trace": "new", "nn_module_stack": {"new": 1}, "val": 2, "original_aten": aten.sin.default,
    }  # fmt: skip


def test_decomposing_leaves_the_random_generators_alone(exported: torch.export.ExportedProgram) -> None:
    before = torch.get_rng_state()
    planning.decompose(exported, {}, {})
    assert torch.equal(torch.get_rng_state(), before)
    assert threading.current_thread() is threading.main_thread()


def test_a_function_is_exported_inside_of_another_export() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Outer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with planning.beside_export():
                inner = torch.export.export(Twice(), (torch.ones(2),), strict=False)
            assert [str(node.target) for node in inner.graph.nodes if node.op == "call_function"] == ["aten.mul.Tensor"]
            return x + 1

    outer = torch.export.export(Outer(), (torch.ones(3),), strict=False)
    assert [str(node.target) for node in outer.graph.nodes if node.op == "call_function"] == ["aten.add.Tensor"]


def test_a_function_of_autograd_calls_the_apply_of_its_base() -> None:
    called = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

    kept = Same.apply
    planning.FunctionBase.apply = classmethod(lambda cls, *args: called.append(cls))
    try:
        kept(torch.ones(2))
    finally:
        del planning.FunctionBase.apply
    assert called == [Same]
    assert kept(torch.ones(2)).tolist() == [1, 1]


def test_losses_in_chunks_are_operators_where_there_are_any() -> None:
    assert all(isinstance(operator, planning.OpOverload) for operator in planning.chunked_losses)


# -- What runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),))


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_has_its_part_and_its_spec(one_process: Any) -> None:
    held = DTensor.from_local(torch.ones(2), one_process, [Replicate()])
    assert running.local_part_of(held).shape == (2,)
    assert type(running.local_part_of(held)) is Tensor
    again = DTensor(torch.zeros(2), running.spec_of(held), requires_grad=False)
    assert (again.placements, again.device_mesh, again.shape) == (held.placements, one_process, held.shape)
    assert running.spec_of(held) == running.spec_of(again) == running.spec_or_none(held)
    assert running.spec_or_none(torch.ones(1)) is None


def test_what_nccl_was_given_is_recorded_under_the_keys_that_are_read() -> None:
    """What entries have is tested with those that gloo writes (runtime/ranks/test_flights.py)."""
    for asked in ((True, False), (True, True), (False, False)):
        recorded = running.flight_record(*asked)
        assert {"pg_config", "pg_status"} <= set(recorded)
        assert not recorded.get("entries")


def test_groups_have_a_store_a_timeout_and_coalescing(one_process: Any) -> None:
    running.default_store().set("canary", "sings")
    assert running.default_store().get("canary") == b"sings"
    assert running.timeout_of(dist.group.WORLD).total_seconds() == 1800
    assert callable(running.coalescing_manager)
    assert running.process_group_named(dist.group.WORLD.group_name) is dist.group.WORLD
    with pytest.raises(RuntimeError):
        running.process_group_named("no group is called so")


def test_a_gloo_with_tls_would_name_its_variables_as_it_does_the_others() -> None:
    assert running.GLOO_TLS.startswith(b"GLOO_DEVICE_TRANSPORT")
    [library] = Path(torch.__file__).parent.joinpath("lib").glob("libtorch_cpu.so")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(b"GLOO_DEVICE_TRANSPORT\0") >= 0


def test_a_store_answers_the_ping() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_connection(("127.0.0.1", store.port), timeout=10) as client:
        client.sendall(running.STORE_PING)
        assert client.recv(5) == running.STORE_PING[-4:]


def test_hooks_of_a_tensor_move_with_their_handles() -> None:
    x, y, seen = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True), []
    handle = x.register_hook(seen.append)
    x.register_post_accumulate_grad_hook(seen.append)
    running.give_hooks(y, running.take_hooks(x))
    (y * 2).sum().backward()
    assert len(seen) == 2
    handle.remove()
    (y * 2).sum().backward()
    assert len(seen) == 3


def test_views_know_their_base() -> None:
    x = torch.ones(4)
    assert running.is_view(x[1:])
    assert running.base_of(x[1:]) is x
    assert not running.is_view(x.clone())
    assert running.base_of(x) is None


def test_a_level_of_forward_derivatives_is_told() -> None:
    assert planning.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert planning.forward_level() == 0


def test_a_thread_that_computes_a_backward_is_told() -> None:
    told = [running.in_backward()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: told.append(running.in_backward()))
    assert torch._C._current_graph_task_id() == -1
    x.sum().backward()
    assert [*told, running.in_backward()] == [False, True, False]


def test_inductor_takes_a_graph_of_operators() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.add.Tensor, (x, 1))
    x.meta["val"] = y.meta["val"] = torch.ones(2)
    graph.output((y,))
    compiled = running.inductor(fx.GraphModule(nn.Module(), graph), [torch.ones(2)])
    assert torch.equal(compiled(torch.ones(2))[0], torch.full((2,), 2.0))


def test_inductor_takes_any_number_of_rows_but_few() -> None:
    """Sizes that the compiled code does not allow run the graph itself."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    rows = graph.call_function(aten.sym_size.int, (x, 0))
    each = graph.call_function(aten.expand.default, (y, [rows, 8]))
    graph.output((graph.call_function(aten.mul.Tensor, (graph.call_function(aten.silu.default, (x,)), each)),))
    itself, ran = fx.GraphModule(nn.Module(), graph), list[int]()
    known = itself.forward
    itself.forward = lambda *given: ran.append(len(given[0])) or known(*given)  # type: ignore[func-returns-value]
    with planning.FakeTensorMode():
        examples = [torch.empty(16, 8), torch.empty(8)]
    compiled = running.inductor(itself, examples, [(0,), ()])
    for count in (16, 5, 1, 0, 4000):
        given = torch.randn(count, 8), torch.randn(8)
        torch.testing.assert_close(compiled(*given)[0], known(*given)[0])
    assert ran == [1, 0]


def test_a_recurrent_layer_refers_to_the_parameters_that_it_has() -> None:
    layer = nn.GRU(2, 2)
    for name, held in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(held.detach()))
    assert layer._weights_have_changed()
    running.refer_anew(layer)
    assert not layer._weights_have_changed()
    running.refer_anew(nn.Linear(2, 2))


def test_dtensors_are_placed_by_specs() -> None:
    spec = running.dtensor_spec("mesh", (Shard(0), Replicate()), (4, 6), torch.float32)
    assert (spec.shape, spec.tensor_meta.stride, spec.tensor_meta.dtype) == ((4, 6), (6, 1), torch.float32)
    assert running.spec_like(spec, (4, 6), torch.float32) is spec
    assert running.spec_like(spec, (), torch.float64).placements == (Replicate(), Replicate())
    assert running.is_documented(spec)
    assert not running.is_documented(SimpleNamespace(placements=(_StridedShard(0, split_factor=2),)))
    held = SimpleNamespace()
    running.set_part(held, torch.ones(2), spec)
    assert held._spec is spec
    assert torch.equal(held._local_tensor, torch.ones(2))


def test_a_subclass_is_asked_as_an_object_and_stepped_in_lists() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "asked"

    own = torch.ones(2).as_subclass(Own)
    assert own.shape == "asked"
    assert running.as_object(torch.Tensor.shape.__get__, (), (own,), {}) == (2,)  # type: ignore[attr-defined]
    assert running.as_object(lambda: own.shape, (), (), {}) == (2,)
    with pytest.raises(ZeroDivisionError):
        running.as_object(lambda: 1 / 0, (), (), {})
    assert own.shape == "asked"

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise NotImplementedError

    wrapper = running.wrapper_like(Wrapper, torch.empty(2, 3, device="meta"), torch.device("cpu"))
    assert (wrapper.shape, wrapper.device.type) == ((2, 3), "cpu")
    running.takes_foreach(Own)
    running.takes_foreach(Own)
    for kinds in (optim_types, util_types):
        assert kinds.count(Own) == 1
        kinds.remove(Own)


def test_the_casts_of_a_devices_autocast_can_be_replaced() -> None:
    assert "exp" in planning.autocasts("cuda")
    assert "exp" not in planning.autocasts("cpu")

    def cast(x: Tensor) -> Tensor:
        with planning.excluding_autocast("cpu"):
            return aten.exp(x.double())

    context = torch.autocast("cpu", torch.bfloat16, enabled=False)
    planning.turned_on(context)
    with planning.autocast_library("cpu") as library, context:
        library.impl("exp", cast)
        assert torch.ones(2).exp().dtype is torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2).exp().dtype is torch.float32


def test_a_function_casts_tensors_of_another_device() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    torch.set_autocast_enabled("cuda", True)
    try:
        with planning.with_casts_of("cpu", "cuda"):
            assert Same.apply(torch.ones(2)).dtype is torch.float16  # type: ignore[no-untyped-call]
        assert Same.apply(torch.ones(2)).dtype is torch.float32  # type: ignore[no-untyped-call]
    finally:
        torch.set_autocast_enabled("cuda", False)
