"""The run file's sections, and how they are loaded: each service reads its own section and the shared ones.

Relative paths are relative to the working directory. Each problem is reported in a sentence: the key, what came, what
is allowed, where.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from quartet_common.checkpoints import part_of
from quartet_common.refusals import sentences, unknown_section
from quartet_common.run_file import ConfigError, Problems, RunFile, read_text
from quartet_common.sampling import SamplingSection
from quartet_common.sections import AnyEnvironment, Section, Verifiers, VerifierSection
from quartet_common.values import NAME, NAME_ALLOWED

# Each read by one program, sft by the trainer and the command.
_OWNED_SECTIONS = ("data", "broker", "reward", "rollout", "environment", "trainer", "launcher", "sft")
_YEAR_SECONDS = 366 * 86400.0
_EXACT = 2**53  # the broker accepts whole numbers up to here: its scripts calculate in doubles


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or "/" in host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"an address is host:port with a port from 0 to 65535, e.g. 127.0.0.1:7101; got '{address}'")
    return host.strip("[]"), int(port)


def _host_and_port(value: str) -> str:
    if value:
        split_address(value)
    return value


Address = Annotated[str, AfterValidator(_host_and_port)]
"""host:port, or empty for none."""


class TemperatureScheduleSection(Section):
    """The temperature of training prompts by policy version."""

    kind: Literal["constant", "linear", "cosine", "piecewise", "colossalchat"] = Field(
        description="Curve between the points; colossalchat: from sampling.temperature toward 0.9 in `updates` steps."
    )
    points: list[tuple[Annotated[int, Field(ge=0, le=_EXACT)], Annotated[float, Field(gt=0)]]] = Field(
        [], description="[policy version, temperature], in order of version."
    )
    updates: int = Field(
        0, ge=0, le=_EXACT, description="colossalchat: optimizer steps in the first pass over the data."
    )

    @model_validator(mode="after")
    def _usable(self) -> "TemperatureScheduleSection":
        if self.kind == "colossalchat":
            if self.points or not self.updates:
                raise ValueError("colossalchat takes `updates`, at least 1, and no points")
            return self
        least, most = {"constant": (1, 1), "piecewise": (1, 1024)}.get(self.kind, (2, 1024))
        if self.updates or not least <= len(self.points) <= most:
            count = "one point" if most == 1 else f"at least {least} point{'s' if least > 1 else ''}"
            raise ValueError(f"{self.kind} takes {count} and no `updates`; got {len(self.points)} points")
        versions = [version for version, _ in self.points]
        if any(after <= before for before, after in pairwise(versions)):
            raise ValueError(f"the points' versions must rise; got {versions}")
        return self


class TeacherSection(Section):
    """[run.teachers.NAME]: a model that judges each token of a training completion (docs/distillation.md)."""

    model: Path | None = Field(
        None,
        description="Its folder, or hub id, with the policy's vocabulary. `quartet run` serves it unless it has an "
        "address.",
    )
    address: Address = Field("", description="host:port of the rollout service that serves it.")

    @model_validator(mode="after")
    def _found_somewhere(self) -> Self:
        if self.model is None and not self.address:
            raise ValueError("got neither model nor address; allowed: a model to serve, or the address where it is")
        return self


class CurriculumSection(Section):
    """Which training prompts are skipped because they are solved or hopeless, see docs/data.md."""

    by: Literal["prompt", "source"] = Field(
        "prompt", description="Whose answers count: each prompt's, or those of all prompts of its source."
    )
    window: int = Field(2, ge=1, le=64, description="Last groups whose mean answer accuracy counts; fewer: it is used.")
    solved_above: float = Field(0.99, ge=0, le=1, description="A higher mean is solved; 1: none is.")
    hopeless_below: float = Field(0.01, ge=0, le=1, description="A lower mean is hopeless; 0: none is.")
    floor: float = Field(
        0.1, ge=0, lt=1, description="Share of the solved and hopeless that is used all the same; 0: none, for good."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.hopeless_below > self.solved_above:
            raise ValueError(f"hopeless_below: allowed: at most solved_above ({self.solved_above:g})")
        if self.solved_above == 1 and self.hopeless_below == 0:
            raise ValueError("solved_above: with 1, and hopeless_below = 0, nothing is skipped; leave the section out")
        return self


class RunSection(Section):
    """[run]: the run's settings, which become the contract's RunSpec."""

    id: str = Field("default", description="Name of the run, unique at its broker.")
    folder: Path | None = Field(None, description="Folder of metrics, samples and checkpoints. Default: runs/<id>.")
    group_size: int = Field(8, ge=1, le=1024, description="Completions per training prompt (G).")
    groups_per_step: int = Field(16, ge=1, le=1 << 16, description="Prompt groups per optimizer step.")
    max_staleness: int = Field(
        4, ge=0, lt=2**31, description="Maximum steps between a group's oldest weights and those it updates."
    )
    lease_order: Literal["fifo", "fresh_first"] = Field("fifo", description="Order of the trainer's batches.")
    partial_batch: Literal["drop", "train"] = Field("drop", description="What happens to a last partial batch.")
    max_deliveries: int = Field(
        5, ge=1, le=1 << 20, description="Deliveries of a prompt before it is set aside as dead."
    )
    max_queued_prompts: int = Field(4096, ge=1, le=_EXACT, description="Maximum prompts in the queue.")
    max_experience_bytes: int = Field(
        1 << 30, ge=1 << 20, le=_EXACT, description="Maximum bytes of experience in Redis."
    )
    prompt_lease_ttl: float = Field(
        60.0, gt=0, le=_YEAR_SECONDS, description="Seconds until a prompt lease expires unless it is renewed."
    )
    member_ttl: float = Field(
        15.0, gt=0, le=_YEAR_SECONDS, description="Seconds until a member without a heartbeat expires."
    )
    result_ttl: float = Field(3600.0, gt=0, le=_YEAR_SECONDS, description="Seconds that results are kept.")
    max_steps: int = Field(
        0, ge=0, le=_EXACT, description="Optimizer steps after which the run ends; 0: when the prompts end."
    )
    sampling: SamplingSection = Field(SamplingSection(), description="Sampling of training prompts.")
    evaluation_sampling: SamplingSection | None = Field(
        None, description="Sampling of evaluation prompts; keys left out are sampling's, with one completion each."
    )
    verifiers: Verifiers = Field(
        [VerifierSection(name="think_answer_tags")],
        min_length=1,
        description="Verifiers of prompts without their own; of one, its name or function is enough.",
    )
    system_prompt: str = Field("", description="Prepended to chats that have no system message.")
    add_special_tokens: bool = Field(
        False, description="Text prompts begin with the special tokens that the tokenizer adds. Chats: the template's."
    )
    max_prompt_tokens: int = Field(
        0, ge=0, lt=2**31, description="Longest prompt; 0: the context minus max_new_tokens."
    )
    long_prompts: Literal["refuse", "truncate_left"] = Field(
        "refuse", description="What happens to longer prompts: set aside as dead, or cut at their beginning."
    )
    sampling_masks: bool = Field(False, description="Store each token's candidates after top_p, top_k and min_p.")
    router_replay: bool = Field(
        False, description="Mixtures of experts: store each token's experts, and train with the same experts."
    )
    labels: dict[str, str] = Field({}, description="Free labels.")
    environment: AnyEnvironment | None = Field(
        None, description="What answers the policy's turns, for prompts without their own. Default: one turn."
    )
    temperature_schedule: TemperatureScheduleSection | None = Field(
        None, description="Temperature of training prompts by policy version. Default: sampling.temperature throughout."
    )
    teachers: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")], TeacherSection] = Field(
        {}, description="Teachers by name, whose log-probs rollouts store; prompts without a teacher have the first."
    )
    curriculum: CurriculumSection | None = Field(
        None, description="Skip training prompts that are solved or hopeless. Default: none is."
    )

    @field_validator("verifiers")
    @classmethod
    def _weighty(cls, value: list[VerifierSection]) -> list[VerifierSection]:
        if not any(one.weight for one in value):
            raise ValueError("every weight is 0, and so is then every reward; allowed: one above 0 at least")
        return value

    @field_validator("id")
    @classmethod
    def _named(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            near = re.sub(r"[^a-zA-Z0-9._-]+", "-", value).strip("._-")[:64] or "run-1"
            raise ValueError(f"allowed: {NAME_ALLOWED}, such as '{near}'")
        return value

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder if self.folder is not None else Path("runs") / self.id


class ModelSection(Section):
    """[model]: the model that is trained."""

    path: Path | None = Field(
        None,
        description="Hugging Face model folder with config, safetensors and tokenizer, or the id of a model of the hub "
        "(owner/name), or a run's checkpoint, for the model in it.",
    )
    revision: str = Field("", description="Branch, tag or commit of a hub model. Default: its main branch.")
    tokenizer: str = Field("", description="Folder, or id at the hub, of another tokenizer. Default: the model's own.")
    chat_template: str = Field("", description="File with another chat template (Jinja).")
    template_arguments: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str] = Field(
        {}, description="Variables of the chat template, e.g. enable_thinking = false; exports have them as defaults."
    )

    @property
    def overrides_tokenizer(self) -> bool:
        """Whether tokenizer or chat template differ from those of `path`."""
        return bool(self.tokenizer or self.chat_template or self.template_arguments)

    @field_validator("path")
    @classmethod
    def _in_a_checkpoint(cls, path: Path | None) -> Path | None:
        return path and part_of(path, "model")


class AddressesSection(Section):
    """[addresses]: where each service listens and is reached, host:port."""

    broker: str = Field("127.0.0.1:7101", description="The broker.")
    reward: str = Field("127.0.0.1:7102", description="The reward service.")
    rollout: str = Field("127.0.0.1:7103", description="The rollout service.")
    trainer: str = Field("127.0.0.1:7104", description="The trainer's rank 0.")
    environment: str = Field("127.0.0.1:7105", description="The environment service, where one is used.")

    @field_validator("*", mode="before")
    @classmethod
    def _host_and_port(cls, value: Any) -> Any:
        split_address(str(value))
        return value


class SecuritySection(Section):
    """[security]: plaintext is accepted on loopback only, unless `insecure` says otherwise."""

    token_file: Path | None = Field(None, description="File with the bearer token every call must carry.")
    tls_ca: Path | None = Field(None, description="PEM of the CA that signs servers and clients.")
    tls_certificate: Path | None = Field(None, description="PEM certificate of this process.")
    tls_key: Path | None = Field(None, description="PEM key of the certificate.")
    roles: bool = Field(
        True, description="With TLS, a certificate calls only what its role may (docs/certificates.md)."
    )
    server_roles: bool = Field(True, description="With roles, check that a server called has its role.")
    insecure: bool = Field(False, description="Accept plaintext on addresses that are not loopback.")

    @model_validator(mode="after")
    def _whole(self) -> "SecuritySection":
        given = [name for name in ("tls_ca", "tls_certificate", "tls_key") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ValueError(f"tls_ca, tls_certificate and tls_key go together; only {', '.join(given)} is set")
        return self

    @property
    def tls(self) -> bool:
        """True if mutual TLS is configured."""
        return self.tls_ca is not None

    def check_listening(self, kind: str, host: str) -> None:
        """Raise ConfigError if a service would listen at `host` in plaintext, which only loopback allows."""
        if not (self.tls or self.insecure or is_loopback(host)):
            raise ConfigError(
                f"{kind}: {host} is not loopback and [security] has no TLS: set tls_ca, tls_certificate and "
                "tls_key, or insecure = true if the network is trusted"
            )

    def token(self) -> str | None:
        """Return the bearer token, or None if none is configured. Raises ConfigError if the file cannot be used."""
        if self.token_file is None:
            return None
        token = read_text(self.token_file, "security.token_file").strip()
        if not token:
            raise ConfigError(f"security.token_file: '{self.token_file}' is empty; it must hold the token")
        return token


class ServerSection(Section):
    """[server]: settings of all servers."""

    bind_host: str = Field("", description="Host to listen on, if not the one of [addresses], e.g. 0.0.0.0.")
    reflection: bool = Field(True, description="Serve gRPC reflection, so that grpcurl works.")
    metrics: bool = Field(True, description="Serve Prometheus metrics at the gRPC port plus metrics_port_offset.")
    metrics_port_offset: int = Field(100, ge=1, le=10000, description="Metrics port minus gRPC port.")
    metrics_hosts: list[str] = Field(
        [], description="Further host names that requests for metrics may use; others are refused."
    )
    drain_seconds: float = Field(10.0, gt=0, description="Seconds to finish current work after SIGTERM.")
    max_message_bytes: int = Field(64 << 20, ge=1 << 20, description="Largest gRPC message, received or sent.")
    max_connection_calls: int = Field(
        1024, ge=16, description="Maximum concurrent calls and streams of one connection; more wait at the caller."
    )


class TracingSection(Section):
    """[tracing]: OpenTelemetry traces (docs/tracing.md). Off unless `endpoint` or `file` is set."""

    endpoint: str = Field("", description="OTLP/gRPC collector that receives traces, host:port or http://host:port.")
    file: Path | None = Field(
        None, description="File in Chrome's trace format (Perfetto) to which all processes of a machine append."
    )
    sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of the prompts that are traced.")
    tls_ca: Path | None = Field(None, description="PEM of the CA of the collector's certificate; unset: plaintext.")

    @model_validator(mode="after")
    def _usable(self) -> "TracingSection":
        if self.endpoint:
            scheme, _, address = self.endpoint.rpartition("://")
            if scheme not in ("", "https" if self.tls_ca else "http"):
                raise ValueError(
                    "endpoint is host:port or http://host:port; with tls_ca host:port or https://host:port"
                )
            split_address(address)
        return self


SectionT = TypeVar("SectionT", bound=Section)


_SHARED_SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "addresses": AddressesSection,
    "security": SecuritySection,
    "server": ServerSection,
    "tracing": TracingSection,
}


@dataclass(frozen=True)
class LoadedConfig(Generic[SectionT]):
    """The configuration of a service."""

    run: RunSection
    model: ModelSection
    addresses: AddressesSection
    security: SecuritySection
    server: ServerSection
    section: SectionT
    data: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    tracing: TracingSection = TracingSection()
    file: RunFile = field(default_factory=RunFile)
    weights: bool = True
    """False: model.path has no weights yet, because a dry run does not download those of a hub model."""
    dry_run: bool = False
    """Only the checks are run, also those that take seconds."""


def load_config(
    section_name: str,
    section_model: type[SectionT],
    path: Path | None = None,
    overrides: Sequence[str] = (),
) -> LoadedConfig[SectionT]:
    """Read the run file, apply overrides `key=value`, and validate the shared sections and one owned section.

    Raises:
        ConfigError: all problems, a sentence each.
    """
    file = RunFile.read(path, overrides)
    allowed = (*_SHARED_SECTIONS, *_OWNED_SECTIONS)
    found: dict[str, Any] = {}
    with Problems() as problems:
        for name, value in file.tree.items():
            if name not in allowed:
                problems.add(*unknown_section(name, value, allowed, file.where))
            elif not isinstance(value, dict):
                problems.add(f"{name}: got {value!r} {file.where((name,))}; it must be a section, [{name}]")
        for name, model in _SHARED_SECTIONS.items():
            with problems.collecting():
                found[name] = validate_section(model, file.section(name), name, file)
        with problems.collecting():
            section = validate_section(section_model, file.section(section_name), section_name, file)
    return LoadedConfig(**found, section=section, data=file.section("data"), path=path, file=file)


def validate_section(model: type[SectionT], values: dict[str, Any], name: str, file: RunFile) -> SectionT:
    """Validate the values of section `name`. Raises ConfigError with a sentence for each that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(*sentences(model, error, name, file.where, _SHARED_SECTIONS)) from error


def is_loopback(host: str) -> bool:
    """Return True for localhost and loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
