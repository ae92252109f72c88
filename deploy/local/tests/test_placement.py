"""The processes of a run on a machine, their addresses and GPUs, and the memory check."""

from pathlib import Path

import pytest
from launched import hollow_model

from quartet_common.config import ConfigError, load_config, split_address
from quartet_common.gpus import GIB, Gpu
from quartet_local.config import SERVICES, LauncherSection
from quartet_local.memory import MemoryKeys, check_memory, rank_bytes
from quartet_local.placement import place, unused

ALL, TRAINERLESS = SERVICES, SERVICES[:3]
TWO_EACH = "rollout.vllm.tensor_parallel_size=2"
SEVEN_BILLION = 7_615_616_512


def gpus(count: int, free: float = 79.0) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index}", "H100", 80 * GIB, int(free * GIB), "580.95.05") for index in range(count)]


def placed(count: int, *settings: str, kinds=ALL):
    return place(load_config("launcher", LauncherSection, None, settings), kinds, gpus(count), settings)


def test_rollouts_listen_at_ports_of_their_own_which_are_no_other_services_nor_its_metrics():
    services = placed(0, "launcher.rollouts=4", "rollout.advertise_address=public:7103")
    assert [service.name for service in services] == [
        "broker", "reward", "rollout", "rollout-2", "rollout-3", "rollout-4", "trainer",
    ]  # fmt: skip
    ports = [split_address(service.address)[1] for service in services]
    assert ports[:3] == [7101, 7102, 7103] and len({*ports, *(port + 100 for port in ports)}) == 14
    second = services[3]
    assert second.settings == [f"addresses.rollout={second.address}", "rollout.advertise_address="]


def test_further_rollouts_serve_their_endpoints_at_ports_of_their_own():
    services = placed(0, "launcher.rollouts=3", "rollout.http.address=127.0.0.1:7113", "rollout.http.url=http://a:7113")
    _, second, third = (service for service in services if service.kind == "rollout")
    endpoints = [service.settings[2] for service in (second, third)]
    ports = {int(one.rpartition(":")[2]) for one in endpoints}
    assert all(one.startswith("rollout.http.address=127.0.0.1:") for one in endpoints)
    own = {split_address(service.address)[1] for service in services}
    assert len(ports) == 2 and not ports & (own | {7113})
    assert second.settings[3] == "rollout.http.url="


def test_without_gpus_nothing_is_said_of_them_and_there_is_one_rollout():
    assert [(service.name, service.environment, service.settings) for service in placed(0)] == [
        (name, {}, []) for name in ALL
    ]


@pytest.mark.parametrize(
    ("count", "settings", "kinds", "rollouts", "trainer"),
    [
        (2, [], ALL, ["0"], "1"),
        (4, [], ALL, ["0", "1"], "2,3"),
        (4, [TWO_EACH], ALL, ["0,1"], "2,3"),
        (8, ["launcher.rollouts=1", TWO_EACH, "rollout.vllm.data_parallel_size=2"], ALL, ["0,1,2,3"], "4,5,6,7"),
        (8, [TWO_EACH, "rollout.engine=transformers"], ALL, ["0", "1", "2", "3"], "4,5,6,7"),
        (8, ["trainer.ranks=2", TWO_EACH], ALL, ["0,1", "2,3", "4,5"], "6,7"),
        (8, ["launcher.rollout_gpus=[7, 5]"], ALL, ["7", "5"], "0,1,2,3,4,6"),
        (8, ["launcher.trainer_gpus=[0, 1]", TWO_EACH], ALL, ["2,3", "4,5", "6,7"], "0,1"),
        (4, ["launcher.reward_gpus=[0]"], ALL, ["1"], "2,3"),
        (1, [], TRAINERLESS, ["0"], None),
        # Two hosts: the trainer with the others on one, rollouts alone on the other.
        (1, ["launcher.rollouts=0"], ALL, [], "0"),
        (4, [], ("rollout",), ["0", "1", "2", "3"], None),
    ],
)
def test_gpus_are_shared_out(count, settings, kinds, rollouts, trainer):
    services = placed(count, *settings, kinds=kinds)
    seen = [(service.kind, service.environment["CUDA_VISIBLE_DEVICES"]) for service in services]
    assert [own for kind, own in seen if kind == "rollout"] == rollouts
    assert dict(seen).get("trainer") == trainer
    assert dict(seen).get("reward", "") == ("0" if "launcher.reward_gpus=[0]" in settings else "")
    assert all(service.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for service in services)
    if trainer and not any(setting.startswith("trainer.ranks") for setting in settings):
        assert services[-1].settings == [f"trainer.ranks={len(trainer.split(','))}"]


def test_gpus_that_no_service_uses_are_named():
    settings = ["launcher.rollouts=1", "trainer.ranks=1"]
    assert unused(placed(2, *settings), gpus(2)) == unused(placed(0, *settings), []) == []
    assert unused(placed(4, *settings), gpus(4)) == [
        "launcher: no service uses the GPUs 2, 3, of 4: raise launcher.rollouts or trainer.ranks, or leave both out to "
        "use all"
    ]


ASLEEP = "trainer.weights.sleep_rollouts=true"


@pytest.mark.parametrize(
    ("settings", "rollout", "trainer"),
    [
        ([], ["rollout.vllm.gpu_memory_utilization=0.5", "rollout.vllm.sleep_mode=true"], [ASLEEP]),
        (["launcher.colocate=split"],
         ["rollout.vllm.gpu_memory_utilization=0.1", "rollout.vllm.kv_cache_gib=10"], []),
        (["rollout.engine=transformers"], [], [ASLEEP]),
    ],
)  # fmt: skip
def test_one_gpu_is_shared_in_turns_or_split(settings, rollout, trainer):
    services = {service.kind: service for service in placed(1, *settings)}
    assert services["rollout"].settings == rollout
    assert services["trainer"].settings == ["trainer.ranks=1", *trainer]
    assert {services[kind].environment["CUDA_VISIBLE_DEVICES"] for kind in ("rollout", "trainer")} == {"0"}
    assert services["broker"].environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (1, ["launcher.rollouts=2"], "launcher: got 2 × 1 GPUs for rollouts"),
        (1, ["trainer.ranks=2"], "2 for the trainer (trainer.ranks), 3 in all; allowed: at most 1: GPU 0 (H100"),
        (2, ["launcher.colocate=sleep"], "launcher.colocate: got 'sleep' with 1 GPUs for rollouts and 1 for"),
        (1, ["trainer.weights.transport=nccl"], "got 'nccl', which refuses two members on one GPU"),
        (0, ["launcher.colocate=sleep"], "with rollout.engine 'vllm', which cannot sleep on a CPU; allowed here: the"),
        (4, ["launcher.rollout_gpus=[4]"], "launcher.rollout_gpus: got 4; allowed: 0, 1, 2, 3"),
        (4, ["launcher.rollout_gpus=[1]", "launcher.trainer_gpus=[1]"], "trainer_gpus: got 1; allowed: 0, 2, 3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(count, settings, words):
    with pytest.raises(ConfigError) as error:
        placed(count, *settings)
    assert words in str(error.value)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hollow_model(tmp_path, SEVEN_BILLION)


def check(model: Path, free: float, *settings: str, count: int = 8) -> None:
    settings = (f"model.path={model}", *settings)
    config = load_config("launcher", LauncherSection, None, settings)
    check_memory(place(config, ALL, gpus(count, free), settings), config, settings)


ZERO = ("trainer.plugin=low_level_zero", "trainer.precision=bf16")


@pytest.mark.parametrize(
    ("free", "settings", "words"),
    [
        (79, [], "trainer on GPU 4 (H100, 79.0 of 80.0 GiB free) needs at least 113.48 GiB: 7.62 billion parameters × "
         "(weights 4 + gradients 4 + Adam 8) bytes; allowed: 79.00 GiB, its free memory"),
        (70, ZERO, "rollout on GPU 0 (H100, 70.0 of 80.0 GiB free) needs at least 72.00 GiB: "
         "rollout.vllm.gpu_memory_utilization (0.9); allowed: 70.00 GiB, its free memory"),
        (79, [*ZERO, "rollout.vllm.gpu_memory_utilization=0.1"], "at least 14.19 GiB: weights 14.19 GiB; allowed: "
         "8.00 GiB, its rollout.vllm.gpu_memory_utilization (0.1)"),
        (79, [*ZERO, "rollout.vllm.kv_cache_gib=70"], "needs at least 84.19 GiB: weights 14.19 GiB + KV cache 70 GiB"),
    ],
)  # fmt: skip
def test_what_gpus_cannot_hold_is_refused_with_the_sum(model, free, settings, words):
    with pytest.raises(ConfigError) as error:
        check(model, free, *settings)
    assert words in str(error.value)


def test_one_gpu_has_to_hold_both(model):
    lora = (*ZERO, "trainer.lora.r=8")
    check(model, 79, *lora, count=1)
    check(model, 79, *lora, "launcher.colocate=split", count=1)
    with pytest.raises(ConfigError) as error:
        check(model, 50, *lora, count=1)
    assert (
        "launcher: rollout and trainer on GPU 0 (H100, 50.0 of 80.0 GiB free) needs at least 54.19 GiB: rollout: "
        "rollout.vllm.gpu_memory_utilization (0.5) of 80.0 GiB; trainer: 7.62 billion parameters × (weights 2) bytes"
    ) in str(error.value)
    with pytest.raises(ConfigError, match=r"rollout: weights 14.19 GiB \+ KV cache 60 GiB .*; trainer: 7.62 billion"):
        check(model, 79, *lora, "launcher.colocate=split", "rollout.vllm.kv_cache_gib=60", count=1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 16),
        ({"plugin": "torch_fsdp"}, 4),
        ({"plugin": "gemini", "precision": "bf16"}, 3.5),
        ({"plugin": "low_level_zero"}, 7),
        ({"plugin": "low_level_zero", "offload_optimizer": True}, 4),
        ({"plugin": "low_level_zero", "precision": "bf16", "zero_stage": 2}, 5.5),
        ({"plugin": "hybrid_parallel", "tp_size": 2, "pp_size": 2, "precision": "bf16"}, 4),
        ({"plugin": "hybrid_parallel", "tp_size": 2, "zero_stage": 1, "precision": "fp32"}, 6),
        ({"lora": {"r": 8}, "kl_coefficient": 0.1}, 4),
    ],
)
def test_bytes_a_parameter_of_one_of_four_ranks(settings, expected):
    assert sum(rank_bytes(MemoryKeys(**settings), 4).values()) == expected
