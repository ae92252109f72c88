"""A run's data in Redis as two files, and back: the half of `quartet backup` and `quartet restore` that needs Redis.

python -m quartet_broker.backup save|check|restore RUN FOLDER [--config FILE.toml] [--set KEY=VALUE ...] [--replace]

Each key is read by DUMP and written by RESTORE, into a Redis that runs, with an append-only file or without, alone,
behind Sentinels, or in a Cluster. The file `books` has the keys that change, as of one moment (`lua/dump_books.lua`).
The file `values` has the groups' bytes, which are stored once and never change: they are read between the calls of
others, so that Redis is blocked for the books only.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from redis.exceptions import ResponseError

from quartet_broker import keys, scripts
from quartet_broker.config import BrokerSection, without_password
from quartet_broker.events import timestamp
from quartet_broker.members import Members
from quartet_broker.notifier import EVERYONE, Notifier
from quartet_broker.preflight import check_redis
from quartet_broker.runs import Runs
from quartet_broker.servers import connect
from quartet_broker.store import Store
from quartet_common.config import ConfigError, load_config
from quartet_common.errors import ContractError, aborted
from quartet_common.text import one_line

Record = tuple[bytes, bytes]
"""A key and its DUMP; in `books` the DUMP of a value is empty: it is in `values`."""

_HEAD = Struct(">QQ")  # bytes of the key, bytes of its DUMP; both follow
_SECONDS = 300.0  # for one reply
_READ_AT_ONCE = 16  # values, each of which may have megabytes
_WRITTEN_AT_ONCE = 4 << 20
_ATTEMPTS = 20


async def save(store: Store, run_id: str, folder: Path) -> dict[str, Any]:
    """Write a run's `books` and `values` to an existing folder; return what the run's hash says of it.

    Raises:
        ConfigError: Redis does not have the run.
        ContractError: Redis does not answer, or groups are deleted faster than they can be read.
    """
    with (folder / "values").open("xb") as file:
        saved: set[bytes] = set()
        prefixes = tuple(f"{keys.prefix(run_id)}{kind}".encode() for kind in ("payload:", "transcript:"))
        async for found in store.scan(run_id):  # before the books, so that few are left to be read after them
            await _save_values(store, [key for key in found if key.startswith(prefixes)], saved, file)
        for _ in range(_ATTEMPTS):
            (reply,) = await store.run_many(scripts.DUMP_BOOKS, run_id, [()], missing_ok=True)
            if reply[0] == b"NOT_FOUND":
                (newest,) = await store.read([("ZREVRANGE", keys.RUNS, 0, 9)])
                names = ", ".join(name.decode() for name in newest) or "none"
                raise ConfigError(f"run: Redis has no run '{run_id}'; its newest runs: {names}")
            _, (created, policy_version, committed_step), values, books = reply
            # A value that is gone was deleted after the books were read: other books, without it, are needed.
            if await _save_values(store, values, saved, file):
                break
        else:
            raise aborted(f"run '{run_id}'", "its groups are deleted faster than they can be read; retry")
    with (folder / "books").open("xb") as file:
        for key, dump in [*zip(books[::2], books[1::2], strict=True), *((key, b"") for key in values)]:
            _write(file, key, dump)
    return {
        "run_created_at": timestamp(float(created)).ToJsonString(),
        "policy_version": int(policy_version),
        "committed_step": int(committed_step),
        "keys": len(books) // 2 + len(values),
    }


async def _save_values(store: Store, wanted: Iterable[bytes], saved: set[bytes], file: BinaryIO) -> bool:
    """Append values that are not saved yet; return False if one does not exist any more."""
    missing = [key for key in dict.fromkeys(wanted) if key not in saved]
    complete = True
    for first in range(0, len(missing), _READ_AT_ONCE):
        portion = missing[first : first + _READ_AT_ONCE]
        dumps = await store.read(("DUMP", key) for key in portion)
        for key, dump in zip(portion, dumps, strict=True):
            if dump is None:
                complete = False
            else:
                _write(file, key, dump)
                saved.add(key)
    return complete


async def check(store: Store, run_id: str) -> None:
    """Raise ConfigError if Redis has a run of this name."""
    (state,) = await store.read([("HGET", keys.run(run_id), "state")])
    if state is not None:
        raise ConfigError(
            f"run: Redis has a run '{run_id}', which is {state.decode().lower()}; add --replace to delete its data "
            "there and restore the backup's"
        )


async def restore(store: Store, runs: Runs, run_id: str, folder: Path) -> None:
    """Write a run from its two files, in place of what Redis has of it.

    No caller finds the run before all of it is there, because its own hash is written last. An interrupted restore is
    repeated from its beginning.

    Raises:
        ConfigError: the run was made by another caller meanwhile.
        ContractError: Redis does not answer, or refuses.
    """
    # As DeleteRun does: the rest of an interrupted restore is found, too.
    await store.read([("HSET", keys.run(run_id), "state", "DELETING")])
    await runs.purge(run_id)
    own = keys.run(run_id).encode()
    books = dict(_read(folder / "books"))
    run = books.pop(own)
    await _write_all(store, ((key, dump) for key, dump in _read(folder / "values") if key in books))
    await _write_all(store, ((key, dump) for key, dump in books.items() if dump))
    try:
        await store.read([("RESTORE", own, 0, run)])
    except ResponseError as error:
        if not str(error).startswith("BUSYKEY"):
            raise
        raise ConfigError(
            f"run: run '{run_id}' was recreated during the restore; stop `quartet run`, and repeat with --replace"
        ) from error
    await runs.list_again(run_id)
    await store.read([("PUBLISH", keys.prefix(run_id) + "bell", EVERYONE)])


async def _write_all(store: Store, records: Iterable[Record]) -> None:
    portion: list[tuple[str, bytes, int, bytes, str]] = []
    size = 0
    for key, dump in records:
        portion.append(("RESTORE", key, 0, dump, "REPLACE"))
        size += len(key) + len(dump) + 100
        if size >= _WRITTEN_AT_ONCE:
            await store.read(portion)
            portion, size = [], 0
    if portion:
        await store.read(portion)


def _write(file: BinaryIO, key: bytes, dump: bytes) -> None:
    file.write(_HEAD.pack(len(key), len(dump)))
    file.write(key)
    file.write(dump)


def _read(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        while head := file.read(_HEAD.size):
            key_bytes, dump_bytes = _HEAD.unpack(head)
            yield file.read(key_bytes), file.read(dump_bytes)


async def _work(section: BrokerSection, arguments: argparse.Namespace) -> dict[str, Any]:
    servers = connect(section)
    store = Store(servers, section)
    try:
        if arguments.action == "save":
            return await save(store, arguments.run, arguments.folder)
        if not arguments.replace:
            await check(store, arguments.run)
        if arguments.action == "restore":
            members = Members(store, store, Notifier(servers), section.max_members)
            await restore(store, Runs(store, members, section, 0), arguments.run, arguments.folder)
        return {}
    finally:
        await servers.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 2 refused, with a sentence on standard error. Standard output is JSON."""
    parser = argparse.ArgumentParser(prog="python -m quartet_broker.backup", description=__doc__)
    parser.add_argument("action", choices=("save", "check", "restore"))
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--replace", action="store_true")
    arguments = parser.parse_args(argv)
    problems: Sequence[str]
    try:
        section = load_config("broker", BrokerSection, arguments.config, arguments.set).section
        where = without_password(section.redis_url)
        version = check_redis(section)
        done = asyncio.run(_work(section.model_copy(update={"redis_timeout": _SECONDS}), arguments))
        print(json.dumps({"redis": version, **done}))
        return 0
    except ConfigError as error:
        problems = error.problems
    except ContractError as error:
        problems = [error.message]
    except ResponseError as error:
        if "DUMP payload" not in str(error):
            raise
        problems = [
            f"Redis at {where}, version {version}, cannot read what the Redis of the backup wrote ({error}): restore "
            "into that version or a later one, which the backup's manifest.json names"
        ]
    for problem in problems:
        print(one_line(problem), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
