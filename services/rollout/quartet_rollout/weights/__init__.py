"""How weights arrive: by a transport, in buckets, into buffers; tensors are views of them.

    transport.py    what a transport is on this side, and which there are
    process_group.py  the process group of a group epoch, over Gloo or NCCL
    files.py        safetensors files in a folder that the trainer sees too
    packaged.py     this end of a transport that another package brings
    receiver.py     takes the buckets of one update into reusable buffers and checksums them
    manifest.py     does an announced update fit the model; tensors as views of received buckets
    adapter.py      a LoRA adapter that arrived, as full weights: base + B A alpha / r

Nothing here touches a model: an engine installs what a receiver holds.
"""
