"""What the driver's tool says of GPUs; a script stands for it."""

import fake_nvidia_smi
import pytest

from quartet_common.gpus import GIB, GpuError, read_gpus


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("1, 0", [1, 0]), ("GPU-1a", [1])],
)
def test_the_gpus_that_may_be_used(tmp_path, monkeypatch, visible, indices):
    fake_nvidia_smi.install(tmp_path, monkeypatch)
    gpus = read_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in gpus] == indices
    for gpu in gpus:
        assert (gpu.name, gpu.driver, gpu.memory, gpu.free) == ("NVIDIA H100", "580.95.05", 80 * GIB, 79 * GIB)


@pytest.mark.parametrize(
    ("says", "visible", "words"),
    [
        ("", "2", "CUDA_VISIBLE_DEVICES: got '2'; allowed: 0, 1, or UUIDs"),
        ("", "MIG-x", "CUDA_VISIBLE_DEVICES: got 'MIG-x'"),
        ("0, GPU-a, NVIDIA GB10, [N/A], [N/A], 580.95.05", "0", "nvidia-smi: got '0, GPU-a, NVIDIA GB10, "),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path, monkeypatch, says, visible, words):
    fake_nvidia_smi.install(tmp_path, monkeypatch, says=says)
    with pytest.raises(GpuError) as error:
        read_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert str(error.value).startswith(words)
