"""Weight updates to one rollout, step by step, as a trainer drives them."""

import base64
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from quartet.v1 import rollout_pb2 as pb

from quartet_common.durations import to_duration

sys.path.append(str(Path(__file__).resolve().parents[1] / "preloaded"))
from started import Answering  # noqa: E402 (beside the other suites' tests)

if TYPE_CHECKING:
    from quartet_contract.world import World

# Small, so that an update takes several.
BUCKET_BYTES = 1 << 19
SCRIPT = Path(__file__).with_name("weight_peer.py")


class Peer(Answering):
    """A weight_peer process with the weights of one folder."""

    def __init__(self, python: Path, folder: Path, log: Path):
        super().__init__([python, SCRIPT, folder, str(BUCKET_BYTES)], log)
        self.folder = folder
        told = self.hear()
        self.manifest = pb.WeightManifest.FromString(base64.b64decode(told["manifest"]))
        self.checksum: int = told["checksum"]


class WeightEpochs:
    """The trainer of one rollout. Each test opens an epoch of its own; `use` chooses whose weights are sent."""

    def __init__(self, engine: str, run_id: str, peers: Sequence[Peer]):
        self.engine = engine
        self.epoch = 0
        self.version = 0
        self.peer = peers[0]
        self._peers = peers
        self._run_id = run_id
        self._secret = b""
        self._port = 1

    @property
    def checksum(self) -> int:
        """Checksum of what is sent."""
        return self.peer.checksum

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Return the log-prob of each completion token under the weights that are sent, by plain transformers."""
        # Always of the same process: the library takes seconds to import.
        order = {"folder": str(self.peer.folder), "prompt": list(prompt), "completion": list(completion)}
        return self._peers[0].order(do="score", **order)["log_probs"]

    def use(self, index: int) -> "WeightEpochs":
        """Send the weights of another folder from the next epoch on."""
        self.peer = self._peers[index]
        return self

    def open(self) -> "WeightEpochs":
        """Open the store of a new epoch; rank 0 begins to join."""
        self.epoch, self.version, self._secret = self.epoch + 1, self.version + 1, secrets.token_bytes(16)
        self._port = self.peer.order(do="open", epoch=self.epoch, secret=self._secret.hex())["port"]
        return self

    def invitation(self) -> pb.JoinWeightGroupRequest:
        """Return the request that invites into the newest epoch."""
        return pb.JoinWeightGroupRequest(
            run_id=self._run_id,
            group_epoch=self.epoch,
            transport=pb.WEIGHT_TRANSPORT_GLOO,
            store_host="127.0.0.1",
            store_port=self._port,
            rank=1,
            world_size=2,
            timeout=to_duration(30),
            secret=self._secret,
        )

    def wait_until_met(self) -> None:
        """Wait until both ranks are in the group."""
        self.peer.order(do="meet")

    def join(self, w: "World") -> "WeightEpochs":
        """Have the rollout in a new epoch's group."""
        w.call("RolloutService.JoinWeightGroup", self.open().invitation())
        self.wait_until_met()
        return self

    def announcement(self) -> pb.BeginWeightUpdateRequest:
        """Return the request that begins an update."""
        return pb.BeginWeightUpdateRequest(
            run_id=self._run_id,
            group_epoch=self.epoch,
            policy_version=self.version,
            manifest=self.peer.manifest,
            timeout=to_duration(30),
        )

    def begin(self, w: "World") -> "WeightEpochs":
        """Begin an update."""
        w.call("RolloutService.BeginWeightUpdate", self.announcement())
        return self

    def send(self) -> "WeightEpochs":
        """Broadcast all buckets."""
        assert self.peer.order(do="send")["sent"] == len(self.peer.manifest.bucket_bytes) > 1
        return self

    def conclusion(self) -> pb.FinishWeightUpdateRequest:
        """Return the request that ends an update."""
        return pb.FinishWeightUpdateRequest(
            run_id=self._run_id, group_epoch=self.epoch, policy_version=self.version, checksum=self.checksum
        )

    def surrender(self) -> pb.AbortWeightUpdateRequest:
        """Return the request that gives an update up."""
        return pb.AbortWeightUpdateRequest(
            run_id=self._run_id, group_epoch=self.epoch, policy_version=self.version, reason="another rollout died"
        )

    def publish(self, w: "World") -> int:
        """Make a whole update; return the version now installed."""
        self.join(w).begin(w).send()
        return w.call("RolloutService.FinishWeightUpdate", self.conclusion()).policy_version

    def ensure(self, w: "World") -> None:
        """Have the rollout generate with weights of a known version."""
        now = w.call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest())
        if now.paused:
            w.call("RolloutService.AbortWeightUpdate", self.surrender())
        if now.paused or now.policy_version < 0:
            self.publish(w)

    def settle(self, w: "World") -> None:
        """Leave no update open behind a test."""
        try:
            if w.call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest()).paused:
                w.call("RolloutService.AbortWeightUpdate", self.surrender())
        except grpc.RpcError as error:
            raise AssertionError(f"the rollout could not be settled: {error.details()}") from error
        self.peer.order(do="leave")
