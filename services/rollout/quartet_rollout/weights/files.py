"""Weights from safetensors files in a folder that the trainer and this rollout both see.

There is nobody to meet: a file is there, whole, before it is announced. `docs/weights.md` has the layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError, safe_open

from quartet_common.weights import bucket_file
from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_rollout.weights.manifest import TORCH_DTYPES, view


class Files:
    """The file `Transport`."""

    device = torch.device("cpu")

    def __init__(self, info: WeightGroupInfo) -> None:
        """Nothing to meet."""

    def fill(
        self,
        manifest: rollout_pb2.WeightManifest,
        buckets: Sequence[torch.Tensor],
        path: str,
        timeout_seconds: float,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        """See `Transport.fill`; `path` is the version's folder."""
        if not path:
            raise WeightTransferError("the update was announced without the path of its files")
        deadline = time.monotonic() + timeout_seconds
        for index, tensors in groupby(manifest.tensors, key=lambda tensor: tensor.bucket):
            if time.monotonic() > deadline:
                raise WeightTransferError(f"the files in '{path}' were not read within {timeout_seconds:g} s")
            _read(Path(path) / bucket_file(manifest, index), buckets[index], tensors)
            arrived(buckets[index])

    def close(self) -> None:
        """Nothing to leave."""


def _read(path: Path, bucket: torch.Tensor, tensors: Iterable[rollout_pb2.WeightTensor]) -> None:
    """Fill a bucket from its file. Raises WeightTransferError."""
    bucket.zero_()  # Padding is part of the checksum.
    try:
        with safe_open(path, framework="pt") as file:
            for tensor in tensors:
                came = file.get_tensor(tensor.name)
                if came.dtype != TORCH_DTYPES[tensor.dtype] or list(came.shape) != list(tensor.shape):
                    raise WeightTransferError(
                        f"'{tensor.name}' in '{path}' is {came.dtype} {list(came.shape)}, not as announced"
                    )
                view(tensor, bucket).copy_(came)
    except (OSError, SafetensorError) as error:
        raise WeightTransferError(f"the weights in '{path}' cannot be read: {error}") from error
