"""The wire of the weight store's gate, byte by byte, and somebody between the two ends."""

import hashlib
import hmac
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quartet_common import store_gate
from quartet_common.store_gate import GateError, Link, answer_hello, say_hello

SECRET = b"a secret of tests"
SECONDS = 20.0


def pair() -> tuple[Link, Link]:
    """The two ends of a connection that have shaken hands."""
    client, gate = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer_hello, gate, lambda epoch: SECRET if epoch == 5 else None, SECONDS)
        return say_hello(client, 5, SECRET, SECONDS), answered.result(SECONDS)


def mac(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).digest()


def read(connection: socket.socket, size: int) -> bytes:
    return connection.recv(size, socket.MSG_WAITALL)


def test_a_client_written_from_the_description_gets_in():
    client, gate = socket.socketpair()
    client.settimeout(SECONDS)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer_hello, gate, lambda _: SECRET, SECONDS)
        hello = b"QTRTGATE" + struct.pack(">q", 5) + bytes(range(32))
        client.sendall(hello)
        both = hello + read(client, 32)
        client.sendall(mac(SECRET, b"client" + both))
        assert read(client, 32) == mac(SECRET, b"gate" + both)
        link = answered.result(SECONDS)
    key = mac(SECRET, b"frames" + both)
    content = b"S" + struct.pack(">I", 3) + b"key" + struct.pack(">I", 0)
    for count in range(2):
        client.sendall(
            struct.pack(">I", len(content)) + content + mac(key, b"client" + struct.pack(">Q", count) + content)
        )
        assert link.receive(SECONDS) == (b"S", [b"key", b""])
    link.send(b"+", [b"v"], SECONDS)
    answer = b"+" + struct.pack(">I", 1) + b"v"
    assert read(client, 4 + 6 + 32) == struct.pack(">I", 6) + answer + mac(key, b"gate" + bytes(8) + answer)
    client.close()
    with pytest.raises(GateError, match="closed"):
        link.receive(None)
    gate.close()


def recorded(link: Link) -> bytes:
    """A frame of `link`, taken from the wire."""
    mine, theirs = socket.socketpair()
    link._connection, connection = mine, link._connection
    link.send(b"S", [b"key", b"value"], SECONDS)
    link._connection = connection
    mine.close()
    with theirs:
        return theirs.recv(1 << 10)


@pytest.mark.parametrize("where", [4, 5, 10, -33, -1])
def test_a_frame_that_was_changed_is_refused(where: int):
    client, gate = pair()
    frame = bytearray(recorded(client))
    frame[where] ^= 1
    client._connection.sendall(frame)
    with pytest.raises(GateError, match="that the peer did not send"):
        gate.receive(SECONDS)


def test_a_frame_is_taken_once_in_its_turn_and_its_direction():
    client, gate = pair()
    frame = recorded(client)
    client._connection.sendall(frame * 2)
    assert gate.receive(SECONDS) == (b"S", [b"key", b"value"])
    with pytest.raises(GateError, match="did not send"):
        gate.receive(SECONDS)
    gate._connection.sendall(frame)
    with pytest.raises(GateError, match="did not send"):
        client.receive(SECONDS)
    elsewhere, other = pair()
    elsewhere._connection.sendall(frame)  # of another connection
    with pytest.raises(GateError, match="did not send"):
        other.receive(SECONDS)


@pytest.mark.parametrize("length", [0, store_gate.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_the_length_of_a_frame_is_bounded_before_it_is_read(length: int):
    client, gate = pair()
    client._connection.sendall(struct.pack(">I", length))
    with pytest.raises(GateError, match=f"a frame of {length} bytes was announced"):
        gate.receive(SECONDS)
    with pytest.raises(GateError, match=r"allowed: 1048576"):
        client.send(b"S", [b"key", bytes(store_gate.MAX_FRAME_BYTES)], SECONDS)


def test_a_field_longer_than_its_frame_is_refused():
    client, gate = pair()
    content = b"S" + struct.pack(">I", 99) + b"key"
    tag = client._mac(b"client", 0, content)
    client._connection.sendall(struct.pack(">I", len(content)) + content + tag)
    with pytest.raises(GateError, match="longer than the frame"):
        gate.receive(SECONDS)


def test_who_listens_there_without_the_secret_is_found_out():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            connection, _ = server.accept()
            with connection:
                read(connection, 48)
                connection.sendall(bytes(32))
                proof = read(connection, 32)
                connection.sendall(proof)  # the only one it has seen

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(GateError, match="does not know the secret of epoch 5"):
            store_gate.StoreClient("127.0.0.1", server.getsockname()[1], 5, SECRET, SECONDS)
        thread.join(SECONDS)


def test_a_gate_that_says_nothing_costs_the_time_given_and_one_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(GateError, match="nothing came in time"):
            store_gate.StoreClient("127.0.0.1", port, 5, SECRET, 0.1)
    with pytest.raises(GateError, match="the weight store is not reached: connection refused"):
        store_gate.StoreClient("127.0.0.1", port, 5, SECRET, SECONDS)
