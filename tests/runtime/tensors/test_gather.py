"""Wholes that are gathered outside of programs: on every mesh, and where the ranks do not do the same."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split

from partway.runtime.tensors.gather import exchange, gather
from partway.strategy import RuntimeStateError

pytestmark = pytest.mark.gloo


def gathers():
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("x", "y"))
    rank = dist.get_rank()
    for shape in ((8, 6), (7, 5), (3, 1), (1,), (9, 4, 2)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        dims = [Split(d) for d in range(len(shape))]
        for placements in [[a, b] for a in (*dims, Replicate()) for b in (*dims, Replicate())]:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(gather(tensor, "a test"), whole), placements
        share = DTensor.from_local(whole * (rank // 2 + 1), mesh, [Partial(), Replicate()], run_check=False)
        assert torch.equal(gather(share, "a test"), whole * 3)
    assert exchange(mesh, torch.tensor([rank, 10 + rank]), "a test").tolist() == [[i, 10 + i] for i in range(4)]


def test_wholes_are_gathered_from_any_placement(on_ranks):
    on_ranks(4, gathers)


def differs():
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("x",))
    tensors = [distribute_tensor(torch.ones(4, n), mesh, [Split(0)], src_data_rank=None) for n in (2, 3)]
    with pytest.raises(
        RuntimeStateError, match=r"the ranks are at different points of the program: rank \d would gather"
    ):
        gather(tensors[dist.get_rank()], "a test")


def test_ranks_that_gather_different_tensors_are_told(on_ranks):
    on_ranks(2, differs)


ALONE = """
    import os, sys, time, torch, partway as pw
    n = pw.init(timeout=280)
    torch.manual_seed(0)
    layout = {"in_strategy": (("dp", None),), "parameter_plan": {"weight": ("dp", None)}}
    m = pw.shard(torch.nn.Linear(8, 4), mesh={"dp": n}, **layout)
    m(torch.ones(4, 8)).sum().backward()
    if pw.get_rank() == 0:
        m.weight.grad.norm().item()
    CASE
"""
CASES = {"next call": "m(torch.ones(4, 8)).sum().backward()", "end": "", "a meeting": "pw.save(sys.argv[1], m)"}


@pytest.mark.parametrize(
    "case", ["next call", *(pytest.param(c, marks=pytest.mark.slow) for c in ("end", "a meeting"))]
)
def test_a_rank_that_reads_alone_is_told_what_the_others_do(case, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(textwrap.dedent(ALONE).replace("CASE", CASES[case]))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PARTWAY_CACHE": "0", "MASTER_PORT": "0"}
    process = subprocess.Popen(
        [*command[:3], "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *command[3:]], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=270)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "rank 0 would exchange 1 numbers for aten.linalg_vector_norm.default, and rank 1" in said, said
    assert ("rank 1: has ended" if case == "end" else "alone.py:") in said, said
    assert "run the same program on every rank" in said
