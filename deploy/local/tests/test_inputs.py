"""Whatever is wrong with a run's input is one sentence and exit status 2, and nothing is left running."""

import json
import socket

import fake_nvidia_smi
import pytest
from launched import free_ports, preloaded_checkout

pytestmark = pytest.mark.timeout(300)


def refused(launched) -> str:
    """Return the one sentence it ended with, leaving nothing behind."""
    sentence = last_sentence(launched)
    launched.assert_gone(within=2.0)
    return sentence


def last_sentence(launched) -> str:
    assert launched.wait(90) == 2, launched.text()
    text = launched.text()
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if not line.startswith(("checking", "redis ready"))]
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.grup_size=2", ["unknown key run.grup_size", "group_size"]),
        ("trainer.learning_rat=1", ["unknown key trainer.learning_rat", "learning_rate"]),
        ("model.path=/no/such/model", ["model.path", "/no/such/model"]),
    ],
)
def test_a_wrong_key_or_value_is_named(launch, run_file, setting, words):
    sentence = refused(launch(run_file, "--set", setting))
    assert all(word in sentence for word in words), sentence


def test_a_run_file_that_is_not_there_or_not_toml(launch, run_file, tmp_path):
    assert "missing.toml" in refused(launch(tmp_path / "missing.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text(run_file.read_text() + "\n[run\n")
    assert "broken.toml is not valid TOML" in refused(launch(broken))


def test_one_gpu_for_a_rollout_and_the_trainer(launch, run_file, pythons, tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, count=1)
    by_hand = preloaded_checkout(tmp_path / "by-hand", pythons)
    sentence = refused(launch(run_file, checkout=by_hand))
    assert sentence.startswith("quartet: launcher: GPU 0 (NVIDIA H100, 79.0 of 80.0 GiB free) is the only GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sentence = refused(launch(run_file, checkout=by_hand))
    assert sentence == "quartet: CUDA_VISIBLE_DEVICES: got '1'; allowed: 0, or UUIDs as `nvidia-smi -L` lists them"


def test_environments_of_two_kinds(launch, run_file, pythons, tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch)
    mixed = preloaded_checkout(tmp_path / "mixed", pythons)
    (mixed / ".quartet" / "envs" / "trainer" / "quartet-stamp.json").write_text("{}")
    sentence = refused(launch(run_file, checkout=mixed))
    assert "the rollout's environment is made for the gpu, the trainer's for the cpu; make both alike:" in sentence


def test_a_redis_of_the_users_that_does_not_answer(launch, run_file):
    (port,) = free_ports(1)
    sentence = refused(launch(run_file, "--set", f"broker.redis_url=redis://127.0.0.1:{port}/0"))
    assert "redis_url" in sentence and str(port) in sentence


@pytest.mark.parametrize("service", ["broker", "trainer"])
def test_a_port_that_is_taken(launch, run_file, service):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = refused(launch(run_file, "--set", f"addresses.{service}=127.0.0.1:{port}"))
    assert f"addresses.{service}" in sentence and str(port) in sentence


def test_a_prompt_longer_than_the_models_context_is_named_by_file_and_line(launch, run_file, tmp_path):
    data = tmp_path / "long.jsonl"
    lines = [{"prompt": "1+1=?", "gt_answer": "2"}, {"prompt": "1+" * 150 + "1=?", "gt_answer": "151"}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sentence = refused(launch(run_file, "--set", f"data.train={data}"))
    assert f"{data}, line 2: the prompt has 303 tokens" in sentence
    assert "at most 248, the model's context of 256 less run.sampling.max_new_tokens (8)" in sentence


def test_a_folder_in_which_another_launcher_is_at_work(launch, run_file):
    first = launch(run_file, "--set", "run.max_steps=1000000")
    first.wait_for_line("redis ready", 60)
    services = ("broker", "reward", "rollout", "trainer")
    addresses = [f"addresses.{name}=127.0.0.1:{port}" for name, port in zip(services, free_ports(4), strict=True)]
    second = launch(run_file, *(part for address in addresses for part in ("--set", address)))
    # (What is left in the folder is the first one's.)
    assert "another launcher" in last_sentence(second)
    first.signal(2)
    assert first.wait(60) == 130
