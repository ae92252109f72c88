"""The tensor codec: arrays as raw little-endian bytes with dtype and shape, decoded without a copy.

numpy has no bfloat16: its bit patterns are encoded from and decoded to uint16 arrays, which `dtype_of` distinguishes.
torch users read the message's bytes with ``torch.frombuffer`` instead.
"""

import math
import sys
from collections.abc import Sequence

import numpy as np
from quartet.v1 import tensor_pb2

if sys.byteorder != "little":
    raise ImportError("Quartet's tensor codec needs a little-endian machine")

Dtype = tensor_pb2.Dtype

_NUMPY_OF: dict[int, np.dtype] = {
    Dtype.DTYPE_UINT8: np.dtype(np.uint8),
    Dtype.DTYPE_INT8: np.dtype(np.int8),
    Dtype.DTYPE_INT32: np.dtype(np.int32),
    Dtype.DTYPE_INT64: np.dtype(np.int64),
    Dtype.DTYPE_FLOAT16: np.dtype(np.float16),
    Dtype.DTYPE_BFLOAT16: np.dtype(np.uint16),
    Dtype.DTYPE_FLOAT32: np.dtype(np.float32),
    Dtype.DTYPE_FLOAT64: np.dtype(np.float64),
}
_DTYPE_OF = {array_dtype: dtype for dtype, array_dtype in _NUMPY_OF.items() if dtype != Dtype.DTYPE_BFLOAT16}


def item_size(dtype: int) -> int:
    """Return the bytes of one element. Raises ValueError for a dtype the contract does not have."""
    return _numpy_of(dtype).itemsize


def dtype_of(message: tensor_pb2.Tensor | tensor_pb2.RaggedTensor) -> str:
    """Return the element type by its common name, e.g. "float32" or "bfloat16"."""
    return Dtype.Name(message.dtype).removeprefix("DTYPE_").lower()


def encode(array: np.ndarray, dtype: int | None = None) -> tensor_pb2.Tensor:
    """Return `array` as a Tensor, row-major.

    Args:
        array: any shape; a scalar becomes shape ().
        dtype: the wire dtype; by default the array's own. DTYPE_BFLOAT16 takes a uint16 array of bit patterns.

    Raises:
        TypeError: the array's dtype has no wire form, or does not fit `dtype`.
    """
    wire = _wire_dtype(array.dtype, dtype)
    contiguous = np.ascontiguousarray(array)
    return tensor_pb2.Tensor(dtype=wire, shape=array.shape, data=contiguous.tobytes())


def decode(message: tensor_pb2.Tensor) -> np.ndarray:
    """Return a read-only view of the message's bytes in its shape.

    Raises:
        ValueError: the dtype is unknown, a dimension is negative, or the bytes do not fit the shape.
    """
    dtype = _numpy_of(message.dtype)
    shape = tuple(message.shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(message.data):
        raise ValueError(f"shape {shape} of {dtype_of(message)} needs {expected} bytes; got {len(message.data)}")
    return np.frombuffer(message.data, dtype=dtype).reshape(shape)


def encode_ragged(rows: Sequence[np.ndarray], dtype: int) -> tensor_pb2.RaggedTensor:
    """Return one-dimensional rows as a RaggedTensor, converted to `dtype` if numpy's "same_kind" rule allows it.

    Raises:
        TypeError: a row is not one-dimensional, or its dtype cannot be converted safely.
    """
    target = _numpy_of(dtype)
    arrays = [np.asarray(row) for row in rows]
    for index, array in enumerate(arrays):
        if array.ndim != 1:
            raise TypeError(f"row {index} has {array.ndim} dimensions; a ragged tensor's rows have one")
        if array.size and not np.can_cast(array.dtype, target, casting="same_kind"):
            raise TypeError(f"row {index} is {array.dtype}; it does not fit {Dtype.Name(dtype)}")
    data = b"".join(np.ascontiguousarray(array, dtype=target).tobytes() for array in arrays)
    return tensor_pb2.RaggedTensor(dtype=dtype, lengths=[array.size for array in arrays], data=data)


def decode_ragged(message: tensor_pb2.RaggedTensor) -> list[np.ndarray]:
    """Return the rows as read-only views of the message's bytes.

    Raises:
        ValueError: the dtype is unknown, a length is negative, or the bytes do not fit the lengths.
    """
    dtype = _numpy_of(message.dtype)
    lengths = list(message.lengths)
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths {lengths} have a negative element")
    expected = sum(lengths) * dtype.itemsize
    if expected != len(message.data):
        raise ValueError(f"lengths of {sum(lengths)} elements need {expected} bytes; got {len(message.data)}")
    flat = np.frombuffer(message.data, dtype=dtype)
    ends = np.cumsum(lengths)
    return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _numpy_of(dtype: int) -> np.dtype:
    try:
        return _NUMPY_OF[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype} is not one of {sorted(Dtype.Name(known) for known in _NUMPY_OF)}") from None


def _wire_dtype(array_dtype: np.dtype, dtype: int | None) -> int:
    if dtype is None:
        if array_dtype == np.bool_:
            return Dtype.DTYPE_UINT8
        if array_dtype not in _DTYPE_OF:
            raise TypeError(f"numpy dtype {array_dtype} has no wire form")
        return _DTYPE_OF[array_dtype]
    if _numpy_of(dtype) != array_dtype:
        raise TypeError(f"a {Dtype.Name(dtype)} tensor is made from {_numpy_of(dtype)}; got {array_dtype}")
    return dtype
