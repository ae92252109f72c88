"""Weight updates to one rollout, step by step, as a trainer drives them."""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quartet.v1 import rollout_pb2 as pb

from quartet_common.durations import to_duration

sys.path.append(str(Path(__file__).resolve().parents[1] / "preloaded"))
from started import Answering  # noqa: E402 (beside the other suites' tests)

if TYPE_CHECKING:
    from quartet_contract.world import World

# Small, so that an update takes several.
BUCKET_BYTES = 1 << 19
ROOT = Path(__file__).resolve().parents[2]
SENDER = ROOT / "services" / "rollout" / "tests" / "engines" / "sender.py"
SECONDS = 60.0


class Peer(Answering):
    """The trainer's end of weight groups, one at a time: the program that the rollout's own tests have."""

    def __init__(self, python: Path, log: Path):
        super().__init__([python, SENDER], log)
        self.hear()  # its process id
        self._meeting = False

    def open(self, epoch: int, secret: bytes) -> int:
        """Open the store of a group and begin to join as rank 0; return its port."""
        if self._meeting:
            self.hear()  # the one before was never joined
        self._meeting = True
        return self.order(do="open", epoch=epoch, secret=secret.hex(), world_size=2, timeout=SECONDS)["port"]

    def meet(self) -> None:
        """Wait until both ranks are in the group."""
        self._meeting = False
        assert self.hear() == {"joined": True}


class WeightEpochs:
    """The trainer of one rollout. Each test opens an epoch of its own; `use` chooses whose weights are sent."""

    def __init__(self, engine: str, run_id: str, peer: Peer, folders: Sequence[Path]):
        self.engine = engine
        self.epoch = 0
        self.version = 0
        self._peer, self._folders = peer, folders
        self._run_id = run_id
        self._secret = b""
        self._port = 1
        self.use(0)

    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Return the log-prob of each completion token under the weights that are sent, by plain transformers."""
        order = {"folder": self._folder, "prompt": list(prompt), "completion": list(completion)}
        return self._peer.order(do="score", **order)["log_probs"]

    def use(self, index: int) -> "WeightEpochs":
        """Send the weights of another folder from the next epoch on."""
        self._folder = str(self._folders[index])
        told = self._peer.order(do="plan", folder=self._folder, bucket_bytes=BUCKET_BYTES)
        self._manifest = pb.WeightManifest.FromString(bytes.fromhex(told["manifest"]))
        self.checksum: int = told["checksum"]
        return self

    def open(self) -> "WeightEpochs":
        """Open the store of a new epoch; rank 0 begins to join."""
        self.epoch, self.version, self._secret = self.epoch + 1, self.version + 1, secrets.token_bytes(16)
        self._port = self._peer.open(self.epoch, self._secret)
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
        self._peer.meet()

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
            manifest=self._manifest,
            timeout=to_duration(30),
        )

    def begin(self, w: "World") -> "WeightEpochs":
        """Begin an update."""
        w.call("RolloutService.BeginWeightUpdate", self.announcement())
        return self

    def send(self) -> "WeightEpochs":
        """Broadcast all buckets."""
        sent = self._peer.order(do="send", folder=self._folder, bucket_bytes=BUCKET_BYTES)["sent"]
        assert sent == len(self._manifest.bucket_bytes) > 1
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
        if self.settle(w) < 0:
            self.publish(w)

    def settle(self, w: "World") -> int:
        """Leave no update open behind a test; return the version that stands."""
        now = w.call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest())
        if not now.paused:
            return now.policy_version
        return w.call("RolloutService.AbortWeightUpdate", self.surrender()).policy_version
