"""The ranks of a training job meet, before torch's process groups are created.

By default Gloo listens at the address of the host's own name, which Debian maps to 127.0.1.1, and waits in silence for
ranks that cannot come. So each rank chooses an interface and connects with every other rank through it. If that fails,
all ranks end with the same sentence.
"""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from quartet_common.config import ConfigError, is_loopback
from quartet_common.ports import address_toward, interface_address
from quartet_trainer import launch
from quartet_trainer.config import TrainerSection
from quartet_trainer.errors import TrainingError
from quartet_weights.process_group import first_line

_CONNECT_SECONDS = 10.0
_LEAVE_SECONDS = 2.0


class Rendezvous:
    """One rank's part. The store has each rank's answer in each phase; a failure takes the place of the missing.

    Keep it until the process groups are created: torch's own rendezvous shares the store.
    """

    def __init__(self, settings: TrainerSection) -> None:
        """Connect with every other rank and choose the interface of Gloo and NCCL. With one rank, do nothing.

        Raises:
            ConfigError, TrainingError: within `settings.rendezvous_seconds`, the same on every rank that came.
        """
        self._rank, self._world = launch.rank(), launch.world_size()
        if self._world == 1:
            return
        self._me = f"rank {self._rank} on {socket.gethostname()}"
        self._deadline = time.monotonic() + settings.rendezvous_seconds
        self._within = f"within {settings.rendezvous_seconds:g} s (trainer.rendezvous_seconds)"
        named = settings.interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        if settings.weights.transport == "nccl":  # which has one interface per process
            named = named or settings.weights.interface
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._connect(*master)
        try:
            interface, address = self._choose_interface(named, *master)
            self._meet(interface, address)
        except RuntimeError as error:  # of the store
            raise TrainingError(f"{self._me}: rank 0 ended; its log says why: {first_line(error)}") from error
        except (ConfigError, TrainingError):
            with suppress(RuntimeError):  # Rank 0, which has the store, ends last.
                self._store.set(f"left/{self._rank}", "")
                if self._rank == 0:
                    self._store.wait(self._keys("left"), timedelta(seconds=_LEAVE_SECONDS))
            raise
        # Not in os.environ, which is what the user set, and applies to the weight group too.
        os.putenv("GLOO_SOCKET_IFNAME", interface)
        if named or ("NCCL_SOCKET_IFNAME" not in os.environ and not is_loopback(address)):
            os.putenv("NCCL_SOCKET_IFNAME", f"={interface}")

    def _connect(self, host: str, port: int) -> None:
        """Connect with the store, which is in rank 0's process or, by torchrun, in that of its agent."""
        where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
        try:
            if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
                self._server = dist.TCPStore("127.0.0.1", port, **options)
            while (error := self._unreachable(host, port)) and time.monotonic() < self._deadline:
                time.sleep(0.2)
            if error:
                cure = "start rank 0, and set both to an address of its host and a port that is open"
                raise TrainingError(f"{self._me}: cannot reach rank 0 at {where} {self._within}: {error}; {cure}")
            # In a thread, because TCPStore has no deadline for a program that accepts and does not answer.
            making = ThreadPoolExecutor(1).submit(dist.TCPStore, host, port, is_master=False, timeout=self._left())
            store = making.result(self._left().total_seconds())
        except (RuntimeError, TimeoutError) as error:
            came = first_line(error) or "another program listens there"
            cure = "set a port that nothing else uses"
            raise TrainingError(f"{self._me}: rank 0 cannot serve at {where}: {came}; {cure}") from error
        self._store = dist.PrefixStore(f"quartet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def _choose_interface(self, named: str, host: str, port: int) -> tuple[str, str]:
        """Return the interface, by default that of the route to MASTER_ADDR, and the address of it that Gloo takes."""
        try:
            if not named:
                own = address_toward(host, port)
                there = psutil.net_if_addrs().items()
                named = next((name for name, addresses in there if own in {each.address for each in addresses}), "")
            return named, interface_address("trainer.interface", named)
        except (ConfigError, OSError) as error:
            self._fail(ConfigError, f"{self._me}: {error}")

    def _meet(self, interface: str, address: str) -> None:
        """Connect with every other rank, all at once."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=self._world) as listener:
            place = {"host": socket.gethostname(), "address": address, "port": listener.getsockname()[1]}
            for rank, other in enumerate(self._exchange("place", {**place, "world": self._world})):
                there = f"rank {rank} on {other['host']}"
                if other["world"] != self._world:
                    came = f"{self._me}: WORLD_SIZE: got {self._world}, but {there} has {other['world']}"
                    self._world = max(self._world, other["world"])
                    self._fail(ConfigError, f"{came}; set the same on every host")
                if error := self._unreachable(other["address"], other["port"]):
                    came = f"{self._me}, at {address} ({interface}), cannot reach {there} at {other['address']}"
                    cure = "set trainer.interface to one with a network that all hosts share"
                    if is_loopback(other["address"]):
                        cure += ", or MASTER_ADDR to an address that is loopback on no host"
                    kind = ConfigError if is_loopback(other["address"]) else TrainingError
                    self._fail(kind, f"{came}: {error}; {cure}")
            self._exchange("reached", {})

    def _exchange(self, phase: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Give this rank's answer and return all ranks'. Raises what a rank has failed with."""
        keys = self._keys(phase)
        own = json.loads(self._store.compare_set(keys[self._rank], "", json.dumps(mine)))
        if own != mine and "failed" not in own:
            self._fail(ConfigError, f"{self._me}: RANK: another process has it too; set a different one for each")
        try:
            self._store.wait(keys, self._left())
        except RuntimeError:
            if time.monotonic() < self._deadline:
                raise
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
            cure = "start it with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and look at its log"
            self._fail(TrainingError, f"{self._me}: no answer of rank {missing} {self._within}; {cure}")
        answers = [json.loads(answer) for answer in self._store.multi_get(keys)]
        for failure in (answer for answer in answers if "failed" in answer):
            raise (ConfigError if failure["invalid"] else TrainingError)(failure["failed"])
        return answers

    def _fail(self, kind: type[ConfigError | TrainingError], sentence: str) -> NoReturn:
        """Raise an error, here and on all ranks that wait; of several, the first."""
        mine = json.dumps({"failed": sentence, "invalid": kind is ConfigError})
        answer = self._store.compare_set("failed", "", mine).decode()
        for key in (*self._keys("place"), *self._keys("reached")):
            self._store.compare_set(key, "", answer)
        first = json.loads(answer)
        raise (ConfigError if first["invalid"] else TrainingError)(first["failed"])

    def _keys(self, phase: str) -> list[str]:
        return [f"{phase}/{rank}" for rank in range(self._world)]

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def _unreachable(self, host: str, port: int) -> str:
        """Connect and disconnect. Return what fails, or ""."""
        try:
            socket.create_connection((host, port), min(_CONNECT_SECONDS, self._left().total_seconds())).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""
