"""How parameters are cut into pieces, and the pieces divided over servers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples

from partway.ps.service.pieces import LARGEST, SMALLEST, Parameter, assign, divide

shapes = st.lists(st.integers(0, 700), max_size=3).map(tuple)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Parameter, ...]:
    drawn = draw(st.lists(st.tuples(shapes, st.sampled_from([("float32", 4), ("float64", 8)])), min_size=1, max_size=6))
    return tuple(Parameter(i, f"p{i}", shape, *kind) for i, (shape, kind) in enumerate(drawn))


sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=40).map(
    lambda each: {f"{i}:0": s for i, s in enumerate(each)}
)


def loads(sizes: dict[str, int], where: dict[str, str], servers: list[str]) -> dict[str, int]:
    return {server: sum(sizes[key] for key, its in where.items() if its == server) for server in servers}


def named(count: int) -> list[str]:
    return [f"server{i}" for i in range(count)]


# -- Pieces


@examples(100)
@given(jobs(), st.booleans())
def test_every_row_of_every_parameter_is_in_one_piece(parameters: tuple[Parameter, ...], by_element: bool) -> None:
    pieces = divide(parameters, by_element)
    for parameter in parameters:
        mine = [piece for piece in pieces if piece.parameter == parameter.index]
        assert mine[0].start == 0
        assert mine[-1].stop == parameter.rows
        assert all(one.stop == two.start for one, two in pairwise(mine))
        assert len(mine) == 1 or all(piece.start < piece.stop for piece in mine)
    assert len({piece.key for piece in pieces}) == len(pieces)


@examples(50)
@given(jobs())
def test_parameters_stay_whole_where_a_step_is_not_by_element(parameters: tuple[Parameter, ...]) -> None:
    pieces = divide(parameters, by_element=False)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, parameter.rows) for parameter in parameters]


@examples(100)
@given(jobs())
def test_a_piece_is_no_larger_than_its_share_or_one_row(parameters: tuple[Parameter, ...]) -> None:
    total = sum(parameter.rows * parameter.row_bytes for parameter in parameters)
    share = min(max(total // 32, SMALLEST), LARGEST)
    for piece in divide(parameters, by_element=True):
        row = parameters[piece.parameter].row_bytes
        assert (piece.stop - piece.start) * row < share + row


def test_a_large_parameter_is_cut_into_pieces_of_at_most_four_mebibytes() -> None:
    table = Parameter(0, "table", (10_000_000, 64), "float32", 4)
    pieces = divide([table], by_element=True)
    assert len(pieces) == 611
    assert max(piece.stop - piece.start for piece in pieces) * table.row_bytes <= LARGEST


def test_a_number_and_an_empty_parameter_have_one_piece_each() -> None:
    parameters = [
        Parameter(0, "scale", (), "float32", 4),
        Parameter(1, "none", (0, 5), "float32", 4),
        Parameter(2, "thin", (5, 0), "float32", 4),
    ]
    for by_element in (True, False):
        pieces = divide(parameters, by_element)
        assert [(piece.key, piece.start, piece.stop) for piece in pieces] == [
            ("0:0", 0, 1),
            ("1:0", 0, 0),
            ("2:0", 0, 5),
        ]


# -- Servers


@examples(200)
@given(sizes, st.integers(1, 7))
def test_servers_have_about_as_many_bytes_each(sizes: dict[str, int], count: int) -> None:
    where = assign(sizes, named(count), {})
    assert where.keys() == sizes.keys()
    load = loads(sizes, where, named(count))
    assert max(load.values()) - min(load.values()) <= max(sizes.values())


@examples(100)
@given(sizes, st.integers(1, 7), st.randoms(use_true_random=False))
def test_who_has_what_follows_from_names_and_sizes_alone(sizes: dict[str, int], count: int, random: object) -> None:
    names, keys = named(count), list(sizes)
    where = assign(sizes, names, {})
    random.shuffle(names)  # type: ignore[attr-defined]
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert assign({key: sizes[key] for key in keys}, names, {}) == where


@examples(100)
@given(sizes, st.integers(1, 7))
def test_nothing_moves_where_nobody_comes_or_goes(sizes: dict[str, int], count: int) -> None:
    where = assign(sizes, named(count), {})
    assert assign(sizes, named(count), where) == where


@examples(200)
@given(st.integers(1, 200), st.integers(1, 7))
def test_a_server_that_comes_gets_its_share_and_no_other_gets_anything(pieces: int, count: int) -> None:
    sizes = {f"0:{i}": 100 for i in range(pieces)}
    before = assign(sizes, named(count), {})
    after = assign(sizes, named(count + 1), before)
    moved = [key for key in sizes if before[key] != after[key]]
    assert {after[key] for key in moved} <= {f"server{count}"}
    assert len(moved) == pieces // (count + 1)


@examples(200)
@given(sizes, st.integers(1, 7))
def test_a_server_that_comes_is_given_little_more_than_its_share(sizes: dict[str, int], count: int) -> None:
    before = assign(sizes, named(count), {})
    after = assign(sizes, named(count + 1), before)
    to_new = sum(sizes[key] for key in sizes if after[key] == f"server{count}")
    moved = sum(sizes[key] for key in sizes if before[key] != after[key])
    largest = max(sizes.values())
    assert to_new <= sum(sizes.values()) / (count + 1) + largest
    assert moved - to_new <= count * largest  # between those that were there: what makes them alike
    load = loads(sizes, after, named(count + 1))
    assert max(load.values()) - min(load.values()) <= largest


@examples(200)
@given(sizes, st.integers(2, 7), st.data())
def test_of_a_server_that_goes_only_its_pieces_move_and_few_to_balance(
    sizes: dict[str, int], count: int, data: st.DataObject
) -> None:
    before = assign(sizes, named(count), {})
    gone = data.draw(st.sampled_from(named(count)))
    left = [name for name in named(count) if name != gone]
    after = assign(sizes, left, before)
    others = sum(sizes[key] for key in sizes if before[key] not in (gone, after[key]))
    assert set(after.values()) <= set(left)
    assert others <= len(left) * max(sizes.values())
    load = loads(sizes, after, left)
    assert max(load.values()) - min(load.values()) <= max(sizes.values())


@examples(100)
@given(st.integers(1, 200), st.integers(2, 7))
def test_of_a_server_that_goes_only_its_pieces_move_where_all_are_alike(pieces: int, count: int) -> None:
    sizes = {f"0:{i}": 100 for i in range(pieces)}
    before = assign(sizes, named(count), {})
    after = assign(sizes, named(count)[1:], before)
    assert {before[key] for key in sizes if before[key] != after[key]} <= {"server0"}


@examples(50)
@given(sizes, st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_servers_that_come_and_go_have_about_as_many_bytes_each_all_the_time(
    sizes: dict[str, int], counts: list[int]
) -> None:
    where: dict[str, str] = {}
    for count in counts:
        where = assign(sizes, named(count), where)
        load = loads(sizes, where, named(count))
        assert max(load.values()) - min(load.values()) <= max(sizes.values())


def test_all_pieces_are_given_out_to_new_servers_where_the_old_ones_are_gone() -> None:
    assert assign({"0:0": 5, "1:0": 5}, ["b", "a"], {"0:0": "gone", "1:0": "gone"}) == {"0:0": "a", "1:0": "b"}
