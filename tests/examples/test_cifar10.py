"""ResNet-50 on CIFAR-10 from run.sh: the format of the files, and one loss however the training is started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scripts import free_port
from torch import nn

import partway as pw
from partway.measure.workloads import ResNet50

EXAMPLE = Path(__file__).parents[2] / "examples" / "cifar10"
SMALL = "--epochs 1 --batch 4 --size 32 --width 4"
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cifar() -> ModuleType:
    """The module examples/cifar10/cifar.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        import cifar

        return cifar


# -- The files ---------------------------------------------------------------------------------------------------------


def by_hand(path: Path) -> list[tuple[int, list[list[tuple[int, int, int]]]]]:
    """The records of a file as CIFAR-10's description has them: each image as rows of (red, green, blue)."""
    data, found = path.read_bytes(), []
    for start in range(0, len(data), 3073):
        label, pixels = data[start], data[start + 1 : start + 3073]
        red, green, blue = pixels[:1024], pixels[1024:2048], pixels[2048:]
        rows = [
            [(red[32 * y + x], green[32 * y + x], blue[32 * y + x]) for x in range(32)] for y in range(len(red) // 32)
        ]
        found.append((label, rows))
    return found


def test_the_files_have_cifar_10_s_names_and_format(cifar: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    cifar.make_files(folder, 20, seed=5)
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
    assert sorted(path.name for path in folder.iterdir()) == ["batches.meta.txt", *batches, "test_batch.bin"]
    assert {(folder / name).stat().st_size for name in (*batches, "test_batch.bin")} == {20 * 3073}
    assert (folder / "batches.meta.txt").read_text().split()[::9] == ["airplane", "truck"]

    expected = [record for name in batches for record in by_hand(folder / name)]
    records = cifar.Records(folder)
    assert records.labels.tolist() == [label for label, _ in expected]
    for index, (_, rows) in enumerate(expected):
        assert np.array_equal(records.image(index).transpose(1, 2, 0), rows)
    assert len(cifar.Records(folder, cifar.TEST)) == 20
    for name in batches:  # every label as often as another, in no order
        labels = [label for label, _ in by_hand(folder / name)]
        assert sorted(labels) == sorted(2 * list(range(10))) != labels
    cifar.make_files(tmp_path / "again", 20, seed=5)
    assert [(tmp_path / "again" / name).read_bytes() for name in batches] == [
        (folder / name).read_bytes() for name in batches
    ]


def test_made_images_can_be_learned(cifar: ModuleType) -> None:
    images, labels = (torch.from_numpy(array) for array in cifar.pictures(600))
    colours = images.double().mean((2, 3)) / 128 - 1
    seen, others = slice(0, 500), slice(500, None)
    centres = torch.stack([colours[seen][labels[seen] == label].mean(0) for label in range(10)])
    nearest = torch.cdist(colours[others], centres).argmin(1)
    assert (nearest == labels[others]).double().mean() > 0.9


def test_files_that_are_not_cifar_10_are_named(cifar: ModuleType, tmp_path: Path) -> None:
    def refused(folder: Path = tmp_path) -> str:
        with pytest.raises(pw.DataError) as error:
            cifar.Records(folder)
        return str(error.value).replace(str(tmp_path), "DATA")

    files = ", ".join(cifar.TRAINING)
    makes = "give the folder cifar-10-batches-bin, or make files of its format with make_files.py"
    assert refused() == f"DATA has no {files}; {makes}"
    assert refused(tmp_path / "nowhere") == f"DATA/nowhere has no {files}; {makes}"
    (tmp_path / "data_batch_1").touch()
    assert "these are the files of the Python version; take the binary version of CIFAR-10" in refused()
    (tmp_path / "cifar-10-batches-bin").mkdir()
    assert refused() == f"DATA has no {files}; give DATA/cifar-10-batches-bin"

    cifar.make_files(tmp_path, 3)
    third = tmp_path / "data_batch_3.bin"
    whole = third.read_bytes()
    for size in (0, 9000):
        third.write_bytes(whole[:size])
        assert refused() == (
            f"DATA/data_batch_3.bin has {size} bytes, no multiple of the 3073 of an image: it is incomplete; "
            "copy it again"
        )
    third.write_bytes(whole[:3073])
    assert refused() == (
        "DATA/data_batch_3.bin has 1 images and data_batch_1.bin 3; one of them is incomplete: copy it again"
    )
    third.write_bytes(whole[:6146] + bytes([10]) + whole[6147:])
    assert refused() == (
        "DATA/data_batch_3.bin has the label 10 in its record 2, and CIFAR-10 has 0 to 9; it is damaged, or another "
        "data set: copy the binary version of CIFAR-10 again"
    )
    third.unlink()
    assert refused() == "DATA has no data_batch_3.bin; give DATA/cifar-10-batches-bin"


# -- Training data -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(cifar: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of 32 images each."""
    folder: Path = tmp_path_factory.mktemp("cifar") / "data"
    cifar.make_files(folder, 32)
    return folder


def test_the_shares_of_processes_make_the_batches_of_one(cifar: ModuleType, data: Path) -> None:
    images = cifar.Cifar10(data, 32, seed=3)
    seen = []
    for epoch in range(2):
        shares = [cifar.Shares(images, 48, seed=3) for _ in range(4)]
        for rank, share in enumerate(shares[1:]):
            share.rank, share.processes = rank, 3
        shares[0].set_epoch(epoch)
        whole, *parts = (torch.tensor(list(share)) for share in shares)
        assert [len(part) for part in (whole, *parts)] == [len(share) for share in shares] == [144, 48, 48, 48]
        assert torch.equal(torch.cat([part.view(3, 16) for part in parts], 1), whole.view(3, 48))
        assert len(set(whole.tolist())) == 144
        seen.append(whole)
    assert not torch.equal(*seen)


def test_images_are_augmented_as_in_the_reference(cifar: ModuleType, data: Path) -> None:
    images = cifar.Cifar10(data, 32, seed=3)
    mean, deviation = torch.tensor(cifar.MEAN), torch.tensor(cifar.DEVIATION)
    places = set()
    for index in range(20):
        found = images[index][0].permute(1, 2, 0) * deviation + mean
        padded = np.pad(images.records.image(index).transpose(1, 2, 0), ((4, 4), (4, 4), (0, 0)))
        crops = {
            (y, x, flipped): torch.from_numpy(padded[y : y + 32, x : x + 32][:, :: -1 if flipped else 1].copy()) / 255
            for y in range(9) for x in range(9) for flipped in (False, True)
        }  # fmt: skip
        (place,) = (place for place, crop in crops.items() if torch.allclose(crop, found, atol=1e-5))
        places.add(place)
    assert len(places) > 15
    assert {flipped for _, _, flipped in places} == {False, True}

    first = images[7][0]
    assert torch.equal(first, cifar.Cifar10(data, 32, seed=3)[7][0])
    images.epoch.set(1)
    assert not torch.equal(first, images[7][0])
    assert cifar.Cifar10(data, 224, seed=3)[7][0].shape == (3, 224, 224)


# -- Training ----------------------------------------------------------------------------------------------------------


def losses(log: str) -> list[float]:
    """Those of a log whose lines are the reference's, step by step."""
    found = re.findall(r"^epoch: (\d+) step: (\d+), loss is ([\d.]+)$", log, re.M)
    assert found
    places = [(int(epoch), int(step)) for epoch, step, _ in found]
    assert places == sorted(set(places))
    return [float(loss) for *_, loss in found]


@pytest.fixture(scope="module")
def plain(cifar: ModuleType, data: Path) -> list[float]:
    """The losses of one epoch in plain PyTorch, in float64, of batches of 32."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        images, model = cifar.Cifar10(data, 32, 0), ResNet50(4, 10)
        order = torch.randperm(160, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        found = []
        for batch in order.split(32):
            pixels, labels = (torch.stack(each) for each in zip(*(images[int(i)] for i in batch), strict=True))
            loss: nn.Module = model(pixels, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def assert_as_plain(found: list[float], plain: list[float]) -> None:
    """The first loss is that of plain PyTorch to 12 digits. Rounding grows a thousandfold in some steps of so small a
    network: plain PyTorch differs from itself as much when a batch is in another order."""
    assert found[0] == pytest.approx(plain[0], rel=1e-12)
    assert found == pytest.approx(plain, rel=1e-7)
    assert len(found) == 5


README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
COMMANDS = [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.S)]
[REAL], SCHEDULER, OTHERS, AGAIN = COMMANDS


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    """A copy of the example, with data."""
    shutil.copytree(EXAMPLE, tmp_path / "cifar10", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(data, tmp_path / "cifar10" / "data")
    return tmp_path / "cifar10"


def environment(**more: str) -> dict[str, str]:
    """That of a user; a port alone would be half of a launcher's variables."""
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def run(folder: Path, command: str, seconds: float = 280, **more: str) -> subprocess.CompletedProcess[str]:
    if "run.sh" in command:
        more["MS_SCHED_PORT"] = str(free_port())
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment(**more), capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip


def ran(folder: Path, command: str, seconds: float = 280, **more: str) -> str:
    """What a command prints that has to succeed."""
    done = run(folder, command, seconds, **more)
    logs = "\n".join(path.read_text() for path in folder.glob("*.txt"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_a_scheduler_and_8_workers_train_as_one_device(folder: Path, plain: list[float]) -> None:
    shutil.rmtree(folder / "data")
    said = ran(folder, "\n".join(SCHEDULER), 800)
    logs = [(folder / f"worker_{i}.txt").read_text() for i in range(8)]
    assert "scheduler start success!" in said
    assert all(f"worker {i} start success with pid " in said for i in range(8))
    assert said.endswith(logs[0])
    assert not (folder / "worker_8.txt").exists()
    assert (folder / "scheduler.txt").read_text() == ""
    for log in logs:
        assert losses(log) == losses(logs[0])  # to the last digit
        assert re.search(r"^epoch: 1, 4 steps in [\d.]+ s, .* a step, [\d.]+ samples a second$", log, re.M)
    assert_as_plain(losses(logs[0]), plain)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("command", OTHERS)
def test_the_other_ways_to_start_it_print_the_same_losses(command: str, folder: Path, plain: list[float]) -> None:
    lines = [re.sub(r"^\[rank \d\] ", "", line) for line in ran(folder, command).splitlines()]
    printed = [line for line in lines if "step:" in line]
    assert len(printed) in (5, 10)  # partway run shows rank 0, torchrun both ranks
    for line in printed:
        assert printed.count(line) == len(printed) // 5
    assert_as_plain(losses("\n".join(dict.fromkeys(printed))), plain)


@pytest.mark.slow
@pytest.mark.gloo
def test_the_command_of_the_reference_runs(folder: Path) -> None:
    command = f"{REAL.replace('/dataset/cifar-10-batches-bin', str(folder / 'data'))} {SMALL} --rates"
    ran(folder, command, MS_WORKER_NUM="2")
    rates = r"[\d.]+ m?s a step, [\d.]+ samples a second, 100 % of the epoch, 0 us left"
    line = rf"^epoch: 1 step: 20, loss is [\d.]+, {rates}$"
    assert all(re.search(line, (folder / f"worker_{i}.txt").read_text(), re.M) for i in range(2))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_training_that_is_started_again_goes_on(folder: Path) -> None:
    def log_of(command: str) -> str:
        ran(folder, command, MS_WORKER_NUM="2")
        return (folder / "worker_1.txt").read_text()

    whole = losses(log_of(AGAIN[1].replace(" --checkpoints checkpoints", "")))
    first, second = map(log_of, AGAIN)
    assert "epoch: 1 step: " not in second
    assert len(whole) == 40
    assert losses(first) + losses(second) == whole
    assert ran(folder, AGAIN[1], MS_WORKER_NUM="2").count("start success") == 3
    assert "epoch: " not in (folder / "worker_1.txt").read_text()  # all is done


@pytest.mark.slow
@pytest.mark.gloo
def test_a_failure_ends_all_and_is_said_with_a_status(folder: Path) -> None:
    third = folder / "data" / "data_batch_3.bin"
    third.write_bytes(third.read_bytes()[:-1])
    done = run(folder, f"bash run.sh data {SMALL}", MS_WORKER_NUM="2")
    assert done.returncode == 1
    said = "data_batch_3.bin has 98335 bytes, no multiple of the 3073 of an image: it is incomplete; copy it again"
    assert re.search(rf"^worker_\d.txt ends with status 1: .*{re.escape(said)}$", done.stderr, re.M), done.stderr


@pytest.mark.slow
@pytest.mark.gloo
def test_a_loss_that_is_no_number_ends_all_and_names_the_step(folder: Path) -> None:
    done = run(folder, f"bash run.sh data {SMALL} --rate 1e30", MS_WORKER_NUM="2")
    assert done.returncode == 1
    said = re.findall(r"^worker_\d.txt ends with status 1: .*: the loss of (.*?);", done.stderr, re.M)
    assert said
    assert set(said) == {"epoch 1, step 2 is nan on every rank"}, done.stderr


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("way", ["INT", "TERM"])
def test_ctrl_c_ends_all_after_a_checkpoint(way: str, folder: Path) -> None:
    start = ["env", "--default-signal=INT", "bash", "run.sh"]  # a shell in the background ignores Ctrl-C
    command = [*start, "data", *SMALL.split(), "--epochs", "1000", "--checkpoints", "kept", "--every", "9999"]
    found = environment(MS_WORKER_NUM="2", MS_SCHED_PORT=str(free_port()))
    process = subprocess.Popen(
        command, cwd=folder, env=found, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        end, log = time.monotonic() + 200, folder / "worker_0.txt"
        while "step: 3," not in (log.read_text() if log.exists() else "") and time.monotonic() < end:
            time.sleep(0.2)
        process.send_signal(getattr(signal, f"SIG{way}"))
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {"INT": 130, "TERM": 143}[way]
    for started in re.findall(r"with pid (\d+)", said):
        assert not Path(f"/proc/{started}").exists()
    assert [path.name for path in (folder / "kept").glob("checkpoint-*")]


def test_a_folder_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for arguments, text in (
        ("", "Please run the script with the path of the data set, such as: bash run.sh /path/cifar-10-batches-bin"),
        ("nowhere", "nowhere is not a folder; give the folder cifar-10-batches-bin"),
    ):
        done = run(tmp_path, f"bash {EXAMPLE}/run.sh {arguments}")
        assert (done.returncode, done.stdout, done.stderr.strip()) == (2, "", text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_script_names_what_it_was_not_given(python: Runner, data: Path, tmp_path: Path) -> None:
    for arguments, text in (
        ((), "Missing option '--data'"),
        (("--data", str(data), "--batch", "1000"), "1 times 1000 images are more than the 160 that there are"),
        (("--data", "nowhere"), "nowhere has no data_batch_1.bin, data_batch_2.bin"),
    ):
        done = python(EXAMPLE / "train.py", *arguments)
        assert done.returncode
        assert text in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())


def test_the_readme_has_every_option(cifar: ModuleType) -> None:
    source = (EXAMPLE / "train.py").read_text(encoding="utf-8")
    names = re.findall(r"^    (\w+): Annotated", source, re.M)
    assert len(names) == 15
    assert [name for name in names if f"`--{name.replace('_', '-')}`" not in README] == []
