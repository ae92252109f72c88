"""Which servers there are, and how each is configured."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quartet.v1 import broker_pb2, trainer_pb2
from quartet.v1 import rollout_pb2 as rollout
from servers_under_test import KINDS, Server, Servers, copy_models, free_addresses, python_of
from weight_arrangements import Peer, WeightEpochs

import quartet_contract
from quartet_contract.calls import OWNERS, Caller
from quartet_contract.target import group_tensors
from quartet_contract.world import BrokerRun, World

RUN = "contract"
"""The rollouts' run. It is never made: they wait for it, and do what callers ask meanwhile."""

TRAINED_RUN = "contract-trained"
"""The trainer's run. One group is put by the tests themselves: experience may come from anyone."""

AGENT = Path(quartet_contract.__file__).with_name("contract_agent.py:play")
TOKEN = "a shared secret"
SMALL_MESSAGES = 1 << 20
ENGINES = ("transformers", "vllm")


class Stack(Servers):
    """Broker, reward, trainer and a rollout of each engine, which work together; and one of each kind that is alone."""

    def __init__(
        self,
        folder: Path,
        engines: Sequence[str] = ENGINES,
        alone: Sequence[str] = KINDS,
        environment: Mapping[str, str] | None = None,
    ):
        """`engines`: of the rollouts; `alone`: kinds of which one is alone; `environment`: more variables."""
        super().__init__(folder, environment)
        self._engine_names, self._alone_kinds = engines, alone
        self.models = [folder / "model-0", folder / "model-1"]
        self.servers: dict[str, Server] = {}
        self.alone: dict[str, Server] = {}
        self._engines: dict[str, WeightEpochs] = {}
        self._peer: Peer | None = None
        self._redis_url = ""
        self._trained = False

    def start(self) -> None:
        """Start all; nobody is waited for but Redis and the broker."""
        copy_models(*self.models)
        _, self._redis_url = self.start_redis()
        first = ("broker", "reward") if self.environment else ("broker", "reward", "environment")  # no release has it
        for kind in first:
            self.servers[kind] = self._start(kind)
        for engine in self._engine_names:
            self.servers[engine] = self._start("rollout", engine, address=free_addresses()["rollout"], engine=engine)
        for kind in self._alone_kinds:
            section = {"engine": ENGINES[0]} if kind == "rollout" else {}
            self.alone[kind] = self._start(kind, f"{kind}-alone", alone=True, **section)
        self._prepare_training()
        self.servers["trainer"] = self._start("trainer", run=TRAINED_RUN)

    def callers(self, engine: str = ENGINES[0]) -> "Callers":
        """Return the servers by service name, as a World takes them; RolloutService is the one of `engine`."""
        return Callers(self, engine)

    def weights(self, engine: str) -> WeightEpochs:
        """Return the trainer's side for the rollout of an engine, whose engine is loaded then."""
        if engine not in self._engines:
            self.wait_until_loaded(engine)
            self._engines[engine] = self._new_weights(engine)
        return self._engines[engine]

    def wait_until_trained(self) -> None:
        """Wait until the trainer has done its one step and waits for the next batch."""
        if self._trained:
            return
        server, request = self.servers["trainer"], trainer_pb2.TrainerServiceGetStatusRequest()
        caller, waiting = server.caller(), trainer_pb2.TRAINER_PHASE_WAITING_FOR_BATCH

        def has_trained() -> bool:
            status = caller.call("TrainerService.GetStatus", request)
            return status.step == 1 and status.phase == waiting

        server.wait_until(has_trained, "it has trained a step")
        self._trained = True

    def _start(
        self, kind: str, name: str = "", address: str = "", run: str = RUN, alone: bool = False, **section: object
    ) -> Server:
        name = name or kind
        sections: dict[str, dict[str, object]] = {
            "run": {"id": run, "folder": str(self.folder / f"run-{name}"), "group_size": 2, "groups_per_step": 1},
            "model": {"path": str(self.models[0])},
            "addresses": free_addresses() if alone else self.addresses | ({kind: address} if address else {}),
        }
        if kind == "broker":
            section["redis_url"] = self._redis_url
        if kind == "environment":
            section |= {"files": [str(AGENT)], "workers": 1}
        if kind == "trainer":
            section |= {"tensorboard": False, "learning_rate": 1e-4}
        if alone:
            token_file = self.folder / f"{name}.token"  # of each: another may read it at this moment
            token_file.write_text(TOKEN)
            sections["security"] = {"token_file": str(token_file)}
            sections["server"] = {"metrics": False, "max_message_bytes": SMALL_MESSAGES}
        return self.serve(kind, name, TOKEN if alone else "", sections, **section)

    def wait_until_loaded(self, engine: str) -> None:
        """Wait until the rollout of an engine can take calls about weights."""
        self._wait_until_loaded(self.servers[engine])

    def new_rollout(self) -> World:
        """Return the rollout that is alone, its engine loaded; and a trainer's side for it alone."""
        server = self.alone["rollout"]
        self._wait_until_loaded(server)
        return World({"RolloutService": server.caller()}, self._new_weights(ENGINES[0]))

    def _wait_until_loaded(self, server: Server) -> None:
        caller, request = server.caller(), rollout.RolloutServiceGetStatusRequest()
        server.wait_until(lambda: caller.call("RolloutService.GetStatus", request).max_model_len > 0, "it is loaded")

    def _new_weights(self, engine: str) -> WeightEpochs:
        if self._peer is None:
            self._peer = Peer(python_of("trainer"), self.folder / "peer.log")
            self.processes.append(self._peer)
        return WeightEpochs(engine, RUN, self._peer, self.models)

    def _prepare_training(self) -> None:
        world = World({"BrokerService": self.servers["broker"].caller()})
        run = BrokerRun(world, TRAINED_RUN, groups_per_step=1)
        run.put(run.submit("a").lease(1), tensors=group_tensors().SerializeToString())
        run.call("LeaveMember", broker_pb2.LeaveMemberRequest(run_id=TRAINED_RUN, instance_id="r1"))


class Callers(dict):
    """Channels by service, made when first asked for: a server is waited for only where it is called."""

    def __init__(self, stack: Stack, engine: str):
        super().__init__()
        self._stack, self._engine = stack, engine

    def __missing__(self, name: str) -> Caller:
        if name == "idle trainer":
            return self._stack.alone["trainer"].caller()
        (kind,) = [kind for kind, service in OWNERS.items() if service == name]
        if kind == "trainer":
            self._stack.wait_until_trained()
        return self._stack.servers[self._engine if kind == "rollout" else kind].caller()
