"""Keep groups free of cycles: no group may wait, directly or through other groups, for a result of its own.

A parameter's gradient may be reduced on one axis and then on another: the second collective needs the result of the
first. Any policy may put such members together (or, with two groups, crosswise), so its groups are split here where
needed, and policies need not know about dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from .members import Groups


def split_cycles(groups: Groups, needs: Sequence[Set[int]]) -> Groups:
    """`groups`, in which each group that would wait for itself is split into consecutive pieces.

    `needs[i]` are the positions of all members whose results member i needs, directly or indirectly. A member stays
    in its group unless it and the piece before it depend on each other, given the pieces made so far.
    """
    if not any(needs):
        return groups
    before = [_mask(positions) for positions in needs]
    pieces: list[tuple[int, ...]] = []
    for group in groups:
        piece: tuple[int, ...] = ()
        for position in group:
            if piece and _independent(piece, position, before):
                piece = (*piece, position)
                _join(piece, before)
            else:
                if piece:
                    pieces.append(piece)
                piece = (position,)
        if piece:
            pieces.append(piece)
    return tuple(pieces)


def _mask(positions: Iterable[int]) -> int:
    """A set of positions as the bits of an int: there are as many sets as members, with frequent unions."""
    return sum(1 << position for position in positions)


def _independent(piece: Iterable[int], position: int, before: Sequence[int]) -> bool:
    return not before[position] & _mask(piece) and not any(before[member] >> position & 1 for member in piece)


def _join(piece: Iterable[int], before: list[int]) -> None:
    """Merge the needs of the members of `piece`, and let members that need one of them need all of them."""
    joint = 0
    for member in piece:
        joint |= before[member]
    own = _mask(piece)
    for position, needed in enumerate(before):
        if needed & own:
            before[position] = needed | joint | own
    for member in piece:
        before[member] = joint
