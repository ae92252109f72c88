"""The trainer's side of a weight group, written from the protos alone; run with the trainer's environment.

    python weight_peer.py FOLDER BUCKET_BYTES       a Hugging Face folder; orders come as lines of JSON

order                                               answer
{"do": "open", "epoch", "secret"}                   {"port"}: where its TCPStore listens; it goes on to join as rank 0
{"do": "meet"}                                      {"met": true} once all ranks are there
{"do": "send"}                                      {"sent"}: buckets broadcast
{"do": "score", "folder", "prompt", "completion"}   {"log_probs"}: of the completion's tokens under a folder's weights
{"do": "leave"}                                     {"left": true}

Its first line tells {"manifest": base64 of a WeightManifest, "checksum"}. The rest of a weight update is gRPC, which
the tests speak themselves.
"""

import base64
import json
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from quartet.v1 import rollout_pb2, tensor_pb2
from safetensors import safe_open
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from quartet_common.weights import Checksum, plan_buckets

TIMEOUT = timedelta(seconds=60)
WORLD_SIZE = 2
DTYPES = {torch.float32: tensor_pb2.DTYPE_FLOAT32, torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of a Hugging Face folder by name."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return tensors


def pack(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> tuple[rollout_pb2.WeightManifest, list[torch.Tensor]]:
    """Return the manifest of an update and its uint8 buckets."""
    specs = [(name, DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]
    manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, specs, bucket_bytes)
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in manifest.bucket_bytes]
    for entry in manifest.tensors:
        data = tensors[entry.name].contiguous().view(-1).view(torch.uint8)
        buckets[entry.bucket][entry.offset : entry.offset + data.numel()] = data
    return manifest, buckets


class Group:
    """Rank 0 of one epoch's process group."""

    def __init__(self, epoch: int, secret: str):
        self.store = TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        self._prefixed = PrefixStore(f"quartet/{epoch}/{secret}", self.store)
        self._group: ProcessGroupGloo | None = None
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        self._group = ProcessGroupGloo(self._prefixed, 0, WORLD_SIZE, TIMEOUT)

    def meet(self) -> None:
        """Wait until all ranks are there."""
        self._thread.join(TIMEOUT.total_seconds())
        if self._group is None:
            raise TimeoutError("not all ranks met")

    def broadcast(self, buckets: list[torch.Tensor]) -> None:
        """Send all buckets, in order."""
        self.meet()
        for bucket in buckets:
            options = BroadcastOptions()
            options.rootRank = 0
            options.timeout = TIMEOUT
            self._group.broadcast([bucket], options).wait()


def score(folder: Path, prompt: list[int], completion: list[int]) -> list[float]:
    """Return the log-prob of each completion token, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].float()
    log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return log_probs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def answers(folder: Path, bucket_bytes: int) -> Iterator[dict]:
    """Yield what is to be said, order by order."""
    manifest, buckets = pack(read(folder), bucket_bytes)
    checksum = Checksum()
    for bucket in buckets:
        checksum.update(bucket.numpy())
    yield {"manifest": base64.b64encode(manifest.SerializeToString()).decode(), "checksum": checksum.value()}
    group: Group | None = None
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "open":
                group = Group(order["epoch"], order["secret"])
                yield {"port": group.store.port}
            case "meet":
                group.meet()
                yield {"met": True}
            case "send":
                group.broadcast(buckets)
                yield {"sent": len(buckets)}
            case "score":
                yield {"log_probs": score(Path(order["folder"]), order["prompt"], order["completion"])}
            case "leave":
                group = None
                yield {"left": True}


def main() -> None:
    """Answer orders until standard input ends."""
    torch.set_num_threads(1)
    for answer in answers(Path(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
