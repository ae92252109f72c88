"""A reward service that is wrong in ways that somebody's first one might be; it listens on a free port."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import common_pb2, common_pb2_grpc, reward_pb2, reward_pb2_grpc


class WrongReward(reward_pb2_grpc.RewardServiceServicer):
    """Everything is right, nothing is refused, the last comes first, and there is no Execute."""

    def Score(self, request, context):  # noqa: N802 (the contract's name)
        score = reward_pb2.Score(outcome=reward_pb2.OUTCOME_CORRECT, reward=1.0, ans_acc=1.0, format_acc=1.0)
        results = [reward_pb2.ScoreResult(item_id=item.item_id, score=score) for item in reversed(request.items)]
        return reward_pb2.ScoreResponse(results=results)

    def ListVerifiers(self, request, context):  # noqa: N802
        return reward_pb2.ListVerifiersResponse(verifiers=[reward_pb2.VerifierInfo(name="exact")])


class Introduction(common_pb2_grpc.HandshakeServiceServicer):
    """Says that it is a reward service, to whoever asks, however they do."""

    def Handshake(self, request, context):  # noqa: N802
        return common_pb2.HandshakeResponse(
            contract=common_pb2.ContractVersion(major=1),
            service=common_pb2.SERVICE_KIND_REWARD,
            build="wrong",
            instance_id="w",
            started_at=Timestamp(seconds=1),
            capabilities=["none"],
        )


@contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Yield the address of a running server; with `credentials` it speaks TLS."""
    server = grpc.server(ThreadPoolExecutor(4))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(WrongReward(), server)
    common_pb2_grpc.add_HandshakeServiceServicer_to_server(Introduction(), server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait(10)
