"""The tensor codec: exact, without copies, and strict about what comes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.tensors import Dtype, decode, decode_ragged, dtype_of, encode, encode_ragged
from quartet_common.weights import ALIGNMENT, check_manifest, plan_buckets

DTYPES = [np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64]


@settings(deadline=None)
@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    )
)
def test_every_array_comes_back_bit_for_bit(array):
    back = decode(tensor_pb2.Tensor.FromString(encode(array).SerializeToString()))
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=5))
def test_ragged_rows_come_back(rows):
    message = encode_ragged([np.array(row, dtype=np.int32) for row in rows], Dtype.DTYPE_INT32)
    assert [row.tolist() for row in decode_ragged(message)] == rows
    assert len(message.data) == 4 * sum(map(len, rows))


def test_bfloat16_travels_as_its_bits():
    bits = np.array([0x3F80, 0xC000], dtype=np.uint16)  # 1.0, -2.0
    message = encode(bits, Dtype.DTYPE_BFLOAT16)
    assert dtype_of(message) == "bfloat16" and message.data == b"\x80\x3f\x00\xc0"
    assert decode(message).tolist() == bits.tolist()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (tensor_pb2.Tensor(dtype=Dtype.DTYPE_INT32, shape=[2], data=b"1234"), "needs 8 bytes; got 4"),
        (tensor_pb2.Tensor(dtype=Dtype.DTYPE_INT32, shape=[-1], data=b""), "negative dimension"),
        (tensor_pb2.Tensor(shape=[1], data=b"1"), "dtype 0"),
        (tensor_pb2.RaggedTensor(dtype=Dtype.DTYPE_INT32, lengths=[1, 2], data=b"1234"), "needs? 12 bytes"),
    ],
)
def test_a_message_that_does_not_fit_is_refused(message, said):
    with pytest.raises(ValueError, match=said):
        (decode if isinstance(message, tensor_pb2.Tensor) else decode_ragged)(message)


def test_rows_of_another_dtype_are_not_encoded():
    with pytest.raises(TypeError, match="row 0 is float32"):
        encode_ragged([np.zeros(2, dtype=np.float32)], Dtype.DTYPE_INT32)


def test_buckets_are_filled_in_order_and_aligned():
    specs = [("a", Dtype.DTYPE_FLOAT32, (3,)), ("b", Dtype.DTYPE_BFLOAT16, (5,)), ("c", Dtype.DTYPE_FLOAT32, (100,))]
    manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, specs, bucket_bytes=64)
    assert [(t.name, t.bucket, t.offset) for t in manifest.tensors] == [("a", 0, 0), ("b", 0, 16), ("c", 1, 0)]
    assert list(manifest.bucket_bytes) == [32, 400]
    assert all(t.offset % ALIGNMENT == 0 for t in manifest.tensors)
    check_manifest(manifest)


def test_a_manifest_that_contradicts_itself_names_the_tensor():
    manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, [("a", Dtype.DTYPE_FLOAT32, (4,))], 64)
    manifest.tensors[0].offset = 16
    with pytest.raises(ValueError, match="tensor 'a'"):
        check_manifest(manifest)
