"""The server of every service: a ServiceHost, to which the service adds its servicers.

host.start -> SERVING -> (SIGTERM, SIGINT, host.stop) -> NOT_SERVING -> drain -> stopped

A service that is `loading` when it starts is NOT_SERVING until it calls `set_ready`.
"""

import asyncio
import gc
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from quartet.v1 import common_pb2, common_pb2_grpc

from quartet_common.certificates import server_credentials
from quartet_common.config import ConfigError, SecuritySection, ServerSection, split_address
from quartet_common.handshake import HandshakeServicer, Identity, Idleness
from quartet_common.log import get_logger
from quartet_common.ports import AddressUnavailable
from quartet_server.interceptor import CallInterceptor
from quartet_server.metrics import serve_metrics
from quartet_server.process import SystemdNotifier
from quartet_server.vitals import report_build, report_certificate, report_disk

log = get_logger(__name__)


def freeze_gc_heap() -> None:
    """Exempt all current objects from garbage collection, and begin to collect.

    Call it when all long-lived objects are loaded: otherwise a full collection, which stops every thread, takes 35 ms
    in a small service and 130 ms where torch and transformers are imported. A service's command disables collection
    before that: looking through what imports have made takes a sixth of the processor time of a start.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


class ServiceHost:
    """A gRPC server with what every service has: TLS, token, health, reflection, handshake, metrics, drain."""

    def __init__(self, kind: str, address: str, security: SecuritySection, settings: ServerSection):
        """Make the server, which does not listen yet.

        Raises:
            ConfigError: plaintext on an address that is not loopback, or unusable TLS or token files.
        """
        host, port = split_address(address)
        self._bind_host = settings.bind_host or host
        security.check_listening(kind, self._bind_host)
        self.kind = kind
        self.address = address
        self.instance_id = f"{kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        """Unique for this process's life, e.g. "rollout-myhost-4711-a3f9c2"."""
        self.loading = ""
        """What a service that cannot work yet waits for when it starts; it calls `set_ready` when it can work."""
        self.stopping = asyncio.Event()
        self.exit_code = 0
        self._port = port
        self._security = security
        self._settings = settings
        self._identity = Identity(common_pb2.ServiceKind.Value(f"SERVICE_KIND_{kind.upper()}"), self.instance_id)
        self.capabilities = self._identity.capabilities
        """What the handshake says this service can do; append to it."""
        self.libraries = self._identity.libraries
        """Library versions that the handshake reports; add to it."""
        self.waiting = self._identity.waiting
        """What this service waits for; add and discard."""
        self._systemd = SystemdNotifier()
        self._drains: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task] = set()
        self._health = health.aio.HealthServicer()
        self._service_name = f"quartet.v1.{kind.capitalize()}Service"
        self._interceptor = CallInterceptor(security.token(), security.tls and security.roles)
        self.limit_requests = self._interceptor.limit_requests
        self.server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.max_concurrent_streams", settings.max_connection_calls),
                # Two services on one port would share its calls at random: refuse the second.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        common_pb2_grpc.add_HandshakeServiceServicer_to_server(HandshakeServicer(self._identity), self.server)

    def report_idleness(self, idleness: Idleness) -> None:
        """Include the service's idleness in handshakes."""
        self._identity.idleness = idleness

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Register `drain`, awaited in order of registration when the service stops, before the server stops."""
        self._drains.append(drain)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task:
        """Run `work` in the background. If it raises, the service stops with exit code 1; draining cancels it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s", task.get_name(), error, exc_info=error)
            self.stop(f"{task.get_name()} failed", exit_code=1)

    def stop(self, reason: str, exit_code: int = 0) -> None:
        """Ask the service to drain and end. The first reason counts; call it on the event loop's thread."""
        if not self.stopping.is_set():
            log.info("stopping: %s", reason)
            self.exit_code = exit_code
            self.stopping.set()

    async def set_ready(self) -> None:
        """Report that the service can do its work, to its health's callers and to systemd."""
        freeze_gc_heap()
        self.waiting.discard(self.loading)
        self.loading = ""
        if not self.stopping.is_set():
            await self.set_serving(True)
            self._systemd.notify(READY=1, STATUS=f"serving at {self.address}")

    async def set_serving(self, serving: bool) -> None:
        """Set the service's health, under its own name and the empty one."""
        await self.set_health("", serving)
        await self.set_health(self._service_name, serving)

    async def set_health(self, name: str, healthy: bool) -> None:
        """Set the health of `name`, e.g. of a part, which does not change the service's own."""
        state = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, state)

    async def start(self) -> None:
        """Listen and serve. Raises AddressUnavailable, or ConfigError for an invalid port or unusable TLS files."""
        if self._settings.reflection:
            names = (
                self._service_name,
                common_pb2.DESCRIPTOR.services_by_name["HandshakeService"].full_name,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            )
            reflection.enable_server_reflection(names, self.server)
        target = f"[{self._bind_host}]:{self._port}" if ":" in self._bind_host else f"{self._bind_host}:{self._port}"
        try:
            if self._security.tls:
                port = self.server.add_secure_port(target, server_credentials(self._security))
            else:
                port = self.server.add_insecure_port(target)
        except RuntimeError as error:
            raise AddressUnavailable(
                f"addresses.{self.kind}: cannot listen on {target}: the address is taken or not of this host"
            ) from error
        if self._port == 0:
            self._port = port
            self.address = f"{split_address(self.address)[0]}:{port}"
        elif self._settings.metrics:
            self._serve_metrics()
        await self.set_serving(False)
        await self.server.start()
        if self.loading:
            self.waiting.add(self.loading)
            self._systemd.notify(STATUS=f"loading, answers at {self.address}")
        else:
            await self.set_ready()
        self.spawn(self._systemd.feed_watchdog(), "watchdog")
        log.info("serving at %s", self.address)

    def _serve_metrics(self) -> None:
        report_build(self.kind)
        report_disk(Path(tempfile.gettempdir()))
        if self._security.tls:
            report_certificate(self._security)
        port = self._port + self._settings.metrics_port_offset
        try:
            serve_metrics(self._bind_host, port, [split_address(self.address)[0], *self._settings.metrics_hosts])
        except OSError as error:
            raise AddressUnavailable(
                f"server.metrics_port_offset: cannot serve metrics on {self._bind_host}:{port}: {error.strerror}"
            ) from error
        except OverflowError as error:
            raise ConfigError(f"server.metrics_port_offset: {port} is no port; ports end at 65535") from error

    async def drain(self) -> None:
        """Refuse new work, finish current work within `drain_seconds`, stop."""
        self._systemd.notify(STOPPING=1, STATUS="finishing what is under way")
        await self.set_serving(False)
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                for drain in self._drains:
                    try:
                        await drain()
                    except Exception:
                        log.exception("a part of the service failed to stop")
                        self.exit_code = self.exit_code or 1
        except TimeoutError:
            log.warning("drain took longer than %s s; what was left is given up", self._settings.drain_seconds)
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=1.0)
        await self.server.stop(grace=0.5)
        log.info("stopped")

    async def run(self) -> None:
        """Serve until stopped by SIGTERM (exit code 0), SIGINT (130) or `stop`, then drain."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop, "SIGTERM", 0)
        loop.add_signal_handler(signal.SIGINT, self.stop, "SIGINT", 130)
        await self.start()
        await self.stopping.wait()
        await self.drain()
