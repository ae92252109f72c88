"""Receiving weights: a transport fills buffers with packed buckets; tensors are views of them.

    transports.py  Gloo, NCCL, safetensors files, and transports of other packages
    receiver.py    a member of the weight group: receives buckets into reusable buffers and checksums them; merges a
                   received LoRA adapter into the base weights: W0 + B A alpha / r
    spec.py        names and shapes of a model; checks an announced update against them

Nothing here changes a model: an engine installs the receiver's tensors.
"""
