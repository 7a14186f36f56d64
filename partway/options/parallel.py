"""The options of the parallel context. A field's `description` says what it accepts, where its type does not.

The args of a validator's ValueError are its problems; for a ValueError without args, the error says what the field
accepts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainSerializer, PlainValidator, field_serializer, field_validator, model_validator

from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.fusion.by_index import problems as index_problems
from partway.options.base import FrozenOptions
from partway.propagation.cost.profile import profile_of
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.problem.problem import Fallback
from partway.propagation.search.search import SearchMode
from partway.runtime.code.loaded_graph import Backend
from partway.strategy.basics.choice import Choice
from partway.strategy.errors import StrategyError
from partway.strategy.validate import check_dataset_form

# -- Closed choices, equal to the strings that users write and printed like them, and the types of fields


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


# -- The options


class CommFusion(FrozenOptions):
    """How the collectives of parameters are grouped, each kind by {"mode": ..., "config": ...}; None: not at all.

    A kind that is not named is grouped in mode auto, as in MindSpore and in PyTorch's DistributedDataParallel.
    """

    openstate: bool = True
    """False turns all grouping off, that of `all_reduce_fusion_config` too."""
    allreduce: Annotated[Fusion | None, fusion_of("allreduce"), as_option] = Field(
        default=AUTO, description=FUSION_OPTION
    )
    """Of gradients. `FusionMode` (fusion/modes.py) says what each mode does and what "config" it takes."""
    allgather: Annotated[Fusion | None, fusion_of("allgather"), as_option] = Field(
        default=AUTO, description=FUSION_OPTION
    )
    """Of weights; a MB is one of the whole weights. `index` is a mode of allreduce only."""
    reducescatter: Annotated[Fusion | None, fusion_of("reducescatter"), as_option] = Field(
        default=AUTO, description=FUSION_OPTION
    )
    """Of the gradients of parameters that are split over the axis. The modes are those of allgather."""


class StrategyCkptConfig(FrozenOptions):
    """The files from which plans are loaded and to which they are saved."""

    load_file: str = Field(default="", description="the path of an existing file, or ''")
    """A plan whose layouts of parameters are kept; the rest is searched for. '': none."""
    save_file: str = Field(default="", description="a path, or ''")
    """Where each plan that is made is written. '': nowhere."""
    only_trainable_params: bool = True
    """False: the layouts of parameters that need no gradient are kept from load_file, too."""

    @field_validator("load_file")
    @classmethod
    def _load_file_exists(cls, value: str) -> str:
        if value and not os.path.isfile(value):
            raise ValueError(f"there is no file {value!r}")
        return value


class ParallelOptimizerConfig(FrozenOptions):
    """The parameters that `enable_parallel_optimizer` splits."""

    absent: ClassVar[Mapping[str, str]] = {
        "gradient_accumulation_shard": "accumulated gradients are split as their parameters are",
        "optimizer_weight_shard_size": "optimizer states are split over all devices that hold a copy",
        "optimizer_level": "use enable_parallel_optimizer=True",
    }

    parallel_optimizer_threshold: int = Field(default=64, ge=0, description="an int of 0 or more (KB)")
    """Parameters below this size, in KB, stay whole."""


_PIPELINE = "pipeline parallelism is not available yet"


_NORMS = "read the gradients' norms in the training loop"


class ParallelContext(FrozenOptions):
    """The parallel context. `current()` is the one in force."""

    absent: ClassVar[Mapping[str, str]] = {
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
    """How strategies are chosen. stand_alone: not at all; everything runs on one device, as if `shard` were not there.
    data_parallel: only the batch is split. semi_auto_parallel: annotated operators follow their annotation, others
    split the batch. auto_parallel: the search chooses all strategies that are not annotated. If the mode was never set,
    `shard` acts as in auto_parallel, so that a script with one annotation runs sharded; MindSpore ignores the
    annotation. MindSpore's `hybrid_parallel`, which is neither checked nor planned, is left out."""

    search_mode: SearchMode = Field(default=SearchMode.DYNAMIC_PROGRAMMING, strict=False)
    """The search algorithm. dynamic_programming: exact; the default of MindSpore up to 2.0 (2.7:
    recursive_programming). sharding_propagation: annotations spread to neighboring operators. recursive_programming:
    the devices are halved recursively."""

    device_num: int = Field(default=1, ge=1, le=16384, description="an int from 1 to 16384")
    """The number of simulated devices. Under a launcher it is the number of processes, so that one script serves both.
    MindSpore takes 1, 2, 4 or a multiple of 8; here any number works."""

    dataset_strategy: DatasetStrategy = DatasetMode.FULL_BATCH
    """The part of each input that a process passes to a call. full_batch: the whole input, which the plan then splits.
    data_parallel: the part of its rank, as a DistributedSampler reads it: the part under `in_strategy`, or without one
    an equal part along the first dim. Split counts for each input, such as ((1, 1, 1, 8), (1,)): one of as many parts;
    an input with fewer dims may have a smaller count, which MindSpore refuses. Default: data_parallel in parallel_mode
    data_parallel, as in MindSpore, and full_batch otherwise. In one process with simulated devices inputs are always
    whole."""

    full_batch: bool = True
    """True is short for `dataset_strategy="full_batch"`, False for "data_parallel"."""

    gradients_mean: bool = True
    """True: gradients of the mean over the global batch, as on one device. False: the sum of the means of the
    data-parallel parts, which is every parameter's gradient times the number of parts. MindSpore defaults to False;
    here sharding must not change training unasked."""

    batch_norm_parts: int = Field(default=1, ge=1, description="an int of 1 or more")
    """The number of equal parts of the batch over which BatchNorm computes statistics in training, each part its own
    ("ghost batch norm"; running statistics are updated with the mean of the parts). 1: statistics of the whole batch,
    as on one device; each layer then waits for an AllReduce, forward and backward. The number of ranks that split the
    batch: the statistics of DDP, without these AllReduces. The layout of the model changes neither. SyncBatchNorm
    always uses the whole batch. Not in MindSpore."""

    gradient_fp32_sync: bool = True
    """True: gradients of bfloat16 and float16 parameters are reduced in float32, at twice the bytes. False: in their
    own dtype."""

    parameter_broadcast: bool = False
    """True: `shard` copies parameters, buffers and random generators from rank 0 to every process. False: it is an
    error if they differ."""

    all_reduce_fusion_config: Positions = Field(default=None, description="None or a list such as [20, 35]")
    """Short for comm_fusion={"allreduce": {"mode": "index", "config": ...}}. [20, 35] makes groups of 20, 15 and the
    rest, as in MindSpore's documentation; its code makes 21, 15 and the rest."""

    comm_fusion: CommFusion = Field(
        default=CommFusion(), description="a dict with the keys openstate, allreduce, allgather and reducescatter"
    )
    """Collectives are grouped unless {"openstate": False} turns all grouping off, or {"allreduce": None} that of one
    kind. Reading the option shows defaults, and the effect of `all_reduce_fusion_config` on allreduce."""

    strategy_ckpt_config: StrategyCkptConfig = Field(
        default=StrategyCkptConfig(), description="a dict with the keys load_file, save_file and only_trainable_params"
    )
    """The files that plans are loaded from and saved to. A load_file must exist when the option is set, so that a wrong
    path fails at its own line."""

    enable_parallel_optimizer: bool = False
    """True: parameters, gradients and optimizer states are split over the devices that would hold copies (ZeRO, FSDP);
    see `parallel_optimizer_config`."""

    parallel_optimizer_config: ParallelOptimizerConfig = Field(
        default=ParallelOptimizerConfig(), description="a dict with the key parallel_optimizer_threshold"
    )
    """Parameters below parallel_optimizer_threshold KB stay whole."""

    reshard_after_forward: bool | None = Field(default=None, description="None, True or False")
    """As in FSDP2. True: weights that are split at rest are freed after the forward and gathered again in the backward,
    which saves memory and sends more. False: gathered weights are kept. None: they are kept unless `memory_limit`
    leaves no room. Not in MindSpore."""

    enable_compile_cache: bool = True
    """True: captures, plans and compiled steps are cached on disk by content, so that a second start loads them.
    MindSpore has this option in set_context."""

    compile_cache_path: str = Field(default="", description="a folder, or '' for PARTWAY_CACHE_DIR or ~/.cache/partway")
    """The folder must belong to this user alone (mode 0700), else it is not used. It takes at most PARTWAY_CACHE_MB
    megabytes, by default 1000."""

    backend: Backend = Field(default=Backend.EAGER, strict=False)
    """"eager" runs the operators of a step one by one in PyTorch; "inductor" compiles the operators between two
    collectives with TorchInductor, in the first call of a signature. Not in MindSpore."""

    compare_replicas: bool | int = Field(default=True, description="True, False, or an int of 1 or more")
    """Whether ranks with the same part of a parameter, buffer, gradient or optimizer state compare it during training,
    and the settings of their optimizers. True: a few elements of some of them at each call and step, on CPUs. An int n:
    also all elements at every n-th call and step, on any device. False: no comparison. Unless it is False, `save` and
    `save_pretrained` compare everything, and refuse to write if something differs. Not in MindSpore."""

    random_numbers: RandomNumbers = Field(default=RandomNumbers.COUNTER, strict=False)
    """The random numbers of dropout and other random operators, for the seed of torch.manual_seed. "counter": each
    number is a function of the seed, the operator and the global index of its element, the same for any layout and any
    number of devices; a rank draws only its part. "torch": the numbers of the plain model; every rank draws all of
    them. "rank": each rank draws its part from its own stream of PyTorch's generator; the numbers depend on the layout,
    and are the same on all ranks where a tensor is whole. Operators without an index (multinomial, randperm, poisson)
    always draw whole tensors. Not in MindSpore."""

    whole_results: bool = False
    """True: the results of a function beside a scalar loss are whole on every rank. False: they keep their layout,
    which sends nothing; under a launcher they are DTensors that mix with plain tensors, and all ranks gather them at
    the first use. The results of a function without a loss are whole, unless out_strategy splits them. Not in
    MindSpore."""

    on_unknown_op: Fallback = Field(default=Fallback.WARN, strict=False)
    """Whether an operator without a rule runs replicated with a warning, or is an error. Not in MindSpore."""

    device_profile: str | None = Field(
        default=None, description="None, the name of a preset such as 'h100', or the path of a profile's JSON file"
    )
    """The device and network for which plans are priced (None: by the device type). A path must hold a profile when the
    option is set, so that a wrong path fails at its own line. Not in MindSpore."""

    @field_validator("device_profile")
    @classmethod
    def _profile_loads(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                profile_of(value)
        except StrategyError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("compare_replicas", mode="before")
    @classmethod
    def _is_a_count(cls, value: object) -> object:
        if not isinstance(value, int) or (not isinstance(value, bool) and value < 1):
            raise ValueError  # pydantic would report two errors for a union
        return value

    @property
    def look_every(self) -> int | None:
        """The number of calls after which everything that ranks hold alike is compared; 0: never all of it; None: no
        comparison."""
        every = self.compare_replicas
        return every if not isinstance(every, bool) else 0 if every else None

    @property
    def mode_was_set(self) -> bool:
        """Whether the user chose the parallel mode: an explicit stand_alone means one device, no choice means auto."""
        return "parallel_mode" in self.model_fields_set

    @property
    def device_num_was_set(self) -> bool:
        """Whether the user set the number of devices."""
        return "device_num" in self.model_fields_set

    @property
    def dataset_was_set(self) -> bool:
        """Whether the user set the dataset_strategy."""
        return bool({"dataset_strategy", "full_batch"} & self.model_fields_set)

    @property
    def gives_parts(self) -> bool:
        """Whether each process is given its own part of some input."""
        return self.dataset_strategy != DatasetMode.FULL_BATCH

    @property
    def fusion_policies(self) -> FusionPolicies:
        """The fusion policies, by comm_fusion and all_reduce_fusion_config together."""
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
        dataset = self._dataset
        object.__setattr__(self, "dataset_strategy", dataset)
        object.__setattr__(self, "full_batch", dataset == DatasetMode.FULL_BATCH)
        return self

    @property
    def _dataset(self) -> DatasetMode | tuple[tuple[int, ...], ...]:
        """The dataset_strategy in force."""
        if "dataset_strategy" in self.model_fields_set:
            return self.dataset_strategy
        whole = self.parallel_mode != ParallelMode.DATA_PARALLEL
        if "full_batch" in self.model_fields_set:
            whole = self.full_batch
        return DatasetMode.FULL_BATCH if whole else DatasetMode.DATA_PARALLEL

    def _contradictions(self) -> Iterator[str]:
        dataset, mode = self._dataset, self.parallel_mode
        both = {"full_batch", "dataset_strategy"} <= self.model_fields_set
        if both and self.full_batch != (dataset == DatasetMode.FULL_BATCH):
            yield (
                f"full_batch={self.full_batch} contradicts dataset_strategy={dataset!r}; "
                "full_batch=True is short for dataset_strategy='full_batch', so change one of them"
            )
        if mode == ParallelMode.DATA_PARALLEL and not isinstance(dataset, DatasetMode):
            yield (
                f"dataset_strategy={dataset!r} with parallel_mode={mode!r}, which splits every input along its first "
                "dim; write 'data_parallel' or 'full_batch', or set parallel_mode='semi_auto_parallel' or "
                "'auto_parallel'"
            )
        alone = self.mode_was_set and mode == ParallelMode.STAND_ALONE
        if alone and self.dataset_was_set and dataset != DatasetMode.DATA_PARALLEL:
            yield (
                f"dataset_strategy={dataset!r} with parallel_mode={mode!r}, in which nothing is split; "
                "set another parallel_mode"
            )
        named = self.comm_fusion.allreduce if "allreduce" in self.comm_fusion.model_fields_set else None
        if self.all_reduce_fusion_config and named not in (None, self._allreduce):
            yield (
                'all_reduce_fusion_config and comm_fusion["allreduce"] both say how to group AllReduces; '
                "set one of them to None"
            )
