"""A gRPC server in Python that does nothing, for comparison: `python bare.py` prints its port and serves until killed.

Its messages are neither parsed nor looked at. How late it answers a bystander while attackers send it large messages is
what grpcio itself and the machine take, and so what no service written with it can do better.
"""

import asyncio

import grpc

SERVICE, METHOD = "quartet.test.Bare", "Do"
MOST_BYTES = 64 << 20


async def main() -> None:
    """Serve."""

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b""

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MOST_BYTES)])
    handlers = {METHOD: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
