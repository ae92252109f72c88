"""The wire of a weight group's store: who proves to know the epoch's secret sets and gets its keys, others get nothing.

    client                                  gate
    MAGIC, epoch, nonce             ->
                                    <-      nonce
    HMAC(secret, "client" + both)   ->                      anything else, and the connection is closed
                                    <-      HMAC(secret, "gate" + both)
    frames                          <->     frames

All HMACs are HMAC-SHA256 (RFC 2104). The secret itself never travels here. A frame is its length (4 bytes, big endian),
its content, and an HMAC under a key of this connection alone over sender, count and content: nobody in between can
change, repeat or add one. Nothing is encrypted. A content is an operation (one byte) and fields, each after its length:

    b"S" key value                      -> b"+"
    b"G" milliseconds key, key, ...     -> b"+" value, value, ...  or b"-": not all were there in that time
"""

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

# A rollout that knows this wire says so in its handshake.
CAPABILITY = "weights.store_gate"
MAGIC = b"QTRTGATE"
MAX_FRAME_BYTES = 1 << 20
# The gate answers at least so often: it need not notice sooner that who waits for a key is gone.
LONGEST_WAIT_SECONDS = 1.0

_NONCE, _MAC = 32, 32
_HELLO = struct.Struct(f">8sq{_NONCE}s")
_LENGTH = struct.Struct(">I")
_ANSWER_SECONDS = 5.0  # beyond the wait itself; never beyond the caller's own deadline


class GateError(RuntimeError):
    """The other side is no holder of the secret, went away, or did not answer in time."""


class Link:
    """Frames to and from a peer that has proved to know the secret. `receive` and `send` on one thread at a time."""

    def __init__(self, connection: socket.socket, key: bytes, is_gate: bool):
        self._connection, self._key = connection, key
        self._names = (b"gate", b"client") if is_gate else (b"client", b"gate")
        self._sent = self._received = 0

    def send(self, operation: bytes, fields: Sequence[bytes], timeout: float) -> None:
        """Send one frame. Raises GateError."""
        content = operation + b"".join(_LENGTH.pack(len(field)) + field for field in fields)
        if len(content) > MAX_FRAME_BYTES:
            raise GateError(f"a frame has {len(content)} bytes; allowed: {MAX_FRAME_BYTES}")
        mac = self._mac(self._names[0], self._sent, content)
        self._sent += 1
        _send(self._connection, _LENGTH.pack(len(content)) + content + mac, timeout)

    def receive(self, timeout: float | None) -> tuple[bytes, list[bytes]]:
        """Return the next frame's operation and fields. `timeout` in seconds; None: wait until the connection ends.

        Raises:
            GateError: the connection ended, or what came was not sent by the peer, or not in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size, deadline))
        if not 1 <= length <= MAX_FRAME_BYTES:
            raise GateError(f"a frame of {length} bytes was announced; allowed: 1 to {MAX_FRAME_BYTES}")
        content = _read(self._connection, length, deadline)
        mac = self._mac(self._names[1], self._received, content)
        if not hmac.compare_digest(mac, _read(self._connection, _MAC, deadline)):
            raise GateError("a frame came that the peer did not send")
        self._received += 1
        fields, at = [], 1
        while at < length:
            start = at + _LENGTH.size
            end = start + int.from_bytes(content[at:start], "big")
            if start > length or end > length:
                raise GateError("a frame has a field that is longer than the frame")
            fields.append(content[start:end])
            at = end
        return content[:1], fields

    def _mac(self, sender: bytes, count: int, content: bytes) -> bytes:
        return _mac(self._key, sender + struct.pack(">Q", count) + content)


def answer_hello(connection: socket.socket, secret_of: Callable[[int], bytes | None], timeout: float) -> Link:
    """The gate's half of the handshake.

    Args:
        secret_of: the secret of an epoch; None: there is no such epoch now.

    Raises:
        GateError: the client did not prove in `timeout` seconds that it knows the secret. It has been told nothing.
    """
    deadline = time.monotonic() + timeout
    # Magic first: who speaks something else, e.g. torch's TCPStore, need not send as much as a hello has.
    magic = _read(connection, len(MAGIC), deadline)
    if magic != MAGIC:
        raise GateError("it does not know the handshake")
    hello = magic + _read(connection, _HELLO.size - len(MAGIC), deadline)
    _, epoch, _ = _HELLO.unpack(hello)
    nonce = secrets.token_bytes(_NONCE)
    _send(connection, nonce, timeout)
    proof = _read(connection, _MAC, deadline)
    secret = secret_of(epoch)
    if secret is None:
        raise GateError(f"epoch {epoch} is not the present one")
    if not hmac.compare_digest(_mac(secret, b"client" + hello + nonce), proof):
        raise GateError(f"it does not know the secret of epoch {epoch}")
    _send(connection, _mac(secret, b"gate" + hello + nonce), timeout)
    return Link(connection, _mac(secret, b"frames" + hello + nonce), is_gate=True)


def say_hello(connection: socket.socket, epoch: int, secret: bytes, timeout: float) -> Link:
    """The client's half of the handshake. Raises GateError when the gate does not let us in, or is none."""
    deadline = time.monotonic() + timeout
    hello = _HELLO.pack(MAGIC, epoch, secrets.token_bytes(_NONCE))
    _send(connection, hello, timeout)
    nonce = _read(connection, _NONCE, deadline)
    _send(connection, _mac(secret, b"client" + hello + nonce), timeout)
    try:
        proof = _read(connection, _MAC, deadline)
    except GateError as error:
        raise GateError(f"the weight store does not let us into epoch {epoch}: {error}") from error
    if not hmac.compare_digest(_mac(secret, b"gate" + hello + nonce), proof):
        raise GateError(f"who listens there does not know the secret of epoch {epoch}")
    return Link(connection, _mac(secret, b"frames" + hello + nonce), is_gate=False)


class StoreClient:
    """The store of one epoch, from outside. Any thread may call; one call at a time is under way."""

    def __init__(self, host: str, port: int, epoch: int, secret: bytes, timeout: float):
        """Connect and shake hands within `timeout` seconds, which is also the default of `get`. Raises GateError."""
        self._timeout, self._lock = timeout, threading.Lock()
        deadline = time.monotonic() + timeout
        try:
            self._connection = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise GateError(f"the weight store is not reached: {(error.strerror or str(error)).lower()}") from error
        try:
            self._link = say_hello(self._connection, epoch, secret, max(deadline - time.monotonic(), 0.001))
        except GateError:
            self._connection.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Set a key. Raises GateError."""
        with self._lock:
            self._call(b"S", [key.encode(), value], min(_ANSWER_SECONDS, self._timeout))

    def get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        """Return the values of keys once all are there. Raises GateError when they are not in `timeout` seconds."""
        limit = self._timeout if timeout is None else timeout
        deadline, names = time.monotonic() + limit, [key.encode() for key in keys]
        while (left := deadline - time.monotonic()) > 0:
            wait = min(left, LONGEST_WAIT_SECONDS)
            with self._lock:
                # An answer may take a little longer than the wait, but never longer than our own deadline and that.
                values = self._call(b"G", [struct.pack(">I", int(wait * 1000)), *names], wait + _ANSWER_SECONDS)
            if values is not None:
                return values
        raise GateError(f"{', '.join(keys)} did not come in {limit:g} s")

    def close(self) -> None:
        """Leave."""
        self._connection.close()

    def _call(self, operation: bytes, fields: list[bytes], timeout: float) -> list[bytes] | None:
        self._link.send(operation, fields, timeout)
        status, values = self._link.receive(timeout)
        return values if status == b"+" else None


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def _send(connection: socket.socket, data: bytes, timeout: float) -> None:
    try:
        connection.settimeout(timeout)
        connection.sendall(data)
    except OSError as error:
        raise GateError(f"the connection ended: {(error.strerror or str(error)).lower()}") from error


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    try:
        while len(parts) < size:
            connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            part = connection.recv(size - len(parts))
            if not part:
                raise GateError("the connection was closed")
            parts += part
            if deadline is not None and time.monotonic() > deadline and len(parts) < size:
                raise GateError("nothing came in time")
    except TimeoutError as error:
        raise GateError("nothing came in time") from error
    except OSError as error:
        raise GateError(f"the connection ended: {(error.strerror or str(error)).lower()}") from error
    return bytes(parts)
