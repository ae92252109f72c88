"""The processes of a run on this machine, and their GPUs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pydantic import ConfigDict

from quartet_common.config import ConfigError, LoadedConfig, load_config, split_address
from quartet_common.gpus import GIB, Gpu
from quartet_common.ports import free_ports
from quartet_common.sections import Section
from quartet_local.config import LauncherSection

# Defaults of a rollout that shares its GPU. sleep: vLLM's share of the memory. split: the KV cache, as a share of the
# memory; vLLM then does not use gpu_memory_utilization, but still refuses to start unless that share is free.
_SLEEP_UTILIZATION, _SPLIT_UTILIZATION, _SPLIT_KV_CACHE = 0.5, 0.1, 1 / 8


class Keys(Section):
    """Some keys of a service's section; the service itself checks them and all others."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class VllmKeys(Keys):
    """Of [rollout.vllm]."""

    dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None


class HttpKeys(Keys):
    """Of [rollout.http]."""

    address: str = ""


class RolloutKeys(Keys):
    """Of [rollout]."""

    engine: str = "vllm"
    standalone: bool = False
    http: HttpKeys = HttpKeys()
    vllm: VllmKeys = VllmKeys()

    @property
    def gpus(self) -> int:
        """The number of GPUs of one rollout."""
        vllm = self.vllm if self.engine == "vllm" else VllmKeys()
        return vllm.tensor_parallel_size * vllm.pipeline_parallel_size * vllm.data_parallel_size


class WeightsKeys(Keys):
    """Of [trainer.weights]."""

    transport: str = "gloo"


class TrainerKeys(Keys):
    """Of [trainer]; `ranks` is None if the run file does not set it."""

    ranks: int | None = None
    weights: WeightsKeys = WeightsKeys()


@dataclass(frozen=True)
class Service:
    """A process of a service.

    Attributes:
        name: the kind; further rollouts are "rollout-2", "rollout-3", …
        kind: the service.
        address: host:port at which it listens.
        settings: KEY=VALUE overrides for this process only.
        gpus: those it may use; None if the run uses no GPUs.
        options: further options of its command line.
    """

    name: str
    kind: str
    address: str
    settings: list[str] = field(default_factory=list)
    gpus: tuple[Gpu, ...] | None = None
    options: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables in addition to the launcher's."""
        if self.gpus is None:
            return {}
        indices = ",".join(str(gpu.index) for gpu in self.gpus)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": indices}


def place(
    config: LoadedConfig[LauncherSection],
    kinds: Sequence[str],
    gpus: Sequence[Gpu],
    overrides: Sequence[str] = (),
    teachers: Mapping[str, str] = MappingProxyType({}),
) -> list[Service]:
    """Return the processes of these services, in this order, each with its GPUs.

    Args:
        gpus: those that may be used; if empty, everything runs on the CPU.
        overrides: those that `config` was loaded with.
        teachers: addresses of the teachers to serve, by name.

    Raises:
        ConfigError: [launcher] asks for GPUs that do not exist, or there are too few free ports.
    """
    rollout = load_config("rollout", RolloutKeys, config.path, overrides).section
    trainer = load_config("trainer", TrainerKeys, config.path, overrides).section
    if rollout.standalone:
        raise ConfigError(
            "rollout.standalone: got true, with which no rollout works for the run; leave it out: the launcher sets it "
            "for the teachers of [run.teachers]"
        )
    ranks = trainer.ranks
    shares = divide(gpus, config.section, rollout.gpus, ranks, kinds)
    shared = colocated(config.section, shares, rollout, trainer, kinds)
    single = {"trainer": shares.trainer, "reward": shares.reward}
    services = []
    for kind in kinds:
        address = getattr(config.addresses, kind)
        own = single.get(kind, ()) if gpus else None
        if kind == "rollout":
            own_gpus = shares.rollouts if gpus else [None] * len(shares.rollouts)
            services += _rollouts(config, address, rollout.http.address, own_gpus)
        else:
            settings = [f"trainer.ranks={len(own)}"] if kind == "trainer" and own and not ranks else []
            services.append(Service(kind, kind, address, settings, own))
    for service in services:
        service.settings.extend(shared.get(service.kind, []))
    return [*services, *_teachers(config, teachers, [*shares.teachers] if gpus else None, rollout.gpus)]


def colocated(
    launcher: LauncherSection, shares: "Shares", rollout: RolloutKeys, trainer: TrainerKeys, kinds: Sequence[str]
) -> dict[str, list[str]]:
    """Return the settings, by service, with which rollout and trainer share a GPU or take turns on a CPU.

    Raises:
        ConfigError: the engine cannot sleep here, or the weight transport does not work on a shared GPU.
    """
    mode = launcher.colocate or ("sleep" if set(shares.trainer) & set(sum(shares.rollouts, ())) else None)
    if mode is None or not shares.rollouts or "trainer" not in kinds:
        return {}
    vllm, settings = rollout.vllm, list[str]()
    written = vllm.model_fields_set
    if shares.trainer and trainer.weights.transport == "nccl":
        raise ConfigError(
            "trainer.weights.transport: got 'nccl', which refuses two members on one GPU; allowed where rollout and "
            "trainer share one: gloo, through host memory, or file"
        )
    if rollout.engine == "vllm" and not shares.trainer and mode == "sleep":
        raise ConfigError(
            "launcher.colocate: got 'sleep' with rollout.engine 'vllm', which cannot sleep on a CPU; allowed here: the "
            "transformers engine, or unset"
        )
    if rollout.engine == "vllm" and shares.trainer:
        share = _SLEEP_UTILIZATION if mode == "sleep" else _SPLIT_UTILIZATION
        if "gpu_memory_utilization" not in written:
            settings.append(f"rollout.vllm.gpu_memory_utilization={share:g}")
        if mode == "sleep":
            settings.append("rollout.vllm.sleep_mode=true")
        elif vllm.kv_cache_gib is None:
            settings.append(f"rollout.vllm.kv_cache_gib={_SPLIT_KV_CACHE * shares.trainer[0].memory / GIB:.4g}")
    return {"rollout": settings, "trainer": ["trainer.weights.sleep_rollouts=true"] if mode == "sleep" else []}


@dataclass(frozen=True)
class Shares:
    """The GPUs of each rollout, of the trainer, of the reward service and of the teachers."""

    rollouts: list[tuple[Gpu, ...]]
    trainer: tuple[Gpu, ...] = ()
    reward: tuple[Gpu, ...] = ()
    teachers: tuple[Gpu, ...] = ()


def divide(
    gpus: Sequence[Gpu], launcher: LauncherSection, per_rollout: int, ranks: int | None, kinds: Sequence[str]
) -> Shares:
    """Assign GPUs: half to rollouts, half to the trainer, unless [launcher] or `ranks` say otherwise.

    Args:
        gpus: those of this machine; if empty, everything runs on the CPU.
        per_rollout: GPUs of one rollout.
        ranks: of the trainer, one GPU each; None: as many as it has GPUs.
        kinds: services that run here.

    Raises:
        ConfigError: there are too few GPUs, or [launcher] contradicts itself.
    """
    reward, teachers, own, trained = _named(launcher, gpus)
    if not gpus:
        return Shares([()] * (1 if launcher.rollouts is None else launcher.rollouts))
    here = [gpu for gpu in gpus if gpu not in (*reward, *teachers)]
    rollouts = launcher.rollouts if "rollout" in kinds else 0
    trained = trained if "trainer" in kinds else []
    held = (ranks or len(trained) or None) if "trainer" in kinds else 0
    if rollouts is None and own:
        rollouts = len(own) // per_rollout
    if rollouts is None:
        left = len(here) // 2 if held is None else len(here) - held
        rollouts = max(1, left // per_rollout)
    if held is None:
        held = max(1, len(here) - rollouts * per_rollout)
    needed = rollouts * per_rollout
    there = "; ".join(map(str, here))
    if trained == own == [] and len(here) == needed == held == 1:
        return Shares([tuple(here)], tuple(here), tuple(reward), tuple(teachers))
    if launcher.colocate and rollouts and held:
        raise ConfigError(
            f"launcher.colocate: got '{launcher.colocate}' with {needed} GPUs for rollouts and {held} for the trainer "
            f"of {len(here)}; allowed: one rollout and one rank on one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if needed + held > len(here):
        raise ConfigError(
            f"launcher: got {rollouts} × {per_rollout} GPUs for rollouts (launcher.rollouts × the parallel sizes of "
            f"rollout.vllm) and {held} for the trainer (trainer.ranks), {needed + held} in all; "
            f"allowed: at most {len(here)}: {there}"
        )
    for key, given, count in (("rollout_gpus", own, needed), ("trainer_gpus", trained, held)):
        if given and len(given) != count:
            raise ConfigError(f"launcher.{key}: got {len(given)} GPUs; allowed: {count}, which the run file asks for")
    own = own or [gpu for gpu in here if gpu not in trained][:needed]
    trained = trained or [gpu for gpu in here if gpu not in own][:held]
    split = [tuple(own[at : at + per_rollout]) for at in range(0, needed, per_rollout)]
    return Shares(split, tuple(trained), tuple(reward), tuple(teachers))


def unused(services: Sequence[Service], gpus: Sequence[Gpu]) -> list[str]:
    """Return a warning about GPUs that no service uses, if there are any."""
    used = {gpu for service in services for gpu in service.gpus or ()}
    left = ", ".join(str(gpu.index) for gpu in gpus if gpu not in used)
    cure = "raise launcher.rollouts or trainer.ranks, or leave both out to use all"
    return [f"launcher: no service uses the GPUs {left}, of {len(gpus)}: {cure}"] if left else []


def _named(launcher: LauncherSection, gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Return the GPUs that [launcher] names for reward, teachers, rollouts and trainer. Raises ConfigError."""
    left = {gpu.index: gpu for gpu in gpus}
    named: list[list[Gpu]] = []
    for key in ("reward_gpus", "teacher_gpus", "rollout_gpus", "trainer_gpus"):
        named.append([])
        for index in getattr(launcher, key):
            if index not in left:
                allowed = ", ".join(map(str, left)) or "none, as there are no further GPUs here"
                raise ConfigError(f"launcher.{key}: got {index}; allowed: {allowed}")
            named[-1].append(left.pop(index))
    return named


def _rollouts(
    config: LoadedConfig[LauncherSection], address: str, endpoint: str, gpus: Sequence[tuple[Gpu, ...] | None]
) -> list[Service]:
    """`endpoint`: rollout.http.address; further rollouts serve theirs at ports of their own too."""
    host, endpoint_host = (each.rpartition(":")[0] for each in (address, endpoint))
    more = len(gpus) - 1
    ports = _ports(config, more * (2 if endpoint else 1), endpoint) if more > 0 else []
    services = []
    for number, own in enumerate(gpus, start=1):
        name, at, settings = "rollout", address, []
        if number > 1:
            name, at = f"rollout-{number}", f"{host}:{ports[number - 2]}"
            settings = [f"addresses.rollout={at}", "rollout.advertise_address="]
            if endpoint:
                settings += [f"rollout.http.address={endpoint_host}:{ports[more + number - 2]}", "rollout.http.url="]
        services.append(Service(name, "rollout", at, settings, own))
    return services


def teacher_addresses(config: LoadedConfig) -> dict[str, str]:
    """Return free addresses for the teachers of the run that have none, by name. Raises ConfigError."""
    names = [name for name, teacher in config.run.teachers.items() if not teacher.address]
    ports = _ports(config, len(names), "") if names else []
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


def _teachers(
    config: LoadedConfig, addresses: Mapping[str, str], gpus: list[Gpu] | None, per_teacher: int
) -> list[Service]:
    """Return rollout services that serve the teachers, on `per_teacher` of the GPUs each; None: on the CPU."""
    if gpus is not None and len(gpus) != per_teacher * len(addresses):
        raise ConfigError(
            f"launcher.teacher_gpus: got {len(gpus)} GPUs; allowed: {per_teacher * len(addresses)}, for the models of "
            "run.teachers that have no address; or serve them elsewhere and set their addresses"
        )
    services = []
    for number, (name, address) in enumerate(addresses.items()):
        own = {
            "model.path": str(config.run.teachers[name].model),
            **dict.fromkeys(("model.revision", "model.tokenizer", "model.chat_template"), ""),
            "model.template_arguments": {},
            "addresses.rollout": address,
            "rollout.standalone": True,
            "rollout.runs": [],
            "rollout.advertise_address": "",
            "rollout.http.address": "",
        }
        settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in own.items()]
        share = None if gpus is None else tuple(gpus[number * per_teacher : (number + 1) * per_teacher])
        services.append(Service(f"teacher-{name}", "rollout", address, settings, share))
    return services


def _ports(config: LoadedConfig[LauncherSection], count: int, endpoint: str) -> list[int]:
    """Return ports for rollouts that are free, as are their metrics ports, and not configured. Raises ConfigError."""
    offset = config.server.metrics_port_offset
    configured = [split_address(address)[1] for address in config.addresses.model_dump().values()]
    reserved = {port + distance for port in configured for distance in (0, offset)}
    if endpoint:
        reserved.add(split_address(endpoint)[1])
    host = config.server.bind_host or split_address(config.addresses.rollout)[0]
    try:
        return free_ports(count, host, offset, reserved)
    except OSError as error:
        raise ConfigError(f"launcher.rollouts: {count} more rollouts need as many ports: {error}") from error
