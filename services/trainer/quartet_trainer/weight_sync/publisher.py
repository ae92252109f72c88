"""Tracks the policy version of each rollout and updates those that lack the current one.

Every update ends by its deadline, and a failed one does not end the training: a rollout that fails is skipped for a
while, and the others get the weights in a new group.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from quartet.v1 import broker_pb2, common_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.channel import connect_sync
from quartet_common.config import SecuritySection
from quartet_common.durations import to_duration
from quartet_common.errors import describe
from quartet_common.handshake import handshake
from quartet_common.log import get_logger
from quartet_common.weights import plan_buckets
from quartet_server.transports import OWN_TRANSPORTS, how_to_install
from quartet_trainer.config import WeightsSection
from quartet_trainer.members import Members
from quartet_trainer.weight_sync.group import PAUSE_MODES, Transfer, WeightGroup, create_transport, form_group, gather
from quartet_trainer.weight_sync.packing import Packer, Snapshot, Weights
from quartet_trainer.weight_sync.process_group import WeightStore
from quartet_trainer.weight_sync.transports import TransferFailed

log = get_logger(__name__)

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 30.0
STATUS_SECONDS = 5.0
CLOSE_SECONDS = 2.0
SLEEP_SECONDS = 30.0  # a sleeping rollout wakes after this time unless SetSleep is called again


@dataclass
class Published:
    """The outcome of an update."""

    version: int
    epoch: int
    rollouts: int
    """How many rollouts have the version now."""
    bytes: int
    """Sent to each rollout."""
    elapsed: float
    """Seconds, retries included."""
    failures: list[str] = field(default_factory=list)
    """A message for each failed attempt."""


@dataclass
class _Peer:
    """The publisher's state for a live rollout."""

    channel: grpc.Channel
    stub: rollout_pb2_grpc.RolloutServiceStub
    handshake_done: bool = False
    version: int | None = None
    """Version this trainer installed; None: none, or unknown."""
    failures: int = 0
    retry_at: float = 0.0


class Publisher:
    """Sends the current policy version to the rollouts."""

    def __init__(
        self,
        run_id: str,
        settings: WeightsSection,
        store: WeightStore,
        members: Members,
        security: SecuritySection,
        specs: Sequence[tuple[str, int, Sequence[int]]],
        stopping: Callable[[], bool] = lambda: False,
        folder: Path = Path("weights"),
        lora: rollout_pb2.LoraConfig | None = None,
    ):
        """Prepare the buckets.

        Args:
            store: used by this publisher only, which closes it.
            specs: name, Dtype and shape of each tensor, as the learner's `weight_specs`.
            folder: where the file transport writes, if the settings name no folder.
            lora: the adapter whose tensors `specs` lists; None: `specs` lists the whole model.

        Raises:
            ConfigError: the configured transport cannot work here.
        """
        self._run_id = run_id
        self._settings = settings
        self._store = store
        self._members = members
        self._security = security
        self._stopping = stopping
        own_folder = settings.folder / run_id if settings.folder else folder
        self._transport = create_transport(settings, store, own_folder)
        kind = rollout_pb2.WEIGHT_KIND_FULL if lora is None else rollout_pb2.WEIGHT_KIND_LORA
        self._manifest = plan_buckets(kind, specs, settings.bucket_bytes)
        if lora is not None:
            self._manifest.lora.CopyFrom(lora)
        self._packer = Packer(self._manifest, self._transport.device)
        self._capabilities = [f"weights.{settings.transport}", "weights.full" if lora is None else "weights.lora"]
        self._peers: dict[str, _Peer] = {}
        self._ranks: dict[str, int] = {}
        self._group: WeightGroup | None = None
        self._last_epoch = 0
        self._stop_seen: float | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the current group; -1: none."""
        return self._group.epoch if self._group else -1

    @property
    def seconds(self) -> float:
        """The time limit of an update of all live rollouts."""
        return self._seconds(sum(self._manifest.bucket_bytes), len(self._members.rollouts()))

    def current(self, version: int) -> int:
        """Return the number of live rollouts that have `version`."""
        return sum(
            1 for name in self._members.rollouts() if name in self._peers and self._peers[name].version == version
        )

    def behind(self, version: int) -> dict[str, broker_pb2.Member]:
        """Return the live rollouts that do not have `version`, except those in backoff after a failure."""
        live = self._members.rollouts()
        for name in self._peers.keys() - live.keys():
            self._peers.pop(name).channel.close()
            self._ranks.pop(name, None)
        now = time.monotonic()
        behind = {}
        for name, member in live.items():
            peer = self._peer(name, member)
            if peer.version == version and member.policy_version < 0 and self._has_lost_weights(peer):
                log.warning("rollout lost its weights", extra={"rollout": name})
                peer.version, peer.handshake_done = None, False  # its release may have changed
            if peer.version != version and peer.retry_at <= now:
                behind[name] = member
        return behind

    def set_sleep(self, level: int) -> dict[str, str]:
        """Put the live rollouts to sleep for `SLEEP_SECONDS`, or wake them (0). No update may be under way.

        Returns:
            The error of each rollout whose call failed, by instance id.
        """
        request = rollout_pb2.SetSleepRequest(level=level, timeout=to_duration(SLEEP_SECONDS))
        seconds = self._settings.timeout_seconds
        calls = {
            name: self._peer(name, member).stub.SetSleep.future(request, timeout=seconds)
            for name, member in self._members.rollouts().items()
        }
        return gather(calls, time.monotonic() + seconds, self._keep_waiting_for).bad

    def _peer(self, name: str, member: broker_pb2.Member) -> _Peer:
        if name not in self._peers:
            channel = connect_sync(member.address, self._security, service="rollout")
            self._peers[name] = _Peer(channel, rollout_pb2_grpc.RolloutServiceStub(channel))
        return self._peers[name]

    def _has_lost_weights(self, peer: _Peer) -> bool:
        """Call GetStatus, because the rollout's last heartbeat may be older than its weights."""
        try:
            status = peer.stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=STATUS_SECONDS)
        except grpc.RpcError:
            return False  # its membership at the broker decides whether it is alive
        return status.policy_version < 0 and not status.paused

    def snapshot(self) -> Snapshot:
        """Return an empty snapshot on the transport's device."""
        return Snapshot(self._manifest, self._transport.device)

    def publish(self, version: int, weights: Weights | Snapshot) -> Published | None:
        """Send `version` to every rollout that lacks it, with retries until the deadline. None: no rollout lacks it.

        Args:
            weights: a function that is called for each attempt, or a snapshot of `version`.
        """
        began = time.monotonic()
        failures: list[str] = []
        targets = self.behind(version)
        if not targets:
            return None
        seconds = self._seconds(sum(self._manifest.bucket_bytes), len(targets))
        deadline = began + seconds
        while targets and time.monotonic() < deadline and not self._stopping():
            try:
                self._attempt(version, targets, weights, deadline)
            except TransferFailed as failure:
                self._drop_group()
                if self._stopping():
                    break
                log.warning("weight update failed", extra={"version": version, "error": str(failure)})
                failures.append(str(failure))
                self._back_off(failure.blame)
            targets = self.behind(version)
        if targets and not self._stopping():
            failures.append(f"{', '.join(targets)} did not get version {version} in {seconds:.3g} s")
            self._back_off(dict.fromkeys(targets, "not in time"))
        return Published(
            version=version,
            epoch=self.epoch,
            rollouts=self.current(version),
            bytes=sum(self._manifest.bucket_bytes),
            elapsed=time.monotonic() - began,
            failures=failures,
        )

    def _attempt(
        self, version: int, targets: dict[str, broker_pb2.Member], weights: Weights | Snapshot, deadline: float
    ) -> None:
        self._handshake(targets)
        group = self._group
        if group is None or group.stubs.keys() != targets.keys():
            group = self._make_group(targets)
        else:  # a rollout that left and came back has a new channel
            group = self._group = replace(group, stubs=self._stubs(targets))
        transfer = Transfer(
            group,
            version,
            deadline,
            self._packer,
            weights,
            PAUSE_MODES[self._settings.pause_mode],
            self._settings.keep_kv_cache,
        )
        for name in targets:
            self._peers[name].version = None  # unknown until Finish succeeds
        try:
            answers = transfer.run()
        except Exception as failure:
            transfer.abort(str(failure))
            raise
        for name in answers.good:
            self._peers[name].version = version
            self._peers[name].failures = 0
        answers.raise_if_bad(f"finishing update to version {version}")

    def _handshake(self, targets: Iterable[str]) -> None:
        refused = {}
        for name in targets:
            peer = self._peers[name]
            if not peer.handshake_done:
                try:
                    handshake(peer.channel, common_pb2.SERVICE_KIND_TRAINER, self._capabilities, timeout=STATUS_SECONDS)
                    peer.handshake_done = True
                except grpc.RpcError as error:
                    refused[name] = describe(error)
                    lacks = refused[name].partition("; it has ")[0]
                    transport = self._settings.transport
                    if transport not in OWN_TRANSPORTS and self._capabilities[0] in lacks:
                        refused[name] += f"; {how_to_install(transport)}"
        if refused:
            raise TransferFailed("handshake failed", refused)

    def _stubs(self, names: Iterable[str]) -> dict[str, rollout_pb2_grpc.RolloutServiceStub]:
        return {name: self._peers[name].stub for name in names}

    def _make_group(self, targets: Iterable[str]) -> WeightGroup:
        self._drop_group()
        stubs = self._stubs(targets)
        self._last_epoch = 1 + max(self._last_epoch, self._members.epoch, *self._reported_epochs(targets))
        self._group = form_group(
            self._settings.transport,
            self._transport,
            self._store,
            self._run_id,
            self._last_epoch,
            stubs,
            self._ranks,
            self._seconds(max(self._manifest.bucket_bytes, default=0), len(stubs)),
            self._keep_waiting_for,
        )
        return self._group

    def _seconds(self, size: int, rollouts: int) -> float:
        """Return the timeout for sending `size` bytes to each of `rollouts`."""
        return self._settings.timeout_seconds + size * rollouts / self._settings.least_bandwidth

    def _reported_epochs(self, names: Iterable[str]) -> list[int]:
        """Ask rollouts for their epochs: before a restart, this trainer may have used epochs unknown to the broker.

        Raises:
            TransferFailed: a rollout does not answer, or another instance answers at its address: it was killed and
                started again, and the killed one's membership has not expired yet.
        """
        epochs, others = [], {}
        for name in names:
            request = rollout_pb2.RolloutServiceGetStatusRequest()
            try:
                status = self._peers[name].stub.GetStatus(request, timeout=STATUS_SECONDS)
            except grpc.RpcError as error:
                raise TransferFailed("GetStatus failed", {name: describe(error)}) from error
            if status.instance_id not in ("", name):  # earlier releases leave it empty
                others[name] = f"'{status.instance_id}' answers at its address"
            epochs.append(max(status.group_epoch, status.newest_group_epoch))
        if others:
            raise TransferFailed("members of the run are gone", others)
        return epochs

    def _keep_waiting_for(self, name: str) -> bool:
        """Whether the rollout is alive. False for all, `CLOSE_SECONDS` after this trainer was asked to stop."""
        if self._stopping() and self._stop_seen is None:
            self._stop_seen = time.monotonic()
        in_time = self._stop_seen is None or time.monotonic() < self._stop_seen + CLOSE_SECONDS
        return in_time and self._members.alive(name)

    def _back_off(self, blame: dict[str, str]) -> None:
        """Skip rollouts that failed for a while, twice as long after each failure."""
        for name, why in blame.items():
            if (peer := self._peers.get(name)) is not None:
                backoff = min(FIRST_BACKOFF_SECONDS * 2**peer.failures, LONGEST_BACKOFF_SECONDS)
                peer.version, peer.handshake_done = None, False
                peer.failures, peer.retry_at = peer.failures + 1, time.monotonic() + backoff
                log.warning("rollout is skipped for a while", extra={"rollout": name, "seconds": backoff, "why": why})

    def _drop_group(self, wait: float = 0.0) -> None:
        if self._group is not None:
            self._group.channel.drop(wait)
            self._group = None

    def close(self) -> None:
        """Leave the group, and close the store and the channels."""
        self._drop_group(wait=CLOSE_SECONDS)
        self._store.close()
        for peer in self._peers.values():
            peer.channel.close()
        self._peers.clear()
        self._transport.close()
