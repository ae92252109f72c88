"""Tokens per second through the whole rollout service, beside the library that its engine is made of.

- Ours: broker, reward service and rollout, as processes. Prompts are queued at the broker, the rollout has been given
  its weights as a trainer gives them, leases, generates, has every completion scored and puts the groups. Tokens of
  the accepted groups, from the last group of the warm-up to the last group of the round.
- The peer of the vllm engine is vLLM's own `LLM.generate` on all the prompts at once, with `n` completions a prompt and
  log-probs on, configured as our engine configures it: in-process, and with its engine process. The faster one counts.
- The peer of the transformers engine is `model.generate` with `output_scores`, 128 completions a batch, and the
  log-probs taken from the scores.

Two random models of the demo's kind, 0.3 M and 30 M parameters; 8 completions a prompt, 32 new tokens at most,
temperature 1, float32, one thread each, 128 completions at once. A random model ends some completions early: tokens are
counted as they come. A process can hold one vLLM engine, so each side is a process of its own; they run in the order
A B B A, and the mean of a side's two figures, each the median of its rounds, is reported.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import ENVIRONMENTS, ROOT, Figure, report, service

COMPLETIONS, NEW_TOKENS, AT_ONCE = 8, 32, 128
IN_ENGINE = 192  # so that the engine always has a completion to put into a place that becomes free
LIMIT_SECONDS = 150
CALL_SECONDS = 60
EVER_QUEUED = 1 << 20
RUN = "bench"
# Prompts of a round and rounds, by the name of the size; what differs from the tests' model.
SIZES = {
    "0.3 M": (160, 3, {}),
    "30 M": (
        32,
        2,
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
    ),
}
PEERS = {
    "vllm": {"in process": "bare vLLM LLM.generate", "engine process": "bare vLLM LLM.generate, engine process"},
    "transformers": {"plain": "model.generate"},
}


def prompts(count: int) -> list[list[int]]:
    """Token ids, a dozen each, hardly two prompts alike."""
    return [[16 + (index * 7 + position * (3 + index // 60)) % 60 for position in range(12)] for index in range(count)]


def rate(generate: Callable[[], int], rounds: int) -> float:
    """Median tokens per second of a function that returns how many it generated; once for warm-up before."""
    generate()
    rates = []
    for _ in range(rounds):
        started = time.perf_counter()
        tokens = generate()
        rates.append(tokens / (time.perf_counter() - started))
    return statistics.median(rates)


# --- Ours -------------------------------------------------------------------------------------------------------------


def through_the_service(engine: str, model: str, count: int, rounds: int) -> float:
    """Broker, reward service and rollout; this process is client and trainer."""
    import grpc
    from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2, reward_pb2, tensor_pb2

    places = [f"rollout.engine={engine}", f"rollout.{engine}.max_num_seqs={AT_ONCE}"]
    settings = [f"run.id={RUN}", f"model.path={model}", f"rollout.max_running_completions={IN_ENGINE}", *places]
    with (
        tempfile.TemporaryDirectory() as folder,
        service("broker", Path(folder), [f"broker.redis_url={os.environ['REDIS_URL']}"]) as broker,
        service("reward", Path(folder), []) as reward,
    ):
        addresses = [f"addresses.broker={broker}", f"addresses.reward={reward}"]
        with (
            service("rollout", Path(folder), [*settings, *addresses]) as rollout,
            grpc.insecure_channel(broker) as channel,
        ):
            stub = broker_pb2_grpc.BrokerServiceStub(channel)
            spec = broker_pb2.RunSpec(
                run_id=RUN,
                group_size=COMPLETIONS,
                groups_per_step=EVER_QUEUED,  # the gate stays open
                max_queued_prompts=EVER_QUEUED,
                sampling=experience_pb2.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0),
                verifiers=[reward_pb2.VerifierSpec(name="think_answer_tags")],
            )
            stub.CreateRun(broker_pb2.CreateRunRequest(spec=spec), timeout=CALL_SECONDS)
            give_weights(rollout, Path(model))

            def submit(name: str) -> None:
                instances = []
                for number, tokens in enumerate(prompts(count)):
                    data = b"".join(token.to_bytes(4, "little") for token in tokens)
                    ids = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[len(tokens)], data=data)
                    prompt = experience_pb2.Prompt(
                        prompt_id=str(number), token_ids=ids, reference=reward_pb2.Reference(answer="2")
                    )
                    purpose = experience_pb2.PURPOSE_TRAIN
                    instances.append(
                        experience_pb2.PromptInstance(instance_id=f"{name}/{number}", prompt=prompt, purpose=purpose)
                    )
                request = broker_pb2.SubmitPromptsRequest(run_id=RUN, instances=instances)
                stub.SubmitPrompts(request, timeout=CALL_SECONDS)

            for number in range(rounds + 1):
                submit(f"round-{number}")
            return statistics.median(round_rates(rollout, count, rounds))


def round_rates(rollout: str, count: int, rounds: int) -> list[float]:
    """Tokens per second of each round after the first, by the rollout's own counts."""
    import grpc
    from quartet.v1 import rollout_pb2, rollout_pb2_grpc

    deadline = time.monotonic() + LIMIT_SECONDS
    rates, begin = [], None
    with grpc.insecure_channel(rollout) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        for number in range(rounds + 1):
            while True:
                status = stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS)
                if status.groups_total >= (number + 1) * count:
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{status.groups_total} groups only in {LIMIT_SECONDS} s: {status}")
                time.sleep(0.02)
            now = time.perf_counter()
            if begin is not None:
                rates.append((status.tokens_total - begin[1]) / (now - begin[0]))
            begin = now, status.tokens_total
    return rates


def give_weights(rollout: str, model: Path) -> None:
    """Bring the rollout to version 0, as a trainer does."""
    import grpc
    from harness import BUCKET_BYTES, Sender
    from models import read_weights
    from packing import checksum, pack
    from quartet.v1 import rollout_pb2, rollout_pb2_grpc

    sender = Sender()
    try:
        info = sender.open(timeout=CALL_SECONDS)
        with grpc.insecure_channel(rollout) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            deadline = time.monotonic() + LIMIT_SECONDS
            while stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS).run_id != RUN:
                if time.monotonic() > deadline:
                    raise RuntimeError("the rollout did not become a member of the run")
                time.sleep(0.1)
            epoch = {"run_id": RUN, "group_epoch": info.epoch}
            join = rollout_pb2.JoinWeightGroupRequest(
                **epoch,
                transport=rollout_pb2.WEIGHT_TRANSPORT_GLOO,
                store_host=info.store_host,
                store_port=info.store_port,
                rank=1,
                world_size=2,
                secret=info.secret,
            )
            stub.JoinWeightGroup(join, timeout=CALL_SECONDS)
            if sender.answer() != {"joined": True}:
                raise RuntimeError("the sender did not join")
            manifest, buckets = pack(read_weights(model), BUCKET_BYTES)
            begin = rollout_pb2.BeginWeightUpdateRequest(**epoch, policy_version=0, manifest=manifest)
            stub.BeginWeightUpdate(begin, timeout=CALL_SECONDS)
            sender.send(model)
            finish = rollout_pb2.FinishWeightUpdateRequest(**epoch, policy_version=0, checksum=checksum(buckets))
            stub.FinishWeightUpdate(finish, timeout=CALL_SECONDS)
    finally:
        sender.stop()


# --- The peers --------------------------------------------------------------------------------------------------------


def bare_vllm(model: str, count: int, rounds: int, engine_process: bool) -> float:
    """vLLM configured as our engine configures it, but for what weight updates need."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(engine_process))
    from quartet_rollout.engines.options import VllmOptions
    from quartet_rollout.engines.vllm_engine import environment

    options = VllmOptions(max_num_seqs=AT_ONCE)
    environment.prepare(options)
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams

    from quartet_rollout.engines.vllm_engine.arguments import engine_arguments

    torch.set_num_threads(1)
    arguments = engine_arguments(model, options)
    del arguments["weight_transfer_config"]
    if arguments["enforce_eager"] and not engine_process:
        environment.disable_compilation()
    llm = LLM(**arguments)
    sampling = SamplingParams(
        n=COMPLETIONS, temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, flat_logprobs=True, detokenize=False
    )

    def generate() -> int:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts(count)]
        done = [one for output in llm.generate(requests, sampling, use_tqdm=False) for one in output.outputs]
        return sum(len(np.array(one.logprobs.logprobs, dtype=np.float32)) for one in done)

    return rate(generate, rounds)


def bare_transformers(model_path: str, count: int, rounds: int) -> float:
    """`model.generate`, a batch after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True).eval()
    inputs = torch.tensor(prompts(count)).repeat_interleave(COMPLETIONS, 0)
    end = model.generation_config.eos_token_id
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": NEW_TOKENS, "pad_token_id": end}

    def generate() -> int:
        return sum(batch(part) for part in inputs.split(AT_ONCE))

    def batch(part: torch.Tensor) -> int:
        with torch.no_grad():
            result = model.generate(
                part,
                attention_mask=torch.ones_like(part),
                output_scores=True,
                return_dict_in_generate=True,
                **settings,
            )
        tokens = result.sequences[:, part.shape[1] :]
        scores = torch.log_softmax(torch.stack(result.scores, dim=1), dim=-1)
        log_probs = scores.gather(-1, tokens[..., None])[..., 0]
        ended_before = (tokens == end).cumsum(1) - (tokens == end).long()
        return len(log_probs[ended_before == 0].numpy())

    return rate(generate, rounds)


# --- Both -------------------------------------------------------------------------------------------------------------


def be(side: str, name: str, size: str, model: str) -> float:
    """Be one side, or the one that writes the model."""
    sys.path.append(str(ROOT / "services/rollout/tests/engines"))
    count, rounds, changes = SIZES[size]
    if side == "model":
        from models import write_model

        write_model(Path(model), tied=True, seed=0, **changes)
        return 0.0
    if side == "ours":
        return through_the_service(name, model, count, rounds)
    if name == "vllm":
        return bare_vllm(model, count, rounds, engine_process=side == "engine process")
    return bare_transformers(model, count, rounds)


def measure(side: str, name: str, size: str, model: Path) -> float:
    """Run one side in a process of its own, in the rollout's environment."""
    command = [str(ENVIRONMENTS / "rollout" / "bin" / "python"), __file__, "--side", side, name, size, str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit = 2 * LIMIT_SECONDS
    with contextlib.ExitStack() as stack:
        if side == "ours":
            from broker_town import redis_server  # Of the development environment, where the sides do not live.

            folder = stack.enter_context(tempfile.TemporaryDirectory())
            environment["REDIS_URL"], _ = stack.enter_context(redis_server(Path(folder)))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    tokens = json.loads(done.stdout.splitlines()[-1])
    if side == "model":
        return tokens
    print(f"{name}, {size}, {side}: {tokens:,.0f} tokens/s", file=sys.stderr, flush=True)
    return tokens


def compare(name: str, size: str, model: Path) -> Figure:
    """One engine at one size, beside the faster of its peers."""
    sides = ["ours", *PEERS[name]]
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for side in [*sides, *reversed(sides)]:
        measured[side].append(measure(side, name, size, model))
    means = {side: statistics.mean(each) for side, each in measured.items()}
    faster = max(PEERS[name], key=lambda side: means[side])
    title = f"service: {name}, {size} parameters"
    return Figure(title, "tokens/s", means["ours"], means[faster], PEERS[name][faster], "higher")


def main(engines: list[str], sizes: list[str]) -> None:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            model = Path(folder) / size.replace(" ", "")
            measure("model", "", size, model)
            figures += [compare(name, size, model) for name in engines]
    report(*figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=sorted(PEERS), help="this one only")
    parser.add_argument("--size", choices=sorted(SIZES), help="this one only")
    parser.add_argument("--side", nargs=4, metavar=("SIDE", "ENGINE", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        print(json.dumps(be(*chosen.side)), flush=True)
    else:
        main([chosen.engine] if chosen.engine else list(PEERS), [chosen.size] if chosen.size else list(SIZES))
