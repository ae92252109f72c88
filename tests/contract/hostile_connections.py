"""Connections that speak gRPC wrongly, slowly, or not at all: HTTP/2 written by hand."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
SECONDS = 20.0


def connect(address: str) -> socket.socket:
    """Return a connection to "host:port"."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", length: int | None = None) -> bytes:
    """Return an HTTP/2 frame; with `length` its header lies."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(path: str, content_type: str = "application/grpc") -> bytes:
    """Return the HEADERS frame of a call on stream 1, its fields written out without compression."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": content_type,
    }
    block = b"".join(b"\x00" + bytes((len(k),)) + k.encode() + bytes((len(v),)) + v.encode() for k, v in fields.items())
    return frame(HEADERS, END_HEADERS, 1, block)


def message(data: bytes, length: int | None = None, compressed: int = 0) -> bytes:
    """Return the DATA frame with one gRPC message that ends the call; with `length` its prefix lies."""
    prefix = bytes((compressed,)) + (len(data) if length is None else length).to_bytes(4, "big")
    return frame(DATA, END_STREAM, 1, prefix + data)


def hostile_conversations(path: str) -> dict[str, bytes]:
    """Return what to send, by what is wrong with it."""
    hello = PREFACE + frame(SETTINGS)
    call = hello + headers(path)
    return {
        "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "noise": bytes(range(256)) * 40,
        "noise after the preface": PREFACE + bytes(range(256)) * 40,
        "a preface cut short": PREFACE[:10],
        "a frame cut short": hello + frame(HEADERS, END_HEADERS, 1, b"\x00", length=500),
        "a frame larger than allowed": hello + frame(DATA, 0, 1, b"x" * 100, length=0xFFFFFF),
        "headers that cannot be unpacked": hello + frame(HEADERS, END_HEADERS, 1, b"\xff" * 50),
        "an unknown frame": hello + frame(200, 255, 7, b"?" * 50),
        "data of a stream that was never opened": hello + frame(DATA, END_STREAM, 99, b"x"),
        "another content type": hello + headers(path, "text/plain") + message(b""),
        "a message shorter than its prefix says": call + message(b"abc", length=1000),
        "a message without a prefix": call + frame(DATA, END_STREAM, 1, b"ab"),
        "a message longer than the limit, it says": call + message(b"abc", length=0xFFFFFFFF),
        "a compression nobody named": call + message(b"abc", compressed=1),
        "a flag that does not exist": call + message(b"abc", compressed=77),
        "a call that never ends": call,
    }


@contextmanager
def idle_connections(address: str, count: int) -> Iterator[None]:
    """Hold connections that say nothing, a part of a greeting, or begin a call and leave it there."""
    beginnings = (b"", PREFACE[:5], PREFACE, PREFACE + frame(SETTINGS), PREFACE + frame(SETTINGS) + b"\x00\x00")
    with ExitStack() as stack:
        for number in range(count):
            connection = stack.enter_context(connect(address))
            connection.sendall(beginnings[number % len(beginnings)])
        yield
