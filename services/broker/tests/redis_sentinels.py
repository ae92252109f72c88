"""A master, its replicas and Sentinels that watch them, as real processes on the loopback."""

from pathlib import Path
from urllib.parse import quote

from redis_cluster import until
from redis_process import RedisProcess, free_port

SERVICE = "quartet"
PASSWORD, WATCHWORD = "p@ss/word?", "w@tch"
"""Of the servers that have data, and of the Sentinels."""


class Sentinel(RedisProcess):
    """A `redis-server --sentinel`: it keeps what it learns in its configuration file."""

    def __init__(self, folder: Path, master: RedisProcess):
        super().__init__(folder, password=WATCHWORD)
        self.configuration = folder / "sentinel.conf"
        self.configuration.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"requirepass {WATCHWORD}\nsentinel sentinel-pass {WATCHWORD}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 2\n"
            f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\n"
            f"sentinel failover-timeout {SERVICE} 4000\n"
        )

    def command(self) -> list[str]:
        return [self.executable, str(self.configuration), "--sentinel"]


class Guarded:
    """A master with one replica, watched by three Sentinels, two of which must agree."""

    def __init__(self, folder: Path):
        def home(name: str) -> Path:
            (folder / name).mkdir()
            return folder / name

        port = free_port()
        common = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", "--appendfsync", "no")
        self.master = RedisProcess(home("master"), *common, port=port, password=PASSWORD)
        self.replica = RedisProcess(home("replica"), *common, "--replicaof", "127.0.0.1", str(port), password=PASSWORD)
        self.sentinels = [Sentinel(home(f"sentinel-{n}"), self.master) for n in range(3)]

    @property
    def url(self) -> str:
        """`redis+sentinel://` with all Sentinels and both passwords."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return (
            f"redis+sentinel://:{quote(PASSWORD, safe='')}@{hosts}/{SERVICE}/0"
            f"?sentinel_password={quote(WATCHWORD, safe='')}"
        )

    def start(self) -> None:
        """Start all, wait until the Sentinels know each other and the replica."""
        self.master.start()
        self.replica.start()
        until(lambda: self.replica.client().info("replication")["master_link_status"] == "up", "the replica follows")
        # Last: a Sentinel that sees the replica before it follows takes it for no good one for another ten seconds.
        for each in self.sentinels:
            each.start()
        for each in self.sentinels:
            until(lambda each=each: self._is_ready(each), "the Sentinels know all")

    def _is_ready(self, sentinel: RedisProcess) -> bool:
        state = sentinel.client().sentinel_master(SERVICE)
        return state["num-other-sentinels"] == len(self.sentinels) - 1 and state["num-slaves"] == 1

    def kill(self) -> None:
        for process in (*self.sentinels, self.replica, self.master):
            process.kill()
