"""Calls whose sizes change: one plan serves them all, and each has the numbers of one device."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import fuzz
import images
import pytest
import torch
import torch.nn.functional as F
import zoo
from checks import assert_same_gradients, gradients, loss_of, tolerance, whole
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from torch import Tensor, nn

import partway as pw
from partway.engine import engine
from partway.propagation.plan.replay import follow
from partway.propagation.program.lower import describe_option
from partway.requests.request import engine_of
from partway.reuse import courses
from partway.strategy import StrategyError

MESHES = {"dp": {"dp": 4}, "tp": {"dp": 1, "tp": 2}, "dp_tp": {"dp": 2, "tp": 2}}
MODELS = [
    ("mlp", "dp"), ("mlp", "dp_tp"), ("convnet", "dp_tp"), ("gpt2", "dp_tp"), ("llama", "dp"),
    pytest.param("vit", "dp_tp", marks=pytest.mark.slow), pytest.param("resnet50", "dp", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One word for each plan that is searched."""
    return note_searches(monkeypatch, [])


def note_searches(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> list[str]:
    compile_call = engine.compile_call

    def noted(*args: Any) -> Any:
        compiled = compile_call(*args)
        if not compiled.plan.certificate.of_other_sizes:
            found.append("inference" if compiled.plan.certificate.inference else "training")
        return compiled

    monkeypatch.setattr(engine, "compile_call", noted)
    return found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("partway"), "warning", lambda text, *args: lines.append(text % args))
    return lines


def batch_of(case: zoo.Case, step: int, size: int) -> dict[str, Tensor]:
    batch = case.batch(step=step, size=size)
    if "input_ids" in batch:  # their lengths change too
        batch = {name: ids[:, : 8 - step % 3].contiguous() for name, ids in batch.items()}
    return batch


def train_and_evaluate(name: str, mesh: str, sizes: Sequence[int]) -> int:
    """Gradients and losses of batches of these sizes are those of one device; how many there were."""
    case = zoo.CASES[name]
    axes = MESHES[mesh]
    model = pw.shard(case.build(), mesh=axes, in_strategy=case.batch_split("dp"))
    plain, relative = case.build(), tolerance(torch.float64, case.single)
    for step, size in enumerate(sizes):
        batch = batch_of(case, step, size)
        loss, found = gradients(model.train(), batch)
        expected_loss, expected = gradients(plain.train(), batch)
        torch.testing.assert_close(whole(loss), expected_loss, rtol=relative, atol=0)
        assert_same_gradients(whole(found), expected, relative)
        with torch.no_grad():
            evaluated, wanted = (loss_of(one.eval()(**batch)) for one in (model, plain))
        torch.testing.assert_close(whole(evaluated), wanted, rtol=relative, atol=0)
    return len(sizes)


@pytest.mark.parametrize(("name", "mesh"), MODELS)
def test_a_plan_for_training_and_one_for_inference_serve_all_sizes(name: str, mesh: str, searched: list[str]) -> None:
    train_and_evaluate(name, mesh, [8, 4, 12, 7])
    assert searched.count("training") <= 2
    assert searched.count("inference") <= 2


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "mesh", "ranks"), [("mlp", "dp_tp", 4), ("convnet", "dp", 4), ("gpt2", "tp", 2)])
def test_sizes_change_in_processes(on_ranks: Callable[..., Any], name: str, mesh: str, ranks: int) -> None:
    assert on_ranks(ranks, train_and_evaluate, name, mesh, [8, 4, 7]) == [3] * ranks


def every_image(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    for rows, side in sizes:
        torch.manual_seed(rows * side)
        target = torch.randint(0, images.CLASSES + 1, (rows, side, side))
        yield torch.randn(rows, 3, side, side, dtype=torch.float64), target


def compared(model: Any, plain: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Losses and gradients of one call are equal."""
    for one in (model, plain):
        one.zero_grad()
        one(*inputs).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same_gradients(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-9)


def test_the_sizes_of_images_change(searched: list[str]) -> None:
    torch.manual_seed(0)
    plain = images.UNet(levels=2).double()
    torch.manual_seed(0)
    model = pw.shard(
        images.UNet(levels=2).double(), mesh={"dp": 2}, in_strategy=(("dp", *[None] * 3), ("dp", None, None))
    )
    for inputs in every_image([(4, 16), (6, 24), (3, 20)]):
        compared(model, plain, inputs)
    assert len(searched) <= 3


class Texts(nn.Module):
    """Padded token ids through a layer, to four numbers for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8, padding_idx=0), nn.Embedding(32, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        mixed = self.mixed(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])), padding)
        result: Tensor = self.out(mixed.masked_fill(padding[..., None], 0).sum(1))
        return result

    def mixed(self, x: Tensor, padding: Tensor) -> Tensor:
        raise NotImplementedError


class Encoded(Texts):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def mixed(self, x: Tensor, padding: Tensor) -> Tensor:
        result: Tensor = self.layers(x, src_key_padding_mask=padding)
        return result


class Decoded(Texts):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def mixed(self, x: Tensor, padding: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) < 0
        result: Tensor = self.layers(x, x, later, tgt_key_padding_mask=padding)
        return result


class Recurrent(Texts):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = kind(8, 8, batch_first=True, **options)

    def mixed(self, x: Tensor, padding: Tensor) -> Tensor:
        result: Tensor = self.layers(x)[0].unflatten(-1, (-1, 8)).sum(-2)
        return result


class ByHand(Texts):
    """Attention as it is written in a hundred notebooks."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def mixed(self, x: Tensor, padding: Tensor) -> Tensor:
        length = x.size(1)
        q, k, v = (part.view(-1, length, 2, 4).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        scores = (q @ k.transpose(-1, -2)) / k.size(-1) ** 0.5
        scores = scores.masked_fill(later | padding[:, None, None], -1e9)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


OF_TEXTS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoded, "decoder": Decoded, "by hand": ByHand, "lstm": lambda: Recurrent(nn.LSTM),
    "lstm, two ways": lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2),
    "gru": lambda: Recurrent(nn.GRU), "rnn": lambda: Recurrent(nn.RNN),
}  # fmt: skip


def train_on_texts(name: str, mesh: dict[str, int], lengths: Sequence[int]) -> int:
    """Texts of these lengths have the losses and gradients of one device; how many plans were searched."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        note_searches(patched, found)
        torch.manual_seed(0)
        plain = OF_TEXTS[name]().double()
        model = pw.shard(copy.deepcopy(plain), mesh=mesh, in_strategy=(("dp", None),))
        for length in lengths:
            ids = torch.randint(1, 16, (4, length))
            ids[1:, -1] = 0
            for one in (model, plain):
                one.zero_grad()
                one(ids).square().mean().backward()
            assert_same_gradients(gradients_in(model), gradients_in(plain), 1e-9)
            with torch.no_grad():
                torch.testing.assert_close(whole(model(ids)), plain(ids), rtol=1e-10, atol=1e-12)
    return len(found)


def gradients_in(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", OF_TEXTS)
def test_texts_of_other_lengths_have_new_programs_and_no_new_plan(name: str) -> None:
    assert train_on_texts(name, {"dp": 2, "tp": 2}, [3, 5, 4]) <= 2


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["encoder", "lstm", "by hand"])
def test_texts_of_other_lengths_have_no_new_plan_in_processes(on_ranks: Callable[..., Any], name: str) -> None:
    assert max(on_ranks(2, train_on_texts, name, {"dp": 2}, [3, 5, 4])) <= 2


class Growing(nn.Module):
    """A decoder that concatenates what it keeps of earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.project, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids: Tensor, kept: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.project(self.tokens(ids)).chunk(3, -1)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=kept is None)
        return self.out(mixed), (k, v)


def test_a_decoder_that_grows_by_a_token_has_no_new_plan_for_each(searched: list[str]) -> None:
    torch.manual_seed(0)
    plain = Growing().double().eval()
    model = pw.shard(copy.deepcopy(plain), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),))
    ids, kept, wanted = torch.randint(0, 16, (4, 5)), None, None
    with torch.inference_mode():
        for _ in range(8):
            (found, kept), (expected, wanted) = model(ids, kept), plain(ids, wanted)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            ids = expected[:, -1:].argmax(-1)
    assert len(searched) <= 4  # the text, then a token: each for training, as parameters have no layout yet, and here


def test_what_a_recurrent_layer_lists_anew_is_no_result() -> None:
    """An nn.LSTM whose weights were replaced, as a capture does, lists them again."""
    layer = nn.LSTM(8, 8)
    listed = [*layer._flat_weights]
    compiled = pw.compile(layer, (torch.randn(4, 2, 8),), mesh={"dp": 2})
    assert [port.role.value for port in compiled.graph.outputs] == ["result"] * 3
    assert all(one is other for one, other in zip(listed, layer._flat_weights, strict=True))


class Perceptron(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def perceptron(**options: Any) -> Any:
    torch.manual_seed(0)
    return pw.shard(Perceptron().double(), mesh={"a": 2}, in_strategy=(("a", None),), **options)


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, dtype=torch.float64)


def test_the_second_size_is_planned_for_all(searched: list[str]) -> None:
    model = perceptron()
    for size in (4, 6, 8, 5, 12, 4, 6):
        model(rows(size))
    assert searched == ["training"] * 2
    assert str(model.plan.certificate) == "dynamic_programming: the optimum, proven"
    model(rows(10))
    assert str(model.plan.certificate) == "none: the strategies are those of the plan for other sizes"


def test_declared_sizes_are_planned_at_once(searched: list[str]) -> None:
    model = perceptron(dynamic={"input": {0: (1, 16)}})
    for size in (4, 6, 16, 2):
        model(rows(size))
    assert searched == ["training"]
    with pytest.raises(StrategyError) as error:
        model(rows(17))
    assert str(error.value) == (
        "the sizes of this call are not those that were declared:\n"
        "  - dim 0 of 'input': is 17, and dynamic says 1 to 16; give a tensor of such a size, or declare more sizes"
    )
    assert model(rows(3)).shape == (3, 8)


def test_sizes_of_their_own_have_plans_of_their_own(searched: list[str]) -> None:
    model = perceptron(dynamic=False)
    for size in (4, 6, 8):
        model(rows(size))
    assert searched == ["training"] * 3


def test_one_row_and_none_have_plans_of_their_own(searched: list[str]) -> None:
    model, plain = perceptron(), Perceptron().double()
    plain.load_state_dict(model.state_dict())
    for size in (4, 1, 6, 1, 5):
        x = rows(size)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-13)
    assert searched == ["training"] * 3


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (True, "dynamic: is True (bool); write {"),
        ({1: (0,)}, "dynamic: has the key 1 (int); write an argument's name, a str"),
        ({"x": 0}, "dynamic['x']: is 0 (int); write {"),
        ({"x": ("a",)}, "dynamic['x']: has the dim 'a' (str); write dims by number, such as 0 or -1"),
        (
            {"x": {0: (4, 2)}},
            "dynamic['x'][0]: is (4, 2); write the least and the largest size, such as (1, 4096), or None",
        ),
    ],
)
def test_what_dynamic_does_not_take(dynamic: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(message)):
        pw.shard(nn.Linear(2, 2), mesh={"a": 2}, dynamic=dynamic)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"y": (0,)}, "dynamic: names 'y', and the call has no such tensor; write one of input"),
        ({"input": (2,)}, "dynamic: names dim 2 of 'input', a tensor of 2 dims; write a dim from 0 to 1"),
    ],
)
def test_what_dynamic_says_must_fit_the_call(dynamic: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(message)):
        perceptron(dynamic=dynamic)(rows(4))


class Counting(nn.Module):
    """Counts on its number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            x = x + i
        return x


def test_a_size_that_python_counts_on_is_told(log: list[str], searched: list[str]) -> None:
    model = pw.shard(Counting(), mesh={"a": 2}, dynamic={"x": (0,)})
    for size in (4, 6):
        x = rows(size)
        assert torch.equal(model(x), Counting()(x))
    assert log == ["what dynamic declares has a plan for each size: it counts on the size of dim 0 of 'x'"]
    assert len(searched) == 2


def test_the_log_of_a_new_plan_says_why_one_cannot_serve_all_sizes(log: list[str]) -> None:
    model = pw.shard(Counting(), mesh={"a": 2})
    for size in (4, 6, 8, 10):
        model(rows(size))
    assert log == [
        "Counting is planned for the 4th time: dim 0 of 'x' is 10, and was 8 (one plan cannot serve all sizes: it "
        "counts on the size of dim 0 of 'x'). Every new call is captured and planned, which takes seconds; pad to a "
        "few sizes, or leave out the last batch"
    ]


class Branching(nn.Module):
    """Does one thing for few rows and another for many, and keeps their number."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x.shape[0]
        return x * self.factor if x.shape[0] > 4 else x.sin()


def test_a_branch_on_a_size_and_what_is_kept_of_it() -> None:
    model, plain = pw.shard(Branching(), mesh={"a": 2}), Branching()
    for size in (6, 8, 3, 5, 2, 12, 4):
        x = rows(size)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-15, atol=0)
        assert model.rows == size
        assert type(model.rows) is int


def test_what_a_function_reads_counts_as_before() -> None:
    model, plain = pw.shard(Branching(), mesh={"a": 2}), Branching()
    for size, factor in ((6, 1.0), (8, 1.0), (10, 3.0), (12, 3.0), (14, 1.0)):
        model.factor = plain.factor = factor
        x = rows(size)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-15, atol=0)


def test_hooks_see_every_size() -> None:
    seen: list[int] = []
    model = perceptron()
    model[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    plain = Perceptron().double()
    plain.load_state_dict(model.state_dict())
    for size in (4, 6, 8, 5):
        x = rows(size)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-13)
    assert seen == [4, 6, 8, 5]


def test_programs_of_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch, searched: list[str]) -> None:
    monkeypatch.setattr(courses, "MOST_PLANS", 3)
    model = perceptron()
    for _ in range(2):
        for size in range(2, 9):
            model(rows(size))
    assert searched == ["training"] * 2
    assert len(engine_of(model)._planned.signatures) == 3


def sizes_of(program: fuzz.Program) -> list[int]:
    """The sizes of a program's arguments that may change."""
    shapes = [re.search(r"[TI]\(.*?\((.*?)\)", argument.text) for argument in program.arguments]
    return sorted({int(n) for found in shapes if found for n in re.findall(r"\d+", found[1]) if int(n) > 1})


@examples(4)
@given(seed=st.integers(0, 100_000), places=st.lists(st.integers(0, 5), min_size=1, max_size=2), data=st.data())
def test_random_programs_of_changing_sizes(seed: int, places: list[int], data: st.DataObject) -> None:
    program = fuzz.generate(seed)
    known = sizes_of(program)
    new = st.lists(st.integers(2, 9), min_size=3, max_size=3)
    sizes = {known[place % len(known)]: data.draw(new) for place in places if known}
    changing = {size: (size, *others) for size, others in sizes.items()}
    outcome = fuzz.checked(replace(program, setting=replace(program.setting, sizes=changing, steps=4)))
    assert not outcome.failed, f"{outcome}\n{program.as_test()}\n{changing}"


def rows_by(size: int, mesh: dict[str, int], function: Any) -> Any:
    return pw.compile(function, (rows(size), torch.randn(8, 8, dtype=torch.float64)), mesh=mesh)


def strategies(problem: Any, choice: Any) -> list[str]:
    chosen = ((v, v.options[c]) for v, c in zip(problem.vertices, choice, strict=True) if v.kind.value == "operator")
    return [describe_option(vertex, option) for vertex, option in chosen]


def test_a_plan_for_other_sizes_is_followed_where_it_can_be() -> None:
    """Four rows are split over both axes; of six the second axis takes another dim, or none."""
    given = pw.compile(lambda x: x.reshape(2, -1).tanh(), (rows(4),), mesh={"a": 2, "b": 2}, in_strategy=(("a", "b"),))
    same = pw.compile(lambda x: x.reshape(2, -1).tanh(), (rows(8),), mesh={"a": 2, "b": 2}, in_strategy=(("a", "b"),))
    found = follow(same.problem, given.plan)
    assert found.replayed
    assert found.of_other_sizes
    assert strategies(same.problem, found.choice) == [operator.strategy for operator in given.plan.operators]


def test_a_plan_of_other_operators_or_another_mesh_is_not_followed() -> None:
    product, total = torch.matmul, torch.add
    given = rows_by(8, {"a": 2}, product).plan
    other = pw.compile(total, (rows(8), rows(8)), mesh={"a": 2})
    with pytest.raises(StrategyError, match=r"^the plan cannot be followed: it is of other operators$"):
        follow(other.problem, given)
    with pytest.raises(StrategyError, match="mesh: it is a=4, the plan's a=2"):
        follow(rows_by(8, {"a": 4}, product).problem, given)
