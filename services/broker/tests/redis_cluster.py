"""A real Redis Cluster on the loopback: processes with `--cluster-enabled yes`, introduced to each other."""

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import redis
from redis_process import RedisProcess, free_port

SLOTS = 16384
_FORMING_SECONDS = 60


def until(true: Callable[[], object], what: str, seconds: float = _FORMING_SECONDS) -> None:
    """Wait until something is true of servers that tell nobody when it becomes true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} within {seconds:g} s"
        time.sleep(0.05)


def _port_with_bus() -> int:
    """A free port with the one 10,000 above it, at which the nodes talk to each other."""
    while True:
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port + 10_000 < 65536:
                probe.bind(("127.0.0.1", port + 10_000))
                return port


class RedisCluster:
    """`masters` masters with an equal part of the slots each, then replicas, each of the master with its index."""

    def __init__(self, folder: Path, masters: int = 3, replicas_of: tuple[int, ...] = (), *options: str):
        self.nodes: list[RedisProcess] = []
        self._masters = masters
        self._replicas_of = replicas_of
        common = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", *options)
        # Waits on disks and copies are for machines: here a replica is there at once.
        common += ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        common += ("--cluster-replica-validity-factor", "0", "--appendfsync", "no")
        for n in range(masters + len(replicas_of)):
            home = folder / f"node-{n}"
            home.mkdir()
            self.nodes.append(RedisProcess(home, *common, port=_port_with_bus()))

    @property
    def url(self) -> str:
        """`redis+cluster://` with two of the nodes: the others are found."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def client(self, n: int) -> redis.Redis:
        return self.nodes[n].client()

    def start(self) -> None:
        """Start the nodes, make a Cluster of them, wait until all agree on it."""
        for node in self.nodes:
            node.start()
        first = self.client(0)
        for n, node in enumerate(self.nodes):
            client = self.client(n)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            if n:
                first.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
            if n < self._masters:
                slots = range(SLOTS * n // self._masters, SLOTS * (n + 1) // self._masters)
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        ids = [self.client(n).execute_command("CLUSTER", "MYID") for n in range(len(self.nodes))]
        for replica, master in enumerate(self._replicas_of, self._masters):
            client = self.client(replica)
            until(lambda client=client, master=master: ids[master].decode() in self._known(client), "they meet")
            client.execute_command("CLUSTER", "REPLICATE", ids[master])
        for n in range(len(self.nodes)):
            until(lambda n=n: self._is_ready(n), f"node {n} knows all slots and nodes")

    @staticmethod
    def _known(client: redis.Redis) -> str:
        return client.execute_command("CLUSTER", "NODES").decode()

    def _is_ready(self, n: int) -> bool:
        client = self.client(n)
        info = client.execute_command("CLUSTER", "INFO").decode()
        replication = client.info("replication")
        attached = replication["role"] == "master" or replication["master_link_status"] == "up"
        covered = sum(last - first + 1 for first, last, *_ in client.execute_command("CLUSTER", "SLOTS"))
        if covered < SLOTS:
            return False
        return f"cluster_known_nodes:{len(self.nodes)}" in info and "cluster_state:ok" in info and attached

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()
