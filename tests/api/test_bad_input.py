"""Every wrong call of the public API gets an error that says where, what and how to repair it, and changes nothing.

A row of `WRONG` is one wrong call. Beside the message, each row checks that the parameters (values, requires_grad),
the random numbers and the whole context are as before, and that a right call of the same model then works.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bend import bend
from torch import Tensor, nn
from torch.distributed import tensor as dt
from torch.distributed.device_mesh import DeviceMesh

import partway as pw
from partway.options.context import current, current_algo
from partway.propagation.cost.profile import profile_of
from partway.strategy.torch_mesh import from_device_mesh

MESH = {"dp": 2, "tp": 4}
X = torch.linspace(-1.0, 1.0, 64).reshape(8, 8)


class Net(nn.Module):
    """Two layers, an optional tensor, and an argument that is no tensor."""

    example = X

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.down(torch.relu(self.up(x))) * scale + self.offset
        return y if mask is None else y * mask


class Tied(nn.Module):
    """One matrix under two names."""

    example = torch.arange(8)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


class Inner(nn.Module):
    """A Net inside another module."""

    example = X

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@dataclass(frozen=True)
class Wrong:
    """One wrong call. `kept`: the call leaves the model sharded, with annotations that a right call can meet."""

    name: str
    call: Callable[[Any], object]
    says: tuple[str, ...]
    error: type[Exception] = pw.StrategyError
    make: Callable[[], nn.Module] = Net
    context: Mapping[str, Any] = field(default_factory=dict)
    kept: bool = False
    repair: Callable[[Any], object] = lambda model: pw.shard(model, mesh={"dp": 2})


def run(*args: Any, mesh: Any = MESH, **annotations: Any) -> Callable[[Any], object]:
    """Shard the model and call it on `args`."""
    return lambda model: pw.shard(model, mesh=mesh, **annotations)(*(args or (model.example,)))


def function(fn: Callable[..., Any], *args: Any, **annotations: Any) -> Callable[[Any], object]:
    """Shard a function and call it."""
    return lambda _: pw.shard(fn, mesh=MESH, **annotations)(*(args or (X,)))


def nested(*args: Any, **annotations: Any) -> Callable[[Any], object]:
    """Shard a function inside a sharded function."""

    def call(_: Any) -> object:
        def double(h: Tensor) -> Tensor:
            return h * 2

        inner = pw.shard(double, *args, **annotations)
        return pw.shard(lambda x: inner(x) + 1, mesh=MESH)(X)

    return call


IN = "input 'x': "
NOT_ONE_A_DIM = "write one entry per dim, such as"

STRATEGIES = [
    Wrong(
        "names_of_wrong_rank",
        run(in_strategy=(("dp",),)),
        (IN + "('dp',) has 1 entry for a tensor of 2 dims [8, 8]", NOT_ONE_A_DIM + " (None, None)"),
    ),
    Wrong(
        "ints_of_wrong_rank",
        run(in_strategy=((2, 1, 1),)),
        (IN + "(2, 1, 1) has 3 entries for a tensor of 2 dims [8, 8]", NOT_ONE_A_DIM + " (1, 1)"),
    ),
    Wrong(
        "too_few_placements",
        run(in_strategy=([pw.Shard(0)],)),
        (IN + "it has 1 placement for the 2 axes of the mesh (dp=2, tp=4)", "one placement per mesh axis"),
    ),
    Wrong(
        "placement_of_a_dim_that_is_not_there",
        run(in_strategy=([pw.Shard(2), pw.Replicate()],)),
        (
            "input 'x', axis 'dp': Shard(dim=2) splits a dim that a tensor of 2 dims does not have",
            "write a dim of 0 to 1, or Replicate()",
        ),
    ),
    Wrong(
        "dtensor_partial_max",
        run(in_strategy=([dt.Partial("max"), dt.Replicate()],)),
        ("input 'x', axis 'dp'", "Partial"),
    ),
    Wrong(
        "unknown_axis",
        run(in_strategy=(("pp", None),)),
        (IN + "dim 0 names the axis 'pp', which the mesh (dp=2, tp=4) lacks", "did you mean 'tp'?"),
    ),
    Wrong(
        "axis_in_two_dims",
        run(in_strategy=(("dp", "dp"),)),
        (IN + "axis 'dp' splits both dim 0 and dim 1", "use each axis at most once per tensor"),
    ),
    Wrong("axis_twice_in_a_dim", run(in_strategy=((("dp", "dp"), None),)), (IN + "axis 'dp' splits dim 0 twice",)),
    Wrong(
        "axes_out_of_order",
        run(in_strategy=((("tp", "dp"), None),)),
        ("('tp', 'dp')", "not in the order of the mesh (dp=2, tp=4)", "write ('dp', 'tp'), major first"),
    ),
    Wrong(
        "more_than_the_devices",
        run(in_strategy=((8, 8),)),
        (IN + "(8, 8) takes 64 devices, but there are 8", "product is at most 8"),
    ),
    Wrong(
        "count_that_does_not_divide_the_devices",
        run(in_strategy=((3, 1),), mesh=None),
        ("(3, 1) takes 3 devices, which does not divide the 8 available", "product is 8, 4, 2 or 1"),
        context={"device_num": 8},
    ),
    Wrong(
        "count_that_no_axes_make_up",
        run(in_strategy=((2, 1),), mesh={"a": 8}),
        (
            "no combination of axes of the mesh (a=8) gives the split counts (2, 1)",
            "another mesh, such as Mesh({'d0': 2, 'd1': 4})",
        ),
    ),
    Wrong(
        "split_count_0",
        run(in_strategy=((0, 1),)),
        (IN + "dim 0 has size 8 and the split count 0", "write an int of 1 or more"),
    ),
    Wrong("negative_split_count", run(in_strategy=((-2, 1),)), ("the split count -2",)),
    Wrong(
        "bool_for_a_count",
        run(in_strategy=((True, 1),)),
        ("in_strategy[0]: entry 0 is True, a bool", "write an axis name, a tuple of names, an int, None"),
    ),
    Wrong("float_for_a_count", run(in_strategy=((2.0, 1),)), ("in_strategy[0]: entry 0 is 2.0, a float",)),
    Wrong(
        "names_mixed_with_counts",
        run(in_strategy=((2, "tp"),)),
        ("in_strategy[0]: (2, 'tp') mixes axis names and split counts",),
    ),
    Wrong("names_mixed_with_placements", run(in_strategy=((pw.Shard(0), "tp"),)), ("mixes axis names and placements",)),
    Wrong(
        "none_in_quotes",
        run(in_strategy=(("dp", "None"),)),
        ("dim 1 names the axis 'None'", "write None without quotes"),
    ),
    Wrong(
        "partial_for_an_input",
        run(in_strategy=([pw.Partial(), pw.Replicate()],)),
        ("axis 'dp': Partial is a state inside a program", "write Shard(dim) or Replicate()"),
    ),
    Wrong(
        "broadcast_for_an_input",
        run(in_strategy=([pw.Broadcast(), pw.Replicate()],)),
        ("axis 'dp': Broadcast says how a value is used", "write Replicate()"),
    ),
    Wrong(
        "layout_on_another_mesh",
        run(in_strategy=(pw.Layout(pw.Mesh({"x": 8}), (pw.Shard(0),)),)),
        ("the layout [x:S0] is on the mesh (x=8), not (dp=2, tp=4)", "use one mesh"),
    ),
    Wrong(
        "names_without_a_named_mesh",
        run(in_strategy=(("dp", None),), mesh=None),
        ("dim 0 names the axis 'dp'", "name the axes of the mesh, such as mesh={'dp': 8}, or write split counts"),
        context={"device_num": 8},
    ),
    Wrong(
        "split_of_an_empty_dim",
        run(torch.ones(0, 8), in_strategy=(("dp", None),)),
        (IN + "dim 0 has size 0, so there is nothing to split", "leave the dim whole"),
    ),
    Wrong(
        "layout_with_a_dict_for_a_mesh",
        lambda _: pw.Layout(MESH, (pw.Shard(0), pw.Replicate())),
        ("a layout takes a Mesh, such as Mesh(", "{'dp': 2, 'tp': 4}"),
    ),
    Wrong(
        "layout_with_a_list",
        lambda _: pw.Layout(pw.Mesh(MESH), [pw.Shard(0), pw.Replicate()]),
        ("takes a tuple of placements, one for each axis of (dp=2, tp=4)",),
    ),
    Wrong(
        "layout_with_too_few_placements",
        lambda _: pw.Layout(pw.Mesh(MESH), (pw.Shard(0),)),
        ("dp=2, tp=4", "takes 2 placements, not 1"),
    ),
    Wrong(
        "layout_with_codes",
        lambda _: pw.Layout(pw.Mesh(MESH), ("S0", "R")),
        ("'S0' is not a placement", "write Shard(dim), Replicate()"),
    ),
    Wrong("negative_dim", lambda _: pw.Shard(-1), ("takes a dim of 0 or more, not -1", "count dims from the front")),
    Wrong("shard_of_an_axis_name", lambda _: pw.Shard("dp"), ("takes a dim of 0 or more, not 'dp'",)),
    Wrong("partial_of_avg", lambda _: pw.Partial("avg"), ("takes 'sum' or 'max', not 'avg'",)),
]

MESHES = [
    Wrong("axis_of_size_0", run(mesh={"dp": 0}), ("mesh axis 'dp' has size 0", "an int of 1 or more")),
    Wrong("axis_of_a_float_size", run(mesh={"dp": 2.0}), ("mesh axis 'dp' has size 2.0",)),
    Wrong("no_axes", run(mesh={}), ('Mesh takes a dict of axis names and sizes, such as {"dp": 2, "tp": 4}, not {}',)),
    Wrong(
        "list_for_a_mesh",
        run(mesh=[2, 4]),
        ("mesh: it is [2, 4] (list)", "a dict such as {'dp': 2, 'tp': 4}, or a DeviceMesh"),
    ),
    Wrong("int_for_a_mesh", run(mesh=8), ("mesh: it is 8 (int)", "set device_num in the context")),
    Wrong(
        "axis_name_with_a_blank", run(mesh={"d p": 2}), ("mesh axis name 'd p' must be an identifier, such as 'dp'",)
    ),
    Wrong("axis_name_that_is_no_str", run(mesh={0: 2}), ("mesh axis name 0 must be an identifier",)),
    Wrong("mesh_of_a_list", lambda _: pw.Mesh([2, 4]), ("Mesh takes a dict of axis names and sizes", "not [2, 4]")),
    Wrong("device_mesh_class", run(mesh=DeviceMesh), ("mesh: it is <class", "DeviceMesh")),
    Wrong("no_device_mesh", lambda _: from_device_mesh(MESH), ("is not a DeviceMesh",)),
    Wrong(
        "no_mesh_and_no_device_num",
        run(mesh=None),
        ("there is no mesh to split over", "pass mesh={'dp': 2, 'tp': 4}, or set_auto_parallel_context(device_num=8)"),
    ),
    Wrong("compile_without_a_mesh", lambda model: pw.compile(model, (X,)), ("there is no mesh to split over",)),
    Wrong("compile_with_an_int_for_a_mesh", lambda model: pw.compile(model, (X,), mesh=8), ("mesh: it is 8 (int)",)),
]

ARGUMENTS = [
    Wrong(
        "in_strategy_too_long",
        run(in_strategy=(("dp", None), None, None, None)),
        ("in_strategy: has 4 entries for 3 arguments (x, mask, scale)", "one entry per argument, in order"),
    ),
    Wrong(
        "in_strategy_of_an_unknown_name",
        run(in_strategy={"xs": ("dp", None)}),
        ("in_strategy['xs']: there is no such argument", "annotate 'x'"),
    ),
    Wrong(
        "module_plan_with_a_wrong_key",
        run(module_plan={"fc1": {"in_stratgy": (("dp", None),)}}),
        ("module_plan['fc1']: has the key 'in_stratgy' (str)", "write in_strategy or out_strategy"),
    ),
    Wrong(
        "in_strategy_with_an_int_key",
        run(in_strategy={0: ("dp", None)}),
        ("in_strategy: has the key 0 (int)", "write an argument's name, a str"),
    ),
    Wrong(
        "in_strategy_list",
        run(in_strategy=[("dp", None)]),
        ("in_strategy: [('dp', None)] is a list", "write the tuple (('dp', None),)", "a dict by argument name"),
    ),
    Wrong(
        "in_strategy_int", run(in_strategy=8), ("in_strategy: is 8 (int)", "one strategy (or None) for each argument")
    ),
    Wrong("in_strategy_str", run(in_strategy="dp"), ("in_strategy: is 'dp' (str)",)),
    Wrong(
        "in_strategy_of_one_tensor_in_ints",
        run(in_strategy=(8, 1)),
        ("in_strategy: (8, 1) is the strategy of one tensor", "as in ((8, 1),)"),
    ),
    Wrong("in_strategy_of_one_tensor_in_names", run(in_strategy=("dp", None)), ("as in (('dp', None),)",)),
    Wrong(
        "in_strategy_entry_that_is_a_list",
        run(in_strategy=([2, 1],)),
        ("in_strategy[0]: the strategy [2, 1] is a list", "write the tuple (2, 1)"),
    ),
    Wrong(
        "in_strategy_entry_that_is_a_dict",
        run(in_strategy=({"a": 2},)),
        ("in_strategy[0]: the strategy {'a': 2} is a dict, not a tuple",),
    ),
    Wrong(
        "in_strategy_of_a_number",
        run(X, None, 2.0, in_strategy={"scale": (2,)}),
        ("in_strategy['scale']: the call passes no tensor for it",),
    ),
    Wrong(
        "out_strategy_too_long",
        run(out_strategy=(("dp", None), None)),
        ("out_strategy: has 2 entries for 1 output tensor", "one entry per output tensor"),
    ),
    Wrong(
        "out_strategy_of_wrong_rank",
        run(out_strategy=(("dp",),)),
        ("output 0: ('dp',) has 1 entry for a tensor of 2 dims [8, 8]",),
    ),
    Wrong(
        "out_strategy_list",
        run(out_strategy=[("dp", None)]),
        ("out_strategy: [('dp', None)] is a list", "write the tuple (('dp', None),)"),
    ),
    Wrong(
        "out_strategy_dict",
        run(out_strategy={"result": ("dp", None)}),
        ("out_strategy: is {'result': ('dp', None)} (dict)",),
    ),
    Wrong(
        "out_strategy_of_one_tensor",
        run(out_strategy=("dp", None)),
        ("out_strategy: ('dp', None) is the strategy of one tensor", "one for each output tensor"),
    ),
    Wrong("level_3", run(level=3), ("level: is 3 (int)", "0 (least communication), 1 (least memory) or 2 (speed)")),
    Wrong("level_str", run(level="1"), ("level: is '1' (str)",)),
    Wrong("level_bool", run(level=True), ("level: is True (bool)",)),
    Wrong("unknown_device", run(device="tpu"), ("device: is 'tpu' (str)", "write 'cpu', 'cuda' or None")),
    Wrong(
        "tensor_on_another_device",
        run(device="cuda"),
        ("input 'x': is on cpu, and device='cuda' was asked for", "move it with .to('cuda')"),
    ),
    Wrong(
        "sparse_tensor", run(torch.eye(8).to_sparse()), ("input 'x': is a torch.sparse_coo tensor", "give a dense one")
    ),
    Wrong(
        "call_with_too_many_arguments",
        run(X, None, 1.0, 2),
        ("Net takes (x: 'Tensor', mask:", "too many positional arguments"),
        TypeError,
        kept=True,
    ),
    Wrong(
        "call_with_an_unknown_name",
        lambda m: pw.shard(m, mesh=MESH)(X, masc=X),
        ("Net takes (", "unexpected keyword argument 'masc'"),
        TypeError,
        kept=True,
    ),
    Wrong(
        "call_without_arguments",
        lambda m: pw.shard(m, mesh=MESH)(),
        ("Net takes (", "missing a required argument: 'x'"),
        TypeError,
        kept=True,
    ),
]


def repair_inner(model: Any) -> object:
    pw.shard(model.net, parameter_plan={"up.weight": ("tp", None)})
    return pw.shard(model, mesh=MESH)


def inner(outer: Mapping[str, Any], **annotations: Any) -> Callable[[Any], object]:
    """Shard a module inside a sharded module."""

    def call(model: Any) -> object:
        pw.shard(model.net, **annotations)
        return pw.shard(model, mesh=MESH, parameter_plan=outer)(X)

    return call


PARAMETERS = [
    Wrong(
        "pattern_that_matches_nothing",
        run(parameter_plan={"up.weigth": ("tp", None)}),
        (
            "parameter_plan['up.weigth']: matches no parameter that the call uses",
            "did you mean 'up.weight' or 'down.weight'?",
        ),
    ),
    Wrong(
        "pattern_far_from_all_names",
        run(parameter_plan={"zzz": ("tp", None)}),
        ("the parameters are 'up.weight', 'up.bias', 'down.weight', 'down.bias'",),
    ),
    Wrong(
        "pattern_for_a_buffer",
        run(parameter_plan={"offset": ("tp",)}),
        ("parameter_plan['offset']: matches no parameter",),
    ),
    Wrong(
        "parameter_plan_of_a_function",
        function(torch.relu, parameter_plan={"w": ("tp", None)}),
        ("parameter_plan needs an nn.Module", "annotate a function's arguments with in_strategy"),
    ),
    Wrong(
        "parameter_plan_of_a_compiled_function",
        lambda _: pw.compile(torch.relu, (X,), mesh=MESH, parameter_plan={"w": ("tp", None)}),
        ("parameter_plan['w']: a function has no parameters",),
    ),
    Wrong(
        "parameter_plan_list",
        run(parameter_plan=[("up.weight", ("tp", None))]),
        ("parameter_plan: is [('up.weight', ('tp', None))] (list)", "a dict from name patterns to strategies"),
    ),
    Wrong(
        "parameter_plan_with_an_int_key",
        run(parameter_plan={0: ("tp", None)}),
        ("parameter_plan: has the key 0 (int)",),
    ),
    Wrong(
        "parameter_plan_with_a_str_for_a_strategy",
        run(parameter_plan={"up.weight": "tp"}),
        ("parameter_plan['up.weight']: the strategy 'tp' is a str, not a tuple", "write ('tp',)"),
    ),
    Wrong(
        "pattern_of_the_wrong_rank_for_some",
        run(parameter_plan={"up.*": ("tp", None)}),
        ("parameter 'up.bias': ('tp', None) has 2 entries for a tensor of 1 dim [16]",),
    ),
    Wrong(
        "parameter_that_a_dtensor_is_not_cut_like",
        run(parameter_plan={"up.weight": (("dp", "tp"), None)}, mesh={"dp": 3, "tp": 2}),
        ("parameter 'up.weight': dim 0 has size 16, which axes 'dp' (3) and 'tp' (2) cut into slices other than",),
    ),
    Wrong(
        "two_patterns_that_contradict",
        run(parameter_plan={"up.weight": ("tp", None), "*.weight": (None, "tp")}),
        (
            "annotations contradict",
            "parameter 'up.weight': parameter_plan['up.weight'] says ('tp', None)",
            "and parameter_plan['*.weight'] says (None, 'tp')",
            "drop one of the two",
        ),
    ),
    Wrong(
        "third_pattern_that_contradicts_the_first",
        run(mesh={"a": 2, "b": 2}, parameter_plan={"up.weight": ("a", None), "up.w*": (2, 1), "*.weight": ("b", None)}),
        (
            "parameter 'up.weight': parameter_plan['up.weight'] says ('a', None), "
            "and parameter_plan['*.weight'] says ('b', None); drop one of the two",
        ),
    ),
    Wrong(
        "tied_names_that_contradict",
        run(parameter_plan={"embed.weight": ("tp", None), "head.weight": (None, "tp")}),
        (
            "parameter 'embed.weight' (tied to 'head.weight')",
            "parameter_plan['embed.weight'] says ('tp', None), and parameter_plan['head.weight'] says (None, 'tp')",
        ),
        make=Tied,
    ),
    Wrong(
        "inner_pattern_that_matches_nothing",
        inner({}, parameter_plan={"nope": ("tp",)}),
        ("parameter_plan['net.nope']: matches no parameter",),
        make=Inner,
        repair=repair_inner,
    ),
    Wrong(
        "inner_and_outer_plan_that_contradict",
        inner({"net.up.weight": (None, "tp")}, parameter_plan={"up.weight": ("tp", None)}),
        ("parameter 'net.up.weight'", "says ('tp', None)", "says (None, 'tp')"),
        make=Inner,
        repair=repair_inner,
    ),
    Wrong(
        "inner_plan_on_another_mesh",
        inner({}, parameter_plan={"up.weight": ("a", None)}, mesh={"a": 8}),
        ("module 'net': the parameter_plan inside is written for the mesh a=8, inside one for dp=2, tp=4",),
        make=Inner,
        repair=repair_inner,
    ),
]

HERE = "constraint on argument 'h' of nested.<locals>.call.<locals>.double: "

NESTED = [
    Wrong(
        "constraint_on_another_mesh",
        nested((("a", None),), mesh={"a": 8}),
        (HERE + "is written for the mesh a=8, inside one for dp=2, tp=4", "use one mesh, or leave it out inside"),
    ),
    Wrong(
        "constraint_layout_on_another_mesh",
        nested((pw.Layout(pw.Mesh({"a": 8}), (pw.Shard(0),)),)),
        (HERE + "is written for the mesh a=8",),
    ),
    Wrong(
        "constraint_of_wrong_rank", nested((("dp",),)), (HERE + "('dp',) has 1 entry for a tensor of 2 dims [8, 8]",)
    ),
    Wrong(
        "constraint_of_an_unknown_axis",
        nested((("pp", None),)),
        (HERE + "dim 0 names the axis 'pp'", "did you mean 'tp'?"),
    ),
    Wrong("constraint_too_long", nested((("dp", None), None)), ("in_strategy: has 2 entries for 1 argument (h)",)),
    Wrong(
        "constraint_of_an_unknown_name",
        nested({"hh": ("dp", None)}),
        ("in_strategy['hh']: there is no such argument", "annotate 'h'"),
    ),
    Wrong(
        "constraint_of_too_many_outputs",
        nested(None, (("dp", None), None)),
        ("out_strategy: has 2 entries for 1 output tensor",),
    ),
    Wrong("constraint_with_a_float", nested((("dp", 2.5),)), ("in_strategy[0]: entry 1 is 2.5, a float",)),
    Wrong(
        "constraint_to_a_dim_that_is_not_there",
        nested(([pw.Shard(5), pw.Shard(0)],)),
        ("argument 'h'", "Shard(dim=5) splits a dim that a tensor of 2 dims does not have"),
    ),
    Wrong(
        "constraint_to_dtensors_avg",
        nested(([dt.Partial("avg"), dt.Replicate()],)),
        ("argument 'h'", "has no equivalent in Partway"),
    ),
]


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def scripted(_: Any) -> object:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):  # the second from PyTorch 2.15 on
        module = torch.jit.script(Scripted())
    return pw.shard(module, mesh=MESH)


def method(_: Any) -> object:
    class Holder:
        @pw.shard(mesh=MESH)
        def double(self, x: Tensor) -> Tensor:
            return x * 2

    return Holder().double(X)


TARGETS = [
    Wrong(
        "shard_a_class",
        lambda _: pw.shard(Net, mesh=MESH),
        ("shard takes an nn.Module object, not the class Net", "write Net(...)"),
    ),
    Wrong(
        "shard_a_number",
        lambda _: pw.shard(3, mesh=MESH),
        ("shard takes a function or an nn.Module object with a forward, not 3",),
    ),
    Wrong("shard_a_tensor", lambda _: pw.shard(X, mesh=MESH), ("with a forward, not Tensor",)),
    Wrong(
        "shard_a_list_of_modules",
        lambda m: pw.shard(nn.ModuleList([m]), mesh=MESH),
        ("with a forward, not ModuleList",),
    ),
    Wrong(
        "shard_a_generator",
        lambda _: pw.shard(yields, mesh=MESH),
        ("yields is a generator, which computes when it is asked for one", "shard what it calls"),
    ),
    Wrong("shard_a_coroutine", lambda _: pw.shard(waits, mesh=MESH), ("waits is asynchronous",)),
    Wrong("shard_a_scripted_module", scripted, ("shard takes an eager module, not a scripted one",)),
    Wrong(
        "shard_a_lazy_module",
        lambda _: pw.shard(nn.LazyLinear(3), mesh=MESH),
        ("LazyLinear has parameters without a shape yet", "call it once before shard"),
    ),
    Wrong(
        "shard_a_method", method, ("double is a method", "shard the module it belongs to, or a function of its tensors")
    ),
    Wrong(
        "shard_a_module_twice",
        lambda m: pw.shard(pw.shard(m, mesh=MESH), mesh=MESH),
        ("Net is sharded already", "call shard once, with all annotations"),
        kept=True,
    ),
    Wrong(
        "shard_a_function_twice",
        lambda _: pw.shard(pw.shard(torch.relu, mesh=MESH), mesh=MESH),
        ("relu is sharded already",),
    ),
    Wrong(
        "compile_a_number",
        lambda _: pw.compile(3, (X,), mesh=MESH),
        ("compile takes a function or an nn.Module object with a forward, not 3",),
    ),
    Wrong(
        "compile_a_class",
        lambda _: pw.compile(Net, (X,), mesh=MESH),
        ("compile takes an nn.Module object, not the class Net",),
    ),
    Wrong(
        "compile_args_that_are_a_tensor",
        lambda m: pw.compile(m, X, mesh=MESH),
        ("args is a Tensor", "as a tuple, such as (x,)"),
    ),
    Wrong(
        "compile_kwargs_that_are_a_list",
        lambda m: pw.compile(m, (X,), [X], mesh=MESH),
        ("kwargs is a list", "a dict from argument names to values"),
    ),
    Wrong(
        "compile_without_args",
        lambda m: pw.compile(m, mesh=MESH),
        ("Net takes (", "missing a required argument: 'x'"),
        TypeError,
    ),
    Wrong(
        "compile_with_an_unknown_argument",
        lambda m: pw.compile(m, (X,), {"masc": X}, mesh=MESH),
        ("unexpected keyword argument 'masc'",),
        TypeError,
    ),
]


def branches(x: Tensor) -> Tensor:
    return x if int((x @ x.mT).argmax()) > 0 else -x


def writes(x: Tensor) -> Tensor:
    return x.add_(1)


def reads_a_number(x: Tensor) -> Tensor:
    return torch.full_like(x, x.sum().item())


def raises(x: Tensor) -> Tensor:
    raise KeyError("not in the table")


def to_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


def cubed(x: Tensor) -> Tensor:
    result: Tensor = Cube.apply(x)  # type: ignore[no-untyped-call]
    return result


def twice_differentiated(model: Any) -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(pw.shard(cubed, mesh=MESH)(x).sum(), x, create_graph=True)


def yields(x: Tensor) -> Any:
    yield x


async def waits(x: Tensor) -> Tensor:
    return x


CAPTURE = [
    Wrong(
        "branch_on_a_value",
        function(branches),
        (
            "could not capture branches as one static graph",
            "depends on the values of tensors",
            "test_bad_input.py:",
            "return x if int((x @ x.mT).argmax()) > 0 else -x",
            "These values follow from a matrix product or a convolution (aten.mm.default)",
            "torch.where",
        ),
        pw.CaptureError,
    ),
    Wrong(
        "number_from_a_tensor",
        function(reads_a_number),
        ("aten.item.default gives a number that depends on the values",),
        pw.CaptureError,
    ),
    Wrong(
        "size_from_a_tensor",
        function(lambda x: x.unique()),
        ("aten._unique2.default gives a result whose size depends on the values",),
        pw.CaptureError,
    ),
    Wrong(
        "input_written_to_that_needs_a_gradient",
        function(writes, X.clone().requires_grad_()),
        ("a leaf Variable that requires grad is being used in an in-place operation",),
        pw.CaptureError,
    ),
    Wrong(
        "exception_in_the_function",
        function(raises),
        (
            "could not capture raises",
            "KeyError: 'not in the table'",
            "test_bad_input.py:",
            'raise KeyError("not in the table")',
        ),
        pw.CaptureError,
    ),
    Wrong(
        "numpy_inside",
        function(to_numpy),
        ("could not capture to_numpy", "test_bad_input.py:", "do it outside the sharded function"),
        pw.CaptureError,
    ),
    Wrong(
        "shapes_that_do_not_fit",
        run(torch.ones(8, 9)),
        ("could not capture Net", "[8, 9] X [8, 16]", "in forward: y = self.down(torch.relu(self.up(x)))"),
        pw.CaptureError,
    ),
    Wrong(
        "dtypes_that_do_not_fit",
        run(X.double()),
        (
            "operator aten.linear.default in up gets tensors of dtypes float64 and float32",
            "in forward: y =",
            ".to(torch.float32)",
        ),
        pw.CaptureError,
    ),
    Wrong("input_on_meta", run(X.to("meta")), ("could not capture Net", "meta"), pw.CaptureError),
    Wrong(
        "module_in_a_closure",
        lambda m: pw.shard(lambda x: 2 * m(x), mesh=MESH)(X),
        (
            "uses 4 tensors from outside that a gradient should reach",
            "(float32[16, 8], float32[16], float32[8, 16], float32[8])",
            "shard the module they belong to, or pass them as arguments",
        ),
        pw.CaptureError,
    ),
    Wrong(
        "bound_forward",
        lambda m: pw.shard(m.forward, mesh=MESH)(X),
        ("Net.forward uses 4 tensors from outside",),
        pw.CaptureError,
    ),
    Wrong(
        "operator_without_a_rule",
        function(bend, X),
        (
            "partway_tests.bend.default",
            "float32[8, 8]",
            "has no rule, and on_unknown_op='error' does not let it run replicated",
            'pw.rule("partway_tests::bend", "a b -> a b")',
        ),
        pw.OperatorError,
        context={"on_unknown_op": "error"},
    ),
    Wrong(
        "second_derivative",
        twice_differentiated,
        ("the gradient of a sharded function cannot be differentiated again", "it has a torch.autograd.Function"),
        pw.RuntimeStateError,
        kept=True,
    ),
]

DATASET = [
    Wrong(
        "two_split_dims_of_an_input",
        lambda _: pw.set_auto_parallel_context(dataset_strategy=((1, 1, 4, 2), (1,))),
        ("dataset_strategy, input 0: (1, 1, 4, 2) splits 2 dims (2, 3)", "split at most one dim of an input"),
        pw.ContextError,
    ),
    Wrong(
        "highest_rank_split_least",
        lambda _: pw.set_auto_parallel_context(dataset_strategy=((1, 1, 1, 1), (8,))),
        (
            "input 1: (8,) splits it 8 ways, more than input 0, the one of highest rank",
            "split input 0 8 ways, or this one at most 1 way",
        ),
        pw.ContextError,
    ),
    Wrong(
        "dataset_strategy_list",
        lambda _: pw.set_auto_parallel_context(dataset_strategy=[(8, 1), (1,)]),
        ("is a list; write the tuple ((8, 1), (1,))",),
        pw.ContextError,
    ),
    Wrong(
        "dataset_strategy_in_data_parallel_mode",
        lambda _: pw.set_auto_parallel_context(dataset_strategy=((8, 1),), parallel_mode="data_parallel"),
        ("splits every input along its first dim", "set parallel_mode='semi_auto_parallel' or 'auto_parallel'"),
        pw.ContextError,
    ),
    Wrong(
        "data_parallel_mode_after_a_dataset_strategy",
        lambda _: pw.set_auto_parallel_context(parallel_mode="data_parallel"),
        ("dataset_strategy=((8, 1),) with parallel_mode='data_parallel'", "write 'data_parallel' or 'full_batch'"),
        pw.ContextError,
        context={"dataset_strategy": ((8, 1),)},
    ),
    Wrong(
        "more_entries_than_inputs",
        run(),
        ("dataset_strategy: it has 2 entries for 1 input", "one tuple of split counts for each input"),
        context={"dataset_strategy": ((8, 1), (1,))},
    ),
    Wrong(
        "entry_of_wrong_rank",
        run(),
        ("dataset_strategy, input 0: (8, 1, 1) has 3 entries for a tensor of 2 dims [8, 8]",),
        context={"dataset_strategy": ((8, 1, 1),)},
    ),
    Wrong(
        "dataset_strategy_over_the_devices",
        run(torch.ones(16, 8)),
        ("(16, 1) takes 16 devices, but there are 8",),
        context={"dataset_strategy": ((16, 1),)},
    ),
    Wrong(
        "data_parallel_mode_with_strategies",
        run(in_strategy=(("dp", None),)),
        (
            "parallel_mode 'data_parallel': splits the batch and nothing else, but in_strategy[0] was given",
            "set parallel_mode='semi_auto_parallel'",
        ),
        context={"parallel_mode": "data_parallel"},
    ),
]

CONTEXT = [
    Wrong(
        "unknown_option",
        lambda _: pw.set_auto_parallel_context(device_nums=8),
        ("device_nums is not an option; did you mean 'device_num'?", "all options: parallel_mode, search_mode"),
        pw.ContextError,
    ),
    Wrong(
        "unknown_option_read",
        lambda _: pw.get_auto_parallel_context("devicenum"),
        ("devicenum is not an option; did you mean 'device_num'?",),
        pw.ContextError,
    ),
    Wrong(
        "option_of_wrong_type",
        lambda _: pw.set_auto_parallel_context(device_num="8"),
        ("device_num: got '8' (str); accepts an int from 1 to 16384",),
        pw.ContextError,
    ),
    Wrong(
        "unknown_mode",
        lambda _: pw.set_auto_parallel_context(parallel_mode="hybrid_parallel"),
        ("accepts one of 'stand_alone', 'data_parallel', 'semi_auto_parallel', 'auto_parallel'",),
        pw.ContextError,
    ),
    Wrong(
        "one_wrong_option_among_right_ones",
        lambda _: pw.set_auto_parallel_context(gradients_mean=False, device_num=0, search_mode="x"),
        ("changed nothing", "device_num: got 0 (int)", "search_mode: got 'x' (str)"),
        pw.ContextError,
    ),
    Wrong(
        "wrong_option_of_a_with",
        lambda _: pw.auto_parallel_context(device_num=0).__enter__(),
        ("device_num: got 0 (int)",),
        pw.ContextError,
    ),
    Wrong(
        "fusion_of_an_unknown_mode",
        lambda _: pw.set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "big", "config": 1}}),
        ("comm_fusion[\"allreduce\"]: mode 'big' is unknown; write one of auto, size, index, overlap",),
        pw.ContextError,
    ),
    Wrong(
        "fusion_without_a_config",
        lambda _: pw.set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size"}}),
        ('comm_fusion["allreduce"]: mode size takes a whole number of MB, 1 or more, not None',),
        pw.ContextError,
    ),
    Wrong(
        "fusion_indices_that_descend",
        lambda _: pw.set_auto_parallel_context(all_reduce_fusion_config=[5, 3]),
        ("all_reduce_fusion_config: takes ascending indices; write [3, 5] for [5, 3]",),
        pw.ContextError,
    ),
    Wrong(
        "fusion_list",
        lambda _: pw.set_auto_parallel_context(comm_fusion=[1]),
        ("comm_fusion: got [1] (list)", "a dict with the keys openstate, allreduce, allgather and reducescatter"),
        pw.ContextError,
    ),
    Wrong(
        "missing_load_file",
        lambda _: pw.set_auto_parallel_context(strategy_ckpt_config={"load_file": "nowhere.json"}),
        ("strategy_ckpt_config[\"load_file\"]: there is no file 'nowhere.json'",),
        pw.ContextError,
    ),
    Wrong(
        "unknown_algo_parameter",
        lambda _: pw.set_algo_parameters(fully_use=True),
        ("fully_use is not an option; did you mean 'fully_use_devices'?",),
        pw.ContextError,
    ),
    Wrong(
        "idle_devices",
        lambda m: [pw.set_algo_parameters(fully_use_devices=True), run(in_strategy=((2, 1),))(m)],
        ("(2, 1) uses 2 of 8 devices, while fully_use_devices is True", "set fully_use_devices=False"),
    ),
    Wrong(
        "simulate_no_devices",
        lambda _: pw.init(simulate=0),
        ("simulate is 0", "an int of 1 or more"),
        pw.RuntimeStateError,
    ),
    Wrong("simulate_a_str", lambda _: pw.init("8"), ("simulate is '8'",), pw.RuntimeStateError),
    Wrong(
        "unknown_backend",
        lambda _: pw.init(backend="mpi"),
        ("backend is 'mpi'; it must be 'gloo' (CPU) or 'nccl' (CUDA)",),
        pw.RuntimeStateError,
    ),
]


TOO_MUCH = (
    "no plan was found on the mesh dp=2, tp=4 that holds less than ",
    " on a device (parameters, gradients, optimizer states, activations and what operators work with), and "
    "memory_limit is 1 B; a limit of ",
    "B would do. The heaviest: ",
)
MEMORY_ACCEPTS = "accepts None, float('inf') or a number of bytes above 0, such as 80e9"
STATES_ACCEPT = "accepts a number of 0 or more, such as 2 for Adam"


def algo(**options: Any) -> Callable[[Any], object]:
    return lambda _: pw.set_algo_parameters(**options)


def with_limit(call: Callable[[Any], object], limit: float = 1.0) -> Callable[[Any], object]:
    """The call under a memory limit, which is off again after it."""

    def limited(model: Any) -> object:
        pw.set_algo_parameters(memory_limit=limit)
        try:
            return call(model)
        finally:
            pw.reset_algo_parameters()

    return limited


MEMORY = [
    Wrong("memory_limit_that_no_plan_keeps_to", with_limit(run()), TOO_MUCH),
    Wrong(
        "memory_limit_that_no_compiled_plan_keeps_to",
        with_limit(lambda m: pw.compile(m, (X,), mesh=MESH)),
        TOO_MUCH,
    ),
    Wrong(
        "memory_limit_that_no_propagated_plan_keeps_to",
        with_limit(run()),
        TOO_MUCH,
        context={"search_mode": "sharding_propagation"},
    ),
    Wrong(
        "memory_limit_that_no_mesh_can_keep_to",
        with_limit(run(mesh=None)),
        ("no plan was found on the mesh d0=8 that holds less than", "and memory_limit is 1 B"),
        context={"device_num": 8},
    ),
    *(
        Wrong(
            f"memory_limit_of_{value!r}",
            algo(memory_limit=value),
            (f"memory_limit: got {value!r} ({type(value).__name__}); {MEMORY_ACCEPTS}",),
            pw.ContextError,
        )
        for value in (-1.0, 0.0, 0, math.nan, -math.inf, "80e9", True)
    ),
    *(
        Wrong(
            f"optimizer_states_of_{value!r}",
            algo(optimizer_states=value),
            (f"optimizer_states: got {value!r} ({type(value).__name__}); {STATES_ACCEPT}",),
            pw.ContextError,
        )
        for value in (-1.0, math.nan, math.inf, "2", None, True)
    ),
]


def profile_with(change: Callable[[dict[str, Any]], object], call: Callable[[Any], object]) -> Callable[[Any], object]:
    """The call with a changed copy of the H100's profile as device profile; the option is off again after it."""

    def profiled(model: Any) -> object:
        figures = json.loads(profile_of("h100").model_dump_json())
        change(figures)
        Path("profile.json").write_text(json.dumps(figures))
        with pw.auto_parallel_context(device_profile="profile.json"):
            return call(model)

    return profiled


def negative(figures: dict[str, Any]) -> None:
    figures["memory"] = -1.0
    figures["peak"]["float32"] = 0.0
    figures["levels"][0]["latency"] = -1.0


def one_pair(figures: dict[str, Any]) -> None:
    """A network of two devices."""
    figures["name"] = "pair"
    figures["levels"] = [{**figures["levels"][0], "devices": 2}]


def call_without_the_file(model: Any) -> object:
    Path("profile.json").unlink()
    return run()(model)


PAIR = (
    "the mesh dp=2, tp=4 has 8 devices, and the network of device profile 'pair' joins 2 (levels[0], nvlink); "
    "use a mesh of at most 2, or a profile with one more level",
)

PROFILES = [
    Wrong(
        "missing_device_profile",
        lambda _: pw.set_auto_parallel_context(device_profile="nowhere.json"),
        (
            "device_profile: no device profile 'nowhere.json': there is no such file, and the presets are a100, "
            "a100_40, ascend910, b200, cpu, h100, h200, mi300x; write one of them or the path of a file that `partway "
            "calibrate` wrote",
        ),
        pw.ContextError,
    ),
    Wrong(
        "device_profile_that_is_gone_at_the_call",
        profile_with(lambda _: None, call_without_the_file),
        ("no device profile 'profile.json': there is no such file",),
    ),
    Wrong(
        "device_profile_with_negative_figures",
        profile_with(negative, run()),
        (
            "device_profile: 'profile.json' is not a device profile:",
            "peak.float32: is 0.0; write a finite number above 0 (operations/s)",
            "memory: is -1.0; write a finite number above 0 (bytes)",
            "levels[0].latency: is -1.0; write a finite number of 0 or more (s)",
        ),
        pw.ContextError,
    ),
    Wrong("mesh_that_the_network_cannot_hold", profile_with(one_pair, run()), PAIR),
    Wrong(
        "compiled_mesh_that_the_network_cannot_hold",
        profile_with(one_pair, lambda m: pw.compile(m, (X,), mesh=MESH)),
        PAIR,
    ),
    Wrong(
        "devices_that_the_network_cannot_hold",
        profile_with(one_pair, run(mesh=None)),
        ("has 8 devices, and the network of device profile 'pair' joins 2",),
        context={"device_num": 8},
    ),
]


def saved(text: str | bytes) -> str:
    """The name of a file with `text`, in the test's own folder."""
    path = Path("plan.json")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def changed(model: Any, **fields: Any) -> str:
    """A saved plan of the model with other fields."""
    plan = pw.compile(model, (X,), mesh=MESH).plan
    return saved(json.dumps({**json.loads(plan.model_dump_json()), **fields}))


def load(text: str | bytes) -> Callable[[Any], object]:
    return lambda _: pw.Plan.load(saved(text))


def train_from(path: Callable[[Any], str]) -> Callable[[Any], object]:
    """Run the model with the plan that is at a path."""

    def call(model: Any) -> object:
        with pw.auto_parallel_context(strategy_ckpt_config={"load_file": path(model)}):
            return run()(model)

    return call


def plan_of(make: Callable[[], Any], mesh: Any = MESH) -> Callable[[Any], str]:
    def save(_: Any) -> str:
        model = make()
        pw.compile(model, (model.example,), mesh=mesh).plan.save("plan.json")
        return "plan.json"

    return save


def save_below_a_file(model: Any) -> object:
    pw.set_auto_parallel_context(strategy_ckpt_config={"save_file": f"{saved('')}/plan.json"})
    return run()(model)


PLANS = [
    Wrong(
        "plan_before_the_first_call",
        lambda m: pw.shard(m, mesh=MESH).plan,
        ("there is no plan yet", "made by the first call", "partway.compile plans without running"),
        pw.RuntimeStateError,
        kept=True,
    ),
    Wrong(
        "program_before_the_first_call",
        lambda m: pw.shard(m, mesh=MESH).program,
        ("there is no plan yet",),
        pw.RuntimeStateError,
        kept=True,
    ),
    Wrong(
        "explain_a_misspelt_name",
        lambda m: pw.compile(m, (X,), mesh=MESH).plan.explain("up.weigth"),
        ("the plan has nothing called 'up.weigth'; did you mean 'up.weight'",),
    ),
    Wrong(
        "explain_a_name_far_from_all",
        lambda m: pw.compile(m, (X,), mesh=MESH).plan.explain("zzz"),
        ("nothing called 'zzz'; its names are", "up", "down"),
    ),
    Wrong(
        "load_a_missing_plan",
        lambda _: pw.Plan.load("nowhere.json"),
        ("could not read a plan from 'nowhere.json': No such file",),
    ),
    Wrong("load_a_folder", lambda _: pw.Plan.load("."), ("could not read a plan from '.'",)),
    Wrong("load_broken_json", load("{"), ("'plan.json' holds no plan of this version", "it is not JSON")),
    Wrong("load_other_json", load("[1, 2]"), ("'plan.json' holds no plan of this version",)),
    Wrong("load_bytes", load(b"\xff\xfe\x00"), ("'plan.json' holds no plan of this version",)),
    Wrong(
        "load_another_format", lambda m: pw.Plan.load(changed(m, format=99)), ("holds no plan of this version: format",)
    ),
    Wrong(
        "load_a_mesh_of_too_few_sizes",
        lambda m: pw.Plan.load(changed(m, sizes=[2])),
        ("'plan.json' holds no plan", "2 axes and 1 size"),
    ),
    Wrong(
        "load_a_mesh_of_size_0",
        lambda m: pw.Plan.load(changed(m, sizes=[2, 0])),
        ("'plan.json' holds no plan", "mesh axis 'tp' has size 0"),
    ),
    Wrong("save_below_a_file", save_below_a_file, ("could not write the plan to 'plan.json/plan.json'",)),
    Wrong("train_from_a_broken_plan", train_from(lambda _: saved("{")), ("'plan.json' holds no plan of this version",)),
    Wrong(
        "train_from_a_plan_on_another_mesh",
        train_from(plan_of(Net, {"a": 8})),
        ("strategy_ckpt_config: the saved plan is for the mesh a=8, not dp=2, tp=4", "use its mesh"),
    ),
    Wrong(
        "train_from_a_plan_of_another_model",
        train_from(plan_of(Tied)),
        ("the saved plan is of other parameters, such as 'embed.weight'", "load the plan of this model"),
    ),
]


def second(first: Callable[[Any], object], then: Callable[[Any], object]) -> Callable[[Any], object]:
    """A right call, and a wrong one after it."""
    return lambda model: [first(model), then(model)]


def in_data_parallel(model: Any) -> object:
    with pw.auto_parallel_context(parallel_mode="data_parallel"):
        return model(X)


def on_four_devices(model: Any) -> object:
    with pw.auto_parallel_context(device_num=4):
        return model(X)


LATER = [
    Wrong(
        "second_call_that_fails",
        second(run(), lambda m: m(torch.ones(8, 9))),
        ("[8, 9] X [8, 16]",),
        pw.CaptureError,
        kept=True,
    ),
    Wrong(
        "fixed_parameters_in_data_parallel",
        second(run(parameter_plan={"up.weight": ("tp", None)}), in_data_parallel),
        ("parallel_mode 'data_parallel'", "parameter_plan['up.weight'] was given"),
        kept=True,
    ),
    Wrong(
        "fixed_parameters_that_must_be_whole",
        second(run(), in_data_parallel),
        ("parameter 'up.weight': is already split as", "shard a fresh copy of the module"),
        kept=True,
    ),
    Wrong(
        "another_device_num",
        second(run(mesh=None), on_four_devices),
        ("mesh: this call is on (d0=4)", "and they are split on (d0=", "shard a fresh copy"),
        context={"device_num": 8},
        kept=True,
    ),
    Wrong(
        "sharded_again_after_a_plan",
        second(run(), lambda m: pw.shard(m, mesh=MESH)),
        ("Net is sharded already",),
        kept=True,
    ),
]

WRONG = [
    *STRATEGIES,
    *MESHES,
    *ARGUMENTS,
    *PARAMETERS,
    *NESTED,
    *TARGETS,
    *CAPTURE,
    *DATASET,
    *CONTEXT,
    *MEMORY,
    *PROFILES,
    *PLANS,
    *LATER,
]


@pytest.fixture(autouse=True)
def own_context_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)


def state(model: nn.Module) -> dict[str, Any]:
    """What a wrong call must leave as it was: the objects, values and flags of a model, and what modules hold."""
    return {
        "training": [module.training for module in model.modules()],
        "grad enabled": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "tensors": [
            (name, id(tensor), tensor.tolist(), tensor.requires_grad)
            for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        ],
    }


def trains_as(model: Any, plain: Any) -> None:
    """The result and every gradient of a call equal those of the model that was never sharded."""
    given = plain.example
    losses = [one(given).square().mean() for one in (model, plain)]
    model.zero_grad()
    plain.zero_grad()
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    gradients = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_a_wrong_call_is_refused_saying_how_to_repair_it_and_changes_nothing(wrong: Wrong) -> None:
    model: Any = wrong.make()
    plain = copy.deepcopy(model)
    pw.set_auto_parallel_context(**wrong.context)
    before, options, algo = state(model), current(), current_algo()
    with pytest.raises(wrong.error) as refused:
        wrong.call(model)
    message = str(refused.value)
    assert [fragment for fragment in wrong.says if fragment not in message] == [], message
    assert state(model) == {**before, "random": state(model)["random"]} if wrong.kept else before
    assert isinstance(model, type(plain))
    if wrong.name not in ("idle_devices", "save_below_a_file"):  # these set an option before the wrong call
        assert (current(), current_algo()) == (options, algo)
    if type(model) is type(plain):
        return  # it is as it was in every respect, so that there is nothing to try
    if not wrong.kept:
        pw.reset_auto_parallel_context()
        pw.reset_algo_parameters()
        wrong.repair(model)
    trains_as(model, plain)


def test_there_are_enough_rows_and_each_has_its_own_name() -> None:
    assert len(WRONG) >= 60
    assert len({wrong.name for wrong in WRONG}) == len(WRONG)


def problems(call: Callable[[], object]) -> list[str]:
    with pytest.raises(pw.StrategyError) as refused:
        call()
    first, *rest = str(refused.value).splitlines()
    assert len(rest) == len(refused.value.problems)
    assert first.startswith(f"{len(rest)} problem")
    return [line.removeprefix("  - ").split(":")[0] for line in rest]


def test_all_wrong_arguments_are_reported_together() -> None:
    found = problems(
        lambda: pw.shard(Net(), [1], 3, parameter_plan=4, level=9, device="x", mesh=8)  # type: ignore[arg-type]
    )
    assert found == ["in_strategy", "out_strategy", "parameter_plan", "level", "device", "mesh"]


def test_all_wrong_forms_are_reported_together() -> None:
    found = problems(lambda: pw.shard(Net(), ((2.0, 1), "dp"), parameter_plan={"up.weight": ("tp", 2)}, mesh={"a": 0}))
    assert found == ["in_strategy[0]", "in_strategy[1]", "parameter_plan['up.weight']", "mesh"]


def test_all_annotations_that_cannot_be_met_are_reported_together() -> None:
    model = pw.shard(
        Net(),
        in_strategy=(("tp", "qq"), ("dp",), None, None),
        out_strategy=((8, 8), None),
        parameter_plan={"up.weigth": ("tp", None), "up.bias": ("tp", None)},
        mesh=MESH,
    )
    found = problems(lambda: model(torch.ones(1, 8)))
    assert found == [
        "in_strategy",
        "out_strategy",
        "parameter_plan['up.weigth']",
        "input 'x'",
        "output 0",
        "parameter 'up.bias'",
    ]


def test_the_datasets_problems_come_with_the_others() -> None:
    pw.set_auto_parallel_context(dataset_strategy=((8, 1), (1,)))
    model = pw.shard(Net(), out_strategy=(("pp", None),), parameter_plan={"nope": (2,)}, mesh=MESH)
    assert problems(lambda: model(X)) == ["parameter_plan['nope']", "dataset_strategy", "output 0"]


def test_all_contradictions_are_reported_together() -> None:
    plan = {"*.weight": ("tp", None), "up.weight": (None, "tp"), "down.weight": (None, "tp")}
    with pytest.raises(pw.StrategyError, match="contradict") as refused:
        pw.shard(Net(), parameter_plan=plan, mesh=MESH)(X)
    assert [problem.where for problem in refused.value.problems] == ["parameter 'up.weight'", "parameter 'down.weight'"]


def test_two_uses_of_a_tensor_in_different_layouts_are_a_conversion_and_no_contradiction() -> None:
    """`in_strategy` says how an input arrives, and a nested `shard` how it is used: both are kept to."""
    columns = pw.shard(lambda h: h * 2, in_strategy=((None, "dp"),))
    model: Any = pw.shard(
        lambda x: columns(x) + 1, mesh=MESH, in_strategy=(("dp", None),), out_strategy=((None, "dp"),)
    )
    torch.testing.assert_close(model(X), X * 2 + 1)
    assert [(c.kind, c.axes, c.tensor) for c in model.plan.collectives] == [("all_to_all", ("dp",), "x")]


@pytest.mark.parametrize("out", [("tp", None), (None, "dp")])
def test_two_names_of_one_tensor_that_contradict_are_both_named(out: Any) -> None:
    with pytest.raises(pw.StrategyError) as refused:
        pw.shard(Tied(), mesh=MESH, parameter_plan={"embed.weight": ("dp", None), "head.weight": out})(Tied.example)
    assert str(refused.value) == (
        "annotations contradict each other:\n"
        "  - parameter 'embed.weight' (tied to 'head.weight'): parameter_plan['embed.weight'] says ('dp', None), and "
        f"parameter_plan['head.weight'] says {out}; drop one of the two"
    )


def test_a_capture_error_is_chained_from_what_the_function_raised() -> None:
    with pytest.raises(pw.CaptureError) as refused:
        pw.shard(raises, mesh=MESH)(X)
    assert isinstance(refused.value.__cause__, KeyError)
    assert refused.value.__cause__.args == ("not in the table",)


def test_a_refused_first_call_leaves_no_plan_and_other_annotations_may_follow() -> None:
    model = pw.shard(Net(), in_strategy=(("qq", None),), mesh=MESH)
    with pytest.raises(pw.StrategyError, match="'qq'"):
        model(X)
    with pytest.raises(pw.RuntimeStateError, match="no plan yet"):
        model.plan
    again = pw.shard(model, in_strategy=(("dp", None),), mesh=MESH)
    assert again is model
    assert again(X).shape == (8, 8)
    assert "('dp', None)" in again.plan.explain("x")


def test_a_refused_function_may_be_sharded_again() -> None:
    double = pw.shard(lambda x: x * 2, in_strategy=(("qq", None),), mesh=MESH)
    with pytest.raises(pw.StrategyError, match="'qq'"):
        double(X)
    torch.testing.assert_close(pw.shard(double, in_strategy=(("dp", None),), mesh=MESH)(X), X * 2)


def test_a_refused_later_call_leaves_the_earlier_plan() -> None:
    model = pw.shard(Net(), in_strategy=(("dp", None),), mesh=MESH)
    model(X)
    plan = model.plan
    with pytest.raises(pw.StrategyError, match="2 entries for a tensor of 1 dim"):
        model(torch.ones(8))
    assert model.plan is plan
    model(X)
    assert model.plan is plan


def test_a_parameter_of_another_shape_is_refused_or_planned_anew() -> None:
    model: Any = pw.shard(Net(), mesh={"tp": 4}, out_strategy=(None,))
    model(X)
    model.up, model.down = nn.Linear(8, 32), nn.Linear(32, 8)
    assert model(X).shape == (8, 8)
    model.up, model.down = nn.Linear(8, 30), nn.Linear(30, 8)
    assert model(X).shape == (8, 8)
    model.up, model.down = nn.Linear(8, 1), nn.Linear(1, 8)
    with pytest.raises(pw.StrategyError, match=r"parameter 'up.weight': now has the shape \[1, 8\]"):
        model(X)


def test_annotations_by_position_reach_the_tensors_of_var_args() -> None:
    summed = pw.shard(lambda first, *more: first + sum(more), in_strategy=(None, ("dp", None)), mesh=MESH)
    torch.testing.assert_close(summed(X, X), X + X)
    assert "('dp', None)" in summed.plan.explain("arg1")


def test_an_annotated_argument_that_is_none_by_default_may_be_left_out() -> None:
    model = pw.shard(Net(), in_strategy={"x": ("dp", None), "mask": ("dp", None)}, mesh=MESH)
    both, one = model(X, torch.ones_like(model(X))), model(X)
    torch.testing.assert_close(both, one)
