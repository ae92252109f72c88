"""How weights arrive: by a transport, in buckets, into buffers; tensors are views of them.

    transports.py  Gloo, NCCL, safetensors files, and transports that other packages bring
    receiver.py    a member of the weight group: takes an update's buckets into reusable buffers and checksums them
    spec.py        names and shapes of a model: does an announced update fit it
    lora.py        a LoRA adapter that arrived, as full weights: base + B A alpha / r

Nothing here touches a model: an engine installs what a receiver holds.
"""
