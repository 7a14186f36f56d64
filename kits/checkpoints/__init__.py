"""Checkpoints: what training has come to, on disk, and from there into any mesh, any number of processes, one device.

In come a model, an optimizer and what else a script keeps; out goes a folder that appears as a whole or not at all:

    model.safetensors, or model-00001-of-00004.safetensors, ... with their index     weights, as Hugging Face has them
    optimizer.safetensors                                                            what an optimizer keeps of each
    state.pt         all that is no tensor of these; state-00001.pt: what rank 1 has else
    parts-00000.json     which parts each process wrote, with checksums
    partway.json         what there is: written last

    tensor_files.py     whole tensors in safetensors files, written and read by parts
    contents.py         what a model and an optimizer have to keep, by name
    folder.py           numbers of checkpoints, the last good one, the last N
    ranks.py            what the processes tell each other meanwhile
    saving.py, loading.py     `save` and `load`
"""
