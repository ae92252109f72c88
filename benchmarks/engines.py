"""Tokens per second through the whole rollout service, beside the library that its engine is made of.

- Ours: broker, reward service and rollout, as processes. The rollout has received its weights as from a trainer. A
  round queues prompts at the broker, and ends when the broker has accepted their last group: leased, generated with
  log-probs, every completion scored, put. With --alone, only the engine, in one process.
- The peer of the vllm engine is vLLM's own `AsyncLLM` with the same prompts, all at once, with `n` completions per
  prompt and log-probs, configured as by our engine.
- The peer of the transformers engine is `model.generate` with `output_scores`, 128 completions per batch, and log-probs
  computed from the scores.

Random models like the demo's, with 0.3 M, 30 M and 125 M parameters; 8 completions per prompt, at most 32 new tokens,
temperature 1, float32, one thread each, 128 concurrent completions. A random model ends some completions early, so the
generated tokens are counted. Both sides are started once and run rounds in turn, in alternating order, so that other
load affects both alike. The figures are medians of each side's rounds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENTS, ROOT, Figure, Side, report, service
from sizes import SIZES

COMPLETIONS, NEW_TOKENS, AT_ONCE = 8, 32, 128
IN_ENGINE = 192  # so that the engine always has a completion to put into a place that becomes free
ROUNDS = 3
LIMIT_SECONDS = 240
CALL_SECONDS = 60
LOOK_SECONDS = 0.02
BUCKET_BYTES = 1 << 20
EVER_QUEUED = 1 << 16
RUN = "bench"
PROMPTS = {"0.3 M": 480, "30 M": 64, "125 M": 16, "0.5 B": 960}
"""Of a round."""
PEERS = {"vllm": "bare AsyncLLM", "transformers": "model.generate"}
Generate = Callable[[], int]
"""Makes a round's completions; returns their tokens."""


def prompts(count: int) -> list[list[int]]:
    """Token ids, a dozen each, hardly two prompts alike."""
    return [[16 + (index * 7 + position * (3 + index // 60)) % 60 for position in range(12)] for index in range(count)]


async def all_at_once(draw: Callable[[int, list[int]], Awaitable[int]], count: int) -> int:
    """Return the number of tokens of all prompts' completions."""
    return sum(await asyncio.gather(*(draw(number, prompt) for number, prompt in enumerate(prompts(count)))))


# --- Ours -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def through_the_service(engine: str, model: str, count: int) -> Iterator[Generate]:
    """Broker, reward service and rollout; this process is client and trainer."""
    import grpc
    from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2, reward_pb2, rollout_pb2, rollout_pb2_grpc

    settings = [f"run.id={RUN}", f"model.path={model}", f"rollout.max_running_completions={IN_ENGINE}"]
    settings += [f"rollout.engine={engine}", f"rollout.{engine}.max_num_seqs={AT_ONCE}"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(service("broker", folder, [f"broker.redis_url={os.environ['REDIS_URL']}"]))
        reward = stack.enter_context(service("reward", folder, []))
        settings += [f"addresses.broker={broker}", f"addresses.reward={reward}"]
        rollout = stack.enter_context(service("rollout", folder, settings))
        stub = broker_pb2_grpc.BrokerServiceStub(stack.enter_context(grpc.insecure_channel(broker)))
        ours = rollout_pb2_grpc.RolloutServiceStub(stack.enter_context(grpc.insecure_channel(rollout)))
        spec = broker_pb2.RunSpec(
            run_id=RUN,
            group_size=COMPLETIONS,
            groups_per_step=EVER_QUEUED,  # the gate stays open
            max_queued_prompts=EVER_QUEUED,
            sampling=experience_pb2.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0),
            verifiers=[reward_pb2.VerifierSpec(name="think_answer_tags")],
        )
        stub.CreateRun(broker_pb2.CreateRunRequest(spec=spec), timeout=CALL_SECONDS)
        give_weights(rollout, Path(model), folder / "weights")
        made = 0

        def tokens() -> int:
            return ours.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS).tokens_total

        def generate() -> int:
            nonlocal made
            before = tokens()
            stub.SubmitPrompts(submission(f"from-{made}", count), timeout=CALL_SECONDS)
            made += count
            deadline = time.monotonic() + LIMIT_SECONDS
            while True:
                # The broker is asked, not the rollout: that one has to work.
                stats = stub.GetRun(broker_pb2.GetRunRequest(run_id=RUN), timeout=CALL_SECONDS).run.stats
                if stats.ready >= made:
                    return tokens() - before
                if time.monotonic() > deadline:
                    said = (folder / "rollout.log").read_text()[-2000:]
                    raise RuntimeError(f"{made} groups were not accepted within {LIMIT_SECONDS} s: {stats}\n{said}")
                time.sleep(LOOK_SECONDS)

        yield generate


def submission(name: str, count: int):
    """A round's prompts."""
    from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, tensor_pb2

    instances = []
    for number, tokens in enumerate(prompts(count)):
        data = b"".join(token.to_bytes(4, "little") for token in tokens)
        ids = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[len(tokens)], data=data)
        prompt = experience_pb2.Prompt(prompt_id=str(number), token_ids=ids, reference=reward_pb2.Reference(answer="2"))
        instance = experience_pb2.PromptInstance(
            instance_id=f"{name}/{number}", prompt=prompt, purpose=experience_pb2.PURPOSE_TRAIN
        )
        instances.append(instance)
    return broker_pb2.SubmitPromptsRequest(run_id=RUN, instances=instances)


def give_weights(rollout: str, model: Path, folder: Path) -> None:
    """Bring the rollout to version 0, as a trainer does that has `weights.transport = "file"`."""
    import grpc
    from models import read_weights
    from packing import write
    from quartet.v1 import rollout_pb2, rollout_pb2_grpc

    folder.mkdir()
    manifest, checksum = write(read_weights(model), folder, BUCKET_BYTES)
    epoch = {"run_id": RUN, "group_epoch": 1}
    file = rollout_pb2.WEIGHT_TRANSPORT_FILE
    join = rollout_pb2.JoinWeightGroupRequest(**epoch, transport=file, rank=1, world_size=2)
    update = {**epoch, "policy_version": 0}
    begin = rollout_pb2.BeginWeightUpdateRequest(**update, manifest=manifest, path=str(folder))
    with grpc.insecure_channel(rollout) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        deadline = time.monotonic() + LIMIT_SECONDS
        while stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS).run_id != RUN:
            if time.monotonic() > deadline:
                raise RuntimeError("the rollout did not become a member of the run")
            time.sleep(0.1)
        stub.JoinWeightGroup(join, timeout=CALL_SECONDS)
        stub.BeginWeightUpdate(begin, timeout=CALL_SECONDS)
        finish = rollout_pb2.FinishWeightUpdateRequest(**update, checksum=checksum)
        stub.FinishWeightUpdate(finish, timeout=CALL_SECONDS)


@contextlib.contextmanager
def alone(name: str, model: str, count: int) -> Iterator[Generate]:
    """Our engine without a service."""
    from quartet_rollout.engines import SamplingSettings, create_engine

    engine, sampling = create_engine(name, model, options(name)), SamplingSettings(max_new_tokens=NEW_TOKENS)

    async def draw(number: int, prompt: list[int]) -> int:
        return sum([len(one.token_ids) async for one in engine.generate(str(number), prompt, COMPLETIONS, sampling)])

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield lambda: runner.run(all_at_once(draw, count))
        runner.run(engine.close())


def options(name: str) -> dict[str, Any]:
    """Of an engine, which leaves room on a GPU for the other side's."""
    import torch

    fixed = {"kv_cache_gib": 4, "gpu_memory_utilization": 0.1}
    return {"max_num_seqs": AT_ONCE, **(fixed if name == "vllm" and torch.cuda.is_available() else {})}


# --- The peers --------------------------------------------------------------------------------------------------------


def bare_vllm(model: str, count: int) -> Generate:
    """`AsyncLLM` configured as our engine configures it, but for what weight updates need."""
    from quartet_rollout.engines.options import VllmOptions
    from quartet_rollout.engines.vllm_engine import disable_compilation, prepare

    same = VllmOptions(**options("vllm"))
    prepare(same)
    import numpy as np
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from quartet_rollout.engines.vllm_engine.arguments import engine_arguments

    arguments = engine_arguments(model, same)
    del arguments["weight_transfer_config"], arguments["worker_extension_cls"]
    if arguments["enforce_eager"]:
        disable_compilation()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    runner = asyncio.Runner()

    async def draw(number: int, prompt: list[int]) -> int:
        sampling = SamplingParams(
            n=COMPLETIONS,
            temperature=1.0,
            max_tokens=NEW_TOKENS,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = [one async for one in llm.generate({"prompt_token_ids": prompt}, sampling, str(number))]
        return sum(len(np.array(one.logprobs.logprobs, dtype=np.float32)) for one in outputs[-1].outputs)

    return lambda: runner.run(all_at_once(draw, count))


def bare_transformers(model_path: str, count: int) -> Generate:
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

    return generate


# --- Both -------------------------------------------------------------------------------------------------------------


def be(kind: str, name: str, count: int, model: str) -> None:
    """Run one side: a round for each input line, with the tokens per second as an output line."""
    sys.path.append(str(ROOT / "services/rollout/tests/engines"))
    lines, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # What libraries print is no answer.
    with contextlib.ExitStack() as stack:
        if kind == "service":
            generate = stack.enter_context(through_the_service(name, model, count))
        elif kind == "alone":
            generate = stack.enter_context(alone(name, model, count))
        else:
            generate = bare_vllm(model, count) if name == "vllm" else bare_transformers(model, count)
        generate()
        print(json.dumps({"ready": True}), file=lines, flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            tokens = generate()
            print(json.dumps({"rate": tokens / (time.perf_counter() - started)}), file=lines, flush=True)


def compare(ours: str, name: str, size: str, count: int, model: Path, folder: Path) -> Figure:
    """Compare one engine at one size, "alone" or through the "service", with its peer."""
    rates: dict[str, list[float]] = {ours: [], "peer": []}
    with contextlib.ExitStack() as stack:
        if ours == "service":
            from broker_processes import redis_server  # Of the development environment, where the sides do not live.

            own = folder / f"redis-{name}-{size}".replace(" ", "")
            own.mkdir()
            os.environ["REDIS_URL"], _ = stack.enter_context(redis_server(own))
        running = {}
        for kind in rates:
            command = [*PROGRAM, kind, name, str(count), str(model)]
            running[kind] = Side(command, folder / f"{name} {size} {kind}.log", stack)
            # One after the other: two engines that start concurrently would leave no CPU time for Redis.
            running[kind].receive()
        for turn in range(ROUNDS):
            for kind in rates if turn % 2 == 0 else reversed(rates):
                running[kind].send({"round": turn})
                rates[kind].append(running[kind].receive()["rate"])
    for kind, each in rates.items():
        print(f"{name}, {size}, {kind}: {[round(rate) for rate in each]} tokens/s", file=sys.stderr, flush=True)
    title = f"engines: {name}, {size} parameters" + (", the engine alone" if ours == "alone" else "")
    middle = {kind: statistics.median(each) for kind, each in rates.items()}
    return Figure(title, "tokens/s", middle[ours], middle["peer"], PEERS[name], "higher")


def main(ours: str, engines: list[str], sizes: list[str], count: int | None) -> None:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            model = Path(folder) / size.replace(" ", "")
            program = str(ROOT / "benchmarks" / "sizes.py")
            subprocess.run([PROGRAM[0], program, size, str(model)], check=True, timeout=LIMIT_SECONDS)
            prompts = count or PROMPTS[size]
            figures += [compare(ours, name, size, prompts, model, Path(folder)) for name in engines]
    report(*figures)


PROGRAM = [str(ENVIRONMENTS / "rollout" / "bin" / "python"), __file__, "--side"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=sorted(PEERS), help="this one only")
    parser.add_argument("--size", choices=SIZES, help="this one only; default: all but 0.5 B, which wants a GPU")
    parser.add_argument("--prompts", type=int, help="of a round; default: as many as make some seconds on two cores")
    parser.add_argument("--alone", action="store_true", help="our engine without the service")
    parser.add_argument("--side", nargs=4, metavar=("KIND", "ENGINE", "PROMPTS", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        kind, name, count, model = chosen.side
        be(kind, name, int(count), model)
    else:
        engines = [chosen.engine] if chosen.engine else list(PEERS)
        sizes = [chosen.size] if chosen.size else list(SIZES)[:-1]
        main("alone" if chosen.alone else "service", engines, sizes, chosen.prompts)
