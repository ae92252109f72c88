"""Who gets at the store of a weight group: only who proves to know the present epoch's secret."""

import contextlib
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from quartet_common.log import get_logger
from quartet_common.store_gate import LONGEST_WAIT_SECONDS, GateError, Link, answer_hello

log = get_logger(__name__)

# Who was invited proves it in a round trip or two.
HANDSHAKE_SECONDS = 5.0
# Connections that have proved nothing yet; one more, and the eldest of them is closed.
MOST_STRANGERS = 64
# Ranks of a group at most: each has one connection.
MOST_MEMBERS = 1024
_LOG_SECONDS = 10.0
_SEND_SECONDS = 5.0


@dataclass(eq=False)
class _Epoch:
    number: int
    secret: bytes = field(repr=False)
    store: dist.Store
    members: set[socket.socket] = field(default_factory=set)


class StoreGate:
    """Serves the present epoch's store at a listener, one thread for each connection."""

    def __init__(self, listener: socket.socket):
        """Begin to listen; `listener` is the gate's from here on."""
        self._listener = listener
        listener.setblocking(False)
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._free = threading.Semaphore(MOST_STRANGERS)
        self.refused = 0
        """Connections that were closed because they proved nothing."""
        self._logged_at = -_LOG_SECONDS
        self._accepting: _Accepting | None = None
        self.listen()

    def open(self, epoch: int, secret: bytes, store: dist.Store) -> None:
        """Let in who knows `secret`; who was let into an earlier epoch is shut out."""
        if not secret:
            raise ValueError("secret: got an empty one; allowed: at least one byte")
        self.shut()
        with self._lock:
            self._epoch = _Epoch(epoch, secret, store)

    def shut(self) -> None:
        """End the present epoch, if there is one, and its connections."""
        with self._lock:
            epoch, self._epoch = self._epoch, None
            for member in epoch.members if epoch else ():
                _shut_down(member)

    def listen(self) -> None:
        """Accept connections, if that is not done already."""
        if self._accepting is None:
            self._accepting = _Accepting(self._listener, self._begin)

    def lend(self) -> int:
        """Accept no more connections, and return another descriptor of the listener for who does so until `listen`."""
        if self._accepting is not None:
            self._accepting.stop()
            self._accepting = None
        return os.dup(self._listener.fileno())

    def close(self) -> None:
        """End all, the listener too."""
        os.close(self.lend())
        self.shut()
        with self._lock:
            for stranger in self._strangers:
                _shut_down(stranger)
        self._listener.close()

    def _begin(self, connection: socket.socket) -> None:
        if not self._free.acquire(blocking=False):
            with self._lock:
                eldest = next(iter(self._strangers), None)
                if eldest is not None:
                    _shut_down(eldest)
            if not self._free.acquire(timeout=HANDSHAKE_SECONDS):
                connection.close()
                return
        with self._lock:
            self._strangers[connection] = None
        threading.Thread(target=self._converse, args=(connection,), name="weight-store", daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            try:
                epoch, link = self._admit(connection)
            except GateError as error:
                self._refuse(connection, str(error))
                return
            finally:
                with self._lock:
                    del self._strangers[connection]
                self._free.release()
            try:
                with contextlib.suppress(GateError):  # the member went away, or the epoch is over
                    _serve(link, epoch.store)
            finally:
                with self._lock:
                    epoch.members.discard(connection)

    def _admit(self, connection: socket.socket) -> tuple[_Epoch, Link]:
        asked: list[_Epoch] = []

        def secret_of(number: int) -> bytes | None:
            with self._lock:
                if self._epoch is None or self._epoch.number != number:
                    return None
                asked.append(self._epoch)
                return self._epoch.secret

        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # who waits for a member that is no more
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = answer_hello(connection, secret_of, HANDSHAKE_SECONDS)
        with self._lock:
            if self._epoch is not asked[0]:
                raise GateError(f"epoch {asked[0].number} is over")
            if len(asked[0].members) >= MOST_MEMBERS:
                raise GateError(f"epoch {asked[0].number} has {MOST_MEMBERS} connections, which is the most")
            asked[0].members.add(connection)
        return asked[0], link

    def _refuse(self, connection: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError):
            peer = connection.getpeername()[0]
            why = f"{peer}: {why}"
        with self._lock:
            self.refused += 1
            if time.monotonic() < self._logged_at + _LOG_SECONDS:
                return
            self._logged_at, refused = time.monotonic(), self.refused
        log.warning("connection refused at the weight store", extra={"why": why, "refused_so_far": refused})


class _Accepting:
    """A thread that accepts until it is stopped."""

    def __init__(self, listener: socket.socket, begin):
        self._listener, self._begin = listener, begin
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="weight-store-gate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Accept no more; returns when that is so."""
        self._wake.shutdown(socket.SHUT_RDWR)  # a child that was just forked may still hold it: closing is not enough
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        with self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not any(key.fileobj is self._woken for key, _ in selector.select()):
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:  # who came went away again
                    continue
                except OSError as error:  # e.g. no descriptor is free
                    log.warning("the weight store cannot accept a connection", extra={"error": str(error)})
                    selector.unregister(self._listener)
                    stopped = selector.select(LONGEST_WAIT_SECONDS)
                    selector.register(self._listener, selectors.EVENT_READ)
                    if stopped:
                        return
                    continue
                self._begin(connection)


def _serve(link: Link, store: dist.Store) -> None:
    """Do what the member asks for until it leaves. Raises GateError."""
    while True:
        operation, fields = link.receive(None)
        if operation == b"S" and len(fields) == 2:
            store.set(fields[0].decode(errors="replace"), fields[1])
            link.send(b"+", [], _SEND_SECONDS)
        elif operation == b"G" and len(fields) >= 2 and len(fields[0]) == 4:
            keys = [key.decode(errors="replace") for key in fields[1:]]
            wait = min(int.from_bytes(fields[0], "big") / 1000, LONGEST_WAIT_SECONDS)
            with contextlib.suppress(RuntimeError):  # torch's way to say that they are not there; asked for below
                store.wait(keys, timedelta(seconds=max(wait, 0.001)))
            there = store.check(keys)
            link.send(b"+" if there else b"-", [store.get(key) for key in keys] if there else [], _SEND_SECONDS)
        else:
            raise GateError("an operation that there is none of")


def _shut_down(connection: socket.socket) -> None:
    """End a connection that a thread may be waiting on, and will close."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
