"""Tokens per second of episodes that an agent plays over HTTP, beside the same turns in the rollout's own process.

- Ours: broker, reward service, environment service and a rollout with vLLM and its model endpoint, as processes. 64
  episodes at once, each of 8 turns, by the `openai` client of a function in a file: recorded, sent to the trainer's
  queue.
- The limit: the same rollout plays the same conversations by an environment in its own process, without HTTP.
- What recording costs: the agent makes all calls but the last with an application's key, which are not recorded.

Random models like the demo's, a thread. A turn ends at one of eight tokens, after some 12 tokens; a text follows it.
All are rounds of the same services, in alternating order; tokens that the policy sampled are counted. The figures are
medians.
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
from dataclasses import asdict
from pathlib import Path

from engines import CALL_SECONDS, EVER_QUEUED, LIMIT_SECONDS, RUN, give_weights
from measuring import ENVIRONMENTS, ROOT, Figure, report, service
from sizes import SIZES

from quartet_common.ports import free_port

PROMPTS, COMPLETIONS, TURNS, ROUNDS = 8, 8, 8, 3
KEY = "an-application"
STOPS = range(40, 48)
AGENT = """
from pathlib import Path
from quartet_environment import Endpoint, Task

async def play(task: Task, endpoint: Endpoint, *, turns: int, key: str = "") -> float:
    text, tokens = task.messages[0]["content"], 0
    sampling = {**task.sampling, "extra_body": {**task.sampling["extra_body"], "skip_special_tokens": False}}
    client = endpoint.client.with_options(api_key=key) if key else endpoint.client
    for turn in range(turns):
        calls = endpoint.client if turn == turns - 1 else client
        said = await calls.completions.create(model=endpoint.model, prompt=text, **sampling)
        text += said.choices[0].text + " 1+1="
        tokens += said.usage.completion_tokens
    with Path(__file__).with_name("tokens").open("a") as file:
        file.write(f"{tokens}\\n")
    return float(task.index)
"""
IN_PROCESS = """
from quartet_rollout.environments.base import Answer, Parameters

class Talk:
    name, description, parameters, scores_last_turn = "talk", "goes on", Parameters, False

    def stop(self, parameters):
        return ()

    def begin(self, start, parameters, tools):
        return self

    async def answer(self, turn):
        return Answer(" 1+1=")

    async def close(self):
        pass
"""


@contextlib.contextmanager
def services(model: Path, folder: Path):
    """Yield the addresses of broker and rollout, and the specification of each side's environment."""
    from quartet.v1 import experience_pb2

    (folder / "agent.py").write_text(AGENT)
    (folder / "talk.py").write_text(IN_PROCESS)
    agent, talk = f"{folder}/agent.py:play", f"{folder}/talk.py:Talk"
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(service("broker", folder, [f"broker.redis_url={os.environ['REDIS_URL']}"]))
        reward = stack.enter_context(service("reward", folder, []))
        files = [f'environment.files=["{agent}"]', "environment.workers=1", "environment.episodes_per_worker=64"]
        environment = stack.enter_context(service("environment", folder, files))
        settings = [f"run.id={RUN}", f"model.path={model}", "rollout.engine=vllm", "rollout.vllm.max_num_seqs=64"]
        settings += [f"addresses.broker={broker}", f"addresses.reward={reward}", f"addresses.environment={environment}"]
        settings += [f'rollout.environments=["{talk}"]', f'rollout.http.address="127.0.0.1:{free_port()}"']
        settings += [f"rollout.http.keys_file={folder / 'keys'}", "rollout.max_direct_completions=64"]
        (folder / "keys").write_text(f"{KEY}\n")
        rollout = stack.enter_context(service("rollout", folder, settings))
        bounds = {"max_turns": TURNS, "max_turn_tokens": 128}
        served = experience_pb2.EnvironmentSpec(name=agent, served=True, **bounds)
        served.parameters["turns"] = TURNS
        unrecorded = experience_pb2.EnvironmentSpec()
        unrecorded.CopyFrom(served)
        unrecorded.parameters["key"] = KEY
        in_process = experience_pb2.EnvironmentSpec(name=talk, **bounds)
        yield broker, rollout, {"HTTP": served, "in process": in_process, "unrecorded": unrecorded}


def measure(size: str, folder: Path) -> list[Figure]:
    """Compare all sides with a model of this size."""
    import grpc
    from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2, reward_pb2, rollout_pb2, rollout_pb2_grpc

    model = folder / "model"
    python = str(ENVIRONMENTS / "rollout" / "bin" / "python")
    subprocess.run([python, str(ROOT / "benchmarks" / "sizes.py"), size, str(model)], check=True, timeout=LIMIT_SECONDS)
    rates: dict[str, list[float]] = {"HTTP": [], "in process": [], "unrecorded": []}
    with contextlib.ExitStack() as stack:
        broker, rollout, environments = stack.enter_context(services(model, folder))
        stub = broker_pb2_grpc.BrokerServiceStub(stack.enter_context(grpc.insecure_channel(broker)))
        ours = rollout_pb2_grpc.RolloutServiceStub(stack.enter_context(grpc.insecure_channel(rollout)))
        spec = broker_pb2.RunSpec(
            run_id=RUN,
            group_size=COMPLETIONS,
            groups_per_step=EVER_QUEUED,
            max_queued_prompts=EVER_QUEUED,
            sampling=experience_pb2.SamplingParams(max_new_tokens=1024, temperature=1.0, stop_token_ids=STOPS),
            verifiers=[reward_pb2.VerifierSpec(name="think_answer_tags")],
        )
        stub.CreateRun(broker_pb2.CreateRunRequest(spec=spec), timeout=CALL_SECONDS)
        give_weights(rollout, model, folder / "weights")
        made = 0

        def round_of(side: str) -> float:
            nonlocal made
            began, before = time.perf_counter(), tokens(side)
            instances = []
            for number in range(made, made + PROMPTS):
                reference = reward_pb2.Reference(answer="3")
                prompt = experience_pb2.Prompt(text=f"{number}+2=", environment=environments[side], reference=reference)
                purpose = experience_pb2.PURPOSE_TRAIN
                instances.append(experience_pb2.PromptInstance(instance_id=str(number), prompt=prompt, purpose=purpose))
            stub.SubmitPrompts(broker_pb2.SubmitPromptsRequest(run_id=RUN, instances=instances), timeout=CALL_SECONDS)
            made += PROMPTS
            while (
                stats := stub.GetRun(broker_pb2.GetRunRequest(run_id=RUN), timeout=CALL_SECONDS).run.stats
            ).ready < made:
                if stats.dead or time.perf_counter() - began > LIMIT_SECONDS:
                    raise RuntimeError(f"{side}: {stats}\n{(folder / 'rollout.log').read_text()[-2000:]}")
                time.sleep(0.02)
            return (tokens(side) - before) / (time.perf_counter() - began)

        def tokens(side: str) -> int:
            if side == "unrecorded":  # the rollout does not count them
                counts = folder / "tokens"
                return sum(map(int, counts.read_text().split())) if counts.exists() else 0
            return ours.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS).tokens_total

        for turn in range(-1, ROUNDS):
            for side in rates if turn % 2 else reversed(rates):
                rate = round_of(side)
                if turn >= 0:
                    rates[side].append(rate)
    print(f"{size}: { {side: [round(rate) for rate in each] for side, each in rates.items()} }", file=sys.stderr)
    http, limit, unrecorded = (statistics.median(each) for each in rates.values())
    return [
        Figure(f"agents: episodes over HTTP, {size} parameters", "tokens/s", http, limit, "in process", "higher"),
        Figure(f"agents: recorded episodes, {size} parameters", "tokens/s", http, unrecorded, "unrecorded", "higher"),
    ]


def main(sizes: list[str]) -> None:
    from broker_processes import redis_server  # of the development environment, where no rollout lives

    figures = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            (Path(folder) / "redis").mkdir()
            os.environ["REDIS_URL"], _ = stack.enter_context(redis_server(Path(folder) / "redis"))
            command = [str(ENVIRONMENTS / "rollout" / "bin" / "python"), __file__, "--side", size, folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=2 * (ROUNDS + 2) * LIMIT_SECONDS)
            figures += [Figure(**each) for each in json.loads(done.stdout)]
    report(*figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, help="this one only; default: 0.3 M and 30 M")
    parser.add_argument("--side", nargs=2, metavar=("SIZE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        sys.path.append(str(ROOT / "services" / "rollout" / "tests" / "engines"))
        print(json.dumps([asdict(each) for each in measure(chosen.side[0], Path(chosen.side[1]))]))
    else:
        main([chosen.size] if chosen.size else ["0.3 M", "30 M"])
