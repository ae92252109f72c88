"""Whole runs: to the end, stopped at any time, and with services killed. No process is left."""

import asyncio
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import fake_nvidia_smi
import pytest
from launched import ENDLESS, SERVICES, preloaded_checkout

from quartet_client.async_client import AsyncClient
from quartet_client.models import Run
from quartet_common.config import AddressesSection, ConfigError, load_config
from quartet_common.ports import free_ports
from quartet_common.run_file import RunFile
from quartet_local.config import LauncherSection
from quartet_local.preflight import free_addresses

pytestmark = pytest.mark.timeout(600)
READY = 300  # timeout in seconds of a start on a busy machine
ENDED = 60  # timeout in seconds of a stop, which the launcher itself limits, on a busy machine
GROUPS_PER_STEP = 2  # of the run file in conftest.py


def steps_of(launched) -> int:
    return launched.said().count("\nstep ")


def exactly_once(launched, steps: int) -> bool:
    """Return whether the launcher's audit found the groups of `steps` steps and no fault."""
    return f"audit of run launched: {steps * GROUPS_PER_STEP} exactly once, 0 lost, 0 twice, 0 stuck" in launched.said()


def assert_left(folder: Path, run_file: Path, settings: list[str]) -> None:
    """An ended run has left all its files, which only its user can read."""
    assert RunFile.read(folder / "run.toml", ()).tree == RunFile.read(run_file, settings).tree
    for name in ("metrics.jsonl", "model/config.json", "logs/broker.log", "logs/trainer.log", "redis"):
        assert (folder / name).exists(), name
    open_to_others = [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
    assert not open_to_others, "prompts, completions and weights are their user's alone"
    log = (folder / "logs" / "redis.log").read_text()
    assert "accept connections at" in log and "port=" not in log.replace("port=0", ""), "it listens at a socket alone"


@pytest.mark.parametrize("moment", ["checking", "redis ready", "reward ready"])
def test_ctrl_c_leaves_nothing(launch, run_file, moment):
    interrupt(launch(run_file, *ENDLESS), moment)


def test_ctrl_c_leaves_nothing_of_vllm(launch, run_file, pythons, tmp_path):
    checkout = preloaded_checkout(tmp_path / "checkout", pythons, ordinary="rollout")
    launched = launch(run_file, *ENDLESS, "--set", "rollout.engine=vllm", checkout=checkout)
    interrupt(launched, "step 1")
    said = launched.said().partition("step 1/")[0]
    assert "trainer waits for a rollout to join the run\n" in said, "vLLM takes long enough to be asked meanwhile"


def interrupt(launched, moment: str) -> None:
    launched.wait_for_line(moment, READY)
    launched.send_signal(signal.SIGINT)
    assert launched.wait(ENDED) == 130, launched.said()
    launched.assert_gone(within=1.0)
    assert "Traceback" not in launched.said()


def test_a_run_ends_by_itself_and_a_stopped_and_a_finished_one_go_on_where_they_were(launch, run_file, tmp_path):
    settings = ["run.max_steps=8", 'run.sampling.stop=["\\n"]']
    words = [part for setting in settings for part in ("--set", setting)]
    first = launch(run_file, *words)
    first.wait_for_line("step 2", READY)
    first.send_signal(signal.SIGTERM)
    assert first.wait(ENDED) == 128 + signal.SIGTERM, first.said()
    second = launch(run_file, *words)
    assert second.wait(240) == 0, second.said()
    second.assert_gone(within=1.0)
    assert "step 8/8" in second.said() and "run launched succeeded after 8 steps" in second.said()
    assert_left(tmp_path / "run", run_file, settings)
    assert exactly_once(second, steps=8)
    third = launch(run_file, *words, "--set", "run.max_steps=10")  # and a finished one, if it is to have more steps
    assert third.wait(240) == 0, third.said()
    states = re.findall(r"run launched (?:is )?((?:active|succeeded)(?:: .*)?)$", third.said(), re.MULTILINE)
    assert states[0] == "active" and re.fullmatch(r"active: resumed at step [2-8]", states[1])
    assert states[2:] == [
        "succeeded: all steps are done: 8 steps trained",
        "active: extended to step 10",
        "active: resumed at step 8",
        "succeeded: all steps are done: 10 steps trained",
    ]
    assert exactly_once(third, steps=10)


def test_a_second_ctrl_c_kills_at_once(launch, run_file):
    launched = launch(run_file, *ENDLESS)
    launched.wait_for_line("step 1", READY)
    os.kill(launched.service("trainer"), signal.SIGSTOP)  # it cannot drain
    launched.send_signal(signal.SIGINT)
    launched.wait_for_line("stopping", ENDED)
    launched.send_signal(signal.SIGINT)
    assert launched.wait(ENDED) == 130
    assert "killing what is left" in launched.said()
    launched.assert_gone(within=1.0)


def test_sigterm_while_the_run_file_is_checked_leaves_no_check_behind(launch, run_file):
    launched = launch(run_file)
    launched.wait_for_line("checking the run file", READY)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(ENDED) == 128 + signal.SIGTERM
    launched.assert_gone(within=0.5)
    assert "Traceback" not in launched.said()


def test_when_the_launcher_is_killed_everything_ends(launch, run_file):
    launched = launch(run_file, *ENDLESS)
    launched.wait_for_line("step 1", READY)
    launched.send_signal(signal.SIGKILL)
    launched.wait(ENDED)
    launched.assert_gone(within=10.0)


def test_services_that_are_killed_are_started_again_and_the_run_goes_on(launch, run_file):
    # The leases of a killed rollout expire after this time.
    launched = launch(run_file, "--set", "run.max_steps=20", "--set", "run.prompt_lease_ttl=5")
    launched.wait_for_line("step 1/", READY)
    for service in ("rollout", "redis", "reward", "broker", "trainer"):
        steps = steps_of(launched)
        os.kill(launched.service(service), signal.SIGKILL)
        launched.wait_for_line(f"{service} was killed by SIGKILL; starting it again (1 of 3)", 30)
        launched.wait_for_line(f"{service} ready after", READY, times=2)
        launched.wait_until(
            lambda steps=steps: launched.said().count("\nstep ") > steps, f"a step after {service}", READY
        )
    launched.wait_for_line("run launched succeeded: ", READY)
    os.kill(launched.service("redis"), signal.SIGKILL)  # and after the run's end, for the audit
    assert launched.wait(240) == 0, launched.said()
    assert "run launched succeeded after 20 steps" in launched.said()
    assert exactly_once(launched, steps=20)
    launched.assert_gone(within=1.0)


async def test_several_rollouts_of_one_run_file_are_placed_fed_shown_and_kept_up(
    launch, run_file, pythons, tmp_path, monkeypatch
):
    """With a fake nvidia-smi that lists GPUs; the tiny model runs on the CPU."""
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, count=4)
    by_hand = preloaded_checkout(tmp_path / "by-hand", pythons, by_hand=True)
    settings = (*ENDLESS, "--set", "trainer.ranks=1", "--set", "launcher.rollouts=2")
    launched = launch(run_file, *settings, checkout=by_hand)
    launched.wait_for_line("step 2", READY)
    gpus = {"broker": "", "reward": "", "rollout": "0", "rollout-2": "1", "trainer": "2"}
    assert launched.visible_gpus() == gpus
    assert "rollout-2: GPU 1 (NVIDIA H100, 79.0 of 80.0 GiB free)\n" in launched.said()
    async with AsyncClient.from_config(run_file) as client:
        # Steps are made of what one rollout generates while the other, and the reward service's workers, still load.
        async with asyncio.timeout(READY):
            while len(members := _rollouts(await client.get_run("launched"))) < 2:
                await asyncio.sleep(0.1)
            while {service.health for service in await client.status()} != {"serving"}:
                await asyncio.sleep(0.1)
        services = await client.status()
    assert [service.kind for service in services] == ["broker", "reward", "rollout", "rollout", "trainer"]
    assert members == {service.instance_id: service.address for service in services if service.kind == "rollout"}
    await its_addresses_are_its_own(launch, run_file, tmp_path)
    its_folder_is_its_own(launch, run_file)
    os.kill(int(services[3].instance_id.split("-")[-2]), signal.SIGKILL)
    launched.wait_for_line("rollout-2 was killed by SIGKILL; starting it again (1 of 3)", 30)
    launched.wait_for_line("rollout-2 ready after", READY, times=2)
    interrupt(launched, "run launched is active")


def test_on_one_gpu_they_take_turns_also_after_the_trainer_was_killed_while_the_rollout_slept(
    launch, run_file, pythons, tmp_path, monkeypatch
):
    """With a fake nvidia-smi that lists a GPU; the tiny model runs on the CPU."""
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, count=1)
    by_hand = preloaded_checkout(tmp_path / "by-hand", pythons, by_hand=True)
    launched = launch(run_file, "--set", "run.max_steps=12", checkout=by_hand)
    launched.wait_for_line("step 1/", READY)
    assert launched.visible_gpus() == {"broker": "", "reward": "", "rollout": "0", "trainer": "0"}
    log, trainer = tmp_path / "run" / "logs" / "rollout.log", launched.service("trainer")

    def sleeps() -> bool:
        said = log.read_text()
        return said.count("the engine sleeps") > said.count("the engine is awake")

    def stopped_asleep() -> bool:
        if sleeps():
            os.kill(trainer, signal.SIGSTOP)
            if sleeps():
                return True
            os.kill(trainer, signal.SIGCONT)
        return False

    launched.wait_until(stopped_asleep, "the trainer is stopped while the rollout sleeps", READY)
    os.kill(trainer, signal.SIGKILL)
    assert launched.wait(240) == 0, launched.said()
    assert "the rollout sleeps while a step is trained (launcher.colocate)\n" in launched.said()
    assert "trainer was killed by SIGKILL; starting it again (1 of 3)" in launched.said()
    assert exactly_once(launched, steps=12)
    assert log.read_text().count("the engine sleeps") >= 12 and not sleeps()
    launched.assert_gone(within=1.0)


def _rollouts(run: Run) -> dict[str, str]:
    return {member.instance_id: member.address for member in run.members if member.kind == "rollout"}


def its_folder_is_its_own(launch, run_file):
    addresses = (
        f"addresses.{name}=127.0.0.1:{port}" for name, port in zip(SERVICES, free_ports(4, neighbor=100), strict=True)
    )
    second = launch(run_file, *(part for address in addresses for part in ("--set", address)))
    assert second.wait(READY) == 2
    assert second.said().splitlines()[-1].startswith("quartet: run.folder: another launcher is at work in ")


async def its_addresses_are_its_own(launch, run_file, tmp_path):
    second = launch(run_file, "--set", f"run.folder={tmp_path / 'second'}")
    assert second.wait(READY) == 2
    for kind in SERVICES:
        assert f": address already in use by the {kind} of run 'launched'\n" in second.said()
    config = load_config("launcher", LauncherSection, run_file)
    assert await free_addresses(config, SERVICES) == ([], ""), "those of a run file are left as they are"
    one = config.addresses.model_copy(update={"reward": config.addresses.broker})
    with pytest.raises(ConfigError, match=r"addresses.reward: got '.*', that of addresses.broker; allowed: a port of"):
        await free_addresses(replace(config, addresses=one), SERVICES)
    default = AddressesSection.model_construct(set(), **config.addresses.model_dump())
    found, held = await free_addresses(replace(config, addresses=default), SERVICES)
    assert held.startswith("addresses.broker: cannot listen on ") and held.endswith(" by the broker of run 'launched'")
    others = load_config("launcher", LauncherSection, run_file, found).addresses.model_dump()
    own = config.addresses.model_dump()
    assert not {others[kind] for kind in SERVICES} & {own[kind] for kind in SERVICES}


def test_a_run_that_another_launcher_trains_is_refused_and_goes_on(launch, run_file, tmp_path):
    """Of another folder, and on the same Redis."""
    first = launch(run_file, *ENDLESS)
    first.wait_for_line("step 1", READY)
    head, _, rest = run_file.read_text().partition("[addresses]")
    run_file.write_text(head + rest[rest.index("[") :])
    url = f"unix://{(tmp_path / 'run' / 'sockets').resolve()}/redis.sock"
    second = launch(
        run_file, "--set", f"run.folder={tmp_path / 'other'}", "--set", f'broker.redis_url="{url}"', *ENDLESS
    )
    assert second.wait(READY) == 2, second.said()
    assert "quartet: run.id: the Redis of broker.redis_url has a run 'launched' that " in second.said()
    steps = steps_of(first)
    first.wait_until(lambda: steps_of(first) > steps + 1, "further steps", READY)
    assert "starting it again" not in first.said()


def test_a_run_whose_folder_is_removed_says_why_it_ends(launch, run_file, tmp_path):
    launched = launch(run_file, *ENDLESS, "--set", "trainer.checkpoint.interval=1")
    launched.wait_for_line("step 3", READY)
    shutil.rmtree(tmp_path / "run")
    assert launched.wait(READY) == 1, launched.said()
    assert re.search(r"\nquartet: trainer ended with status 1 .*", launched.said())


def test_runs_started_at_once_find_their_ports(launch, run_file, tmp_path):
    """Four run files without addresses: each process chooses before a service of any of them listens."""
    head, _, rest = run_file.read_text().partition("[addresses]")
    run_file.write_text(head + rest[rest.index("[") :])
    names = [f"at-once-{number}" for number in range(4)]
    runs = [launch(run_file, "--set", f"run.id={name}", "--set", f"run.folder={tmp_path / name}") for name in names]
    used = set()
    for name, launched in zip(names, runs, strict=True):
        assert launched.wait(READY) == 0, launched.said()
        assert f"run {name} succeeded after 3 steps" in launched.said() and "starting it again" not in launched.said()
        addresses = load_config("launcher", LauncherSection, tmp_path / name / "run.toml").addresses
        used |= {getattr(addresses, kind) for kind in SERVICES}
    assert len(used) == 16


def test_a_service_that_fails_while_starting_is_told_by_its_last_error(launch, run_file, model, tmp_path):
    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in model.iterdir():  # whole, and of a type that there is not
        (broken / file.name).write_bytes(file.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F99"'))
    launched = launch(run_file, "--set", f"model.path={broken}")
    assert launched.wait(150) == 1, launched.said()
    last = launched.said().splitlines()[-1]
    assert re.match(
        r"quartet: (rollout|trainer) ended with status 1 (while starting|twice): .*deserializing header: .*F99", last
    )
    assert "Traceback" not in launched.said()
    # A preloaded engine is no descendant of the guard, which kills others at once: it exits when its model is loaded.
    launched.assert_gone(within=10.0)
