"""Reads the contract's tensors as numpy views of their bytes."""

from __future__ import annotations

import numpy as np
from quartet.v1 import tensor_pb2

_NUMPY: dict[int, np.dtype] = {
    tensor_pb2.DTYPE_UINT8: np.dtype(np.uint8),
    tensor_pb2.DTYPE_INT32: np.dtype(np.int32),
    tensor_pb2.DTYPE_INT64: np.dtype(np.int64),
    tensor_pb2.DTYPE_FLOAT32: np.dtype(np.float32),
}


class ExperienceError(ValueError):
    """A group violates the contract; the message is one sentence that names the field and what was expected."""


def one_dimension(message: tensor_pb2.Tensor, dtype: int, where: str) -> np.ndarray:
    """Decode a one-dimensional tensor. Raises ExperienceError."""
    values = view(message.dtype, message.data, dtype, where)
    if list(message.shape) != [values.size]:
        raise ExperienceError(
            f"{where} has shape {list(message.shape)} and {values.size} elements; it has one dimension"
        )
    return values


def all_rows(
    message: tensor_pb2.RaggedTensor, dtype: int, lengths: np.ndarray, where: str, of: str = "completion_token_ids"
) -> np.ndarray:
    """Decode the concatenated rows of a ragged tensor, which must have the lengths of `of`. Raises ExperienceError."""
    values, own = rows(message, dtype, where)
    if not np.array_equal(own, lengths):
        raise ExperienceError(f"{where} has other row lengths than {of}")
    return values


def rows(message: tensor_pb2.RaggedTensor, dtype: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Decode a ragged tensor into its concatenated rows and their lengths, int64. Raises ExperienceError."""
    values = view(message.dtype, message.data, dtype, where)
    lengths = np.array(message.lengths, dtype=np.int64)
    if (lengths < 0).any():
        raise ExperienceError(f"{where} has a row of {lengths.min()} elements")
    if lengths.sum() != values.size:
        raise ExperienceError(f"{where} has {values.size} elements in rows of {lengths.sum()}")
    return values, lengths


def view(given: int, data: bytes, dtype: int, where: str) -> np.ndarray:
    """View bytes of dtype `given` as elements of `dtype`. Raises ExperienceError if they differ."""
    if given != dtype:
        raise ExperienceError(f"{where} is {_name(given)}; the contract says {_name(dtype)}")
    if len(data) % _NUMPY[dtype].itemsize:
        raise ExperienceError(f"{where} has {len(data)} bytes, not whole elements of {_name(dtype)}")
    return np.frombuffer(data, dtype=_NUMPY[dtype])


def _name(dtype: int) -> str:
    return (
        tensor_pb2.Dtype.Name(dtype).removeprefix("DTYPE_").lower()
        if dtype in tensor_pb2.Dtype.values()
        else str(dtype)
    )


def must_be_finite(values: np.ndarray, where: str) -> None:
    """Raise ExperienceError if they are not."""
    if not np.isfinite(values).all():
        raise ExperienceError(f"{where} has values that are not finite")
