"""Whatever is wrong with a run's input is one sentence and exit status 2, and nothing is left running."""

import socket

import fake_nvidia_smi
import pytest
from launched import free_ports, preloaded_checkout

pytestmark = pytest.mark.timeout(300)


def refused(launched) -> str:
    """Return the one sentence it ended with, leaving nothing behind."""
    (sentence,) = refusals(launched)
    return sentence


def refusals(launched) -> list[str]:
    """Return the sentences it ended with, leaving nothing behind."""
    assert launched.wait(90) == 2, launched.text()
    text = launched.text()
    assert "Traceback" not in text
    launched.assert_gone(within=2.0)
    return [line for line in text.splitlines() if not line.startswith("checking")]


def test_one_gpu_for_a_rollout_and_the_trainer(launch, run_file, pythons, tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, count=1)
    by_hand = preloaded_checkout(tmp_path / "by-hand", pythons, by_hand=True)
    sentence = refused(launch(run_file, "--set", "trainer.ranks=2", checkout=by_hand))
    assert sentence.endswith("3 in all; allowed: at most 1: GPU 0 (NVIDIA H100, 79.0 of 80.0 GiB free)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sentence = refused(launch(run_file, checkout=by_hand))
    assert sentence == "quartet: CUDA_VISIBLE_DEVICES: got '1'; allowed: 0, or UUIDs as `nvidia-smi -L` lists them"


def test_environments_of_two_kinds(launch, run_file, pythons, tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch)
    mixed = preloaded_checkout(tmp_path / "mixed", pythons, by_hand=True)
    (mixed / ".quartet" / "envs" / "trainer" / "quartet-stamp.json").write_text("{}")
    sentence = refused(launch(run_file, checkout=mixed))
    assert "the rollout's environment is made for the gpu, the trainer's for the cpu; make both alike:" in sentence


def test_ports_that_are_taken_and_a_redis_of_the_users_that_does_not_answer(launch, run_file):
    (nowhere,) = free_ports(1)
    settings = [f"broker.redis_url=redis://127.0.0.1:{nowhere}/0"]
    expected = {"redis_url": nowhere}
    with socket.socket() as one, socket.socket() as other:
        for service, taken in (("broker", one), ("trainer", other)):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            expected[f"addresses.{service}"] = taken.getsockname()[1]
            settings.append(f"addresses.{service}=127.0.0.1:{taken.getsockname()[1]}")
        sentences = refusals(launch(run_file, *(word for setting in settings for word in ("--set", setting))))
    assert len(sentences) == len(expected), sentences
    for (key, port), sentence in zip(expected.items(), sentences, strict=True):
        assert key in sentence and str(port) in sentence
