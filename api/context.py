"""The parallel context: the options of the process and those of `with` blocks, and the only place that holds them.

    set_auto_parallel_context(device_num=8, search_mode="sharding_propagation")
    with auto_parallel_context(device_num=4): ...      # afterwards as before
    set_algo_parameters(fully_use_devices=False)

Names and meanings are MindSpore's. A call takes all its options or none: each value is frozen, validated once, and
replaced whole. What is set outside of a `with` holds in every thread. A `with` is its thread's (or asyncio task's) own:
it has the options as they were when it was entered, and those that it was given; what is set or reset inside, by that
thread, ends with it, and what others set meanwhile it does not see. A thread that starts inside has the options of the
process.

An option of MindSpore that would have no effect here does not exist; the error for it says what to use instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.fusion.by_index import problems as index_problems
from partway.propagation.cost.profile import profile_of
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.search.problem import Fallback
from partway.propagation.search.search import SearchMode
from partway.runtime.step import Backend
from partway.strategy.afterwards import afterwards
from partway.strategy.choice import Choice
from partway.strategy.errors import ContextError, StrategyError, shown
from partway.strategy.suggest import did_you_mean
from partway.strategy.validate import check_dataset_form

# -- Closed choices, equal to the strings that users write and printed like them -------------------------------------


class ParallelMode(Choice):
    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


class DatasetMode(Choice):
    DATA_PARALLEL = "data_parallel"
    FULL_BATCH = "full_batch"


# -- Field types. The args of a validator's ValueError are its problems; none: "see what the field accepts". ----------


def _positions(value: object) -> object:
    """The list of positions at which groups of collectives end, as a tuple."""
    if problems := index_problems(value) if value is not None else []:
        raise ValueError(*problems)
    return tuple(value) if isinstance(value, list) else value


def _fusion_of(collective: str) -> PlainValidator:
    """Reads the option of a collective; what is wrong with it the policy says."""

    def read(value: object) -> Fusion | None:
        return value if value is None or isinstance(value, Fusion) else Fusion.from_option(value, collective)

    return PlainValidator(read)


def _dataset_strategy(value: object) -> object:
    check_dataset_form(value)
    return DatasetMode(value) if isinstance(value, str) else value


_as_list = PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value)
_as_option = PlainSerializer(lambda value: value and value.option)

_FUSION = 'None or a dict such as {"mode": "size", "config": 32}'
_AUTO = Fusion(FusionMode.AUTO)

_Positions = Annotated[tuple[int, ...] | None, PlainValidator(_positions), _as_list]
_DatasetStrategy = Annotated[DatasetMode | tuple[tuple[int, ...], ...], PlainValidator(_dataset_strategy)]


# -- The options. A field's `description` says what it accepts, where its type does not. -----------------------------


class _Options(BaseModel):
    """Frozen options; `absent` names MindSpore's that are not here, with what to do instead."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    absent: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> str:
        """A table with one row per option: its name, whether it was set or is the default, and its value."""
        values = self.model_dump()
        width = max(map(len, values))
        return "\n".join(
            f"{key:{width}}  {'set' if key in self.model_fields_set else 'default':7}  {value!r}"
            for key, value in values.items()
        )

    def __str__(self) -> str:
        return self.describe()


class CommFusion(_Options):
    """How the collectives of parameters are grouped, each kind by {"mode": ..., "config": ...}; None: not at all.

    A kind that is not named is grouped in mode auto, as in the reference and in PyTorch's DistributedDataParallel.
    """

    openstate: bool = True
    """False turns all grouping off, that of `all_reduce_fusion_config` too."""
    allreduce: Annotated[Fusion | None, _fusion_of("allreduce"), _as_option] = Field(default=_AUTO, description=_FUSION)
    """Of gradients. The modes are `auto` (64 MB), `size` (`config` in MB), `index` (`config` positions) and `overlap`
    (ours: the groups that the cost model says hide most). "config" may be left out for auto and overlap."""
    allgather: Annotated[Fusion | None, _fusion_of("allgather"), _as_option] = Field(default=_AUTO, description=_FUSION)
    """Of weights. The modes are those of allreduce without `index`; a MB is one of the whole weights."""
    reducescatter: Annotated[Fusion | None, _fusion_of("reducescatter"), _as_option] = Field(
        default=_AUTO, description=_FUSION
    )
    """Of the gradients of parameters that are split over the axis. The modes are those of allgather."""


class StrategyCkptConfig(_Options):
    load_file: str = Field(default="", description="the path of an existing file, or ''")
    save_file: str = Field(default="", description="a path, or ''")
    only_trainable_params: bool = True

    @field_validator("load_file")
    @classmethod
    def _load_file_exists(cls, value: str) -> str:
        if value and not os.path.isfile(value):
            raise ValueError(f"there is no file {value!r}")
        return value


class ParallelOptimizerConfig(_Options):
    absent = {
        "gradient_accumulation_shard": "accumulated gradients are split as their parameters are",
        "optimizer_weight_shard_size": "optimizer states are split over all devices that hold a copy",
        "optimizer_level": "use enable_parallel_optimizer=True",
    }

    parallel_optimizer_threshold: int = Field(default=64, ge=0, description="an int of 0 or more (KB)")
    """Parameters below this size, in KB, stay whole."""


_PIPELINE = "pipeline parallelism is not available yet"
_NORMS = "read the gradients' norms in the training loop"


class ParallelContext(_Options):
    """The parallel context. `current()` is the one in force."""

    absent = {
        "auto_parallel_search_mode": "use search_mode",
        "auto_pipeline": _PIPELINE,
        "communi_parallel_mode": "PyTorch chooses the streams of collectives",
        "dump_device_local_norm": _NORMS,
        "dump_local_norm": _NORMS,
        "dump_local_norm_path": _NORMS,
        "enable_alltoall": "an all-to-all is always used where a conversion calls for one",
        "force_fp32_communication": "gradient_fp32_sync adds up gradients in float32; other values keep their dtype",
        "global_rank": "the launcher numbers the processes; read the rank with partway.get_rank()",
        "grad_accumulation_step": "call backward() several times, all but the last inside `with model.no_sync():`",
        "group_ckpt_save_file": "groups follow from the mesh, so there is nothing to save",
        "loss_repeated_mean": "repeated computation never scales a gradient here",
        "optimizer_weight_shard_size": ParallelOptimizerConfig.absent["optimizer_weight_shard_size"],
        "pipeline_config": _PIPELINE,
        "pipeline_result_broadcast": _PIPELINE,
        "pipeline_stages": _PIPELINE,
        "sharding_propagation": 'use search_mode="sharding_propagation"',
        "strategy_ckpt_load_file": 'use strategy_ckpt_config={"load_file": ...}',
        "strategy_ckpt_save_file": 'use strategy_ckpt_config={"save_file": ...}',
    }

    parallel_mode: ParallelMode = Field(default=ParallelMode.STAND_ALONE, strict=False)
    """Where this was never set, `shard` acts as in auto_parallel (see `mode_was_set`), so that a script with one
    annotation runs split; in the reference it is ignored. `hybrid_parallel` is left out: it is neither checked nor
    planned there."""

    search_mode: SearchMode = Field(default=SearchMode.DYNAMIC_PROGRAMMING, strict=False)
    """As in the reference up to 2.0 (2.7: recursive_programming), because here it is exact and still fast."""

    device_num: int = Field(default=1, ge=1, le=16384, description="an int from 1 to 16384")
    """How many devices are simulated; under a launcher there are as many as processes, so that one script serves both.
    The reference says 4096 but takes more, and wants 1, 2, 4 or a multiple of 8; here any number will do."""

    dataset_strategy: _DatasetStrategy = DatasetMode.DATA_PARALLEL
    """A mode, or split counts for each input, as in ((1, 1, 1, 8), (1,)). An input of smaller rank may have a smaller
    split count, as in the seeds; the reference wants them equal. In stand_alone and data_parallel mode only the default
    has a meaning, and a call may go back to it."""

    full_batch: bool = False
    """Short for `dataset_strategy="full_batch"`: whichever was set, both read the same."""

    gradients_mean: bool = True
    """True: the gradient of the mean over the global batch, which is what one device computes. False: the sum of the
    data-parallel parts' means, that is every parameter's gradient times the number of parts. The reference defaults
    to False; here splitting a model must not change its training unasked."""

    batch_norm_parts: int = Field(default=1, ge=1, description="an int of 1 or more")
    """Ours: into how many equal parts of the batch a BatchNorm in training takes statistics, each part its own ("ghost
    batch norm"; running statistics move by their mean). 1: the statistics of the whole batch, which is what one device
    computes; it costs an AllReduce per layer that computing waits for, forward and backward. The number of ranks that
    split the batch: what DDP computes, without these. How the model is split changes neither. SyncBatchNorm always has
    the statistics of the whole batch."""

    gradient_fp32_sync: bool = True
    """True: gradients of parameters in bfloat16 or float16 are added up over the ranks in float32, with twice the
    bytes. False: in their own dtype."""

    parameter_broadcast: bool = False
    """True: `shard` gives every process rank 0's parameters, buffers and random generators. False: where they differ,
    it is an error."""

    all_reduce_fusion_config: _Positions = Field(default=None, description="None or a list such as [20, 35]")
    """Short for comm_fusion={"allreduce": {"mode": "index", "config": ...}}. The reference's code counts [20, 35] as
    21, 15, the rest; its documents and the seeds as 20, 15, the rest, and so do we."""

    comm_fusion: CommFusion = Field(
        default=CommFusion(), description="a dict with the keys openstate, allreduce, allgather and reducescatter"
    )
    """Collectives are grouped unless {"openstate": False} turns it off, or None one kind: {"allreduce": None}. It is
    shown with the defaults of what was not named, and with what `all_reduce_fusion_config` says of allreduce."""

    strategy_ckpt_config: StrategyCkptConfig = Field(
        default=StrategyCkptConfig(), description="a dict with the keys load_file, save_file and only_trainable_params"
    )
    """A load_file must exist when it is set, so that a wrong path is an error at its own line."""

    enable_parallel_optimizer: bool = False

    parallel_optimizer_config: ParallelOptimizerConfig = Field(
        default=ParallelOptimizerConfig(), description="a dict with the key parallel_optimizer_threshold"
    )

    reshard_after_forward: bool | None = Field(default=None, description="None, True or False")
    """Ours, with FSDP2's name. True: weights that are split at rest and gathered for the forward are let go after it,
    and gathered again in the backward, which holds less and sends more. False: they are kept. None: they are kept
    unless `memory_limit` leaves no room for them."""

    enable_compile_cache: bool = True
    """True: plans and compiled steps are kept on disk by content, so that a second start of a script makes none anew.
    The reference has this option in set_context."""

    compile_cache_path: str = Field(default="", description="a folder, or '' for PARTWAY_CACHE_DIR or ~/.cache/partway")
    """Not used unless it is this user's alone (mode 0700). Entries take PARTWAY_CACHE_MB megabytes at most, or 1000."""

    backend: Backend = Field(default=Backend.EAGER, strict=False)
    """Ours: "eager" runs a step's operators one after another as PyTorch has them; "inductor" has TorchInductor compile
    each stretch between two collectives, which the first call of a signature waits for."""

    random_numbers: RandomNumbers = Field(default=RandomNumbers.COUNTER, strict=False)
    """Ours: what dropout and other random operators draw, for the seed of torch.manual_seed. "counter": each number is
    a function of the seed, the operator and the global index of its element, so that it is the same on any layout and
    any number of devices, and a rank draws its part alone. "torch": the numbers of the plain model, which every rank
    draws whole. "rank": each rank draws its part from a stream of its own, with PyTorch's generator; the numbers depend
    on the layout, but where a tensor is whole they are the same on all ranks. What no index tells (multinomial,
    randperm, poisson) is drawn whole with each of them."""

    on_unknown_op: Fallback = Field(default=Fallback.WARN, strict=False)
    """Ours: whether an operator without a rule runs replicated with a warning, or is an error."""

    device_profile: str | None = Field(
        default=None, description="None, the name of a preset such as 'h100', or the path of a profile's JSON file"
    )
    """Ours: the device and network that plans are priced for (None: by the device type). A path must hold a profile
    when it is set, so that a wrong one is an error at its own line."""

    @field_validator("device_profile")
    @classmethod
    def _profile_loads(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                profile_of(value)
        except StrategyError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def mode_was_set(self) -> bool:
        """Whether the user chose the parallel mode: an explicit stand_alone means one device, no choice means auto."""
        return "parallel_mode" in self.model_fields_set

    @property
    def device_num_was_set(self) -> bool:
        return "device_num" in self.model_fields_set

    @property
    def fusion_policies(self) -> FusionPolicies:
        """How collectives are grouped: what follows from both options."""
        fusion = self.comm_fusion
        if not fusion.openstate:
            return FusionPolicies()
        return FusionPolicies(self._allreduce, fusion.allgather, fusion.reducescatter)

    @property
    def _allreduce(self) -> Fusion | None:
        indices = self.all_reduce_fusion_config
        return Fusion(FusionMode.INDEX, indices) if indices else self.comm_fusion.allreduce

    @field_serializer("comm_fusion")
    def _as_in_force(self, value: CommFusion) -> dict[str, Any]:
        return {**value.model_dump(), "allreduce": self._allreduce and self._allreduce.option}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := tuple(self._contradictions()):
            raise ValueError(*problems)
        full_batch = self.full_batch or self.dataset_strategy == DatasetMode.FULL_BATCH
        object.__setattr__(self, "full_batch", full_batch)
        if full_batch:
            object.__setattr__(self, "dataset_strategy", DatasetMode.FULL_BATCH)
        return self

    def _contradictions(self) -> Iterator[str]:
        dataset, mode = self.dataset_strategy, self.parallel_mode
        if {"full_batch", "dataset_strategy"} <= self.model_fields_set:
            if self.full_batch != (dataset == DatasetMode.FULL_BATCH):
                yield (
                    f"full_batch={self.full_batch} contradicts dataset_strategy={dataset!r}; "
                    "full_batch=True is short for dataset_strategy='full_batch', so change one of them"
                )
        elif self.full_batch:
            dataset = DatasetMode.FULL_BATCH
        manual = self.mode_was_set and mode in (ParallelMode.STAND_ALONE, ParallelMode.DATA_PARALLEL)
        if manual and dataset != DatasetMode.DATA_PARALLEL:
            yield (
                f"dataset_strategy={dataset!r} with parallel_mode={mode!r}: a dataset_strategy applies in semi-auto "
                "and auto modes only; set parallel_mode='semi_auto_parallel' or 'auto_parallel'"
            )
        named = self.comm_fusion.allreduce if "allreduce" in self.comm_fusion.model_fields_set else None
        if self.all_reduce_fusion_config and named not in (None, self._allreduce):
            yield (
                'all_reduce_fusion_config and comm_fusion["allreduce"] both say how to group AllReduces; '
                "set one of them to None"
            )


class AlgoParameters(_Options):
    """Options of the strategy search. `current_algo()` is the one in force."""

    fully_use_devices: bool = True
    """Matrix products, convolutions and attention are spread over all devices wherever they can be; lighter operators
    are split where that is cheapest. False: the objective alone decides, and small work may be repeated. True as in the
    seeds; the reference changed it to False in 2.7, and then leaves half the machine repeating work. Set explicitly to
    True, a strategy of split counts that uses some devices but not all is an error."""

    elementwise_op_strategy_follow: bool = False
    """True: an elementwise operator takes the strategy of what consumes it, so that no conversion follows it. Where
    several operators consume its result the one layout may be converted for each of them. False: the objective
    decides, which is never worse."""

    enable_algo_approxi: bool = False
    """True: of every operator only the strategies that cost least by themselves are looked at, as many as
    `algo_approxi_epsilon` says. What is annotated keeps all that its annotation allows, and elementwise operators that
    follow what consumes them keep theirs. The plan's certificate says that strategies were left out. False: the search
    is exact, and seldom takes long."""

    algo_approxi_epsilon: float = Field(
        default=0.1, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and at most 1, such as 0.1"
    )
    """With `enable_algo_approxi`, 1/epsilon strategies of an operator are looked at, rounded up: 0.1 keeps 10."""

    tensor_slice_align_enable: bool = False
    """The last dim of a matmul's slices must be a multiple of `tensor_slice_align_size`."""

    tensor_slice_align_size: int = Field(default=16, ge=1, le=1024, description="an int from 1 to 1024")

    memory_limit: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="None or a number of bytes above 0, such as 80e9"
    )
    """The most bytes that a device may hold: parameters, gradients, optimizer states and what is kept for the backward.
    The cheapest plan found that keeps to it is taken, and its certificate says how far off it may be; where there is
    none it is an error that says what limit would do. The reference's device_memory_capacity."""

    optimizer_states: float = Field(
        default=2.0, ge=0, allow_inf_nan=False, description="a number of 0 or more, such as 2 for Adam"
    )
    """How many copies of each parameter that is trained the optimizer keeps: 0 for SGD, 1 with momentum, 2 for Adam."""


# -- From what pydantic finds to one error in the user's words -------------------------------------------------------


def _refusal(value: object, accepts: str) -> str:
    return f"got {shown(value, 80)} ({type(value).__name__}); accepts {accepts}"


def _accepts(field: FieldInfo) -> str:
    if field.description:
        return field.description
    kind = field.annotation
    assert isinstance(kind, type) and issubclass(kind, Choice | bool), f"{field} has no description"
    return "True or False" if kind is bool else f"one of {', '.join(map(repr, kind))}"


def _nested(field: FieldInfo) -> type[_Options] | None:
    """The options inside a field whose type is options."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, _Options) else None


def _unknown(options: type[_Options], key: object, path: str) -> str:
    if key in options.absent:
        return f"{path} is MindSpore's and not an option here: {options.absent[str(key)]}"
    meant = did_you_mean(str(key), options.model_fields)
    every = ", ".join(options.model_fields)
    return f"{path} is not an option" + (f"; {meant}" if meant else "") + f" (all options: {every})"


def _explain(options: type[_Options], error: ErrorDetails, given: Any) -> Iterable[str]:
    """The problems that one of pydantic's errors stands for."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, StrategyError):
        return map(str, cause.problems)
    texts: tuple[str, ...] = cause.args if isinstance(cause, ValueError) else ()
    if not error["loc"]:
        return texts
    path = ""
    for key in error["loc"]:
        path = f'{path}["{key}"]' if path else str(key)
        field = options.model_fields.get(str(key))
        if field is None:
            return [_unknown(options, key, path)]
        accepts = _accepts(field)
        given, options = given.get(key), _nested(field) or options
    what = f"is missing; accepts {accepts}" if error["type"] == "missing" else _refusal(given, accepts)
    return [f"{path}: {text}" for text in texts or (what,)]


def _problems(options: type[_Options], settings: Mapping[str, object]) -> list[str]:
    """Every reason why `settings` are refused: the wrong ones, then what the others contradict."""
    try:
        options.model_validate(settings)
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
    else:
        return []
    wrong = {error["loc"][0] for error in errors if error["loc"]}
    others = {key: value for key, value in settings.items() if key not in wrong}
    texts = [text for error in errors for text in _explain(options, error, settings)]
    return texts + (_problems(options, others) if wrong else [])


def _listed(title: str, problems: Iterable[str]) -> ContextError:
    return ContextError("\n".join([title, *("  - " + text.replace("\n", "\n  ") for text in problems)]))


# -- The options in force --------------------------------------------------------------------------------------------

OptionsT = TypeVar("OptionsT", bound=_Options)


class _State(Generic[OptionsT]):
    """One frozen value for the process, and one for each `with` that this thread is in; each is replaced whole."""

    def __init__(self, default: OptionsT) -> None:
        self._default = self._process = default
        self._lock = Lock()
        self._blocks: ContextVar[tuple[tuple[object, OptionsT], ...]] = ContextVar(type(default).__name__, default=())

    @property
    def value(self) -> OptionsT:
        """The value in force: that of the innermost block, or of the process."""
        blocks = self._blocks.get()
        return blocks[-1][1] if blocks else self._process

    def update(self, call: str, given: Mapping[str, object]) -> None:
        """Merge `given` into what was set so far, all or nothing."""
        if self._blocks.get():
            self._replace(self._merged(call, given))
            return
        with self._lock:
            self._process = self._merged(call, given)

    def reset(self) -> None:
        """Put the defaults in force."""
        self._replace(self._default)

    @contextmanager
    def block(self, call: str, given: Mapping[str, object]) -> Iterator[OptionsT]:
        """Merge `given` into what was set so far, for the block and this thread."""
        entered, merged = object(), self._merged(call, given)

        def leave() -> None:  # blocks of generators may end in any order
            self._blocks.set(tuple(block for block in self._blocks.get() if block[0] is not entered))

        with afterwards(leave):
            self._blocks.set((*self._blocks.get(), (entered, merged)))
            yield merged

    def get(self, call: str, key: str) -> Any:
        options = type(self.value)
        if not isinstance(key, str) or key not in options.model_fields:
            name = key if isinstance(key, str) else shown(key)
            raise _listed(f"{call}:", [_unknown(options, name, name)])
        return self.value.model_dump()[key]

    def _merged(self, call: str, given: Mapping[str, object]) -> OptionsT:
        before = self.value
        settings = {**{key: getattr(before, key) for key in before.model_fields_set}, **given}
        try:
            return type(before).model_validate(settings)
        except ValidationError:
            raise _listed(f"{call} changed nothing:", _problems(type(before), settings)) from None
        except RecursionError:
            raise _listed(f"{call} changed nothing:", ["a value is nested too deeply"]) from None

    def _replace(self, value: OptionsT) -> None:
        if blocks := self._blocks.get():
            self._blocks.set((*blocks[:-1], (blocks[-1][0], value)))
        else:
            self._process = value


_parallel = _State(ParallelContext())
_algo = _State(AlgoParameters())


# -- The public functions --------------------------------------------------------------------------------------------


def current() -> ParallelContext:
    """The parallel context in force; print it for a table of all options."""
    return _parallel.value


def current_algo() -> AlgoParameters:
    """The options of the strategy search in force; print them for a table."""
    return _algo.value


def set_auto_parallel_context(**kwargs: object) -> None:
    """Set options of the parallel context, the fields of `ParallelContext`; the others stay as they are. Inside a `with
    auto_parallel_context` it sets those of the `with`.

    Raises ContextError (a ValueError) that lists every wrong option, and then changes none.
    """
    _parallel.update("set_auto_parallel_context", kwargs)


def get_auto_parallel_context(key: str) -> Any:
    """The value of one option, as `set_auto_parallel_context` takes it. Raises ContextError for an unknown one."""
    return _parallel.get("get_auto_parallel_context", key)


def reset_auto_parallel_context() -> None:
    """Put every option back to its default, as if none had been set."""
    _parallel.reset()


@contextmanager
def auto_parallel_context(**kwargs: object) -> Iterator[ParallelContext]:
    """Set options inside a `with`, for this thread; afterwards, after an exception too, all are as they were before.

    Raises ContextError on entering, as `set_auto_parallel_context`. Also works as a decorator.
    """
    with _parallel.block("auto_parallel_context", kwargs) as options:
        yield options


def set_algo_parameters(**kwargs: object) -> None:
    """Set options of the strategy search, the fields of `AlgoParameters`; raises as `set_auto_parallel_context`."""
    _algo.update("set_algo_parameters", kwargs)


def get_algo_parameters(key: str) -> Any:
    """The value of one option of the strategy search. Raises ContextError for an unknown one."""
    return _algo.get("get_algo_parameters", key)


def reset_algo_parameters() -> None:
    """Put every option of the strategy search back to its default."""
    _algo.reset()
