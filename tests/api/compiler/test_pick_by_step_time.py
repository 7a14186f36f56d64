"""Level 2 takes the plan whose step ends first, of those that are cheapest at several prices of communication."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import partway as pw
from partway.compiler import pick_by_step_time as module
from partway.compiler.compiled import Compiled
from partway.propagation.cost.profile import Together, profile_of
from partway.propagation.program.schedule import Work, play


class Deep(nn.Module):
    """Products of which the gradients of one can be added up while those of the next are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of `x`, [N, 512]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture
def slow_network(tmp_path: Path) -> str:
    """Devices of which two save half the computing, about as much as adding up the gradients takes."""
    profile = json.loads(profile_of("cpu").model_dump_json())
    profile["peak"] = dict.fromkeys(profile["peak"], 1e12)
    profile["memory_bandwidth"] = 1e13
    profile["levels"][0] |= {"bandwidth": 2.7e8, "latency": 0.0, "launch": 0.0}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(profile))
    return str(path)


def planned(profile: str, level: int = 2, rows: int = 4096, device: str = "meta") -> Compiled:
    """Data parallelism, or all on both devices: parameters are whole, and nothing is said of the batch. Each gradient
    is added up by itself."""
    pw.set_algo_parameters(fully_use_devices=False)
    with torch.device(device):
        model, x = Deep(), torch.empty(rows, 512)
    options = {"device_profile": profile, "comm_fusion": {"openstate": False}, "enable_compile_cache": False}
    with pw.auto_parallel_context(**options):
        return pw.compile(model, (x,), mesh={"dp": 2}, parameter_plan={"layers.*.weight": (None, None)}, level=level)


def test_what_is_hidden_behind_computing_is_not_saved_at_its_cost(
    slow_network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(slow_network)
    monkeypatch.setattr(module, "PRICES", (1.0,))
    cheapest = planned(slow_network)
    assert cheapest.plan.wire_bytes == 0  # adding up takes longer than what is saved, if nothing runs meanwhile
    assert found.plan.wire_bytes > 0
    assert found.plan.predicted_time > cheapest.plan.predicted_time
    assert found.program.schedule.seconds < 0.95 * cheapest.program.schedule.seconds


def test_the_certificate_says_when_the_step_ends_and_that_none_ends_before_the_bound(slow_network: str) -> None:
    made = planned(slow_network)
    certificate = made.plan.certificate
    assert certificate.ends == made.program.schedule.seconds + made.plan.optimizer_time
    assert certificate.ends_bound is not None
    assert 0.5 * certificate.ends < certificate.ends_bound <= certificate.ends
    later = 100 * (certificate.ends / certificate.ends_bound - 1)
    said = f"proven; the step ends after {1e3 * certificate.ends:.1f} ms, at most {later:.1f} % later than any"
    assert said in str(certificate)
    for level in (0, 1):
        other = planned(slow_network, level).plan.certificate
        assert (other.ends, other.ends_bound) == (None, None)
        assert "ends after" not in str(other)


def test_what_a_plan_says_of_its_end_is_kept_on_disk(slow_network: str, tmp_path: Path) -> None:
    plan = planned(slow_network).plan
    plan.save(tmp_path / "plan.json")
    assert pw.Plan.load(tmp_path / "plan.json") == plan
    data = json.loads((tmp_path / "plan.json").read_text())
    for name in ("ends", "ends_bound"):
        del data["certificate"][name]
    (tmp_path / "older.json").write_text(json.dumps(data))
    assert pw.Plan.load(tmp_path / "older.json").certificate.ends is None


def test_a_plan_that_was_given_is_not_searched_for_again(slow_network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = planned(slow_network).plan
    monkeypatch.setattr(module, "run", None)
    with torch.device("meta"):
        model, x = Deep(), torch.empty(4096, 512)
    again = pw.compile(model, (x,), plan=given, level=2)
    assert again.plan.certificate.ends is None
    assert again.plan.wire_bytes == given.wire_bytes


def test_a_step_of_level_2_computes_what_one_device_does(slow_network: str) -> None:
    pw.set_algo_parameters(fully_use_devices=False)
    torch.manual_seed(0)
    model, x = Deep().double(), torch.randn(64, 512, dtype=torch.float64)
    alone = [p.detach().clone() for p in torch.autograd.grad(model(x), list(model.parameters()))]
    with pw.auto_parallel_context(device_profile=slow_network):
        sharded = pw.shard(model, mesh={"dp": 2}, in_strategy=(("dp", None),), level=2)
        sharded(x).backward()
    assert sharded.plan.certificate.ends is not None
    for parameter, gradient in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("slow", "fast"), [(1.0, 1.0), (0.5, 0.5), (0.54, 1.0), (0.9, 0.2)])
def test_no_step_ends_before_the_bound_and_some_do_not_end_after_it(slow: float, fast: float, lanes: int) -> None:
    """Steps of computation and collectives that all run at once, or one after the other, as the schedule plays them."""
    profile = profile_of("cpu")
    profile = profile.model_copy(update={"together": Together(computing=slow, communicating=fast)})
    for price in module.PRICES:
        share, closest = module.least_share(price, profile, lanes), 0.0
        for computing, *sent in itertools.product([0.0, 0.1, 1.0, 3.0], repeat=1 + lanes):
            graph = fx.Graph()
            nodes = [graph.placeholder(f"n{i}") for i in range(1 + lanes)]
            work = {nodes[0]: Work("compute", computing)}
            work |= {n: Work("communication", s, level=i) for i, (n, s) in enumerate(zip(nodes[1:], sent, strict=True))}
            end = play([(node,) for node in reversed(nodes)], work, profile.together)[1]
            bound = share * (computing + price * sum(sent))
            assert bound <= end * (1 + 1e-9)
            closest = max(closest, bound / end if end else 0.0)
        assert closest > 0.8


def test_groups_on_several_levels_of_the_network_are_several_lanes() -> None:
    assert module._lanes(pw.Mesh({"dp": 2, "tp": 8}), profile_of("h100")) == 2
    assert module._lanes(pw.Mesh({"dp": 2, "tp": 4}), profile_of("h100")) == 1
    assert module._lanes(pw.Mesh({"dp": 1}), profile_of("h100")) == 1
