"""What people do around a model with its parameters, gradients, states, submodules and state dicts gives what it gives
with a plain model: in one process, and on 2 and 4 ranks, with weights that are whole and that are split unevenly."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import partway as pw

Ranks = Callable[..., list[Any]]
Script = Callable[[Any], Any]
EXACT = 1e-9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 33), nn.LayerNorm(33), nn.Linear(33, 7)

    def encode(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).tanh()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x))  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return torch.randn(12, 10, dtype=torch.float64, generator=generator), torch.arange(12) % 7


def loss_of(model: Any) -> Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


def parameters(model: Any) -> list[Any]:
    """With their gradients."""
    loss_of(model).backward()
    return list(model.parameters())


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


SCRIPTS: list[Script] = []


def script(fn: Script) -> Script:
    SCRIPTS.append(fn)
    return fn


# -- Values that are read ---------------------------------------------------------------------------------------------


@script
def norms_of_gradients(model: Any) -> Any:
    ps = parameters(model)
    return [(p.grad.norm().item(), float(p.grad.norm(1)), p.grad.norm(float("inf"))) for p in ps]


@script
def a_clip_by_hand(model: Any) -> None:
    ps = parameters(model)
    total = sum(p.grad.norm().item() ** 2 for p in ps) ** 0.5
    for p in ps:
        p.grad.mul_(min(1.0, 0.3 / total))


@script
def clips_of_pytorch(model: Any) -> Any:
    ps = parameters(model)
    return nn.utils.clip_grad_norm_(ps, 0.3).item(), nn.utils.clip_grad_value_(ps, 0.01), nn.utils.get_total_norm(
        [p.grad for p in ps], 1.0
    ), nn.utils.clip_grad_norm_(ps, 0.1, foreach=False)  # fmt: skip


@script
def texts(model: Any) -> Any:
    ps = parameters(model)
    return [f"{p.grad.norm():.6f} {p.detach().sum():.3e}" for p in ps], [str(p) for p in ps], [repr(p.grad) for p in ps]


@script
def lists_and_arrays(model: Any) -> Any:
    ps = parameters(model)
    return ps[0].tolist(), ps[1].detach().cpu().numpy().sum(), int(ps[0].detach().argmax()), bool((ps[0] > 5).any())


@script
def numbers_by_tensor(model: Any) -> Any:
    ps = [p.detach() for p in parameters(model)]
    return [(p.mean(), p.std(), p.var(), p.min(), p.max(), p.abs().mean(), p.prod(), p.amax(), p.median()) for p in ps]


@script
def numbers_along_dims(model: Any) -> Any:
    g = parameters(model)[0].grad
    return g.norm(dim=1, keepdim=True), g.sum(0), g.mean(-1), g.amax(1), g.softmax(0), g.cumsum(1), g.std(0)


@script
def questions(model: Any) -> Any:
    p, g = parameters(model)[0], model.first.weight.grad
    return (
        torch.equal(p, p), torch.allclose(p, g), torch.isnan(g).any().item(), torch.isfinite(g).all().item(),
        (p > 0).sum(), p.ne(0).all(), bool((g == 0).all()), (p.detach() < g).float().mean(),
    )  # fmt: skip


@script
def histograms(model: Any) -> Any:
    g = parameters(model)[0].grad
    return torch.histc(g, 10), torch.quantile(g, 0.9), g.flatten().topk(3).values, g.argmax(), g.flatten().sort().values


@script
def angles_between_gradients(model: Any) -> Any:
    first = [p.grad.clone() for p in parameters(model)]
    second = [p.grad for p in parameters(model)]
    return [F.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(first, second, strict=True)]


@script
def one_vector(model: Any) -> Any:
    ps = parameters(model)
    return torch.cat([p.grad.flatten() for p in ps]).norm(), torch.stack([p.grad.norm() for p in ps]).sum()


@script
def facts(model: Any) -> Any:
    ps = parameters(model)
    return [(p.shape, p.dtype, p.numel(), p.is_leaf, p.requires_grad, p.ndim, len(p), p.element_size()) for p in ps]


@script
def rows(model: Any) -> Any:
    w = model.first.weight.detach()
    return [row.sum() for row in w], w[3], w[1:4, ::2], w[:, -1], w[torch.tensor([2, 0])], w[w > 0.2], w.unbind(1)[2]


@script
def shapes(model: Any) -> Any:
    w = model.last.weight.detach()
    return w.t() @ w, w.view(-1)[5:9], w.reshape(11, 21), w.mT.contiguous(), w.unsqueeze(0).expand(2, 7, 33)


# -- Values that leave ------------------------------------------------------------------------------------------------


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@script
def state_dicts_that_are_saved(model: Any) -> Any:
    state = saved(model.state_dict())
    assert {type(value) for value in state.values()} == {Tensor}
    plain = Net().double()
    plain.load_state_dict(state)
    return plain(batch()[0])


@script
def pickles(model: Any) -> Any:
    p = parameters(model)[0]
    loaded = pickle.loads(pickle.dumps([p, p.grad, p.grad.norm()]))
    assert type(loaded[0]) is nn.Parameter
    return loaded


@script
def copies(model: Any) -> Any:
    p = parameters(model)[0]
    kept = copy.deepcopy(p), p.clone().detach(), copy.copy(p), p.grad.clone()
    with torch.no_grad():
        p.add_(1)
    assert isinstance(kept[0], nn.Parameter)
    return kept


@script
def optimizer_states_that_are_saved(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer)
    state = saved(optimizer.state_dict())
    again = torch.optim.AdamW(model.parameters(), lr=0.5)
    again.load_state_dict(state)
    trained(model, again)
    return [again.state[p]["exp_avg"].norm() for p in model.parameters()]


@script
def merged_state_dicts(model: Any) -> Any:
    state = {name: value * 2 + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return loss_of(model)


# -- Writes -----------------------------------------------------------------------------------------------------------


@script
def data_that_are_set(model: Any) -> Any:
    for p in model.parameters():
        p.data = p.data * 0 + 0.1
    first = loss_of(model)
    for p in model.parameters():
        p.data = torch.arange(float(p.numel()), dtype=p.dtype).reshape(p.shape) / 100
    return first, loss_of(model)


@script
def data_that_are_swapped(model: Any) -> Any:
    backup = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.clone().mul_(0.5)
    first = loss_of(model)
    for p, before in zip(model.parameters(), backup, strict=True):
        p.data = before
    return first, loss_of(model)


@script
def data_that_are_written(model: Any) -> None:
    for p in model.parameters():
        p.data.copy_(torch.linspace(0, 1, p.numel(), dtype=p.dtype).view_as(p))
        p.data.mul_(2).add_(0.1)
        p.data[0] = 3.0


@script
def writes_without_gradients(model: Any) -> None:
    with torch.no_grad():
        w = model.first.weight
        w.add_(1).mul_(0.5).clamp_(-0.3, 0.6)
        w[w.abs() < 0.1] = 0
        w[3].zero_()
        w[:, 1] = 2
        w.t()[4].fill_(0.25)
        w.view(-1)[5:50].neg_()
        w.diagonal().add_(0.5)
        model.first.bias.copy_(torch.arange(33.0))


@script
def views_that_are_kept(model: Any) -> Any:
    with torch.no_grad():
        p = model.last.weight
        view, row = p.t(), p[2]
        p.mul_(3)
        first = view.sum(), row.clone()
        view.mul_(2)
        return first, view[0], row, p.sum()


@script
def random_writes(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)
            p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.01)
            p.mul_(F.dropout(torch.ones_like(p), 0.1))
        model.first.weight.normal_()
        model.first.bias.uniform_(-1, 1)
        model.last.weight.bernoulli_(0.5)


@script
def initialisers(model: Any) -> None:
    for init in (
        nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.ones_,
        nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.eye_,
    ):  # fmt: skip
        init(model.first.weight)
        init(model.last.weight)
        nn.init.sparse_(model.first.weight, 0.3)
    nn.init.orthogonal_(model.first.weight)
    model.last.reset_parameters()
    nn.init.constant_(model.first.bias, 0.5)


@script
def vectors(model: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 2 + 0.01, model.parameters())
    return vector


@script
def plain_tensors_that_follow(model: Any) -> Any:
    """Averages of weights and slow weights in plain tensors."""
    kept = [torch.zeros(p.shape, dtype=p.dtype) for p in model.parameters()]
    for one, p in zip(kept, model.parameters(), strict=True):
        one.lerp_(p.detach(), 0.3)
        one.mul_(0.9).add_(p.detach(), alpha=0.1)
        one.copy_((one + p.detach()) / 2)
        one[0] += p.detach()[0]
    return kept, torch._foreach_add(kept, [p.detach() for p in model.parameters()])


@script
def outputs_that_are_given(model: Any) -> Any:
    p = model.first.weight.detach()
    out = torch.empty(33, 10, dtype=torch.float64)
    torch.add(p, 1, out=out)
    torch.mul(out, 2, out=p)
    return out, p


@script
def arrays_that_come_back(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(p.detach().cpu().numpy() * 2 + 1))


@script
def gradients_that_are_written(model: Any) -> None:
    ps = parameters(model)
    ps[0].grad.mul_(0.5).add_(torch.ones(33, 10, dtype=torch.float64))
    ps[1].grad = torch.arange(33, dtype=torch.float64)
    ps[2].grad = ps[2].grad * 2
    ps[3].grad.data.copy_(torch.ones(33, dtype=torch.float64))
    ps[4].grad[0] = 0
    loss_of(model).backward()


@script
def gradients_that_are_dropped(model: Any) -> Any:
    parameters(model)
    model.zero_grad(set_to_none=False)
    first = [p.grad.sum().item() for p in model.parameters()]
    loss_of(model).backward()
    model.zero_grad()
    return first, [p.grad for p in model.parameters()]


@script
def projections(model: Any) -> None:
    with torch.no_grad():
        w = model.first.weight
        w.copy_(F.normalize(w, dim=1))
        w.copy_(torch.renorm(w, 2, 0, 0.9))
        u, s, v = torch.linalg.svd(model.last.weight, full_matrices=False)
        model.last.weight.copy_(u[:, :2] @ torch.diag(s[:2]) @ v[:2])


# -- Losses and gradients ---------------------------------------------------------------------------------------------


@script
def penalties(model: Any) -> Any:
    loss = loss_of(model)
    for p in model.parameters():
        loss = loss + 0.01 * p.abs().sum() + 0.02 * p.pow(2).sum() + 0.01 * p.norm()
    w = model.first.weight
    loss = loss + 0.01 * (w.t() @ w - torch.eye(10, dtype=w.dtype)).square().mean() + w.mean().square()
    loss.backward()
    return loss


@script
def elastic_weights(model: Any) -> Any:
    anchors = [p.detach().clone() for p in model.parameters()]
    fisher = [p.grad.detach() ** 2 for p in parameters(model)]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    model.zero_grad()
    terms = [(f * (p - a) ** 2).sum() for f, p, a in zip(fisher, model.parameters(), anchors, strict=True)]
    loss = loss_of(model) + sum(terms)
    loss.backward()
    return loss


@script
def gradients_that_are_asked_for(model: Any) -> Any:
    return torch.autograd.grad(loss_of(model), list(model.parameters()))


@script
def hooks(model: Any) -> Any:
    seen: list[Any] = []
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)
    model.first.bias.register_hook(lambda gradient: gradient.flip(0))
    model.last.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    parameters(model)
    return seen


@script
def frozen_on_the_way(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer)
    model.first.requires_grad_(False)
    trained(model, optimizer)
    model.first.requires_grad_(True)
    trained(model, optimizer)


@script
def accumulated(model: Any) -> Any:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        for one, p in zip(total, parameters(model), strict=True):
            one += p.grad / 3
    return total


@script
def adaptive_clips(model: Any) -> None:
    for p in parameters(model):
        if p.ndim > 1:
            most = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
            norm = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(norm > most, p.grad * (most / norm.clamp(min=1e-6)), p.grad))


@script
def orthogonal_updates(model: Any) -> None:
    for p in parameters(model):
        if p.ndim == 2:
            g = p.grad / (p.grad.norm() + 1e-7)
            for _ in range(3):
                a = g @ g.mT
                g = 1.5 * g - 0.5 * a @ g
            p.data.add_(g, alpha=-0.1)


@script
def sharpness(model: Any) -> None:
    """SAM, by hand."""
    ps = parameters(model)
    norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in ps]), p=2)
    before = [p.data.clone() for p in ps]
    with torch.no_grad():
        for p in ps:
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
    model.zero_grad()
    loss_of(model).backward()
    for p, data in zip(ps, before, strict=True):
        p.data = data
    torch.optim.SGD(ps, lr=0.1).step()


@script
def scaled_losses(model: Any) -> Any:
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * value).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@script
def nodes_that_sum_gradients(model: Any) -> Any:
    """In both ways in which people find them."""
    seen: list[list[float]] = []
    kept = []
    for p in model.parameters():
        seen.append([])
        nodes = p.expand_as(p).grad_fn.next_functions[0][0], torch.autograd.graph.get_gradient_edge(p).node
        handles = [
            nodes[0].register_hook(lambda *gradients, found=seen[-1]: found.append(-1.0)),
            nodes[1].register_prehook(lambda gradients, found=seen[-1]: found.append(gradients[0].norm().item())),
        ]
        kept.append((nodes, handles))
    loss_of(model).backward()
    for _, handles in kept:
        for handle in handles:
            handle.remove()
    for p, found in zip(model.parameters(), seen, strict=True):
        p.register_hook(lambda gradient, found=found: found.append(gradient.norm().item()))
    loss = loss_of(model) + sum(p.view_as(p).square().sum() for p in model.parameters())  # two gradients of each
    loss.backward()
    return seen, [p.grad for p in model.parameters()]


# -- Parts of the model -----------------------------------------------------------------------------------------------


@script
def a_method(model: Any) -> Any:
    first = model.encode(batch()[0])
    first.square().sum().backward()
    loss_of(model).backward()
    return first, model.encode(batch()[0])


@script
def a_submodule(model: Any) -> Any:
    x = batch()[0].requires_grad_()
    out = model.last(model.norm(model.first(x)).relu())
    out.square().mean().backward()
    with torch.no_grad():
        return out, x.grad, model.first(x)


@script
def weights_in_functions(model: Any) -> Any:
    x = batch()[0]
    h = F.linear(x, model.first.weight, model.first.bias)
    out = h @ model.last.weight.t() + torch.einsum("oh,bh->bo", model.last.weight, h)
    out.sum().backward()
    return out


@script
def a_loss_of_features_and_of_the_model(model: Any) -> Any:
    loss = loss_of(model) + model.encode(batch()[0]).square().mean() + model.last.weight.square().sum()
    loss.backward()
    return loss


@script
def a_head_of_ones_own(model: Any) -> Any:
    head = nn.Linear(33, 2).double()
    nn.init.ones_(head.weight)
    nn.init.zeros_(head.bias)
    head(model.encode(batch()[0])).square().mean().backward()
    return head.weight.grad


# -- Optimizers and what stands around them ---------------------------------------------------------------------------


@script
def lbfgs(model: Any) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return optimizer.step(closure)


@script
def groups_and_schedules(model: Any) -> None:
    groups = [{"params": [model.first.weight, model.last.weight], "weight_decay": 0.1}, {"params": [model.first.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(3):
        trained(model, optimizer, 1)
        schedule.step()


@script
def states_that_are_read(model: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained(model, optimizer)
    states = [optimizer.state[p] for p in model.parameters()]
    states[0]["exp_avg"].mul_(0.5)
    trained(model, optimizer)
    return [
        (s["step"], s["exp_avg"].abs().max(), (s["exp_avg"] / s["exp_avg_sq"].sqrt()).norm().item()) for s in states
    ]


@script
def an_optimizer_by_hand(model: Any) -> None:
    momenta = {p: torch.zeros_like(p) for p in model.parameters()}
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                momenta[p].mul_(0.9).add_(p.grad)
                p -= 0.1 * (p.grad + momenta[p].sign() * 0.01)
                p *= 1 - 1e-3


@script
def averaged_models(model: Any) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        trained(model, optimizer, 1)
        averaged.update_parameters(model)
    return [p.sum() for p in averaged.parameters()]


@script
def pruned_parameters(model: Any) -> Any:
    prune.l1_unstructured(model.first, "bias", amount=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer)
    prune.remove(model.first, "bias")
    return loss_of(model)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@script
def parametrized(model: Any) -> Any:
    parametrize.register_parametrization(model.last, "bias", Doubled())
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parametrize.remove_parametrizations(model.last, "bias")
    model.zero_grad()  # PyTorch keeps the gradient where the parameter is of no subclass
    return loss_of(model)


@script
def dtypes(model: Any) -> Any:
    model.float()
    x = batch()[0].float()
    first = model(x).double().round(decimals=4)
    model.double()
    for p in model.parameters():
        p.data = p.data.half().double()
    return first, loss_of(model)


@script
def casts_of_parameters(model: Any) -> Any:
    ps = [p.detach() for p in parameters(model)]
    return [(p.float(), p.bool(), p.to(torch.bfloat16).double(), p.int(), p.cpu(), p.type(torch.float32)) for p in ps]


@script
def mixed_lists(model: Any) -> Any:
    ps = [p.detach() for p in parameters(model)]
    plain = [torch.full(p.shape, 0.5, dtype=p.dtype) for p in ps]
    torch._foreach_mul_(plain, ps)
    torch._foreach_add_(ps, plain, alpha=0.1)
    torch._foreach_lerp_(ps, plain, 0.5)
    return plain, torch._foreach_norm(ps), torch._foreach_div(ps, 2.0), torch._foreach_maximum(ps, plain)


@script
def distillation(model: Any) -> Any:
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x, _ = batch()
    model.zero_grad()
    with torch.no_grad():
        wanted = (teacher(x) / 2).softmax(-1)
    loss = F.kl_div((model(x) / 2).log_softmax(-1), wanted, reduction="batchmean")
    loss.backward()
    return loss, [torch.dist(p, q) for p, q in zip(model.parameters(), teacher.parameters(), strict=True)]


@script
def low_rank_updates(model: Any) -> Any:
    """Merged into a weight, and taken out again."""
    weight = model.first.weight
    down, up = torch.randn(2, 10).double(), torch.randn(33, 2).double()
    before = weight.detach().clone()
    weight.data += up @ down
    merged = loss_of(model)
    weight.data -= up @ down
    left, values, right = torch.linalg.svd(weight.detach() - before + up @ down, full_matrices=False)
    return merged, weight.detach().sub(before).abs().max() < 1e-12, values[:2], (left[:, :2] * values[:2]) @ right[:2]


@script
def spectra(model: Any) -> Any:
    weight = model.first.weight.detach()
    u = torch.ones(33).double()
    for _ in range(5):
        v = F.normalize(weight.T @ u, dim=0)
        u = F.normalize(weight @ v, dim=0)
    norms = torch.linalg.matrix_norm(weight, 2), torch.linalg.norm(weight, "nuc"), torch.linalg.matrix_rank(weight)
    return u @ weight @ v, torch.linalg.svdvals(weight), norms, torch.linalg.cond(model.last.weight.detach())


@script
def the_best_weights(model: Any) -> Any:
    """Early stopping: the best state dict is kept, and comes back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    best, kept, losses = float("inf"), {}, []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model)
        losses.append(loss.item())
        if losses[-1] < best:
            best, kept = losses[-1], {name: value.detach().clone() for name, value in model.state_dict().items()}
        loss.backward()
        optimizer.step()
    model.load_state_dict(kept)
    return losses, best, loss_of(model)


@script
def a_range_of_learning_rates(model: Any) -> Any:
    """Tried from one start, which comes back with the optimizer's state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    trained(model, optimizer)
    start = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    found = []
    for i in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 10.0 ** (i - 3)
        trained(model, optimizer, 1)
        found.append(loss_of(model).item())
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    return found, loss_of(model), optimizer.param_groups[0]["lr"]


@script
def noise_of_gradients(model: Any) -> Any:
    """The variance between halves of a batch."""
    x, y = batch()
    halves = []
    for half in (slice(0, 6), slice(6, 12)):
        model.zero_grad()
        F.cross_entropy(model(x[half]), y[half]).backward()
        halves.append([p.grad.detach().clone() for p in model.parameters()])
    spread = [torch.stack(pair).var(0).mean() for pair in zip(*halves, strict=True)]
    dots = sum((a * b).sum() for a, b in zip(*halves, strict=True))
    return spread, dots, sum(spread) / sum(g.pow(2).sum() for g in halves[0])


@script
def importances(model: Any) -> Any:
    """The diagonal of Fisher's matrix, and the weights that it says matter most."""
    x, y = batch()
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(0, 12, 4):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 4]), y[i : i + 4]).backward()
        for name, p in model.named_parameters():
            fisher[name].addcmul_(p.grad, p.grad, value=1 / 3)
    scores = torch.cat([(fisher[name] * p.detach() ** 2).reshape(-1) for name, p in model.named_parameters()])
    return list(fisher.values()), scores.topk(5), scores.kthvalue(20).values


@script
def centred_gradients(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.4, 0.4)


# -- Runs -------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"parameter_plan": {"first.weight": ("dp", None), "last.weight": (None, "dp"), "norm.weight": ("dp",)}},
}


def outcome(fn: Script, model: Any) -> list[Any]:
    torch.manual_seed(2)
    found = fn(model)
    ps = list(model.parameters())
    return [whole([found]), whole([p.detach() for p in ps]), whole([p.grad for p in ps])]


def check(fn: Script, devices: int, layout: str, called: bool) -> None:
    """`called`: the first call comes before the script; else in it, or never."""
    pw.set_auto_parallel_context(device_num=devices)
    torch.manual_seed(0)
    plain = Net().double()
    model = pw.shard(copy.deepcopy(plain), mesh={"dp": devices}, in_strategy=(("dp", None),), **LAYOUTS[layout])
    if called:
        loss_of(model)
    expected, found = outcome(fn, plain), outcome(fn, model)
    compare(found, expected, f"{fn.__name__}, {layout}")


def check_by_name(name: str, devices: int) -> None:
    """With weights that are split from the first call on, and whole before it."""
    fn = next(fn for fn in SCRIPTS if fn.__name__ == name)
    check(fn, devices, "split", True)
    check(fn, devices, "whole", False)


def compare(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        with torch.no_grad():  # a view that was made without gradients is read without
            torch.testing.assert_close(
                found.clone(), expected.clone(), rtol=EXACT, atol=EXACT, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            compare(one, other, f"{where} [{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=EXACT, abs=EXACT), where
    else:
        assert found == expected, where


every_script = pytest.mark.parametrize("fn", SCRIPTS, ids=lambda fn: fn.__name__)


@every_script
def test_in_one_process(fn: Script) -> None:
    check(fn, 2, "split", False)


@pytest.mark.gloo
@every_script
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_under_a_launcher(fn: Script, ranks: int, on_ranks: Ranks) -> None:
    on_ranks(ranks, check_by_name, fn.__name__, ranks)
