"""The demo, from a made environment to a learnt model: `make demo` calls it with the client's environment.

Warms a tiny model up (kept for the next time), runs the four services on this machine until the run is over, measures
the model before and after with plain transformers on every held-out problem, draws the learning curve, and says what
happened. Exit status 0 only if held-out accuracy rose by 30 points.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quartet_client.progress import RunProgress

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PREPARED = Path(".quartet/arithmetic")
TRAINER_PYTHON = ROOT / ".quartet/envs/trainer/bin/python"
POINTS_WANTED = 30


def main() -> int:
    # Here and not above: they take a second, in which Ctrl-C should be no traceback.
    from rich.console import Console

    from quartet_client.cli.export import plot_runs
    from quartet_client.progress import read_run
    from quartet_client.terminal import Terminal
    from quartet_local.run import run

    # Paths and commands are to be copied: they are never wrapped.
    console = Console(highlight=False, soft_wrap=True)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--plain", action="store_true", help="a line a step instead of the live page")
    parser.add_argument("--no-dashboard", action="store_true", help="serve no page that shows the run in a browser")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of run.toml")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    # `make demo` says when it was typed, so that the summary can tell what a newcomer waited for.
    began = float(os.environ.get("QUARTET_DEMO_BEGAN") or time.time())

    console.print("\n[bold]1. Warm-up[/]  a 312,000-parameter model learns to reckon, then the bad habit of guessing")
    status = trainer_python("prepare.py", PREPARED).returncode
    if status:
        return status

    run_id = time.strftime("demo-%Y%m%d-%H%M%S")
    folder = Path("runs") / run_id
    console.print(f"\n[bold]2. Reinforcement learning[/]  four services on this machine, engine {arguments.engine}")
    overrides = [f"run.id={run_id}", f"rollout.engine={arguments.engine}", f"run.max_steps={arguments.steps}"]
    shown = [] if console.is_terminal else ["--no-open"]
    with dashboard([*overrides, *arguments.set], shown, not arguments.no_dashboard, Terminal(soft_wrap=True).print):
        status = run(HERE / "run.toml", [*overrides, *arguments.set], plain=arguments.plain or not console.is_terminal)
        if status:
            return status

        console.print(
            "\n[bold]3. What came of it[/]  both models, loaded by plain transformers, on every held-out problem"
        )
        with ThreadPoolExecutor(2) as pool:
            before, after = pool.map(measure, (PREPARED / "model", folder / "model"))
    plot_runs([folder], folder / "learning_curve.png")
    report = summarise(read_run(folder), arguments.engine, began, before, after)
    console.print(summary(report, folder))
    (folder / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["points_gained"] >= POINTS_WANTED else 1


@contextmanager
def dashboard(overrides: list[str], options: list[str], wanted: bool, say: Callable[[str], object]) -> Iterator[None]:
    """Serve the run's page beside the run, in a process of its own: whatever becomes of it, the run goes on."""
    if not wanted:
        yield
        return
    from quartet_local.guard import guarded

    command = [sys.executable, "-m", "quartet_client", "dashboard", "--config", str(HERE / "run.toml")]
    command += options + [part for override in overrides for part in ("--set", override)]
    # Under a guard the page ends with this process, however this ends.
    page = subprocess.Popen(
        guarded(command, grace=5.0),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def tell() -> None:
        # Its address, or why there is no page; it comes in a second or two, and nobody waits for it.
        for count, line in enumerate(page.stdout):
            if count == 0:
                say(f"  {line.strip()}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        page.terminate()
        page.wait()
        teller.join(timeout=1)


def trainer_python(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run one of this folder's scripts with the trainer's environment, where torch is."""
    command = [str(TRAINER_PYTHON), "-W", "ignore", str(HERE / script), *map(str, arguments)]
    return subprocess.run(command, check=False, **options)


def measure(model: Path) -> dict:
    """Return check.py's report on a model folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = trainer_python("check.py", model, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"demo: {model} cannot be loaded by plain transformers: {done.stderr.strip().splitlines()[-1]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def summarise(progress: "RunProgress", engine: str, began: float, before: dict, after: dict) -> dict:
    """Return what happened, as demo.json has it."""
    steps = [step for _, step in progress.rows()]
    first, last = steps[0], steps[-1]
    return {
        "run": progress.run_id,
        "engine": engine,
        "steps": len(steps),
        "held_out_problems": after["problems"],
        "sampled_accuracy_before": before["sampled_accuracy"],
        "sampled_accuracy_after": after["sampled_accuracy"],
        "greedy_accuracy_before": before["greedy_accuracy"],
        "greedy_accuracy_after": after["greedy_accuracy"],
        "points_gained": round(100 * (after["sampled_accuracy"] - before["sampled_accuracy"]), 1),
        "training_seconds": round(last.time - first.time, 1),
        "seconds_to_first_step": round(first.time - began, 1),
        "completion_tokens_before": round(first.metrics["completions/mean_length"], 1),
        "completion_tokens_after": round(last.metrics["completions/mean_length"], 1),
    }


def summary(report: dict, folder: Path) -> str:
    """Return what happened, where to look and what to try next, for people."""
    learnt = report["points_gained"] >= POINTS_WANTED
    verdict = "[green]It learnt.[/]" if learnt else f"[red]It should have gained {POINTS_WANTED}.[/]"
    accuracies = (
        f"{report['sampled_accuracy_before']:.0%} → {report['sampled_accuracy_after']:.0%}",
        f"{report['greedy_accuracy_before']:.0%} → {report['greedy_accuracy_after']:.0%}",
    )
    return f"""
  Held-out accuracy [bold]{accuracies[0]}[/], {report["points_gained"]:+.0f} points in \
{report["training_seconds"]:.0f} s of training.  {verdict}
  (greedy {accuracies[1]}; {report["held_out_problems"]} problems never trained on)
  The first optimizer step came {report["seconds_to_first_step"]:.0f} s after the start.
  Answers grew from {report["completion_tokens_before"]} to {report["completion_tokens_after"]} tokens: the model \
could always reckon; it learnt
  that working it out pays, and to make fewer slips.

  [bold]Where to look[/]
    {folder}/learning_curve.png    accuracy, reward and length over time
    {folder}/samples/              what the model wrote, with rewards and weight versions
    {folder}/metrics.jsonl         every metric of every step; also in tensorboard/ beside it
    {folder}/model/                the model, in Hugging Face format
    {folder}/logs/                 each service's log
    {folder}/demo.json             this summary

  [bold]What to try next[/]
    .quartet/envs/client/bin/quartet dashboard --run {report["run"]}      its page again, from its files
    make demo ENGINE=transformers      the other engine
    .quartet/envs/client/bin/quartet run examples/arithmetic/run.toml --set run.id=lag4 --set run.max_staleness=4
    .quartet/envs/client/bin/quartet plot {folder} runs/lag4      both runs in one picture
    docs/start.md                      your own data, reward and model
"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
