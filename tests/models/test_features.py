"""What a training script does around a model works on a split one: every check is against one device."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import (
    assert_same_gradients,
    assert_same_loss,
    assert_sends_as_planned,
    carried,
    counted,
    gradients,
    gradients_of,
    loss_of,
    tolerance,
)
from torch import Tensor, nn
from zoo import CASES, LAYERS, MLP, gpt2

import partway as pw
from partway.propagation.program import differentiate

pytestmark = pytest.mark.deep

MESH = {"dp": 2, "tp": 4}
EXACT = 1e-10


def pair(name: str, **options: Any) -> tuple[nn.Module, Any]:
    """A model on one device, and the same split both ways."""
    case = CASES[name]
    given: dict[str, Any] = {
        "in_strategy": case.batch_split("dp"),
        "parameter_plan": case.block_split("tp"),
        "mesh": MESH,
    }
    return case.build(), pw.shard(case.build(), **{**given, **options})


def assert_same_step(plain: nn.Module, model: Any, batch: Any, relative: float = EXACT) -> None:
    torch.manual_seed(7)
    loss, expected = gradients(plain, batch)
    torch.manual_seed(7)
    found_loss, found = gradients(model, batch)
    assert_same_loss(found_loss, loss, relative)
    assert_same_gradients(found, expected, relative)


# -- the module stays the module it was


def test_tied_weights_get_one_gradient_and_keep_both_names() -> None:
    plain, model = pair("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(model.state_dict())
    assert_same_step(plain, model, CASES["gpt2"].batch())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert sum(t.name in ("lm_head.weight", "transformer.wte.weight") for t in model.plan.inputs) == 1


def test_a_sharded_module_is_an_instance_of_its_class() -> None:
    plain, model = pair("gpt2")
    assert isinstance(model, type(plain))
    assert type(model).__name__ == type(plain).__name__
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]


def test_state_dict_goes_into_one_device_and_back() -> None:
    plain, model = pair("gpt2")
    batch = CASES["gpt2"].batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(model, batch)
    optimizer.step()
    trained = {key: value.clone() for key, value in model.state_dict().items()}
    plain.load_state_dict(trained)
    assert_same_step(plain, model, batch)
    optimizer.step()
    model.load_state_dict(trained)
    assert_same_step(plain, model, batch)


def test_a_deep_copy_plans_anew_and_trains_apart() -> None:
    plain, model = pair("mlp")
    batch = CASES["mlp"].batch()
    gradients(model, batch)
    other = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="there is no plan yet"):
        other.plan
    assert_same_step(plain, other, batch)
    assert other.plan is not model.plan
    assert other.plan.parameters == model.plan.parameters
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same_step(plain, model, batch)


def test_a_change_of_dtype_between_calls_plans_again() -> None:
    plain, model = pair("mlp")
    batch = CASES["mlp"].batch()
    assert_same_step(plain, model, batch)
    single = {name: value.float() for name, value in batch.items()}
    assert_same_step(plain.to(torch.float32), model.to(torch.float32), single, tolerance(torch.float32))
    assert model.fc1.weight.grad.dtype is torch.float32
    assert_same_step(plain.to(torch.float64), model.to(torch.float64), batch)


# -- ways to call it


def test_keyword_arguments_and_a_model_output_come_back_as_they_were() -> None:
    plain, model = pair("gpt2")
    batch = CASES["gpt2"].batch()
    expected = plain(input_ids=batch["input_ids"], labels=batch["labels"])
    found = model(labels=batch["labels"], input_ids=batch["input_ids"])
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=EXACT, atol=EXACT)
    assert found.past_key_values is expected.past_key_values is None


def test_a_tuple_comes_back_where_return_dict_is_false() -> None:
    plain, model = pair("vit")
    batch = CASES["vit"].batch()
    expected, found = plain(**batch, return_dict=False), model(**batch, return_dict=False)
    assert type(found) is tuple
    assert len(found) == len(expected)
    torch.testing.assert_close(found[1], expected[1], rtol=EXACT, atol=EXACT)


@dataclasses.dataclass
class Answer:
    """No pytree knows this one."""

    loss: Tensor
    parts: dict[str, Any]
    note: str = "none"


class Nested(MLP):
    def forward(self, x: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.fc1(x))
        out = self.fc3(self.fc2(hidden))
        loss = nn.functional.mse_loss(out, target)
        return Answer(loss, {"hidden": hidden, "pair": (out, [out.mean(), 3, None])}, note="kept")


def test_dataclasses_dicts_and_nested_tuples_come_back() -> None:
    torch.manual_seed(0)
    plain = Nested().double()
    model = pw.shard(copy.deepcopy(plain), mesh=MESH, in_strategy={"x": ("dp", None)})
    batch = CASES["mlp"].batch()
    expected, found = plain(**batch), model(**batch)
    assert type(found) is Answer
    assert found.note == "kept"
    out, rest = found.parts["pair"]
    assert rest[1:] == [3, None]
    torch.testing.assert_close(found.parts["hidden"], expected.parts["hidden"], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out, expected.parts["pair"][0], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(rest[0], expected.parts["pair"][1][0], rtol=EXACT, atol=EXACT)
    assert_same_step(plain, model, batch)


def test_no_grad_runs_the_forward_only() -> None:
    plain, model = pair("gpt2")
    batch = CASES["gpt2"].batch()
    with torch.no_grad(), pw.record_collectives() as events:
        found, expected = model(**batch), plain(**batch)
    assert found.loss.grad_fn is None
    assert_same_loss(found.loss, expected.loss, EXACT)
    torch.testing.assert_close(found.logits, expected.logits, rtol=EXACT, atol=EXACT)
    assert counted(events) == counted(c for c in model.plan.collectives if c.phase == "forward")
    assert_same_step(plain, model, batch)


def test_a_second_shape_plans_again_and_leaves_the_parameters_where_they_lie() -> None:
    plain, model = pair("gpt2")
    case = CASES["gpt2"]
    assert_same_step(plain, model, case.batch())
    first = model.plan
    assert_same_step(plain, model, case.batch(size=16))
    second = model.plan
    assert second is not first
    assert second.parameters == first.parameters
    assert_same_step(plain, model, case.batch())
    assert model.plan is first


def test_labels_may_be_left_out() -> None:
    plain, model = pair("vit", in_strategy={"pixel_values": ("dp", None, None, None)})
    batch = CASES["vit"].batch()
    assert_same_step(plain, model, batch)
    images = {"pixel_values": batch["pixel_values"]}
    found, expected = model(**images), plain(**images)
    assert found.loss is None
    torch.testing.assert_close(found.logits, expected.logits, rtol=EXACT, atol=EXACT)


# -- training and evaluation


def test_batch_norm_keeps_the_statistics_of_one_device_in_training_and_in_evaluation() -> None:
    plain, model = pair("convnet")
    case = CASES["convnet"]
    for step in range(3):
        assert_same_step(plain, model, case.batch(step=step))
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=EXACT, atol=1e-12, msg=name)
    assert all(b == 3 for n, b in model.named_buffers() if n.endswith("num_batches_tracked"))
    plain.eval()
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_same_step(plain, model, case.batch())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    plain.train()
    model.train()
    assert_same_step(plain, model, case.batch())
    assert all(b == 4 for n, b in model.named_buffers() if n.endswith("num_batches_tracked"))


def test_batch_norm_statistics_move_under_no_grad_too() -> None:
    plain, model = pair("convnet")
    batch = CASES["convnet"].batch()
    with torch.no_grad():
        plain(**batch)
        model(**batch)
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=EXACT, atol=1e-12, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_dropout_draws_the_numbers_of_one_device(attention: str) -> None:
    pw.set_auto_parallel_context(random_numbers="torch")
    torch.manual_seed(0)
    options = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3, "attn_implementation": attention}
    plain = gpt2(**options).double()
    case = CASES["gpt2"]
    model = pw.shard(
        copy.deepcopy(plain), mesh=MESH, in_strategy=case.batch_split("dp"), parameter_plan=case.block_split("tp")
    )
    batch = case.batch()
    for _ in range(2):  # planned, then only run: the generator stands where one device leaves it
        assert_same_step(plain, model, batch)
        after = torch.get_rng_state()
        assert_same_step(plain, plain, batch)
        assert torch.equal(after, torch.get_rng_state())
    plain.eval()
    model.eval()
    assert_same_step(plain, model, batch)
    assert loss_of(model(**batch)) == loss_of(model(**batch))


def test_gradients_accumulate_over_backward_calls() -> None:
    plain, model = pair("gpt2")
    case = CASES["gpt2"]
    for step in range(2):
        for each in (plain, model):
            loss_of(each(**case.batch(step=step))).backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)


def test_two_calls_before_one_backward() -> None:
    plain, model = pair("mlp")
    case = CASES["mlp"]
    for each in (plain, model):
        (loss_of(each(**case.batch(step=0))) + 2 * loss_of(each(**case.batch(step=1)))).backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)


def test_backward_may_run_twice_over_a_retained_graph() -> None:
    plain, model = pair("mlp")
    for each in (plain, model):
        loss = loss_of(each(**CASES["mlp"].batch()))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)


def test_gradient_norms_are_clipped_alike() -> None:
    plain, model = pair("gpt2")
    batch = CASES["gpt2"].batch()
    norms = []
    for each in (plain, model):
        gradients(each, batch)
        norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1).item())
    assert norms[1] == pytest.approx(norms[0], rel=EXACT)
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)


def test_frozen_parameters_get_no_gradient_and_cost_no_collective() -> None:
    plain, model = pair("gpt2", parameter_plan=None)
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(f"transformer.h.{LAYERS - 1}." in name)
    assert_same_step(plain, model, CASES["gpt2"].batch())
    assert model.transformer.wte.weight.grad is None
    backward = [c for c in model.plan.collectives if c.phase == "backward"]
    assert backward
    assert not [c for c in backward if any(f"transformer.h.{i}" in (c.path, c.tensor) for i in range(LAYERS - 1))]
    for each in (plain, model):
        for parameter in each.parameters():
            parameter.requires_grad_(True)
    assert_same_step(plain, model, CASES["gpt2"].batch())


def test_an_input_that_requires_a_gradient_gets_it() -> None:
    plain, model = pair("mlp")
    batch = CASES["mlp"].batch()
    found = []
    for each in (plain, model):
        x = batch["x"].clone().requires_grad_()
        loss_of(each(x=x, target=batch["target"])).backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=EXACT, atol=EXACT)
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)


def test_an_output_that_no_backward_was_planned_for_is_differentiated() -> None:
    plain, model = pair("gpt2")
    batch = CASES["gpt2"].batch()
    for each in (plain, model):
        each.zero_grad()
        each(**batch).logits.square().sum().backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)
    for each in (plain, model):
        each.zero_grad()
        result = each(**batch)
        (result.loss + result.logits.square().mean()).backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)
    assert_same_step(plain, model, batch)


def test_an_unplanned_backward_draws_the_dropout_of_its_forward_again() -> None:
    pw.set_auto_parallel_context(random_numbers="torch")
    torch.manual_seed(0)
    plain = gpt2(resid_pdrop=0.2, attn_pdrop=0.3).double()
    model = pw.shard(copy.deepcopy(plain), mesh=MESH, in_strategy=CASES["gpt2"].batch_split("dp"))
    for each in (plain, model):
        torch.manual_seed(3)
        result = each(**CASES["gpt2"].batch())
        torch.rand(5)
        result.logits.square().sum().backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain), EXACT)


def test_an_unplanned_backward_of_changed_parameters_is_an_error() -> None:
    _, model = pair("gpt2")
    result = model(**CASES["gpt2"].batch())
    result.loss.backward(retain_graph=True)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias.add_(1.0)  # what no backward reads
    with pytest.raises(
        RuntimeError,
        match=r"parameter transformer\.h\.0\.mlp\.c_fc\.bias was changed in place after the forward that this is the "
        r"backward of; call backward before what changes it, such as an optimizer's step",
    ):
        result.logits.sum().backward()


def test_autocast_regions_compute_in_bfloat16() -> None:
    case = CASES["mlp"]
    plain, batch = case.build(torch.float32), case.batch(torch.float32)
    model = pw.shard(case.build(torch.float32), mesh=MESH, in_strategy=case.batch_split("dp"))
    exact, _ = gradients(plain, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = gradients(plain, batch)
        found_loss, found = gradients(model, batch)
    assert loss != exact
    assert found_loss.item() == pytest.approx(loss.item(), rel=1e-2)
    assert all(g is not None and g.dtype is torch.float32 for g in found.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name
    assert any("_to_copy" in operator.operator for operator in model.plan.operators)
    outside, _ = gradients(model, batch)
    assert_same_loss(outside, exact, 1e-6)


# -- options


MODES = ("sharding_propagation", "dynamic_programming", "recursive_programming")


@pytest.mark.parametrize(
    ("name", "mode", "level"),
    [
        *(("mlp", mode, level) for mode in MODES for level in (0, 1, 2)),
        *(pytest.param("gpt2", *each, marks=pytest.mark.slow) for each in zip(MODES, (1, 2, 0), strict=True)),
    ],
)
def test_every_search_and_level_gives_a_right_program(name: str, mode: str, level: int) -> None:
    pw.set_auto_parallel_context(search_mode=mode)
    plain, model = pair(name, level=level)
    batch = CASES[name].batch()
    assert_same_step(plain, model, batch)
    assert model.plan.certificate.mode == mode
    assert_sends_as_planned(model, batch)


def test_no_search_beats_dynamic_programming() -> None:
    costs = {}
    for mode in MODES:
        pw.set_auto_parallel_context(search_mode=mode)
        case = CASES["vit"]
        planned = pw.compile(
            case.build(), (), case.batch(), mesh=MESH,
            in_strategy=case.batch_split("dp"), parameter_plan=case.block_split("tp"),
        )  # fmt: skip
        costs[mode] = planned.plan.certificate.cost
    assert costs["dynamic_programming"] <= min(costs.values()) * (1 + 1e-9)


def test_gradients_mean_false_sums_the_parts() -> None:
    case = CASES["mlp"]
    pw.set_auto_parallel_context(gradients_mean=False)
    model = pw.shard(case.build(), mesh={"dp": 8}, in_strategy=case.batch_split("dp"))
    loss, expected = gradients(case.build(), case.batch())
    found_loss, found = gradients(model, case.batch())
    assert_same_loss(found_loss, loss, EXACT)
    assert_same_gradients(found, {n: g if g is None else 8 * g for n, g in expected.items()}, EXACT)


def test_the_parallel_optimizer_keeps_parameters_split_and_scatters_their_gradients() -> None:
    pw.set_auto_parallel_context(
        enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 0}
    )
    case = CASES["gpt2"]
    model = pw.shard(case.build(), mesh={"dp": 8}, in_strategy=case.batch_split("dp"))
    assert_same_step(case.build(), model, case.batch())
    split = {name for name, found in model.plan.parameters.items() if "S" in str(found)}
    assert {name for name, _ in model.named_parameters()} == split
    kinds = Counter(str(c.kind) for c in model.plan.collectives if c.tensor in split and c.phase == "backward")
    assert kinds["reduce_scatter"]
    assert not kinds["all_reduce"]
    assert_sends_as_planned(model, case.batch())


def test_the_parallel_optimizer_trains_as_one_device_does() -> None:
    pw.set_auto_parallel_context(
        enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 0}
    )
    case = CASES["mlp"]
    plain, model = case.build(), pw.shard(case.build(), mesh={"dp": 4}, in_strategy=case.batch_split("dp"))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step in range(3):
        assert_same_step(plain, model, case.batch(step=step, size=256))
        for optimizer in optimizers:
            optimizer.step()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
    of_parameters = [c for c in model.plan.collectives if c.tensor in model.plan.parameters]
    assert Counter((c.phase, str(c.kind)) for c in of_parameters) == {
        ("forward", "all_gather"): 6,
        ("backward", "reduce_scatter"): 6,
    }
    memory = model.plan.memory
    parts = sum(p.numel() for p in plain.parameters()) * 8 / 4
    assert (memory.parameters, memory.optimizer) == (parts, 2 * parts)
    assert memory.gradients <= parts  # those that are there when most is held


def test_small_parameters_stay_whole_under_the_parallel_optimizer() -> None:
    pw.set_auto_parallel_context(
        parallel_mode="data_parallel",
        device_num=8,
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 8},
    )
    case = CASES["mlp"]
    model = pw.shard(case.build())
    assert_same_step(case.build(), model, case.batch())
    split = {name for name, found in model.plan.parameters.items() if "S" in str(found)}
    assert split == {"fc2.weight"}  # 32 x 32 float64 is 8 KB
    kinds = {(c.tensor, str(c.kind)) for c in model.plan.collectives if c.phase == "backward"}
    assert kinds == {
        ("fc2.weight", "reduce_scatter"),
        *((name, "all_reduce") for name in model.plan.parameters if name != "fc2.weight"),
    }
    assert_sends_as_planned(model, case.batch())


@pytest.mark.parametrize("name", ["mlp_classes", "gpt2", "convnet"])
def test_data_parallel_splits_every_batch_and_keeps_parameters_whole(name: str) -> None:
    pw.set_auto_parallel_context(parallel_mode="data_parallel", device_num=8)
    case = CASES[name]
    model = pw.shard(case.build())
    assert_same_step(case.build(), model, case.batch())
    assert all("S" not in str(found) for found in model.plan.parameters.values())
    assert all("S0" in t.codes for t in model.plan.inputs if t.name in case.ranks)


def test_semi_auto_parallel_follows_the_annotations_and_splits_the_batch_elsewhere() -> None:
    pw.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8, dataset_strategy="full_batch")
    case = CASES["gpt2"]
    model = pw.shard(case.build(), parameter_plan=case.block_split(4))
    assert_same_step(case.build(), model, case.batch())
    assert_sends_as_planned(model, case.batch())


def test_stand_alone_runs_plain_pytorch() -> None:
    pw.set_auto_parallel_context(parallel_mode="stand_alone", device_num=8)
    plain, model = pair("mlp")
    with pw.record_collectives() as events:
        assert_same_step(plain, model, CASES["mlp"].batch())
    assert events == []
    with pytest.raises(RuntimeError, match="there is no plan yet"):
        model.plan


@pytest.mark.parametrize(
    "strategy", ["data_parallel", "full_batch", ((8, 1), (8, 1)), ((1, 8), (1, 1)), ((4, 1), (2, 1))]
)
def test_dataset_strategies_place_the_inputs(strategy: Any) -> None:
    pw.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8, dataset_strategy=strategy)
    case = CASES["mlp"]
    model = pw.shard(case.build())
    assert_same_step(case.build(), model, case.batch())
    counts = {"data_parallel": ((8, 1), (8, 1)), "full_batch": ((1, 1), (1, 1))}.get(str(strategy), strategy)
    for name, expected in zip(("x", "target"), counts, strict=True):
        codes = next(t.codes for t in model.plan.inputs if t.name == name)
        for dim, parts in enumerate(expected):
            found = 1
            for size, code in zip(model.plan.sizes, codes, strict=True):
                found *= size if code == f"S{dim}" else 1
            assert found == parts, (name, codes)


def test_a_saved_plan_gives_the_same_parameter_layouts(tmp_path: Path) -> None:
    case, file = CASES["gpt2"], str(tmp_path / "plan.json")
    with pw.auto_parallel_context(strategy_ckpt_config={"save_file": file}):
        _, first = pair("gpt2")
        gradients(first, case.batch())
    with pw.auto_parallel_context(strategy_ckpt_config={"load_file": file}):
        second = pw.shard(case.build())
        assert_same_step(case.build(), second, case.batch())
    assert second.plan.parameters == first.plan.parameters
    assert any("S" in str(found) for found in second.plan.parameters.values())


SPLIT = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}


def stepped(**options: Any) -> tuple[dict[str, Tensor | None], Any]:
    """The gradients of a step of the vision transformer on 8 simulated ranks, data parallel, and its program."""
    case = CASES["vit"]
    with pw.auto_parallel_context(device_num=8, parallel_mode="data_parallel", **options):
        model: Any = pw.shard(case.build(torch.float32))
        return gradients(model, case.batch(torch.float32))[1], model.program.collectives


@pytest.mark.parametrize("options", [{}, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=["whole", "split"])
def test_collectives_are_grouped_unless_asked_otherwise_and_no_bit_changes(options: dict[str, Any]) -> None:
    grouped, fewer = stepped(**options)
    alone, all_of_them = stepped(**options, comm_fusion={"openstate": False})
    assert all(len(c.members) == 1 for c in all_of_them)
    assert len(fewer) < len(all_of_them) / 4
    assert carried(fewer) == carried(all_of_them)
    assert_same_bits(grouped, alone)


def test_a_kind_whose_fusion_is_none_is_left_alone() -> None:
    # a threshold of 8 KB: small parameters are whole at rest, so that there are collectives of all three kinds
    some = {**SPLIT, "parallel_optimizer_config": {"parallel_optimizer_threshold": 8}}
    kinds = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    for option, kind in kinds.items():
        found = stepped(**some, comm_fusion={option: None})[1]
        assert {str(c.kind) for c in found if len(c.members) > 1} == set(kinds.values()) - {kind}
        assert sum(str(c.kind) == kind for c in found) > 1


def assert_same_bits(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        assert (other is None) == (gradient is None)
        assert gradient is None or other is None or torch.equal(other, gradient), name


@pytest.mark.filterwarnings("error")
def test_calls_with_nothing_to_group_run_as_they_did() -> None:
    case = CASES["mlp"]
    plain = case.build()
    alone = pw.shard(case.build(), mesh={"one": 1})
    assert_same_step(plain, alone, case.batch())
    assert alone.program.collectives == ()
    inference = pw.shard(case.build(), mesh={"dp": 8}, in_strategy=case.batch_split("dp"))
    with torch.no_grad():
        torch.testing.assert_close(inference(**case.batch()), plain(**case.batch()), rtol=EXACT, atol=EXACT)
    assert all(len(c.members) == 1 for c in inference.program.collectives)
    frozen = pw.shard(case.build().requires_grad_(requires_grad=False), mesh={"dp": 8})
    torch.testing.assert_close(frozen(**case.batch()), plain(**case.batch()), rtol=EXACT, atol=EXACT)
    function = pw.shard(lambda x: (x * x).sum(), mesh={"dp": 8}, in_strategy=(("dp", None),))
    x = torch.ones(8, 4, requires_grad=True)
    function(x).backward()
    assert torch.equal(x.grad, 2 * torch.ones(8, 4))
    one = nn.Linear(4, 4, bias=False)
    model = pw.shard(one, mesh={"dp": 8}, in_strategy=(("dp", None),))
    model(x).sum().backward()
    assert [c.members for c in model.program.collectives if c.phase == "backward"] == [("weight",)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        SPLIT,
        {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}},
        {"comm_fusion": {"allreduce": {"mode": "index", "config": [2, 5]}}},
        {"all_reduce_fusion_config": [4]},
        {"comm_fusion": {"allreduce": {"mode": "overlap"}}},
        {**SPLIT, "comm_fusion": {"allgather": None, "reducescatter": {"mode": "size", "config": 1}}},
        {**SPLIT, "comm_fusion": {"allgather": {"mode": "overlap"}, "reducescatter": {"mode": "overlap"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", pytest.param("vit", marks=pytest.mark.slow)])
def test_fusion_groups_collectives_and_changes_nothing_else(name: str, options: dict[str, Any]) -> None:
    pw.set_auto_parallel_context(device_num=8, parallel_mode="data_parallel", **options)
    case = CASES[name]
    model = pw.shard(case.build())
    assert_same_step(case.build(), model, case.batch())
    assert_sends_as_planned(model, case.batch())
    program = model.program.collectives
    assert len(program) < len(model.plan.collectives)
    if "index" in str(options):
        sizes = [len(c.members) for c in program if len(c.members) > 1]
        assert sizes[:2] == [2, 3]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(6, 5, 2, bidirectional=True),
        lambda: nn.LSTM(6, 4, proj_size=2),
        lambda: nn.GRU(6, 5, 2, dropout=0.3, batch_first=True),
        lambda: nn.RNN(6, 5, 2, bias=False),
        lambda: nn.RNN(6, 5, nonlinearity="relu", bidirectional=True),
    ],
    ids=["lstm", "projected", "gru", "rnn", "rnn_relu"],
)
def test_recurrent_layers_train_step_by_step_where_their_kernels_cannot_be_traced(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; on a CPU PyTorch itself traces steps, so that what is traced is told by who traces it."""
    written_out = []

    def told(steps: Any) -> Any:
        return lambda *args, **kwargs: written_out.append(steps) or steps(*args, **kwargs)

    steps = {op: told(by_steps) for op, by_steps in differentiate.steps_of_layers().items()}
    monkeypatch.setattr(differentiate, "steps_of_layers", lambda: steps)
    monkeypatch.setattr(differentiate, "_BY_STEPS", ("cpu",))
    plain = build().double()
    strategy = ("x", None, None) if plain.batch_first else (None, "x", None)
    x = torch.randn(4, 4, 6, dtype=torch.float64)

    def trained(layer: Any) -> list[Tensor]:
        torch.manual_seed(1)
        y = layer(x)[0]
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    with pw.auto_parallel_context(random_numbers="torch"):
        model = pw.shard(copy.deepcopy(plain), mesh={"x": 2}, in_strategy=(strategy,))
        for found, expected in zip(trained(model), trained(plain), strict=True):
            torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
    assert written_out
