"""How weights arrive: a process group of our own, buckets into buffers, tensors as views of them.

    gloo.py      the Gloo process group of a group epoch, outside torch's default group
    receiver.py  takes the buckets of one update into reusable buffers and checksums them
    manifest.py  does an announced update fit the model; tensors as views of received buckets

Nothing here touches a model: an engine installs what a receiver holds.
"""
