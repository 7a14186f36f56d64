"""Mixtures of experts with all that people train them with: the numbers of one device after several steps."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partway as pw
from partway.propagation.cost.profile import profile_of
from partway.propagation.rules.layers import experts as rules
from partway.strategy.placement import Routed

EXPERTS, FEATURES, HIDDEN = 8, 8, 12


def by_ops(x, ids, weights, up, down):
    rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
    return pw.ops.combine(
        pw.ops.grouped_matmul(F.silu(pw.ops.grouped_matmul(rows, up, ends)), down, ends), where, weights
    )


def by_sort(x, ids, weights, up, down):
    """As torchtitan and others do."""
    order = torch.argsort(ids.reshape(-1), stable=True)
    ends = torch.histc(ids.reshape(-1).float(), EXPERTS, 0, EXPERTS).cumsum(0).int()
    rows = x[order // ids.shape[1]]
    made = pw.ops.grouped_matmul(F.silu(pw.ops.grouped_matmul(rows, up, ends)), down, ends)
    made = made * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // ids.shape[1], made)


def by_products(x, ids, weights, up, down):
    """A matrix for each row, as Hugging Face's batched_mm does."""
    tokens, k = ids.shape
    rows = x.unsqueeze(1).expand(tokens, k, x.shape[1]).reshape(tokens * k, -1)
    flat = ids.reshape(-1)
    made = torch.bmm(F.silu(torch.bmm(rows.unsqueeze(1), up[flat])), down[flat]).squeeze(1)
    return (made * weights.reshape(-1, 1)).reshape(tokens, k, -1).sum(1)


def by_weighted_rows(x, ids, weights, up, down):
    """Tokens times their weights before their experts, as torchtitan's score_before_experts."""
    order = torch.argsort(ids.view(-1), stable=True)
    ends = torch.histc(ids.view(-1).float(), EXPERTS, 0, EXPERTS).cumsum(0).int()
    token = order // ids.shape[1]
    rows = (x[token].double() * weights.view(-1)[order].reshape(-1, 1)).to(x.dtype)
    made = pw.ops.grouped_matmul(F.silu(pw.ops.grouped_matmul(rows, up, ends)), down, ends)
    return torch.zeros_like(x).scatter_add(0, token.reshape(-1, 1).expand(-1, x.shape[1]), made)


IDIOMS = {"weighted before": by_weighted_rows, "ops": by_ops, "sort": by_sort, "products": by_products}


class Router(nn.Module):
    """The k experts of each token, with a bias that pulls tokens to experts with few; a loss for balance over the whole
    batch, and the z-loss."""

    def __init__(self, k, features=FEATURES):
        super().__init__()
        self.k, self.gate = k, nn.Linear(features, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x):
        logits = self.gate(x)
        scores = logits.softmax(-1)
        ids = (scores + self.bias).topk(self.k, -1).indices
        chosen = F.one_hot(ids, EXPERTS).sum((0, 1)).to(x.dtype)
        if self.training:
            self.bias += 0.05 * torch.sign(chosen.mean() - chosen)
        balance = EXPERTS * (chosen / ids.numel() * scores.mean(0)).sum()
        return ids, scores.gather(1, ids), 0.1 * balance + 0.01 * logits.logsumexp(-1).square().mean()


class Model(nn.Module):
    """Two layers of experts, the second beside a shared one."""

    def __init__(self, idiom, k, features=FEATURES):
        super().__init__()
        self.mixture = IDIOMS[idiom]
        self.routers = nn.ModuleList(Router(k, features) for _ in range(2))
        self.up = nn.ParameterList(torch.randn(EXPERTS, features, HIDDEN) / 3 for _ in range(2))
        self.down = nn.ParameterList(torch.randn(EXPERTS, HIDDEN, features) / 4 for _ in range(2))
        self.shared = nn.Sequential(nn.Linear(features, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, features))

    def forward(self, x):
        x, beside, extra = x.flatten(0, 1), 0.0, 0.0
        for i, router in enumerate(self.routers):
            ids, weights, loss = router(x)
            if i == 1:
                beside = self.shared(x)
            x = x + self.mixture(x, ids, weights, self.up[i], self.down[i])
            extra = extra + loss
        return (x + beside).square().mean() + extra


def trained(call, model, batches, accumulate):
    """The losses of some steps of AdamW, and the state of the model after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for i, x in enumerate(batches):
        loss = call(x)
        loss.backward()
        losses.append(loss.detach())
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), {name: whole(t) for name, t in model.state_dict().items()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def same(mesh, idiom, k=2, batch=8, length=4, accumulate=1, to=None, experts=None, once=None, profile=None):
    """`to`: the experts that all tokens choose; `experts`: the axis that splits them, the other splits the batch.
    `once`: all axes split both, and each mixture has this strategy, by which tokens are sent once to some ranks;
    `profile`: that of the devices."""
    torch.manual_seed(0)
    features = 64 if once else FEATURES
    plain = Model(idiom, k, features).double()
    if to is not None:
        for router in plain.routers:
            router.bias[to] = 100.0
    batches = [torch.randn(batch, length, features, dtype=torch.float64) for _ in range(4)]
    model = copy.deepcopy(plain)
    cut = experts or (tuple(mesh) if once else None)
    plan = {f"{name}.{i}": (cut, None, None) for name in ("up", "down") for i in (0, 1)} if cut else None
    axes = tuple(mesh) if experts is None else tuple(axis for axis in mesh if axis != experts)
    if profile:
        pw.set_auto_parallel_context(device_profile=profile)
    sharded = pw.shard(model, ((axes or None, None, None),), mesh=mesh, parameter_plan=plan)
    losses, state = trained(sharded, model, batches, accumulate)
    expected, states = trained(plain, plain, batches, accumulate)
    mixtures = [
        o for o in sharded.plan.operators if o.operator in ("partway.dispatch.default", "partway.combine.default")
    ]
    assert len(mixtures) == 4
    found = {o.strategy for o in mixtures}
    assert once is None or found == {once}, found
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for name, tensor in states.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-12, msg=name)


MESHES = ({"x": 2}, {"x": 4}, {"x": 8}, {"dp": 2, "ep": 2}, {"dp": 2, "ep": 4})


@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_idiom_trains_as_on_one_device(idiom, mesh):
    same(mesh, idiom)


def without_latency(folder):
    """The path of a profile with a network that sends small messages as cheaply as large ones."""
    profile = profile_of("h100")
    none = dict.fromkeys(type(profile.levels[0].latency).__dataclass_fields__, 0.0)
    levels = tuple(
        level.model_copy(update={"launch": 0.0, "latency": type(level.latency)(**none)}) for level in profile.levels
    )
    path = folder / "without_latency.json"
    profile.model_copy(update={"name": "without latency", "levels": levels}).save(path)
    return str(path)


def scaled(monkeypatch, ways):
    """Make exchanges and tokens sent once dear, but for each number of ranks in `ways` the way that it names. There is
    no way that has all tokens."""

    def priced(way, hops):
        def dear(*given):
            times = 1 if ways[math.prod(given[-1])] == way else 10**6
            return tuple(
                dataclasses.replace(hop, times=hop.times * times) if isinstance(hop.source, Routed) else hop
                for hop in hops(*given)
            )

        return dear

    for name, way in {
        "_once_hops": "once", "_once_back_hops": "once", "_dispatch_hops": "exchange", "_combine_hops": "exchange"
    }.items():  # fmt: skip
        monkeypatch.setattr(rules, name, priced(way, getattr(rules, name)))
    every = rules._ways
    monkeypatch.setattr(
        rules,
        "_ways",
        lambda *given: every(*given[:3], {k: v for k, v in given[3].items() if k != "expert"}, *given[4:]),
    )


ONCE = [
    ({"x": 2}, {2: "once"}, "(x:once)"),
    ({"x": 8}, {8: "once"}, "(x:once)"),
    ({"host": 2, "local": 2}, {4: "once", 2: "exchange"}, "(host:once local:once)"),
    ({"host": 2, "local": 4}, {2: "once", 4: "exchange", 8: "none"}, "(host:once local:exchange)"),
    ({"local": 4, "host": 2}, {2: "once", 4: "exchange", 8: "none"}, "(local:exchange host:once)"),
]


@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize(("mesh", "ways", "strategy"), ONCE, ids=[each[2] for each in ONCE])
def test_tokens_that_are_sent_once_train_as_on_one_device(mesh, ways, strategy, idiom, monkeypatch, tmp_path):
    scaled(monkeypatch, ways)
    profile = without_latency(tmp_path)
    same(mesh, idiom, once=strategy, profile=profile)
    if idiom == "ops":
        for k, to in ((1, None), (EXPERTS, None), (1, [5]), (2, [0, 1, 6])):
            same(mesh, idiom, k=k, to=to, once=strategy, profile=profile)


CASES = {
    "all experts of each token": {"k": EXPERTS},
    "one expert of each token": {"k": 1},
    "all tokens to one expert": {"k": 1, "to": [5]},
    "experts without a token": {"to": [0, 1, 6]},
    "few tokens": {"batch": 4, "length": 1},
    "uneven tokens": {"batch": 6, "length": 3},
    "accumulated": {"accumulate": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", [{"x": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_edges_train_as_on_one_device(case, mesh):
    same(mesh, "ops", **CASES[case])
    if len(mesh) == 2:
        same(mesh, "sort", experts="ep", **CASES[case])


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_train_as_one_device(on_ranks, ranks, tmp_path):
    on_ranks(ranks, on_processes, ranks, without_latency(tmp_path))


def on_processes(ranks, profile):
    meshes = ONCE[:1] if ranks == 2 else ONCE[2:3]
    for mesh, ways, strategy in meshes:
        with pytest.MonkeyPatch.context() as patch:
            scaled(patch, ways)
            same(mesh, "sort", once=strategy, profile=profile)
            same(mesh, "ops", k=1, to=[5], once=strategy, profile=profile)
    pw.reset_auto_parallel_context()
    same({"x": ranks}, "sort", accumulate=2)
    same({"x": ranks}, "ops", k=1, to=[5])
    if ranks == 4:
        same({"dp": 2, "ep": 2}, "products", experts="ep")


class Dropped(nn.Module):
    """Dropout of the tokens, of the rows of experts, and of what a token gets of them."""

    def __init__(self):
        super().__init__()
        self.router = Router(2)
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FEATURES) / 4)

    def forward(self, x):
        x = F.dropout(x.flatten(0, 1), 0.2, self.training)
        ids, weights, loss = self.router(x)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        hidden = F.dropout(F.silu(pw.ops.grouped_matmul(rows, self.up, ends)), 0.3, self.training)
        made = pw.ops.combine(pw.ops.grouped_matmul(hidden, self.down, ends), where, weights)
        return F.dropout(made, 0.1, self.training).square().mean() + loss


@pytest.mark.parametrize("mesh", [{"x": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_dropout_is_the_same_on_any_mesh(mesh):
    torch.manual_seed(0)
    plain = Dropped().double()
    batches = [torch.randn(8, 4, FEATURES, dtype=torch.float64) for _ in range(3)]
    found = []
    for axes in ({"x": 1}, mesh):
        model = copy.deepcopy(plain)
        sharded = pw.shard(model, ((tuple(axes), None, None),), mesh=axes)
        torch.manual_seed(1)
        found.append(trained(sharded, model, batches, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


def continued(folder, mesh, saves):
    """The state after two steps, between which a checkpoint is written, or after the second, from the checkpoint."""
    torch.manual_seed(0)
    model, x = Model("sort", 2).double(), torch.randn(8, 4, FEATURES, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first, *_, last = *mesh, *mesh
    experts = {f"{name}.0": (last, None, None) for name in ("up", "down")}
    sharded = pw.shard(model, ((first, None, None),), mesh=mesh, parameter_plan=experts)
    for step in range(2):
        if step == 0 and not saves:
            pw.load(folder, model, optimizer)
            continue
        sharded(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            pw.save(folder, model, optimizer)
    return {name: whole(t) for name, t in model.state_dict().items()}


def from_one_mesh_to_another(folder, *meshes):
    first, second = (continued(folder, mesh, i == 0) for i, mesh in enumerate(meshes))
    torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_of_one_mesh_is_read_on_another(tmp_path):
    from_one_mesh_to_another(tmp_path, {"x": 4}, {"dp": 2, "ep": 4})


@pytest.mark.gloo
def test_processes_read_a_checkpoint_of_another_mesh(on_ranks, tmp_path):
    on_ranks(4, from_one_mesh_to_another, tmp_path, {"x": 4}, {"dp": 2, "ep": 2})
