"""The names, signatures and docstrings that users rely on, and what importing the package costs."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import partway as pw

PUBLIC = [
    "Broadcast",
    "CaptureError",
    "Compiled",
    "ContextError",
    "DataError",
    "ExpertLoad",
    "ExpertLoadWarning",
    "GlobalComm",
    "Layout",
    "LossError",
    "LossMonitor",
    "ManualReport",
    "Mesh",
    "Mistake",
    "OperatorError",
    "Partial",
    "PartwayError",
    "Plan",
    "Replicate",
    "Resume",
    "RuntimeStateError",
    "Shard",
    "ShardingPicture",
    "StrategyError",
    "UnknownOperatorWarning",
    "UntestedTorchWarning",
    "VerifyError",
    "WeightLayout",
    "WholeReadWarning",
    "auto_parallel_context",
    "axis_index",
    "axis_size",
    "check_manual",
    "compile",
    "create_group",
    "data",
    "destroy_group",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_group_rank_from_world_rank",
    "get_group_size",
    "get_local_rank",
    "get_rank",
    "get_world_rank_from_group_rank",
    "infer_predict_layout",
    "init",
    "load",
    "load_distributed_checkpoint",
    "manual",
    "ops",
    "ps",
    "rank_list_for_transform",
    "record_collectives",
    "record_expert_load",
    "record_timeline",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "rule",
    "save",
    "save_checkpoint",
    "save_chrome_trace",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_mesh",
    "set_param_ps",
    "set_ps_context",
    "shard",
    "shutdown",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "visualize_sharding",
]

DATA = [
    "Epoch",
    "FillMode",
    "Part",
    "RandomCrop",
    "RandomFlip",
    "SliceMode",
    "SlicePatches",
    "View",
    "Window",
    "WindowReader",
    "distributed_sampler",
    "part_of",
    "planned_part",
    "to_global",
    "web_dataset",
    "whole_batch",
]

OPS = [
    "AllGather",
    "AllReduce",
    "AlltoAll",
    "Broadcast",
    "NeighborExchange",
    "NeighborExchangeV2",
    "ReduceOp",
    "ReduceScatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "combine",
    "dispatch",
    "grouped_matmul",
    "neighbor_exchange",
    "neighbor_exchange_v2",
    "per_expert",
    "permute",
    "reduce_scatter",
]


def parameters(function: object) -> str:
    """The parameters of a function with their kinds and defaults, without types."""
    assert callable(function)
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_no_module_has_the_name_of_a_function_of_the_package() -> None:
    modules = {module.name for module in pkgutil.iter_modules(pw.__path__)}
    assert modules & set(pw.__all__) == {"data", "ops", "ps"}  # an import of it would put it in the function's place


def test_these_are_the_public_names():
    assert pw.__all__ == PUBLIC
    assert all(hasattr(pw, name) for name in PUBLIC)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            pw.shard,
            "(fn=None, in_strategy=None, out_strategy=None, *, parameter_plan=None, mesh=None, device=None, "
            "level=0, module_plan=None, plan=None, inference=False, dynamic=None)",
        ),
        (
            pw.compile,
            "(fn_or_module, args=(), kwargs=None, *, mesh=None, in_strategy=None, out_strategy=None, "
            "parameter_plan=None, device=None, level=0, module_plan=None, plan=None, inference=False)",
        ),
        (pw.init, "(simulate=None, backend=None, timeout=None)"),
        (pw.get_rank, "(group=None)"),
        (pw.get_group_size, "(group=None)"),
        (pw.get_local_rank, "(group=None)"),
        (pw.create_group, "(group, rank_ids)"),
        (pw.destroy_group, "(group)"),
        (pw.get_world_rank_from_group_rank, "(group, group_rank_id)"),
        (pw.get_group_rank_from_world_rank, "(world_rank_id, group)"),
        (pw.shutdown, "()"),
        (pw.Mesh, "(axes, ranks=None)"),
        (pw.Layout, "(mesh, placements)"),
        (pw.Shard, "(dim, cut=None)"),
        (pw.Replicate, "()"),
        (pw.Broadcast, "()"),
        (pw.Partial, "(reduce='sum')"),
        (pw.set_auto_parallel_context, "(**kwargs)"),
        (
            pw.set_ps_context,
            "(*, enable_ps=False, mode='sync', max_staleness=None, durability='process', shard_folder=None, "
            "gradient_dtype=None, enable_ssl=False, config_file_path='', secure_interface=None, "
            "client_password='', server_password='')",
        ),
        (pw.get_auto_parallel_context, "(key)"),
        (pw.reset_auto_parallel_context, "()"),
        (pw.auto_parallel_context, "(**kwargs)"),
        (pw.set_algo_parameters, "(**kwargs)"),
        (pw.get_algo_parameters, "(key)"),
        (pw.reset_algo_parameters, "()"),
        (pw.manual, "(fn=None, in_strategy=None, out_strategy=None, *, mesh=None)"),
        (pw.check_manual, "(fn, in_strategy=None, out_strategy=None, args=(), *, mesh=None, whole=None)"),
        (pw.set_mesh, "(mesh)"),
        (pw.axis_index, "(group=None)"),
        (pw.axis_size, "(group=None)"),
        (pw.ops.all_reduce, "(x, op='sum', group=None)"),
        (pw.ops.all_gather, "(x, dim=0, group=None, *, sizes=None)"),
        (pw.ops.reduce_scatter, "(x, op='sum', dim=0, group=None, *, sizes=None)"),
        (pw.ops.broadcast, "(x, root=0, group=None)"),
        (pw.ops.all_to_all, "(x, split_dim=0, concat_dim=0, group=None, *, sends=None, receives=None)"),
        (pw.ops.permute, "(x, pairs, group=None)"),
        (
            pw.ops.neighbor_exchange,
            "(xs, send_rank_ids, recv_rank_ids, recv_shapes=None, group=None, *, dtype=None, device=None)",
        ),
        (
            pw.ops.neighbor_exchange_v2,
            "(x, send_rank_ids, send_lens, recv_rank_ids, recv_lens, data_format='NCHW', group=None)",
        ),
        (pw.ops.AllReduce, "(op='sum', group=None)"),
        (pw.ops.AllGather, "(group=None)"),
        (pw.ops.ReduceScatter, "(op='sum', group=None)"),
        (pw.ops.Broadcast, "(root_rank, group=None)"),
        (pw.ops.AlltoAll, "(split_count, split_dim, concat_dim, group=None)"),
        (
            pw.ops.NeighborExchange,
            "(send_rank_ids, recv_rank_ids, recv_shapes, send_shapes, recv_type, group=None)",
        ),
        (
            pw.ops.NeighborExchangeV2,
            "(send_rank_ids, send_lens, recv_rank_ids, recv_lens, data_format='NCHW', group=None)",
        ),
        (pw.data.SlicePatches, "(num_height=1, num_width=1, slice_mode=<SliceMode.PAD: 'pad'>, fill_value=0)"),
        (pw.data.part_of, "(strategy, rank=None, *, mesh=None, devices=None)"),
        (pw.data.planned_part, "(planned, input=0, rank=None)"),
        (pw.data.to_global, "(part, strategy, mesh)"),
        (pw.data.whole_batch, "(part, strategy=None, mesh=None)"),
        (pw.data.WindowReader, "(source, *, level=0, path='', axes=None)"),
        (pw.data.WindowReader.read, "(self, window, *, halo=0, mode='constant', fill_value=0)"),
        (pw.data.View.read, "(self, image, *, halo=0, mode='constant', fill_value=0)"),
        (pw.data.RandomCrop, "(size, seed, padding=0)"),
        (pw.data.RandomFlip, "(seed, horizontal=0.5, vertical=0.0)"),
        (pw.data.distributed_sampler, "(dataset, part, *, shuffle=True, seed=0, drop_last=False, dim=0)"),
        (pw.data.web_dataset, "(urls, part, *, seed, resampled=False, shuffle_shards=True, dim=0, allow=())"),
        (pw.Plan.table, "(self, *, every=False, rows=None, width=180)"),
        (pw.Plan.explain, "(self, name, *, alternatives=8, loads=())"),
        (pw.Plan.summary, "(self)"),
        (pw.Plan.save, "(self, path)"),
        (pw.Plan.load, "(path)"),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_signatures_are_these(function, expected):
    assert parameters(function) == expected


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_and_method_has_a_docstring(name):
    public = getattr(pw, name)
    members = [public]
    if inspect.isclass(public) and not issubclass(public, Exception):
        own = [value for key, value in vars(public).items() if not key.startswith("_")]
        members += [value for value in own if inspect.isfunction(value) or isinstance(value, classmethod | property)]
    undocumented = [member for member in members if not inspect.getdoc(member)]
    assert undocumented == []


def test_these_are_the_public_names_of_the_data_side():
    assert pw.data.__all__ == DATA
    assert pw.ops.__all__ == OPS
    assert [name for name in DATA if not inspect.getdoc(getattr(pw.data, name))] == []
    assert [name for name in OPS if not inspect.getdoc(getattr(pw.ops, name))] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.endswith("Error") and name != "PartwayError"])
def test_every_error_is_a_partway_error_and_a_builtin_one(name):
    error = getattr(pw, name)
    assert issubclass(error, pw.PartwayError)
    assert issubclass(error, ValueError | RuntimeError | AssertionError)


IMPORT = """
import sys
import torch
before = set(sys.modules)
import partway
more = {name for name in set(sys.modules) - before if not name.startswith("partway.strategy")}
assert more == {"partway", "partway.versions"}, more
assert sorted(set(partway.__all__) - set(dir(partway))) == []
from partway import *
optional = {"transformers", "sklearn", "scipy", "matplotlib", "pandas", "torchvision", "tifffile", "webdataset", "zarr"}
heavy = optional & (set(sys.modules) - before)
assert not heavy, heavy
assert not torch.distributed.is_initialized()
assert get_rank() == get_local_rank() == 0 and get_group_size() == 1
"""


def test_import_is_quiet_and_takes_no_longer_than_torchs_and_needs_no_process_group():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_are_known_to_type_checkers_where_they_are_found_when_they_are_used():
    tree = ast.parse(Path(pw.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(imported) == pw.__all__


def test_a_name_that_does_not_exist_is_an_error_that_python_explains():
    with pytest.raises(AttributeError, match="module 'partway' has no attribute 'shrad'") as error:
        _ = pw.shrad
    assert (error.value.name, error.value.obj) == ("shrad", pw)
    with pytest.raises(ImportError, match="cannot import name 'shrad' from 'partway'"):
        from partway import shrad  # noqa: F401
