"""`save`: what it takes and refuses, and what a kill leaves behind."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import partway as pw
from partway.checkpoints import saving, tensor_files
from partway.strategy import RuntimeStateError


def test_the_files_are_those_of_hugging_face_and_of_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LARGEST", 100)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    at = pw.save(tmp_path, model)
    assert at == tmp_path / "checkpoint-000001"
    names = sorted(entry.name for entry in at.iterdir())
    assert "model.safetensors.index.json" in names
    found = {}
    for name in names:
        if name.endswith(".safetensors"):
            found |= load_file(at / name)
    assert set(found) == set(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_each_wrong_argument_is_named(tmp_path):
    model = nn.Linear(2, 2)
    (tmp_path / "file").write_text("")
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    made = pw.save(tmp_path / "folder", model)
    for wrong, text in (
        ((3, model), r"^path is 3; write the path of a folder as a str or a Path$"),
        ((tmp_path, 3), r"^model is 3; it must be an nn.Module$"),
        ((tmp_path / "file", model), r"file is a file; checkpoints are saved into a folder$"),
        ((link, model), r"link is a link to what is not there; checkpoints are saved into a folder$"),
        (("", model), r"^path is '', which names no folder; write '\.' for this one$"),
        (("a\0b", model), r"^path is 'a\\x00b', which names no folder"),
        ((tmp_path / "file" / "inner", model), r"file/inner cannot be made a folder for checkpoints: Not a directory$"),
        ((made, model), r"checkpoint-000001 is a checkpoint; give the folder that contains it, to add another one$"),
    ):
        with pytest.raises(RuntimeStateError, match=text):
            pw.save(*wrong)
    for keep in (0, True, 1.5):
        with pytest.raises(
            RuntimeStateError, match=r"keep is .*; it is how many checkpoints to keep, an int of 1 or more"
        ):
            pw.save(tmp_path, model, keep=keep)
    other = torch.optim.SGD(nn.Linear(3, 2).parameters())
    with pytest.raises(
        RuntimeStateError, match=r"SGD has a parameter of shape \[2, 3\] that the model does not have; give"
    ):
        pw.save(tmp_path, model, other)
    with pytest.raises(
        RuntimeStateError, match=r"^state\.thing cannot be kept in a checkpoint, which holds numbers, texts"
    ):
        pw.save(tmp_path, model, thing=object())
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(
        RuntimeStateError, match=r"^weight is on the meta device, without values; call model.materialize"
    ):
        pw.save(tmp_path, empty)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder", "link"]


def test_what_hugging_face_saved_beside_stays(tmp_path):
    model = nn.Linear(2, 2)
    for name in ("checkpoint-500", "checkpoint-000001", "checkpoint-500000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    made = [pw.save(tmp_path, model, keep=1, step=i) for i in range(3)]
    assert [path.name for path in made] == ["checkpoint-000002", "checkpoint-000003", "checkpoint-000004"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "checkpoint-000001", "checkpoint-000004", "checkpoint-500", "checkpoint-500000"
    ]  # fmt: skip
    assert (tmp_path / "checkpoint-000001" / "model.safetensors").read_text() == "checkpoint-000001"
    assert pw.load(tmp_path, model) == {"step": 2}


def test_two_jobs_that_save_into_one_folder_at_once_are_told(tmp_path, monkeypatch):
    model, write = nn.Linear(2, 2), saving.write_part

    def interrupted(*args):
        monkeypatch.undo()
        with pytest.raises(RuntimeStateError, match=r"^another process is saving a checkpoint in .*; give each job"):
            pw.save(tmp_path, model)
        return write(*args)

    monkeypatch.setattr(saving, "write_part", interrupted)
    assert pw.save(tmp_path, model, step=1).name == "checkpoint-000001"
    assert pw.save(tmp_path, model, step=2).name == "checkpoint-000002"
    assert pw.load(tmp_path / "checkpoint-000001", model) == {"step": 1}


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    pw.save(tmp_path, model, step=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "_reserve", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.safetensors'"):
        pw.save(tmp_path, model, step=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert pw.load(tmp_path, model) == {"step": 1}


def test_one_that_is_written_meanwhile_has_the_values_of_its_call(tmp_path):
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    seen = [1]
    first = pw.save(tmp_path, model, asynchronous=True, step=1, seen=seen)
    seen.append(2)
    with torch.no_grad():
        model.weight.add_(1)
    second = pw.save(tmp_path, model, asynchronous=True, step=2)  # waits for the first
    assert first.done
    assert first.wait().name == "checkpoint-000001"
    assert second.wait().name == "checkpoint-000002"
    assert pw.load(first.wait(), model) == {"step": 1, "seen": [1]}
    assert torch.equal(model.weight, before)


def test_an_error_of_one_that_is_written_meanwhile_is_raised_once(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_part", full)
    failed = pw.save(tmp_path, model, asynchronous=True)
    with pytest.raises(OSError, match="No space left"):
        pw.save(tmp_path, model)
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        failed.wait()
    assert not list(tmp_path.iterdir())
    assert pw.save(tmp_path, model).name == "checkpoint-000001"


def test_an_error_that_was_raised_by_its_own_wait_is_not_raised_by_the_next_save(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    monkeypatch.setattr(saving, "write_part", lambda *args: 1 / 0)
    failed = pw.save(tmp_path, model, asynchronous=True)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    monkeypatch.undo()
    assert pw.save(tmp_path, model).name == "checkpoint-000001"


LAST = """
    import torch
    import partway as pw
    from partway.checkpoints import saving

    def full(*args):
        raise OSError(28, "No space left on device")

    saving.write_part = full
    pw.save("checkpoints", torch.nn.Linear(2, 2), asynchronous=True)
"""


def test_a_program_whose_last_checkpoint_fails_says_so_at_its_end(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(LAST))
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "OSError: [Errno 28] No space left on device" in ended.stderr


KILLED = """
    import os, random, sys, time, torch
    import partway as pw

    folder = sys.argv[1]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(i):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(i))
        optimizer.step()

    step(0)
    pw.save(folder, model, optimizer, step=0, keep=2)
    moments, longest = random.Random(0), 0.12
    for kill in range(int(sys.argv[2])):
        began = pw.load(folder, model, optimizer)["step"]
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            for i in range(began + 1, began + 1000):
                step(i)
                pw.save(folder, model, optimizer, step=i, keep=2)
            os._exit(0)
        time.sleep(moments.uniform(0.0, longest))
        os.kill(child, 9)
        os.waitpid(child, 0)
        found = pw.load(folder, model, optimizer)["step"]
        assert found >= began, (found, began)
        longest *= 1.5 if found == began else 1.0  # a busy machine: more of a child's life must reach a save
        for parameter in model.parameters():
            state = optimizer.state[parameter]["momentum_buffer"]
            expected = torch.zeros(())
            for i in range(found + 1):
                expected = 0.9 * expected + i if i else torch.zeros(())
            assert torch.allclose(state, expected.expand_as(state)), (found, state.flatten()[0], expected)
    print(found, "steps")
"""


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_after_a_kill_at_any_moment_the_last_good_one_loads(tmp_path, kills):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, str(script), str(tmp_path / "folder"), str(kills)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) > kills // 4, "hardly any checkpoint was completed"
    assert signal.SIGKILL == 9
