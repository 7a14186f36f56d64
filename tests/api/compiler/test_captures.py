"""A second start takes captures from disk, and only where nothing that a function depends on is another."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partway as pw
from partway.compiler import capture_call as compiling
from partway.compiler import captures
from partway.propagation.capture.capture import capture
from partway.propagation.plan.stored import WrongFormError
from partway.propagation.plan.stored_graph import dump_graph, load_graph
from partway.requests.request import engine_of
from partway.reuse.cache import text_of_graph

NAME = "a_script"  # of the module that each start runs anew


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PARTWAY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PARTWAY_CACHE", raising=False)
    monkeypatch.delenv("PARTWAY_VERIFY", raising=False)
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was captured."""
    names: list[str] = []

    def counted(call: compiling.CallInputs, kept: Any, plain: Any = compiling.capture_call) -> Any:
        names.append(type(call.fn).__name__)
        return plain(call, kept)

    monkeypatch.setattr(compiling, "capture_call", counted)
    return names


@pytest.fixture(autouse=True)
def no_script() -> Iterator[None]:
    yield
    sys.modules.pop(NAME, None)


def started(text: str) -> types.ModuleType:
    """The module that `text` is the text of, made anew as another process would."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    exec(compile(textwrap.dedent(text), f"/a/folder/{NAME}.py", "exec"), vars(module))
    return module


def both(text: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What `model` of a fresh start computes, and what it does on one device."""
    plain = started(text).model
    return pw.shard(started(text).model, mesh={"dp": 2})(x), plain(x)


HEAD = """
import functools
import enum
import math
import operator
import torch
from torch import nn
"""

# What is written at HOLE in one start, and in the next; a model that depends on it.
CHANGED: dict[str, tuple[str, Any, Any]] = {
    "the code of forward": ("class M(nn.Module):\n    def forward(self, x): return x * HOLE\nmodel = M()", 2, 3),
    "a global": ("G = HOLE\nclass M(nn.Module):\n    def forward(self, x): return x * G\nmodel = M()", 2, 3),
    "an attribute": (
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = HOLE\n"
        "    def forward(self, x): return x * self.a\nmodel = M()", 2.5, 3.5,
    ),
    "a list in a dict": (
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = {'k': [1, HOLE]}\n"
        "    def forward(self, x): return x * self.a['k'][1]\nmodel = M()", 2, 3,
    ),
    "a function that is called": (
        "def f(x): return x + HOLE\nclass M(nn.Module):\n    def forward(self, x): return f(x)\nmodel = M()", 2, 3,
    ),
    "a function inside of a function": (
        "class M(nn.Module):\n    def forward(self, x):\n        def f(y): return y * HOLE\n        return f(x)\n"
        "model = M()", 2, 3,
    ),
    "a default": ("class M(nn.Module):\n    def forward(self, x, k=HOLE): return x * k\nmodel = M()", 2, 3),
    "a keyword's default": (
        "class M(nn.Module):\n    def forward(self, x, *, k=HOLE): return x * k\nmodel = M()", 2, 3
    ),
    "a closure": (
        "def make(k):\n    class M(nn.Module):\n        def forward(self, x): return x * k\n    return M()\n"
        "model = make(HOLE)", 2, 3,
    ),
    "a class attribute": (
        "class M(nn.Module):\n    k = HOLE\n    def forward(self, x): return x * self.k\nmodel = M()", 2, 3,
    ),
    "a base class": (
        "class B(nn.Module):\n    def scaled(self, x): return x * HOLE\nclass M(B):\n"
        "    def forward(self, x): return self.scaled(x)\nmodel = M()", 2, 3,
    ),
    "a property": (
        "class M(nn.Module):\n    @property\n    def k(self): return HOLE\n"
        "    def forward(self, x): return x * self.k\nmodel = M()", 2, 3,
    ),
    "a partial": (
        "f = functools.partial(torch.mul, torch.ones(()) if False else HOLE)\nclass M(nn.Module):\n"
        "    def forward(self, x): return torch.mul(x, f.args[0])\nmodel = M()", 2, 3,
    ),
    "a cached function": (
        "@functools.cache\ndef k(): return HOLE\nclass M(nn.Module):\n    def forward(self, x): return x * k()\n"
        "model = M()", 2, 3,
    ),
    "a wrapped function": (
        "@functools.wraps(torch.nn.functional.relu)\ndef f(x): return x * HOLE\nclass M(nn.Module):\n"
        "    def forward(self, x): return f(x)\nmodel = M()", 2, 3,
    ),
    "a member of an enumeration": (
        "class E(enum.Enum):\n    A = HOLE\nclass M(nn.Module):\n    def forward(self, x): return x * E.A.value\n"
        "model = M()", 2, 3,
    ),
    "a number that writes itself otherwise": (
        "class F(float):\n    def __repr__(self): return 'F'\nk = F(HOLE)\nclass M(nn.Module):\n"
        "    def forward(self, x): return x * k\nmodel = M()", 2, 3,
    ),
    "an object": (
        "class O:\n    def __init__(self, k): self.k = k\no = O(HOLE)\nclass M(nn.Module):\n"
        "    def forward(self, x): return x * o.k\nmodel = M()", 2, 3,
    ),
    "an object with slots": (
        "class O:\n    __slots__ = ('k',)\n    def __init__(self, k): self.k = k\no = O(HOLE)\nclass M(nn.Module):\n"
        "    def forward(self, x): return x * o.k\nmodel = M()", 2, 3,
    ),
    "an itemgetter": (
        "f = operator.itemgetter(HOLE)\nclass M(nn.Module):\n    def forward(self, x): return x * f((5, 6, 7))\n"
        "model = M()", 1, 2,
    ),
    "a bound method": (
        "f = {'k': HOLE}.get\nclass M(nn.Module):\n    def forward(self, x): return x * f('k')\nmodel = M()", 2, 3,
    ),
    "a distribution": (
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.d = torch.distributions.Normal(HOLE, 1.0, validate_args=False)\n"
        "    def forward(self, x): return self.d.log_prob(x)\nmodel = M()", 2.0, 3.0,
    ),
    "a tensor": (
        "T = torch.full((4,), HOLE, dtype=torch.float64)\nclass M(nn.Module):\n    def forward(self, x): return x * T\n"
        "model = M()", 2.0, 3.0,
    ),
    "a value of a tensor": (
        "T = torch.tensor(HOLE)\nclass M(nn.Module):\n    def forward(self, x): return x * T.item()\nmodel = M()",
        2.0, 3.0,
    ),
    "a module's type": ("model = nn.Sequential(nn.HOLE())", "Tanh", "Sigmoid"),
    "an option of a module": ("model = nn.Sequential(nn.Softplus(beta=HOLE))", 1.0, 2.0),
    "training": (
        "class M(nn.Module):\n    def forward(self, x): return x * 2 if self.training else x * 3\n"
        "model = M().train(HOLE)", True, False,
    ),
    "a hook": (
        "model = nn.Sequential(nn.Tanh())\nmodel[0].register_forward_hook(lambda m, args, out: out * HOLE)", 2, 3,
    ),
    "tied parameters": (
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        torch.manual_seed(0)\n        self.a, self.b = (nn.Linear(4, 4).double() for _ in range(2))\n"
        "        if HOLE: self.b.weight = self.a.weight\n"
        "    def forward(self, x): return self.a(x) + self.b(x)\nmodel = M()", True, False,
    ),
    "a set": (
        "S = {1, HOLE}\nclass M(nn.Module):\n    def forward(self, x): return x * (2 if 7 in S else 3)\n"
        "model = M()", 7, 8,
    ),
    "a pattern": (
        "import re\nP = re.compile('HOLE')\nclass M(nn.Module):\n"
        "    def forward(self, x): return x * (2 if P.match('abc') else 3)\nmodel = M()", "a", "b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGED)
def test_what_changed_is_captured_anew(what: str, made: list[str]) -> None:
    text, *values = CHANGED[what]
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    results = []
    for value in values:
        found, expected = both(HEAD + text.replace("HOLE", str(value)), x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        results.append(found)
    assert not torch.equal(*results), "the model does not depend on it"
    assert len(made) == 2


NOT_KEPT = {"a distribution", "a tensor", "a value of a tensor"}  # tensors from outside are of this process


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_the_same_is_not_captured_again(what: str, made: list[str]) -> None:
    text, value, _ = CHANGED[what]
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    for _ in range(2):
        found, expected = both(HEAD + text.replace("HOLE", str(value)), x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(made) == (2 if what in NOT_KEPT else 1)


PLAIN = (
    HEAD
    + """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()
    def forward(self, x, scale=1.0):
        return self.down(torch.relu(self.up(x))) * scale
model = M()
"""
)
X = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)


def start(text: str = PLAIN, x: Tensor = X, scale: float = 1.0, **request: Any) -> None:
    pw.shard(started(text).model, **{"mesh": {"dp": 2}, **request})(x, scale)


@pytest.mark.parametrize(
    "other",
    [
        lambda: start(x=torch.ones(8, 4, dtype=torch.float64)),
        lambda: start(x=X.t().contiguous().t()),
        lambda: start(x=X.clone().requires_grad_()),
        lambda: start(scale=2.0),
        lambda: start(module_plan={"up": {"out_strategy": ((None, "dp"),)}}),
        lambda: start(PLAIN.replace("nn.Linear(8, 4)", "nn.Linear(8, 4, bias=False)")),
        lambda: start(PLAIN + "model.up.weight.requires_grad_(False)"),
        lambda: start(PLAIN + "model.register_buffer('more', torch.ones(3))"),
        lambda: start(PLAIN + "model.up.bias.data = model.up.weight.data.view(-1)[:8]"),
    ],
    ids=["sizes", "strides", "gradients", "a number", "constraints", "parameters", "frozen", "buffers", "memory"],
)
def test_another_call_is_captured_anew(other: Any, made: list[str]) -> None:
    start()
    other()
    assert len(made) == 2
    start()
    other()
    assert len(made) == 2


def test_functions_that_show_nothing_are_told_apart_by_name(made: list[str]) -> None:
    for _ in range(2):
        for fn in (torch.mul, torch.add, functools.partial(torch.add, alpha=2), functools.partial(torch.add, alpha=3)):
            torch.testing.assert_close(pw.shard(fn, mesh={"dp": 2})(X, X), fn(X, X))
    assert len(made) == 4


def test_other_modes_of_torch_are_captured_anew(made: list[str]) -> None:
    start()
    with torch.autocast("cpu", torch.bfloat16):
        start()
    assert len(made) == 2


def test_sizes_that_change_have_one_plan_in_each_process(made: list[str]) -> None:
    """Of later starts too: the second size is planned, and others follow that plan."""
    for _ in range(2):
        model, plain = pw.shard(started(PLAIN).model, mesh={"dp": 2}), started(PLAIN).model
        plain.load_state_dict(model.state_dict())
        for size in (4, 8, 6, 12):
            x = torch.linspace(-1, 1, 4 * size, dtype=torch.float64).view(size, 4)
            torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
        assert engine_of(model).searched == 2
        assert len(made) == 1  # and the second size for all


def test_plans_for_training_and_inference_share_a_capture(made: list[str]) -> None:
    start()
    with torch.inference_mode():
        start()
    assert len(made) == 1


def test_ranks_have_captures_of_their_own(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A function may ask which rank it is on."""
    start()
    monkeypatch.setattr(captures, "get_rank", lambda: 1)
    start()
    assert len(made) == 2


def test_other_packages_are_captured_anew(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(captures, "installed", lambda: "another torchvision")
    start()
    assert len(made) == 2


def test_the_cache_can_be_turned_off(made: list[str]) -> None:
    for _ in range(2):
        with pw.auto_parallel_context(enable_compile_cache=False):
            start()
    assert len(made) == 2


def test_graphs_are_saved_of_a_capture_that_is_made(made: list[str], monkeypatch: Any, tmp_path: Path) -> None:
    start()
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    monkeypatch.chdir(tmp_path)
    start()
    assert len(made) == 2


def test_a_damaged_file_is_made_anew_with_a_warning(made: list[str], folder: Path) -> None:
    start()
    (path,) = folder.glob("*/*.capture")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="cannot be read .it is not what was written there., and is made anew"):
        start()
    assert len(made) == 2


FILE = """
class M(nn.Module):
    def forward(self, x, scale):
        with open({path!r}) as file:
            return x * float(file.read())
model = M()
"""


def test_what_reads_a_file_is_captured_in_each_process(made: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    told: list[str] = []
    monkeypatch.setattr(captures._log, "info", lambda text, *values: told.append(text % values))
    path = tmp_path / "scale"
    for number in (2.0, 3.0):
        path.write_text(str(number))
        model = pw.shard(started(HEAD + FILE.format(path=str(path))).model, mesh={"dp": 2})
        torch.testing.assert_close(model(X, 1), X * number)
    assert len(made) == 2
    assert told[0] == (
        "M is captured in each process: it reads what cannot be compared, what M.forward may get from open"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "T = torch.ones(4)\nclass M(nn.Module):\n    def forward(self, x, s): return x * T",
            "uses tensors from outside",
        ),
        (
            "class M(nn.Module):\n    def forward(self, x, s):\n        return x * 2 if x.sum() > 0 else x",
            "asks for values of tensors",
        ),
        (
            "class M(nn.Module):\n    def forward(self, x, s):\n        self.last = x\n        return x * 2",
            "it leaves a value in last",
        ),
    ],
)
def test_what_has_no_form_is_captured_in_each_process(text: str, why: str, made: list[str], monkeypatch: Any) -> None:
    told: list[str] = []
    monkeypatch.setattr(captures._log, "info", lambda text, *values: told.append(text % values))
    for _ in range(2):
        start(HEAD + text + "\nmodel = M()")
    assert len(made) == 2
    assert why in told[0]


@pytest.mark.parametrize(
    "hostile",
    [
        ["l", [["record", "TypeName", ["antigravity.X"]]]],
        '[1, {"type": "builtins.dict", "context": "{\\"__enum__\\": 1, \\"fqn\\": \\"antigravity:X\\"}"}]',
    ],
)
def test_a_capture_that_was_forged_imports_nothing(hostile: Any, made: list[str], folder: Path) -> None:
    """PyTorch's own text for containers would import what it names."""
    start()
    (path,) = folder.glob("*/*.capture")
    head, _, data = path.read_bytes().partition(b"\n")
    tree = json.loads(data)
    tree["value"][4] = hostile
    forged = json.dumps(tree).encode()
    fixed, _, _ = head.decode().rpartition(" ")
    path.write_bytes(f"{fixed} {hashlib.sha256(forged).hexdigest()}\n".encode() + forged)
    with pytest.warns(UserWarning, match="cannot be read .*, and is made anew"):
        start()
    assert len(made) == 2
    assert "antigravity" not in sys.modules


def test_a_type_that_the_code_does_not_name_is_not_read() -> None:
    graph = capture(lambda x: OrderedDict(y=x * 2), (X,), {})
    data = dump_graph(graph)
    assert load_graph(data).result.text() == graph.result.text()
    with pytest.raises(WrongFormError, match=r"collections.Counter is not a type that the function can reach"):
        load_graph(data.replace(b"collections.OrderedDict", b"collections.Counter"))


def test_a_graph_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def kept(folder: Path, fn: Any, call: Any, options: Any, capture: Any) -> Any:
        graphs.append(captures.fetch_capture(folder, fn, call, options, capture).graph)
        return captures.fetch_capture(folder, fn, call, options, capture)

    monkeypatch.setattr(compiling, "fetch_capture", kept)
    start()
    start()
    assert text_of_graph(graphs[0]) == text_of_graph(graphs[1])
    assert graphs[0].result.text() == graphs[1].result.text()


SCRIPT = """
import torch
from torch import nn
import partway as pw
from partway.compiler import capture_call as compiling
from partway.compiler import passes

for module, name in ((compiling, "capture_call"), (passes, "search"), (passes, "lower"), (passes, "fuse_program")):
    def counted(*args, plain=getattr(module, name), name=name, **kwargs):
        print(name)
        return plain(*args, **kwargs)
    setattr(module, name, counted)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return {"y": self.down(torch.relu(self.up(x))), "n": 3}

torch.manual_seed(0)
plain = M()
torch.manual_seed(0)
model = pw.shard(M(), mesh={"dp": 2}, inference=True, **OPTIONS)
x = torch.ones(4, 4)
with torch.inference_mode():
    model.prepare(x)
    found = model(x)
torch.testing.assert_close(found["y"], plain(x)["y"])
assert found["n"] == 3
SAVE
"""


def test_a_process_that_starts_with_a_saved_plan_neither_captures_nor_searches(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "script.py"
    environment = {**os.environ, "PARTWAY_CACHE_DIR": str(folder), "PYTHONWARNINGS": "error"}
    for name in ("PARTWAY_CACHE", "PARTWAY_VERIFY"):
        environment.pop(name, None)

    def run(options: str, save: str) -> list[str]:
        path.write_text(SCRIPT.replace("**OPTIONS", options).replace("SAVE", save))
        done = subprocess.run(
            [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    saved = str(tmp_path / "plan.json")
    assert "capture_call" in run("", f"model.plan.save({saved!r})")
    assert run("", "") == []
    assert "capture_call" not in run(f"plan={saved!r}", "")
    assert run(f"plan={saved!r}", "") == []
