"""Finds out why a service cannot be reached, by connecting once more.

gRPC reports a refused connection, an expired certificate and a plaintext server with almost the same UNAVAILABLE.
"""

import asyncio
import socket
import ssl
from dataclasses import dataclass

import grpc

from quartet_common.certificates import certificate_fault, handshake_with_itself, name_to_check
from quartet_common.config import SecuritySection, split_address
from quartet_common.errors import describe, is_answer

_SECONDS = 3.0


@dataclass(frozen=True)
class Peer:
    """A service as configured at its callers; `str()` names it."""

    kind: str
    address: str
    security: SecuritySection

    def __str__(self) -> str:
        return f"{self.kind} at {self.address}"

    def explain(self, error: grpc.RpcError) -> str:
        """Return one sentence about a call that failed. It connects to the address, which may take seconds."""
        code = error.code() if hasattr(error, "code") else None
        if is_answer(error) or code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            # The server's own text; of UNAVAILABLE, which may concern another service, with the server's name.
            return f"{self}: {describe(error)}" if code is grpc.StatusCode.UNAVAILABLE else describe(error)
        reason = diagnose(self.kind, self.address, self.security)
        if reason is not None:
            return f"{self}: {reason}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{self} did not answer in time"
        return f"{self}: the connection broke ({error.details() or 'no reason given'})"

    async def explain_aside(self, error: grpc.RpcError) -> str:
        """Run `explain` in a thread, so that it does not block the event loop."""
        return await asyncio.to_thread(self.explain, error)


def diagnose(kind: str, address: str, security: SecuritySection) -> str | None:
    """Return why no channel to a service at `address` can be made, and the remedy; None if no reason is found."""
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host, port), _SECONDS)
    except socket.gaierror as error:
        return f"the name '{host}' does not resolve ({error.strerror}); correct it in [addresses]"
    except ConnectionRefusedError:
        return "nothing listens there; is it running, and is its address right?"
    except TimeoutError:
        return f"no answer within {_SECONDS:g} s; is the host up, and does a firewall let the port through?"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error}); is its address right?"
    try:
        with connection:
            return _handshake(connection, kind, address, security)
    except OSError:
        return None  # the connection broke, timed out, or files are being replaced: no conclusion is possible


def _handshake(connection: socket.socket, kind: str, address: str, security: SecuritySection) -> str | None:
    context = _trusting(security) if security.tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not security.tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _ = split_address(address)
    name = name_to_check(security, address, kind) if security.tls else None
    encrypted = refused = False
    try:
        with context.wrap_socket(connection, server_hostname=name or host) as tls:
            encrypted = True
            refused = not tls.recv(1)  # with TLS 1.3 a server checks the client's certificate after the handshake
    except ssl.SSLCertVerificationError as error:
        wanted = f"a {kind} at '{host}'; issue it with --role {kind} --host {host}, or correct [addresses]"
        return f"its certificate {certificate_fault(error, wanted)}"
    except ssl.SSLError as error:
        refused = "ALERT" in (error.reason or "")
    if not security.tls:
        speaks_tls = "it speaks TLS, and this side plaintext; set tls_ca, tls_certificate and tls_key in [security]"
        return speaks_tls if encrypted or refused else None
    if refused:
        try:
            handshake_with_itself(security, as_client=True)
        except ssl.SSLCertVerificationError as error:
            return f"this side's certificate '{security.tls_certificate}' {certificate_fault(error)}"
        return "it does not trust the CA of this side's certificate; both sides need the same"
    return None if encrypted else "it speaks plaintext, and this side TLS; its [security] needs a certificate too"


def _trusting(security: SecuritySection) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=security.tls_ca)
    context.load_cert_chain(str(security.tls_certificate), security.tls_key)
    return context
