"""Events to the broker's stream, sent in order by a thread of its own: a broker that is away costs no time."""

import contextlib
import queue
import threading

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc

from quartet_common.errors import describe
from quartet_common.log import get_logger

log = get_logger(__name__)

CALL_SECONDS = 5.0
MOST_WAITING = 1000


class Reporter:
    """ReportProgress for one run."""

    def __init__(self, stub: broker_pb2_grpc.BrokerServiceStub, run_id: str, source: str):
        self._stub = stub
        self._run_id = run_id
        self._source = source
        self._events: queue.Queue[broker_pb2.RunEvent | None] = queue.Queue(maxsize=MOST_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="report-progress", daemon=True)
        self._thread.start()

    def report(self, **event) -> None:
        """Queue an event, e.g. `report(step=StepFinished(...))`. It is dropped if too many wait."""
        try:
            self._events.put_nowait(broker_pb2.RunEvent(**event))
        except queue.Full:
            log.warning("progress event dropped: the broker does not take them")

    def notice(self, level: str, text: str) -> None:
        """Queue a message for people: "info", "warning" or "error"."""
        self.report(notice=broker_pb2.Notice(level=level, text=text, source=self._source))

    def close(self, seconds: float = 5.0) -> None:
        """Send what waits, for at most `seconds`."""
        with contextlib.suppress(queue.Full):
            self._events.put(None, timeout=seconds)
        self._thread.join(timeout=seconds)

    def _send_all(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                request = broker_pb2.ReportProgressRequest(run_id=self._run_id, event=event)
                self._stub.ReportProgress(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                log.warning("progress event lost", extra={"error": describe(error)})
