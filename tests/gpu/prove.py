"""Checks a GPU host in minutes (`make gpu`): runs the parts one after the other; results go to a JSON file and a table.

A part that cannot run here is reported as "not run", with the reason. Exit status: 0: every part passed; 1: one
failed; 3: none failed, and some were not run. With --cpu, the parts use Gloo instead of NCCL, vLLM's CPU build, and
tiny models.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quartet_common.gpus import GpuError, old_driver, read_gpus

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "preloaded"))

from preloaded import make_models  # noqa: E402
from started import write_demo_run  # noqa: E402

ENVIRONMENTS = ROOT / ".quartet" / "envs"
RESULT = ROOT / ".quartet" / "results" / "gpu.json"
STEPS = 5
PLUGINS = ("torch_ddp", "low_level_zero", "torch_fsdp", "gemini", "hybrid_parallel")
NEAR = {"fp32": 1e-4, "bf16": 5e-2}
"""Tolerances of a step's loss and gradient norm against fp64, relative, below 1 absolute. Twice that is the absolute
tolerance of log-probs against fp32."""
SECONDS = 600.0
NOTE = "note"
"""Key of a part's measurements: a remark about what did not run, or ran differently."""
_VERSIONS = """
import json, torch
cuda = torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda or "", "sees_gpu": cuda, "nccl": nccl}))
"""


class NotRun(Exception):
    """A part cannot run here; the text is the reason."""


@dataclass
class Result:
    """The result of a part."""

    part: str
    claim: str
    outcome: str
    """passed, failed or not run."""
    detail: str = ""
    seconds: float = 0.0
    measured: dict[str, object] = field(default_factory=dict)


def python(service: str) -> str:
    path = ENVIRONMENTS / service / "bin" / "python"
    if not path.exists():
        raise NotRun(f"there is no {service} environment: python3 deploy/local/environments.py")
    return str(path)


def ask(command: list[str], **environment: str) -> str:
    """Return a command's output. Raises AssertionError with the end of its standard error."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    return done.stdout


def gpu_count() -> int:
    """Return the number of GPUs. Raises NotRun for none, or an old driver."""
    try:
        gpus = read_gpus()
    except GpuError as error:
        raise NotRun(str(error)) from error
    if not gpus or old_driver(gpus):
        raise NotRun(old_driver(gpus) or "no GPU")
    return len(gpus)


def has_vllm() -> bool:
    return (
        ask([python("rollout"), "-c", "import importlib.util as i; print(i.find_spec('vllm') is not None)"]) == "True\n"
    )


def need_vllm(cpu: bool) -> None:
    """Raise NotRun if vLLM is not installed, or, unless `cpu`, there is no GPU."""
    if not cpu:
        gpu_count()
    if not has_vllm():
        raise NotRun("vLLM is not installed in the rollout environment")


def versions(cpu: bool) -> dict[str, object]:
    """(a) Driver, torch and NCCL of each environment."""
    if not cpu:
        gpu_count()
    found = {service: json.loads(ask([python(service), "-c", _VERSIONS])) for service in ("rollout", "trainer")}
    assert cpu or all(each["sees_gpu"] for each in found.values()), f"torch does not see the GPU: {found}"
    nccl = {each["nccl"] for each in found.values()}
    assert len(nccl) == 1, f"trainer and rollout have two NCCLs: {found}"
    return {"driver": "" if cpu else read_gpus()[0].driver, **found}


def group(cpu: bool) -> dict[str, object]:
    """(b) A weight group: GB/s, a member killed and one stopped, the epoch after them."""
    if not cpu and gpu_count() < 2:
        raise NotRun("one GPU: NCCL refuses two members on it")
    size = "64" if cpu else "1024"
    return json.loads(ask([python("trainer"), str(ROOT / "tests/gpu/group.py"), "gloo" if cpu else "nccl", size]))


def plugins(cpu: bool) -> dict[str, object]:
    """(c) Each plugin's step against one in fp64 on the CPU, and on a GPU its speed with 0.5 billion parameters."""
    if not cpu:
        gpu_count()
    program = [python("trainer"), str(ROOT / "tests/gpu/plugins.py")]
    exact = json.loads(ask([*program, "torch_ddp:fp64"], CUDA_VISIBLE_DEVICES=""))["torch_ddp"]
    precisions = {plugin: "bf16" if plugin == "gemini" or not cpu else "fp32" for plugin in PLUGINS}
    chosen = [f"{plugin}:{precision}" for plugin, precision in precisions.items()]
    found = json.loads(ask([*program, *chosen, *([] if cpu else ["--large"])]))
    for plugin, step in found.items():
        near = NEAR[precisions[plugin]]
        for name, value in exact.items():
            assert abs(step[name] - value) <= near * max(1.0, abs(value)), f"{plugin}: {name} {step[name]}, not {value}"
    return {"exact": exact, **found}


def generation(cpu: bool) -> dict[str, object]:
    """(d) vLLM's log-probs against transformers', around an update and sleep, and with masks."""
    need_vllm(cpu)
    program = [python("rollout"), str(ROOT / "tests/gpu/generation.py"), *([] if cpu else ["--large"])]
    # On a GPU only the first of vLLM's two model runners provides masks; the second is its default.
    runs = {"default": {}} if cpu else {"default": {}, "first model runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
    found = {name: json.loads(ask(program, **variables).splitlines()[-1]) for name, variables in runs.items()}
    near = 2 * NEAR["fp32" if cpu else "bf16"]
    for name, each in found.items():
        for kind, off in each["largest"].items():
            assert off <= near, f"{name}, {kind}: a log-prob is off by {off:g}, more than {near:g}"
        assert each["carried over"], f"{name}: no completion has tokens of both versions"
        for level, slept in each["sleep"].items():
            assert slept["same_tokens"], f"{name}: other tokens after sleep of level {level}"
            assert slept["freed_gib"] > 4.5, f"{name}: sleep of level {level} freed {slept['freed_gib']} GiB of 5"
    missing = [what for what in ("masks", "sleep") if not any(each[what] for each in found.values())]
    return {**found, **({NOTE: f"without {' and '.join(missing)}, which vLLM lacks here"} if missing else {})}


def speed(cpu: bool) -> dict[str, object]:
    """(f) The engine's tokens/s against bare AsyncLLM's, an update's GB/s against a flat broadcast's, and its pause."""
    need_vllm(cpu)
    size = ["--size", "0.3 M" if cpu else "0.5 B"]
    programs = {
        "engines": ["rollout", "--engine", "vllm", "--alone", *size, *(["--prompts", "64"] if cpu else [])],
        "weights": ["trainer", "--size", "50" if cpu else "500"],
        "weight_stall": ["rollout", "--engine", "vllm", "--free-link", "--updates", "1", *size],
    }
    figures = []
    for name, (environment, *arguments) in programs.items():
        program = [python(environment), str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
        figures += json.loads(ask(program, OMP_NUM_THREADS="1").splitlines()[-1])
    return {
        f"{each['name']} / {each['peer_name']}": {
            each["unit"]: round(each["ours"], 3),
            "ratio": round(each["ours"] / each["peer"], 3),
        }
        for each in figures
    }


def stand_in(cpu: bool, mode: str) -> str:
    """Return why the transformers engine is used instead of vLLM; "" if vLLM runs."""
    if cpu and mode == "sleep":
        return "vLLM cannot sleep on a CPU"
    return "" if has_vllm() else "vLLM is not installed"


def colocated(mode: str) -> Callable[[bool], dict[str, object]]:
    """(e) A whole `quartet run` with rollout and trainer on one GPU, and its audit."""

    def run(cpu: bool) -> dict[str, object]:
        if not cpu:
            gpu_count()
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            make_models(Path(python("trainer")), folder / "model")
            reason = stand_in(cpu, mode)
            rollout = {"engine": "transformers" if reason else "vllm"}
            write_demo_run(
                folder, f"gpu-{mode}", run={"max_steps": STEPS}, rollout=rollout, launcher={"colocate": mode}
            )
            quartet = str(Path(python("client")).with_name("quartet"))
            visible = {} if cpu else {"CUDA_VISIBLE_DEVICES": str(read_gpus()[0].index)}
            began = time.monotonic()
            said = ask([quartet, "run", "--plain", str(folder / "run.toml")], **visible)
            seconds = time.monotonic() - began
            audit = re.search(r"audit of run \S+: (\d+) exactly once, 0 lost, 0 twice, 0 stuck", said)
            assert audit and int(audit[1]) == 2 * STEPS, f"the audit is not clean: {said[-500:]}"
            sleeps = (folder / "run" / "logs" / "rollout.log").read_text().count("the engine sleeps")
            assert sleeps >= STEPS if mode == "sleep" else sleeps == 0, f"{sleeps} sleeps in {STEPS} steps"
        found = {"steps": STEPS, "groups": int(audit[1]), "sleeps": sleeps, "run_seconds": round(seconds, 1)}
        return {**found, **({NOTE: f"with the transformers engine: {reason}"} if reason else {})}

    return run


PARTS: dict[str, tuple[str, Callable[[bool], dict[str, object]]]] = {
    "a": ("driver, torch and NCCL of each environment", versions),
    "b": ("weight group: broadcast, members lost, new epochs", group),
    "c": ("each trainer plugin beside an fp64 step on the CPU", plugins),
    "d": ("vLLM: log-probs, update in flight, sleep levels, masks", generation),
    "e sleep": ("a run on one GPU in turns, its audit", colocated("sleep")),
    "e split": ("a run on one split GPU, its audit", colocated("split")),
    "f": ("pause, GB/s and tokens/s beside bare vLLM", speed),
}


def prove(part: str, cpu: bool) -> Result:
    """Run a part and return its result, also after an error."""
    claim, run = PARTS[part]
    began = time.monotonic()
    result = Result(part, claim, "passed")
    try:
        result.measured = run(cpu)
        result.detail = str(result.measured.pop(NOTE, ""))
    except NotRun as reason:
        result.outcome, result.detail = "not run", str(reason)
    except (AssertionError, subprocess.SubprocessError, OSError, ValueError) as error:
        result.outcome, result.detail = "failed", str(error)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--cpu", action="store_true", help="run the CPU forms of the parts")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the figures go")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}")
    results = []
    for part in options.parts or PARTS:
        results.append(result := prove(part, options.cpu))
        outcome = f"{result.outcome}: {result.detail}" if result.detail else result.outcome
        print(f"{result.part:8} {result.claim:60} {result.seconds:6.1f} s  {outcome}", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    on = "CPU" if options.cpu else "GPU"
    options.json.write_text(json.dumps({"on": on, "parts": [asdict(result) for result in results]}, indent=2) + "\n")
    outcomes = {result.outcome for result in results}
    return 1 if "failed" in outcomes else 3 if "not run" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
