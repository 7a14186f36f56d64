"""Checkpoints: the state of a training on disk, which loads on any mesh, any number of processes, or one device.

The input is a model, an optimizer and further values of a script; the output is a folder that appears as a whole or not
at all:

    model.safetensors, or model-00001-of-00004.safetensors, ... with their index     weights, in Hugging Face's format
    optimizer.safetensors                                                            the optimizer's states
    state.pt         all other values; state-00001.pt: the differing values of rank 1
    parts-00000.json     the parts that each process wrote, with checksums
    partway.json         the manifest, written last

    tensor_files.py     whole tensors in safetensors files, written and read by parts
    contents.py         the tensors and values of a model and an optimizer, by name
    folder.py           numbers of checkpoints, the last good one, the last N
    ranks.py            messages between the processes meanwhile
    saving.py, loading.py     `save` and `load`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.checkpoints import folder, saving
    from partway.checkpoints.contents import (
        MODEL,
        OPTIMIZER,
        STATE,
        Content,
        KeptTensor,
        keep_whole,
        named_tensors,
        packed,
        random_states,
        set_random_state,
        unpacked,
    )
    from partway.checkpoints.tensor_files import arrange
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "contents": """MODEL OPTIMIZER STATE Content KeptTensor keep_whole named_tensors packed random_states
                set_random_state unpacked""",
            "folder": "",
            "saving": "",
            "tensor_files": "arrange",
        },
    )

__all__ = [
    "MODEL",
    "OPTIMIZER",
    "STATE",
    "Content",
    "KeptTensor",
    "arrange",
    "folder",
    "keep_whole",
    "named_tensors",
    "packed",
    "random_states",
    "saving",
    "set_random_state",
    "unpacked",
]
