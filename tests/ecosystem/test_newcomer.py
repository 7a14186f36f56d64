"""What a practitioner does on the first day, with a small GPT: in one process, and on 2 and 4 ranks.

Each script below is one of these uses, beside the same one on one device. Others have tests of their own: averages of
weights, load_state_dict and hooks in test_one_behaviour.py, checkpoints in test_checkpoints.py, save_pretrained in
test_pretrained.py, Trainer, Accelerator, peft and Lightning in test_frameworks.py, installs in `make oldest`.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import partway as pw

Ranks = Callable[..., list[Any]]
EXACT = 1e-10


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, 4, width // 4).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tied embeddings; it returns the scores, and the loss or None."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(61, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block(32, drop) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 61, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return scores, None if targets is None else F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def gpt(drop: float = 0.0, dtype: torch.dtype = torch.float64) -> GPT:
    torch.manual_seed(0)
    return GPT(drop).to(dtype)


def sharded(devices: int, model: Any = None, **options: Any) -> Any:
    given = {"mesh": {"dp": devices}, "in_strategy": (("dp", None), ("dp", None))}
    return pw.shard(model or gpt(), **(given | options))


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 61, (8, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def assert_same_loss(found: Any, expected: Any, relative: float = EXACT) -> None:
    values = [[x.item() if isinstance(x, Tensor) else x for x in losses] for losses in (found, expected)]
    assert values[0] == pytest.approx(values[1], rel=relative)


def wait() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def shared_folder() -> Path:
    """A folder that all ranks have."""
    folder = [tempfile.mkdtemp()]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(folder)
    return Path(folder[0])


# -- Training ----------------------------------------------------------------------------------------------------------


def optimizers_schedules_and_clipping(devices: int) -> None:
    """AdamW in each of its forms, a schedule, and the norm of all gradients as clip_grad_norm_ returns it."""
    for options in ({"fused": True}, {"foreach": True}, {}):
        told = []
        for model in (gpt(), sharded(devices)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
            values: list[float] = []
            for _ in range(3):
                loss = model(*batch())[1]
                optimizer.zero_grad()
                loss.backward()
                norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                values += [loss.item(), norm.item(), schedule.get_last_lr()[0]]
            told.append(values)
        assert_same_loss(told[1], told[0])


def mixed_precision(devices: int) -> None:
    """bfloat16 by autocast, and float16 with a GradScaler. (Sums of parts round otherwise than one sum.)"""
    for dtype in (torch.bfloat16, torch.float16):
        told = []
        for model in (gpt(dtype=torch.float32), sharded(devices, gpt(dtype=torch.float32))):
            optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 64.0)
            losses = []
            for _ in range(3):
                with torch.autocast("cpu", dtype):
                    loss = model(*batch())[1]
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            told.append(losses)
        assert_same_loss(told[1], told[0], 2e-3)


def dropout(devices: int) -> list[float]:
    """The numbers depend on the seed, not on where it runs; `test_...` compares them."""
    model = sharded(devices, gpt(0.2))
    torch.manual_seed(3)
    losses = [model(*batch())[1].item() for _ in range(3)]
    assert len(set(losses)) == 3
    return losses


def data_loaders(devices: int) -> None:
    """Workers, and a DistributedSampler where each process reads its own part of a batch."""
    x, y = batch()
    pw.set_auto_parallel_context(device_num=devices, dataset_strategy="data_parallel")
    model, plain = pw.shard(gpt()), gpt()
    processes, rank = pw.get_group_size(), pw.get_rank()
    # sample i of each batch of 8 is that of process i % processes
    order = torch.arange(16).view(2, processes, 8 // processes).transpose(1, 2).flatten()
    data = TensorDataset(x.repeat(2, 1)[order], y.repeat(2, 1)[order])
    sampler: Any = DistributedSampler(data, processes, rank, shuffle=False)
    count = 0
    for part in DataLoader(data, 8 // processes, sampler=sampler, num_workers=2, multiprocessing_context="fork"):
        assert_same_loss([model(*part)[1]], [plain(x, y)[1]])
        count += 1
    assert count == 2


def loaders_of_accelerate(devices: int) -> None:
    """Accelerate's own `prepare(optimizer, loader)`, which gives each process its part, with dataset_strategy."""
    accelerate = pytest.importorskip("accelerate")
    x, y = batch()
    pw.set_auto_parallel_context(device_num=devices, dataset_strategy="data_parallel")
    processes, told = pw.get_group_size(), []
    for model in (gpt(), pw.shard(gpt())):
        plain = type(model) is GPT
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = accelerate.Accelerator(cpu=True)
        loader: Any = DataLoader(TensorDataset(x.repeat(2, 1), y.repeat(2, 1)), 8 if plain else 8 // processes)
        if not plain:
            optimizer, loader = accelerator.prepare(optimizer, loader)
        losses = []
        for part in loader:
            loss = model(*part)[1]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        told.append(losses)
    assert_same_loss(told[1], told[0])


# -- Evaluation and generation -----------------------------------------------------------------------------------------


def evaluation(devices: int) -> None:
    """Batches of other sizes, the last and shorter one, and one of a single sample."""
    model, plain = sharded(devices), gpt()
    model(*batch())[1].backward()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for size in (8, 5, 1):
                x, y = (t[:size] for t in batch())
                (scores, loss), (expected, other) = model(x, y), plain(x, y)
                assert_same_loss([loss], [other])
                assert torch.equal(scores.argmax(-1), expected.argmax(-1))


def generation(devices: int) -> None:
    """A loop of one's own, as the first use of a model, with two sequences and with one; training follows."""
    model, plain = sharded(devices), gpt()
    for count in (2, 1):
        found = expected = batch()[0][:count, :4]
        with torch.inference_mode():
            for _ in range(2):
                found = torch.cat([found, model(found)[0][:, -1].argmax(-1, keepdim=True)], 1)
                expected = torch.cat([expected, plain(expected)[0][:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(found, expected)
    for one in (model, plain):
        one(*batch())[1].backward()
    torch.testing.assert_close(whole(model.norm.weight.grad), plain.norm.weight.grad, rtol=EXACT, atol=EXACT)


def generation_of_hugging_face(devices: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> Any:
        torch.manual_seed(0)
        ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=16, **ends)).eval()

    model, plain = pw.shard(make(), mesh={"tp": devices}), make()
    for count in (2, 1):
        ids = batch()[0][:count, :4]
        asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(model.generate(ids, **asked), plain.generate(ids, **asked))


# -- Keeping -----------------------------------------------------------------------------------------------------------


def safetensors_files(devices: int) -> None:
    """One process writes and reads them; several say what to use, since none has whole weights."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    model, folder = sharded(devices), shared_folder()
    model(*batch())
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    for run in (
        lambda: save_file(weights, folder / "a"), lambda: save_model(model, str(folder / "b")),
        lambda: load_model(model, folder / "c"),
    ):  # fmt: skip
        if not pw.get_rank():
            save_model(gpt(), str(folder / "c"))
        wait()
        if torch.distributed.is_initialized():
            with pytest.raises(pw.RuntimeStateError, match=r"lies split over the ranks.*; save the model with partway"):
                run()
        else:
            run()
    model.load_state_dict(load_file(folder / "c"), strict=False)
    assert_same_loss([model(*batch())[1]], [gpt()(*batch())[1]])


def state_dicts_of_pytorch(devices: int) -> None:
    """torch.save of a state_dict, copies of it, and torch.distributed.checkpoint's functions with whole tensors."""
    from torch.distributed.checkpoint import state_dict as dcp

    model = sharded(devices)
    model(*batch())[1].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = model(*batch())[1].item()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    held = model.state_dict()
    every: list[dict[str, Any]] = [
        torch.load(file), held, copy.deepcopy(held), {n: v.clone() for n, v in held.items()},
        {n: nn.Parameter(v) for n, v in held.items()}, whole(dict(held)),
        dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True)),
    ]  # fmt: skip
    for state in every[1:]:
        fresh = sharded(devices)
        fresh.load_state_dict(state)
        assert_same_loss([fresh(*batch())[1]], [expected])
    model.load_state_dict(every[0])
    dcp.set_model_state_dict(model, gpt().state_dict(), options=dcp.StateDictOptions(full_state_dict=True))
    assert_same_loss([model(*batch())[1]], [gpt()(*batch())[1]])
    if torch.distributed.is_initialized():
        with pytest.raises(pw.RuntimeStateError, match=r"with assign=True two modules would share its memory"):
            fresh.load_state_dict(held, assign=True)


def pickles(devices: int) -> None:
    """A whole model, by pickle and by torch.save, in one process; several say what to use."""
    model = sharded(devices)
    expected = model(*batch())[1].item()
    if torch.distributed.is_initialized():
        for run in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(pw.RuntimeStateError, match=r"each process has parts of it; keep it with partway\.save"):
                run(model)
        return
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert_same_loss([other(*batch())[1]], [expected])


def distributed_checkpoints(devices: int) -> None:
    """torch.distributed.checkpoint, with the optimizer, of one mesh into another and into a plain model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(4)
        model = gpt() if options.pop("plain", False) else sharded(devices, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = model(*batch())[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    folder = shared_folder()
    split: dict[str, Any] = {"in_strategy": None, "parameter_plan": {"blocks.*.up.weight": ("tp", None)}}
    model, optimizer = made(mesh={"tp": devices}, **split)
    step(model, optimizer)
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    expected = [step(model, optimizer) for _ in range(2)]
    for options in ({}, {"plain": True}, {"mesh": {"tp": devices}, **split}):
        model, optimizer = made(**options)
        states = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])
        assert_same_loss([step(model, optimizer) for _ in range(2)], expected)


# -- torch.compile, meta, plans ----------------------------------------------------------------------------------------


def compiled(devices: int) -> None:
    """torch.compile around a sharded model, and around and in parts of it; a compiled model is refused."""
    plain = gpt()
    expected = plain(*batch())[1]
    expected.backward()
    inside: Any = gpt()
    inside.blocks[0].compile(backend="eager")
    inside.blocks[1] = torch.compile(inside.blocks[1], backend="eager")
    for model in (torch.compile(sharded(devices), backend="eager"), sharded(devices, inside)):
        loss = model(*batch())[1]
        assert_same_loss([loss], [expected])
        loss.backward()
        gradient = model.get_parameter("norm.weight").grad
        torch.testing.assert_close(whole(gradient), plain.norm.weight.grad, rtol=EXACT, atol=EXACT)
    with pytest.raises(pw.StrategyError, match=r"takes a module before torch\.compile.*torch\.compile\(shard\(module"):
        pw.shard(torch.compile(gpt(), backend="eager"))


def compiled_by_inductor(devices: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what TorchInductor imports
        loss = torch.compile(sharded(devices))(*batch())[1]
    assert_same_loss([loss], [gpt()(*batch())[1]])


def meta_and_saved_plans(devices: int) -> None:
    """A model on the meta device, planned within a memory limit and given values; then its plan for another."""
    pw.set_algo_parameters(memory_limit=1e9)
    with torch.device("meta"):
        empty = GPT().double()
    model = sharded(devices, empty)
    torch.manual_seed(0)
    with torch.inference_mode():
        model.materialize(batch())
        loss = model(*batch())[1]
    model(*batch())[1].backward()
    file = shared_folder() / "plan.json"
    if not pw.get_rank():
        model.plan.save(file)
    wait()
    other = pw.shard(gpt(), plan=file)
    other.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    with torch.inference_mode():
        assert_same_loss([other(*batch())[1]], [loss])


SCRIPTS: dict[Callable[[int], Any], str] = {
    generation: "slow", safetensors_files: "", pickles: "", compiled: "", meta_and_saved_plans: "slow",
    optimizers_schedules_and_clipping: "slow", mixed_precision: "slow", dropout: "slow", data_loaders: "slow",
    loaders_of_accelerate: "slow", evaluation: "slow", generation_of_hugging_face: "slow",
    state_dicts_of_pytorch: "slow", distributed_checkpoints: "slow", compiled_by_inductor: "slow",
}  # fmt: skip
every_script = pytest.mark.parametrize(
    "script",
    [pytest.param(run, id=run.__name__, marks=[pytest.mark.slow] if slow else []) for run, slow in SCRIPTS.items()],
)


@every_script
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of torch.distributed.checkpoint, in one process
def test_in_one_process(script: Callable[[int], Any]) -> None:
    script(2)


@pytest.mark.gloo
@every_script
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_under_a_launcher(script: Callable[[int], Any], ranks: int, on_ranks: Ranks) -> None:
    found = on_ranks(ranks, script, ranks)
    if found[0] is not None:
        assert found == [pytest.approx(script(ranks), rel=EXACT)] * ranks


TRAIN = """
    import sys
    import torch
    import partway as pw
    from model import GPT, batch

    torch.manual_seed(0)
    devices = pw.init(simulate=2)
    model = pw.shard(GPT().double(), mesh={"dp": devices}, in_strategy=(("dp", None), ("dp", None)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(*batch())[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sys.stdout.write(f"LOSS {loss.item():.9f}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "each"), [(1, 0), (1, 2), (1, 4), (2, 1)])
def test_a_script_on_one_process_on_ranks_and_on_two_nodes(nodes: int, each: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN), encoding="utf-8")
    (tmp_path / "model.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers}
    launcher = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={each}"]
    place = ["--master-addr=127.0.0.1", "--master-port=29777"] if nodes > 1 else ["--standalone"]
    started = []
    for node in range(nodes):
        command = [*launcher, f"--node-rank={node}", *place] if each else []
        started.append(
            subprocess.Popen(
                [sys.executable, *command, "train.py"], cwd=tmp_path, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    ended = [process.communicate() for process in started]
    assert not any(process.returncode for process in started), ended
    plain = gpt()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        loss: Any = plain(*batch())[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    lines = [line for out, _ in ended for line in out.splitlines() if line.startswith("LOSS")]
    assert lines == [f"LOSS {loss.item():.9f}"] * max(1, nodes * each)
