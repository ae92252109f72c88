"""A broker of its own to be fuzzed, over a Redis that is put back as it was after each call that changed it."""

from pathlib import Path

import redis
from fuzz_messages import Hints
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import broker_pb2 as pb
from servers_under_test import Servers

from quartet_contract.world import EVALUATE, SERVE, TRAIN, BrokerRun, World

LONG = Duration(seconds=30 * 86400)


class FuzzedBroker(Servers):
    """The processes, and runs in which something is in every state."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        _, url = self.start_redis()
        self.redis = redis.Redis.from_url(url)
        # Time does nothing here: what Redis holds changes by calls alone.
        self.server = self.serve("broker", redis_url=url, sweep_interval=60.0)
        self.caller = self.server.caller()
        self.world = World({"BrokerService": self.caller})
        self.hints = self._arrange()
        self._snapshot = {name: self.redis.dump(name) for name in self.redis.scan_iter()}
        self._digest = self.digest()

    def digest(self) -> bytes:
        """Return Redis' own digest of all it holds."""
        return self.redis.execute_command("DEBUG", "DIGEST")

    def unchanged(self) -> bool:
        """True if Redis holds what it held at first. If not, put it back."""
        if self.digest() == self._digest:
            return True
        with self.redis.pipeline() as pipeline:
            pipeline.flushdb()
            for name, value in self._snapshot.items():
                pipeline.restore(name, 0, value)
            pipeline.execute()
        assert self.digest() == self._digest
        return False

    def group_life(self, name: str) -> None:
        """Take one group from submission to commit, in a run of its own that is deleted then."""
        run = BrokerRun(self.world, name).committed()
        group = self.world.call("BrokerService.GetGroup", pb.GetGroupRequest(run_id=name, instance_id="a"))
        assert group.state == pb.GROUP_STATE_COMMITTED
        run.finish().call("DeleteRun", pb.DeleteRunRequest(run_id=name))

    def close(self) -> None:
        self.redis.close()
        super().close()

    def _arrange(self) -> Hints:
        """Make the runs; return what messages may name."""
        spec = {"prompt_lease_ttl": LONG, "member_ttl": LONG, "result_ttl": LONG}
        run = BrokerRun(self.world, "fuzz", max_staleness=2, max_queued_prompts=40, **spec)
        run.trained().dead("d")
        run.ready("r", "y", "z").take(1)
        run.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout").submit("s", "s2", purpose=SERVE)
        run.call("StartEvaluation", pb.StartEvaluationRequest(run_id="fuzz", evaluation_set="heldout"))
        leases = [*run.lease(2), *run.submit("l").lease(4)]
        run.submit("q")
        BrokerRun(self.world, "ended", **spec).finish()
        names = ["a", "r", "y", "z", "d", "q", "s", "s2", "e1", "e1@0", "l", "never", "new"]
        return {
            "run_id": ["fuzz", "fuzz", "fuzz", "fuzz", "fuzz", "fuzz", "ended", "no-such-run"],
            "instance_id": names,
            "instance_ids": names,
            "consumed_instance_ids": names,
            "lease_id": [lease.lease_id for lease in leases] + ["0-0:q"],
            "lease_ids": [lease.lease_id for lease in leases] + ["0-0:q"],
            "session_epoch": [run.session, run.session, run.session, 1],
            "step": [0, 1, 2],
            "checkpoint_step": [0, 1],
            "policy_version": [0, 1, 2],
            "min_policy_version": [0, 0, 1],
            "max_policy_version": [1, 1, 0],
            "holder": ["r1", "r1", "ghost"],
            "max_prompts": [1, 2],
            "evaluation_set": ["", "", "heldout"],
            "evaluation_id": ["heldout@0", ""],
            "purpose": [TRAIN, TRAIN, SERVE, EVALUATE],
            "data_pass": [0, 1],
            "pinned_version": [-1, 0],
            "role": ["user", "assistant"],
            "after_event_id": ["", "$", "0-1"],
            "limit": [0, 1],
            "address": ["127.0.0.1:1"],
            # A call that waits is another test's.
            "wait": [
                Duration(),
                Duration(nanos=1),
                Duration(seconds=-1),
                Duration(seconds=31),
                Duration(seconds=2**62),
            ],
        }
