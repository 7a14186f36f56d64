"""`load`: all is checked before anything is changed."""

import copy
import json
import random
import re
import zlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import partway as pw
from partway.checkpoints.contents import packed
from partway.strategy import RuntimeStateError


def net(wide=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 2))


def stepped(model, kind=torch.optim.Adam):
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path):
    model = net()
    return pw.save(tmp_path, model, stepped(model), step=7)


def assert_unchanged(path, model, optimizer, text, **options):
    """Loading is refused with `text`, and neither weights nor states change."""
    before = copy.deepcopy((model.state_dict(), optimizer and optimizer.state_dict(), torch.get_rng_state()))
    with pytest.raises(RuntimeStateError, match=text):
        pw.load(path, model, optimizer, **options)
    after = model.state_dict(), optimizer and optimizer.state_dict(), torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_checkpoint_of_another_model_says_what_differs(saved):
    text = r"is of another model:[\s\S]*0\.weight: has shape \[5, 3\], and in the checkpoint \[4, 3\]; load it into a"
    assert_unchanged(saved, net(5), None, text)
    other = nn.ModuleDict({"fc": nn.Linear(3, 4)})
    assert_unchanged(
        saved, other, None, r"fc\.weight: is not in the checkpoint[\s\S]*0\.bias: is in the checkpoint, and"
    )
    renamed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))
    assert_unchanged(saved, renamed, None, r"3\.weight: is not in the checkpoint")
    pw.load(saved, renamed, strict=False)
    assert torch.equal(renamed[0].weight, pw_state(saved)["0.weight"])


def pw_state(saved):
    model = net()
    pw.load(saved, model)
    return model.state_dict()


def test_an_optimizer_that_was_made_otherwise_is_refused(saved, tmp_path):
    model = net()
    assert_unchanged(saved, model, torch.optim.SGD(model.parameters()), r"has the state of Adam, not of SGD$")
    part = torch.optim.Adam(list(model.parameters())[1:])
    text = r"state of Adam for 1 group with 6 parameters, and this has 1 group with 5 parameters; group 0"
    assert_unchanged(saved, model, part, text)
    alone = pw.save(tmp_path / "alone", model)
    assert_unchanged(
        alone, model, torch.optim.Adam(model.parameters()), r"has no state of Adam; it was saved without an"
    )
    with pytest.raises(
        RuntimeStateError, match="an optimizer is loaded with the model that its parameters are of; give"
    ):
        pw.load(saved, None, part)


def damaged(saved, name, change):
    file = saved / name
    content = bytearray(file.read_bytes())
    file.write_bytes(change(content))


def flipped(content):
    content[-3] ^= 1
    return content


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("model.safetensors", flipped, r"model\.safetensors is damaged: the values of .* are not what was saved"),
        ("optimizer.safetensors", flipped, r"optimizer\.safetensors is damaged: the values of state\..* are not what"),
        ("model.safetensors", lambda c: c[:-1], r"model\.safetensors is damaged: it has [\d,]+ bytes, and had [\d,]+"),
        ("state.pt", flipped, r"state\.pt is damaged: its content has changed since it was saved"),
        ("parts-00000.json", flipped, r"parts-00000\.json is damaged: its content"),
        ("partway.json", lambda c: c[:20], r"partway\.json is damaged: "),
        ("partway.json", lambda c: c.replace(b'"format": 1', b'"format": 9'), r"is of a later version .*\(format 9\)$"),
        ("partway.json", lambda c: b"[" * 100_000, r"partway\.json is damaged: it is nested too deeply$"),
        ("partway.json", lambda c: b"[]", r"partway\.json is damaged: it holds no manifest$"),
        ("partway.json", lambda c: b"\xff", r"partway\.json is damaged: it has no text in UTF-8 at byte 0$"),
        ("partway.json", lambda c: c.replace(b'"format"', b'"format": 1, "format"'), r"'format' twice in one object$"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(saved, name, change, text):
    damaged(saved, name, change)
    model = net()
    assert_unchanged(saved, model, stepped(model), text)


@pytest.mark.parametrize("name", ["partway.json", "model.safetensors", "optimizer.safetensors", "state.pt"])
def test_any_other_byte_is_found_by_the_file_that_it_is_in(saved, name):
    model = net()
    optimizer = stepped(model)
    content, draw = (saved / name).read_bytes(), random.Random(0)
    said = json.loads(content) if name == "partway.json" else None
    for at in sorted({*range(0, min(len(content), 1200), 7), *(draw.randrange(len(content)) for _ in range(20))}):
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        (saved / name).write_bytes(changed)
        try:
            same = said is not None and json.loads(changed) == said  # white space in the text
        except ValueError:
            same = False
        if not same:
            assert_unchanged(saved, model, optimizer, re.escape(f"{saved / name} is "))


def forged(saved, **changed):
    """Write a manifest with other fields and a right checksum. `sizes` and `checksums` are those of the files."""
    said = json.loads((saved / "partway.json").read_text())
    for name in said["checksums"]:
        content = (saved / name).read_bytes()
        said["sizes"][name], said["checksums"][name] = len(content), zlib.crc32(content)
    said.update(changed)
    said["checksum"] = zlib.crc32(
        json.dumps({name: value for name, value in said.items() if name != "checksum"}).encode()
    )
    (saved / "partway.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("sizes", {"../../secret": 1}, r"sizes\.\.\./\.\./secret.*: '\.\./\.\./secret' is not the name of a file"),
        ("sizes", {"model.safetensors": 1.5}, r"sizes\.model\.safetensors: Input should be a valid integer"),
        ("checksums", {}, "the file: its lists of files do not agree"),
        ("headers", {"state.pt": 1}, "the file: its lists of files do not agree"),
        ("processes", 10**9, "the file: its lists of files do not agree"),
        ("processes", 0, "processes: Input should be greater than or equal to 1"),
        ("aliases", {"a": ["b"]}, r"aliases\.a: Input should be a valid string"),
        ("differ", ["x"], "state.pt is damaged: it lacks x"),
        ("format", "1", "format: Input should be 1"),
        ("more", 1, "more: Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_forged_manifest_with_a_right_checksum_is_named(saved, field, value, text):
    forged(saved, **{field: value})
    model = net()
    assert_unchanged(
        saved, model, stepped(model), rf"(partway\.json|state\.pt) is damaged: .*{text}" if field != "differ" else text
    )


def write_state(saved, **changed):
    """Forge values: bytes, or what torch.save makes of a value; None: without it."""
    blobs = torch.load(saved / "state.pt", weights_only=True)
    for name, value in changed.items():
        data = value if isinstance(value, bytes) else packed(name, value)
        blobs[name.replace("_", ".")] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    (saved / "state.pt").write_bytes(packed("x", blobs))
    forged(saved)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"random_torch": torch.zeros(3, dtype=torch.uint8)}, "RuntimeError: Expected a CPUGeneratorImplState"),
        ({"random_torch": 3}, "TypeError"), ({"random_python": [3, [1], None]}, "it state vector is the wrong size"),
        ({"random_python": "x"}, "IndexError"), ({"random_numpy": ["MT19937", torch.zeros(3)]}, ""),
        ({"optimizer_0": {"groups": []}}, "KeyError: 'values'"), ({"optimizer_0": 3}, "TypeError"),
        ({"optimizer_0": {"groups": [], "values": {"w": {}}, "class": "Adam"}}, "it holds no state of an optimizer"),
        ({"state_step": b"no pickle"}, "UnpicklingError"), ({"state_step": {"partway.tensor": "w"}}, "KeyError: 'w'"),
    ],
)  # fmt: skip
def test_forged_values_are_refused_before_anything_is_changed(saved, changed, why):
    write_state(saved, **changed)
    model = net()
    assert_unchanged(saved, model, stepped(model), rf"state\.pt is damaged: .*{why}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no pickle", r"state\.pt is damaged: .*Error: "), (b"", r"state\.pt is damaged: "),
        (packed("x", [1]), r"state\.pt is damaged: it holds no values$"),
        (packed("x", {"step": torch.ones(2)}), r"state\.pt is damaged: it holds no values$"),
    ],
)  # fmt: skip
def test_a_forged_file_of_values_is_named(saved, content, text):
    (saved / "state.pt").write_bytes(content)
    forged(saved)
    assert_unchanged(saved, net(), None, text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda parts: parts[1:], r"model\.safetensors is damaged: not all of .* was saved$"),
        (lambda parts: [], r"model\.safetensors is damaged: not all of .* was saved$"),
        (
            lambda parts: [["model", "w", [], 0]],
            r"parts-00000\.json is damaged: it has a part of w, which is in no file$",
        ),
        (lambda parts: [[*parts[0][:2], [[0, 10**30]], 0]], r"parts-00000\.json is damaged: "),
        (
            lambda parts: [[*parts[0][:2], [], 0]],
            r"parts-00000\.json is damaged: it has a part of .* that is not in it",
        ),
        (lambda parts: [[*parts[0][:3], -1]], r"parts-00000\.json is damaged: 0\.3: Input should be greater than or"),
        (lambda parts: {"a": 1}, r"parts-00000\.json is damaged: the file: Input should be a valid array"),
    ],
)
def test_forged_parts_are_named(saved, change, text):
    path = saved / "parts-00000.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    forged(saved)
    assert_unchanged(saved, net(), None, text)


def test_a_state_of_no_parameter_is_named(saved):
    path = saved / "optimizer.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"state.0.weight.exp_avg"', b'"state.9.weight.exp_avg"'))
    (saved / "parts-00000.json").write_text(
        (saved / "parts-00000.json").read_text().replace('state.0.weight.exp_avg"', 'state.9.weight.exp_avg"')
    )
    length = 8 + int.from_bytes(content[:8], "little")
    said = json.loads((saved / "partway.json").read_text())["headers"]
    forged(saved, headers={**said, "optimizer.safetensors": zlib.crc32(path.read_bytes()[:length])})
    model = net()
    text = r"optimizer\.safetensors is damaged: its 'state\.9\.weight\.exp_avg' is of no parameter$"
    assert_unchanged(saved, model, stepped(model), text)


def test_a_checkpoint_that_lost_its_manifest_is_named_and_not_taken_for_weights(saved):
    (saved / "partway.json").unlink()
    model = net()
    for path in (saved, saved.parent):
        assert_unchanged(
            path, model, None, r"checkpoint-000001/partway\.json is missing; the checkpoint is incomplete$"
        )
    (saved / "partway.json").mkdir()
    assert_unchanged(saved, model, None, r"checkpoint-000001/partway\.json cannot be read: Is a directory$")


def test_what_refuses_its_state_leaves_all_as_it_was(tmp_path):
    class Refuses:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise RuntimeError("no such state")

    model = net()
    at = pw.save(tmp_path, model, stepped(model), scaler=Refuses())
    other = net()
    before = copy.deepcopy((other.state_dict(), torch.get_rng_state()))
    with pytest.raises(RuntimeError, match=r"^no such state$"):
        pw.load(at, other, scaler=Refuses())
    torch.testing.assert_close((other.state_dict(), torch.get_rng_state()), before, rtol=0, atol=0)


def test_a_missing_file_is_named(saved):
    (saved / "optimizer.safetensors").unlink()
    assert_unchanged(saved, net(), None, r"optimizer\.safetensors is missing; the checkpoint is incomplete")


def test_values_are_returned_and_given_to_what_asks(saved, tmp_path):
    model = net()
    assert pw.load(saved, model) == {"step": 7}
    assert pw.load(saved) == {"step": 7}
    assert pw.load(saved, skip=("step",)) == {}
    with pytest.raises(RuntimeStateError, match=r"scheduler has no load_state_dict\(\); load returns plain val"):
        pw.load(saved, model, scheduler=3)
    optimizer = stepped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    text = r"checkpoint-000001 has no scheduler; its named values are step$"
    assert_unchanged(saved, model, None, text, scheduler=scheduler)


def test_wrong_arguments_are_named(saved):
    with pytest.raises(RuntimeStateError, match=r"^path is 3; write the path"):
        pw.load(3)
    with pytest.raises(RuntimeStateError, match=r"^path is '', which names no folder; write '\.' for this one$"):
        pw.load("")
    with pytest.raises(RuntimeStateError, match=r"^model is 3; it must be an nn\.Module"):
        pw.load(saved, 3)


def test_weights_of_hugging_face_load_alone_and_in_another_dtype(tmp_path):
    model = net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = net().double()
    with torch.no_grad():
        other[0].weight.zero_()
    assert pw.load(tmp_path, other) == {}
    assert torch.equal(other[0].weight, model[0].weight.double())


def test_several_optimizers_keep_their_states_and_options(tmp_path):
    model = net()
    pair = [
        torch.optim.Adam(model[0].parameters(), lr=0.5),
        torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9),
    ]
    for optimizer in pair:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    pw.save(tmp_path, model, pair)
    expected = copy.deepcopy([optimizer.state_dict() for optimizer in pair])
    fresh = net()
    others = [torch.optim.Adam(fresh[0].parameters()), torch.optim.SGD(fresh[2].parameters(), lr=1.0, momentum=0.1)]
    pw.load(tmp_path, fresh, others)
    torch.testing.assert_close([optimizer.state_dict() for optimizer in others], expected, rtol=0, atol=0)


def test_extra_state_of_modules_is_kept(tmp_path):
    class Counts(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model, fresh = nn.Sequential(Counts(2, 2)), nn.Sequential(Counts(2, 2))
    model[0].count = 5
    at = pw.save(tmp_path, model)
    pw.load(at, fresh)
    assert fresh[0].count == 5
    assert json.loads((at / "partway.json").read_text())["processes"] == 1
