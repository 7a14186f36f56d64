import torch

from partway.strategy.place import island_place

R = torch.ops.partway


def axis_index(a):
    return island_place().index(a)


def axis_size(a):
    return island_place().size(a)


def all_reduce(x, op="sum", group=None):
    p = island_place()
    a = p.axes(group)
    return R.all_reduce(x, op, list(a), p.size(a))


def all_gather(x, dim=0, group=None):
    p = island_place()
    a = p.axes(group)
    return R.all_gather(x, dim, list(a), [x.shape[dim]] * p.size(a))


def broadcast(x, root=0, group=None):
    p = island_place()
    a = p.axes(group)
    return R.broadcast(x, root, list(a), p.size(a))


def reduce_scatter(x, op="sum", dim=0, group=None):
    p = island_place()
    a = p.axes(group)
    n = p.size(a)
    return R.reduce_scatter(x, op, dim, list(a), [x.shape[dim] // n] * n, x.shape[dim] // n)


def permute(x, pairs, group=None):
    p = island_place()
    a = p.axes(group)
    return R.permute(x, [e for q in pairs for e in q], list(a), p.size(a))


def all_to_all(x, s, c, group=None):
    p = island_place()
    a = p.axes(group)
    n = p.size(a)
    own = x.shape[s] // n
    return R.all_to_all(
        x, s, c, list(a), [own] * n, [x.shape[c]] * n if c != s else [own] * n, own if c != s else x.shape[s]
    )


def send_receive(xs, to, frm, shapes, group=None):
    p = island_place()
    a = p.axes(group)
    return R.send_receive(
        xs,
        to,
        frm,
        [n for s in shapes for n in s],
        [len(s) for s in shapes],
        torch.float64,
        torch.device("cpu"),
        list(a),
        p.size(a),
    )
