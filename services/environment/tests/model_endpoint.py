"""A stand-in for the rollout's endpoint, whose vLLM cannot share an environment with verifiers or OpenEnv.

A chat's answer is the last word of the last message, a completion's `text`; with `writes`, what that function makes of
the text so far. With tools it calls, one a turn, those that the first message of the user names, or those that are
given. Tokens are answered with their last one, in the form that clients of `renderers` read.
"""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


def answer(body: Json, given: Sequence[tuple[str, str]] | None) -> Json:
    """A chat completion. `given`: the arguments and the tool of each call."""
    messages = body["messages"]
    first = next(one["content"] for one in messages if one["role"] == "user")
    called = sum(one["role"] == "tool" for one in messages)
    message: Json = {"role": "assistant", "content": str(messages[-1]["content"]).split()[-1]}
    finish = "stop"
    wanted = [("{}", name) for name in first.split()] if given is None else given
    if body.get("tools") and called < len(wanted):
        function = dict(zip(("arguments", "name"), wanted[called], strict=True))
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{called}", "type": "function"}]}
        message["tool_calls"][0]["function"] = function
        finish = "tool_calls"
    return {
        "id": "a",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def answer_tokens(body: Json) -> Json:
    """A completion of tokens."""
    last, end = body["token_ids"][-2], body["sampling_params"]["stop_token_ids"][0]
    log_probs = [{"token": f"token_id:{token}", "logprob": -0.5, "token_id": token} for token in (last, end)]
    choice = {"index": 0, "token_ids": [last, end], "finish_reason": "stop", "logprobs": {"content": log_probs}}
    return {"request_id": "a", "choices": [choice]}


@contextmanager
def model_endpoint(
    status: int = 200,
    text: str = "",
    calls: Sequence[tuple[str, str]] | None = None,
    writes: Callable[[str], str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[tuple[str, list[Json]]]:
    """The endpoint's base URL, and the requests that it gets."""
    requests: list[Json] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(
                {"path": self.path, "body": body, "headers": {k.lower(): v for k, v in self.headers.items()}}
            )
            if status != 200:
                self.send(status, {"error": {"message": "no more today"}})
                return
            if "prompt" in body:
                said = writes(body["prompt"]) if writes else text
                choice = {"index": 0, "text": said, "finish_reason": "stop"}
                self.send(
                    200, {"id": "a", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
                )
                return
            if self.path == "/inference/v1/generate":
                self.send(200, answer_tokens(body))
                return
            chat = answer(body, calls)
            if writes:
                so_far = "".join(str(one["content"]) for one in body["messages"])
                chat["choices"][0]["message"]["content"] = writes(so_far)
            self.send(200, chat)

        def do_GET(self) -> None:  # noqa: N802
            self.send(200, {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 512}]})

        def send(self, code: int, body: Json) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
