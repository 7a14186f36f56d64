"""The class of a sharded module: a subclass of the same name whose forward its engine runs."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from partway.compiler.planning_lock import begin_call, calls
from partway.engine.engine import attached_engine, is_transformed_call, stands_alone, uncompiled
from partway.engine.materialize import Init
from partway.options.context import current
from partway.propagation.capture.hooks import rest_outside
from partway.propagation.graph.structure import name_of
from partway.propagation.plan.plan import Plan
from partway.propagation.program.program import Program
from partway.propagation.torch_internals import COMPILED_CALL, compiled_call_of, forward_pre_hooks_in
from partway.requests.request import set_engine
from partway.runtime.launching.process import get_rank, launched
from partway.strategy import RuntimeStateError
from partway.strategy.basics.blocks import afterwards
from partway.strategy.basics.kits import Door

_log = logging.getLogger("partway")


class ShardedModule:
    """The methods that `shard` adds to the class of a module. `plan` and `program` are those of its last call, or of
    the call given to `materialize` or `prepare`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy a module with the arguments of its `shard`; the copy makes its own plans."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        if args[:1] != (type(self),):
            raise RuntimeStateError(
                f"{type(self).__name__} is pickled and copied by a __reduce__ of its own, which does not know shard; "
                "keep its state_dict(), or copy it before shard"
            )
        return _remade, (make, attached_engine(self).kind, *args[1:]), *rest

    def __copy__(self) -> Any:
        make, args, state, *_ = self.__reduce_ex__(4)
        copied = make(*args)
        copied.__dict__.update(state)
        set_engine(copied, attached_engine(self).renewed(copied))
        return copied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Delay the reduction of gradients: calls inside the block leave those of parameters unreduced, and the next
        backward of a call outside of it reduces their sum with its own, in the collectives of one step.

            with model.no_sync():
                for batch in batches[:-1]:
                    model(batch).backward()
            model(batches[-1]).backward()

        As in DistributedDataParallel, the call has to be inside the block, and `.grad` is right only after the last
        backward: until then it is zero for delayed gradients. Gradients that need no reduction arrive at once.

        Delayed gradients wait until they are reduced, also after an exception; dropping gradients (zero_grad, or
        `.grad = None`) drops them too. A step of the optimizer before the last backward does not see them.
        """
        waiting, block = [engine.waiting for engine in attached_engine(self).engines()], object()

        def leave() -> None:
            for w in waiting:
                w.blocks.discard(block)

        with afterwards(leave):
            for w in waiting:
                w.blocks.add(block)
            yield

    def materialize(
        self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, init: Init | None = None
    ) -> None:
        """Give parameters and buffers on the meta device memory and values: each rank its part, with the same numbers
        as on one device, whatever the layout. So a model can be larger than a device:

            with torch.device("meta"):
                model = Model()
            pw.shard(model, ...)
            model.materialize((x,))

        The call of `args` and `kwargs` is planned (not run); it decides the layouts and the device of parameters. Each
        module is initialised by `init(module)`, inner ones first as in Module.apply; by default by the model's
        `_init_weights` (transformers), else by its own `reset_parameters`. Random numbers follow torch.manual_seed, by
        the option random_numbers.

        Raises RuntimeStateError if no initialiser writes a tensor, and the errors of a first call.
        """
        attached_engine(self).materialize(tuple(args), dict(kwargs or {}), init)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan the call `self(*args, **kwargs)` and make its program, without running it: the first such call then only
        runs. A server prepares its calls before it takes requests:

            with torch.inference_mode():
                model.prepare(torch.zeros(8, 512, dtype=torch.long))

        Shapes, dtypes, devices and the surrounding modes matter, values only if the function asks for them. Under a
        launcher every rank calls it, and parameters are laid out. Returns the plan. Raises the errors of a first call,
        and StrategyError in stand_alone mode, which has no plan.
        """
        return attached_engine(self).prepare(args, kwargs)

    def infer_predict_layout(self, *predict_data: Any) -> dict[str, Any]:
        """The layout of each weight in a plan for inference on `predict_data`: see `partway.infer_predict_layout`."""
        layouts: dict[str, Any] = Door.PREDICT_LAYOUT(self, *predict_data)  # WeightLayouts
        return layouts

    @property
    def plan(self) -> Plan:
        """The plan of the last call."""
        return attached_engine(self).latest().plan

    @property
    def program(self) -> Program:
        """The program of the last call."""
        return attached_engine(self).latest().program


@functools.lru_cache(maxsize=4096)
def sharded_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of `cls` and ShardedModule with the same name, whose forward, of the same signature, runs sharded."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # as in model.forward = torch.compile(model.forward)
            return uncompiled(functools.partial(forward, self), args, kwargs)
        return attached_engine(self).call(args, kwargs, functools.partial(cls.forward, self))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return uncompiled(self, args, kwargs)
        thread = get_ident()
        outer = calls.get(thread, 0)
        try:
            if compiled_call_of(self) is not None and not stands_alone(current()):
                _set_compilation_aside(self)
            begin_call(thread, outer)  # before nn.Module.__call__, which a tracer replaces while another thread plans
            if hooks := forward_pre_hooks_in(self):
                rest_outside(hooks, not (stands_alone(current()) or is_transformed_call(self, args, kwargs)))
            return cls.__call__(self, *args, **kwargs)
        finally:
            calls[thread] = outer

    kind: Any = type(cls)
    made = False

    class Kind(kind):  # type: ignore[misc]
        """Attributes that code sets on `type(self)` are set on the user's class, for all its instances."""

        def __setattr__(self, name: str, value: Any) -> None:
            if made:
                setattr(cls, name, value)
            else:  # while this class is made
                super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            delattr(cls, name)

    body = {"forward": forward, "__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if callable(getattr(cls, "save_pretrained", None)):
        body["save_pretrained"] = _saves_pretrained(cls)
    new: Any = Kind(cls.__name__, (ShardedModule, cls), body)
    sharded: type[torch.nn.Module] = new
    made = True
    return sharded


def _set_compilation_aside(module: torch.nn.Module) -> None:
    """Undo `module.compile()`, whose code would replace a sharded call."""
    vars(module).pop(COMPILED_CALL)
    if get_rank():
        return
    _log.warning(
        "%s.compile() is set aside: the plan of a sharded module is what runs. To compile what each rank runs, write "
        "set_auto_parallel_context(backend='inductor')",
        name_of(module),
    )


def _saves_pretrained(cls: Any) -> Callable[..., Any]:
    """The `save_pretrained` of a Hugging Face model or adapter; under a launcher every rank calls it."""
    names = list(inspect.signature(cls.save_pretrained).parameters)[2:]

    @functools.wraps(cls.save_pretrained)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(names, args, strict=False)) | kwargs
        if not launched():
            return cls.save_pretrained(self, save_directory, **options)
        if any(base.__name__ == "PeftModel" for base in cls.__mro__):
            return Door.SAVE_ADAPTER(self, save_directory, **options)
        save = functools.partial(cls.save_pretrained, self)
        return Door.SAVE_PRETRAINED(self, save, save_directory, options)

    return save_pretrained


def _remade(make: Callable[..., Any], kind: Any, *args: Any) -> Any:
    """An empty sharded module of the class `kind`, into which unpickling puts its state."""
    return make(sharded_class(kind), *args)
