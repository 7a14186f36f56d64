"""Closed choices, equal to the strings that users write and printed like them, and the types of fields.

The args of a validator's ValueError are its problems; for a ValueError without args, the error says what the field
accepts.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from partway.fusion import Fusion, FusionMode
from partway.fusion.by_index import problems as index_problems
from partway.strategy.basics.choice import Choice
from partway.strategy.validate import check_dataset_form


class ParallelMode(Choice):
    """Who chooses strategies: nobody, the batch alone is split, or the search."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


class DatasetMode(Choice):
    """How inputs without a strategy are split."""

    DATA_PARALLEL = "data_parallel"
    FULL_BATCH = "full_batch"


def _positions(value: object) -> object:
    """A list of the positions at which groups of collectives end, as a tuple; any other value as it is."""
    if problems := index_problems(value) if value is not None else []:
        raise ValueError(*problems)
    return tuple(value) if isinstance(value, list) else value


def fusion_of(collective: str) -> PlainValidator:
    """A validator that reads the option of a collective; the fusion policy checks it."""

    def read(value: object) -> Fusion | None:
        return value if value is None or isinstance(value, Fusion) else Fusion.from_option(value, collective)

    return PlainValidator(read)


def _dataset_strategy(value: object) -> object:
    check_dataset_form(value)
    return DatasetMode(value) if isinstance(value, str) else value


_as_list = PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value)
as_option = PlainSerializer(lambda value: value and value.option)

FUSION_OPTION = 'None or a dict such as {"mode": "size", "config": 32}'
AUTO = Fusion(FusionMode.AUTO)

Positions = Annotated[tuple[int, ...] | None, PlainValidator(_positions), _as_list]
DatasetStrategy = Annotated[DatasetMode | tuple[tuple[int, ...], ...], PlainValidator(_dataset_strategy)]
