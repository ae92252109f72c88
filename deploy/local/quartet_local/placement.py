"""The processes of a run on this machine: one of each service, as many rollouts as [launcher] says, and their GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict, model_validator

from quartet_common.config import ConfigError, LoadedConfig, Section, load_config, split_address
from quartet_common.gpus import Gpu
from quartet_common.ports import free_ports
from quartet_common.presets import with_preset
from quartet_local.config import LauncherSection

_ONE_GPU = (
    "is the only GPU, and a rollout and the trainer cannot share one; allowed: a second GPU, launcher.rollouts = 0 "
    "with rollouts elsewhere, or the CPU: python3 deploy/local/environments.py --cpu"
)


class _Keys(Section):
    """Some keys of another's section, which that service checks itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class VllmKeys(_Keys):
    """Of [rollout.vllm]."""

    dtype: str = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None


class RolloutKeys(_Keys):
    """Of [rollout]."""

    engine: str = "vllm"
    vllm: VllmKeys = VllmKeys()

    @property
    def gpus(self) -> int:
        """GPUs of one rollout."""
        return self.vllm.tensor_parallel_size if self.engine == "vllm" else 1


class LoraKeys(_Keys):
    """Of [trainer.lora]."""

    r: int = 0


class TrainerKeys(_Keys):
    """Of [trainer], those that say what a rank holds; `ranks` is None if the run file leaves it out."""

    ranks: int | None = None
    algorithm: str = "grpo"
    plugin: str = "torch_ddp"
    precision: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int | None = None
    offload_optimizer: bool = False
    kl_coefficient: float = 0.0
    lora: LoraKeys = LoraKeys()

    @model_validator(mode="before")
    @classmethod
    def _below_what_is_written(cls, values: object) -> object:
        return with_preset(values) if isinstance(values, dict) else values


@dataclass(frozen=True)
class Service:
    """A process of a service.

    Attributes:
        name: the service's; of further rollouts "rollout-2", "rollout-3", …
        kind: the service.
        address: host:port at which it listens.
        settings: KEY=VALUE that it has beyond those of the run.
        gpus: those it may use; None: nothing is said of GPUs, as there are none.
    """

    name: str
    kind: str
    address: str
    settings: list[str] = field(default_factory=list)
    gpus: tuple[Gpu, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables beyond the launcher's."""
        if self.gpus is None:
            return {}
        indices = ",".join(str(gpu.index) for gpu in self.gpus)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": indices}


def place(
    config: LoadedConfig[LauncherSection], kinds: Sequence[str], gpus: Sequence[Gpu], overrides: Sequence[str] = ()
) -> list[Service]:
    """Return the processes of these services, in this order, each with its GPUs.

    Args:
        gpus: those that may be used; none: everything runs on the CPU.
        overrides: those that `config` was loaded with.

    Raises:
        ConfigError: [launcher] asks for ports or GPUs that are not there.
    """
    rollout = load_config("rollout", RolloutKeys, config.path, overrides).section
    ranks = load_config("trainer", TrainerKeys, config.path, overrides).section.ranks
    shares = divide(gpus, config.section, rollout.gpus, ranks, kinds)
    single = {"trainer": shares.trainer, "reward": shares.reward}
    services = []
    for kind in kinds:
        address = getattr(config.addresses, kind)
        own = single.get(kind, ()) if gpus else None
        if kind == "rollout":
            services += _rollouts(config, address, shares.rollouts if gpus else [None] * len(shares.rollouts))
        else:
            settings = [f"trainer.ranks={len(own)}"] if kind == "trainer" and own and not ranks else []
            services.append(Service(kind, kind, address, settings, own))
    return services


@dataclass(frozen=True)
class Shares:
    """The GPUs of each rollout, of the trainer and of the reward service."""

    rollouts: list[tuple[Gpu, ...]]
    trainer: tuple[Gpu, ...] = ()
    reward: tuple[Gpu, ...] = ()


def divide(
    gpus: Sequence[Gpu], launcher: LauncherSection, per_rollout: int, ranks: int | None, kinds: Sequence[str]
) -> Shares:
    """Share GPUs out: half to rollouts, half to the trainer, unless [launcher] or `ranks` say otherwise.

    Args:
        gpus: those there are; none: everything runs on the CPU.
        per_rollout: GPUs of one rollout.
        ranks: of the trainer, a GPU each; None: as many as it has GPUs.
        kinds: services that run here.

    Raises:
        ConfigError: there are too few, or [launcher] contradicts itself.
    """
    reward, own, trained = _named(launcher, gpus)
    if not gpus:
        return Shares([()] * (1 if launcher.rollouts is None else launcher.rollouts))
    here = [gpu for gpu in gpus if gpu not in reward]
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
    if len(here) == 1 and rollouts and held:
        raise ConfigError(f"launcher: {there} {_ONE_GPU}")
    if needed + held > len(here):
        raise ConfigError(
            f"launcher: got {rollouts} × {per_rollout} GPUs for rollouts (launcher.rollouts × "
            f"rollout.vllm.tensor_parallel_size) and {held} for the trainer (trainer.ranks), {needed + held} in all; "
            f"allowed: at most {len(here)}: {there}"
        )
    for key, given, count in (("rollout_gpus", own, needed), ("trainer_gpus", trained, held)):
        if given and len(given) != count:
            raise ConfigError(f"launcher.{key}: got {len(given)} GPUs; allowed: {count}, which the run file asks for")
    own = own or [gpu for gpu in here if gpu not in trained][:needed]
    trained = trained or [gpu for gpu in here if gpu not in own][:held]
    split = [tuple(own[at : at + per_rollout]) for at in range(0, needed, per_rollout)]
    return Shares(split, tuple(trained), tuple(reward))


def _named(launcher: LauncherSection, gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Return the GPUs that [launcher] names for reward, rollouts and trainer. Raises ConfigError."""
    left = {gpu.index: gpu for gpu in gpus}
    named: list[list[Gpu]] = []
    for key in ("reward_gpus", "rollout_gpus", "trainer_gpus"):
        named.append([])
        for index in getattr(launcher, key):
            if index not in left:
                allowed = ", ".join(map(str, left)) or "none, as there are no further GPUs here"
                raise ConfigError(f"launcher.{key}: got {index}; allowed: {allowed}")
            named[-1].append(left.pop(index))
    return named


def _rollouts(
    config: LoadedConfig[LauncherSection], address: str, gpus: Sequence[tuple[Gpu, ...] | None]
) -> list[Service]:
    host = address.rpartition(":")[0]
    ports = _ports(config, len(gpus) - 1) if len(gpus) > 1 else []
    services = []
    for number, own in enumerate(gpus, start=1):
        name, at, settings = "rollout", address, []
        if number > 1:
            name, at = f"rollout-{number}", f"{host}:{ports[number - 2]}"
            settings = [f"addresses.rollout={at}", "rollout.advertise_address="]
        services.append(Service(name, "rollout", at, settings, own))
    return services


def _ports(config: LoadedConfig[LauncherSection], count: int) -> list[int]:
    """Return ports for rollouts, with another for metrics each, that nothing has nor is about to have."""
    offset = config.server.metrics_port_offset
    configured = [split_address(address)[1] for address in config.addresses.model_dump().values()]
    reserved = {port + distance for port in configured for distance in (0, offset)}
    host = config.server.bind_host or split_address(config.addresses.rollout)[0]
    try:
        return free_ports(count, host, offset, reserved)
    except OSError as error:
        raise ConfigError(f"launcher.rollouts: {count} more rollouts need as many ports: {error}") from error
