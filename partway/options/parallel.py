"""The options of the parallel context. A field's `description` says what it accepts, where its type does not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.options.base import FrozenOptions
from partway.options.fields import (
    AUTO,
    FUSION_OPTION,
    DatasetMode,
    DatasetStrategy,
    ParallelMode,
    Positions,
    as_option,
    fusion_of,
)
from partway.propagation.cost.profile import profile_of
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.problem.problem import Fallback
from partway.propagation.search.search import SearchMode
from partway.runtime.code.loaded import Backend
from partway.strategy.errors import StrategyError


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
    """Who chooses strategies. stand_alone: nobody; all runs on one device, as if `shard` were not there. data_parallel:
    the batch is split and nothing else. semi_auto_parallel: annotations are followed, and what has none splits the
    batch. auto_parallel: the search chooses all that is not annotated. If this was never set, `shard` acts as in
    auto_parallel, so that a script with one annotation runs split; in the reference it is ignored. `hybrid_parallel` is
    left out: it is neither checked nor planned there."""

    search_mode: SearchMode = Field(default=SearchMode.DYNAMIC_PROGRAMMING, strict=False)
    """How strategies are searched for. dynamic_programming: the cheapest plan there is, as in the reference up to 2.0
    (2.7: recursive_programming), because here it is exact and still fast. sharding_propagation: annotations spread to
    their neighbours. recursive_programming: the devices are halved again and again."""

    device_num: int = Field(default=1, ge=1, le=16384, description="an int from 1 to 16384")
    """How many devices are simulated; under a launcher there are as many as processes, so that one script serves both.
    The reference says 4096 but takes more, and wants 1, 2, 4 or a multiple of 8; here any number will do."""

    dataset_strategy: DatasetStrategy = DatasetMode.FULL_BATCH
    """What each process is given of every input. full_batch: all of it, and the plan takes the parts. data_parallel:
    its own part, as a DistributedSampler reads it: that which `in_strategy` gives its rank, or without one an equal
    part along the first dim. Split counts for each input, as in ((1, 1, 1, 8), (1,)): one of so many parts; an input of
    smaller rank may have a smaller split count, where the reference wants them equal. Where it is unset, it is
    data_parallel in parallel_mode data_parallel, as in the reference, and full_batch in other modes. In one process
    that stands for all devices inputs are whole in any case."""

    full_batch: bool = True
    """Short for `dataset_strategy="full_batch"`, and False for "data_parallel": both read the same."""

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

    all_reduce_fusion_config: Positions = Field(default=None, description="None or a list such as [20, 35]")
    """Short for comm_fusion={"allreduce": {"mode": "index", "config": ...}}. The reference's code counts [20, 35] as
    21, 15, the rest; its documents as 20, 15, the rest, and so do we."""

    comm_fusion: CommFusion = Field(
        default=CommFusion(), description="a dict with the keys openstate, allreduce, allgather and reducescatter"
    )
    """Collectives are grouped unless {"openstate": False} turns it off, or None one kind: {"allreduce": None}. It is
    shown with the defaults of what was not named, and with what `all_reduce_fusion_config` says of allreduce."""

    strategy_ckpt_config: StrategyCkptConfig = Field(
        default=StrategyCkptConfig(), description="a dict with the keys load_file, save_file and only_trainable_params"
    )
    """Where plans are loaded from and saved to. A load_file must exist when it is set, so that a wrong path is an error
    at its own line."""

    enable_parallel_optimizer: bool = False
    """True: parameters, their gradients and the states of the optimizer are split over the devices that would hold
    copies (ZeRO, FSDP), as `parallel_optimizer_config` says."""

    parallel_optimizer_config: ParallelOptimizerConfig = Field(
        default=ParallelOptimizerConfig(), description="a dict with the key parallel_optimizer_threshold"
    )
    """Parameters of less than parallel_optimizer_threshold KB stay whole."""

    reshard_after_forward: bool | None = Field(default=None, description="None, True or False")
    """Ours, with FSDP2's name. True: weights that are split at rest and gathered for the forward are freed after it,
    and gathered again in the backward, which takes less memory and sends more. False: they are kept. None: they are
    kept unless `memory_limit` leaves no room for them."""

    enable_compile_cache: bool = True
    """True: captures, plans and compiled steps are kept on disk by content, so that a second start makes none anew.
    The reference has this option in set_context."""

    compile_cache_path: str = Field(default="", description="a folder, or '' for PARTWAY_CACHE_DIR or ~/.cache/partway")
    """Not used unless it is this user's alone (mode 0700). Entries take PARTWAY_CACHE_MB megabytes at most, or 1000."""

    backend: Backend = Field(default=Backend.EAGER, strict=False)
    """Ours: "eager" runs a step's operators one after another as PyTorch has them; "inductor" has TorchInductor compile
    each stretch between two collectives, which the first call of a signature waits for."""

    compare_replicas: bool | int = Field(default=True, description="True, False, or an int of 1 or more")
    """Ours: whether ranks that hold the same part of a parameter, a buffer, a gradient or an optimizer's state compare
    it while they train, and their optimizers' settings. True: a few elements of some in turn, at each call and each
    step, on CPUs. An int: besides, all elements of all at every so many calls and steps, on any device. False: not at
    all. Unless it is False, `save` and `save_pretrained` compare all of them, and refuse what differs."""

    random_numbers: RandomNumbers = Field(default=RandomNumbers.COUNTER, strict=False)
    """Ours: what dropout and other random operators draw, for the seed of torch.manual_seed. "counter": each number is
    a function of the seed, the operator and the global index of its element, so that it is the same on any layout and
    any number of devices, and a rank draws its part alone. "torch": the numbers of the plain model, which every rank
    draws whole. "rank": each rank draws its part from a stream of its own, with PyTorch's generator; the numbers depend
    on the layout, but where a tensor is whole they are the same on all ranks. What no index tells (multinomial,
    randperm, poisson) is drawn whole with each of them."""

    whole_results: bool = False
    """Ours: True: what a function returns beside a scalar loss is whole on every rank. False: it stays as it lies,
    which sends nothing; under a launcher it is a DTensor that mixes with plain tensors, and is gathered when it is
    first used, by all ranks. What a function without a loss returns is whole, unless out_strategy says otherwise."""

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
