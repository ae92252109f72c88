"""The demo: `make demo` runs it in the client's environment.

Warms up a tiny model (and keeps it), runs the four services on this machine until the run ends, measures the model
before and after with plain transformers on all held-out problems, plots the learning curve, and prints a summary. Exit
status 0 only if held-out accuracy rose by 30 points.
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
    # Not imported above: the imports take a second, in which Ctrl-C would print a traceback.
    from rich.console import Console

    from quartet_client.cli.plot import plot_runs
    from quartet_client.progress import read_run
    from quartet_client.terminal import Terminal
    from quartet_local.run import run

    # Do not wrap paths and commands, so that they can be copied.
    console = Console(highlight=False, soft_wrap=True)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--plain", action="store_true", help="print a line per step instead of a live display")
    parser.add_argument("--no-dashboard", action="store_true", help="do not start the dashboard")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of run.toml")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    # `make demo` passes its start time, so that the summary includes the time for the environments.
    began = float(os.environ.get("QUARTET_DEMO_BEGAN") or time.time())

    console.print("\n[bold]1. Warm-up[/]  a 312,000-parameter model learns to add, then the bad habit of guessing")
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

        console.print("\n[bold]3. Result[/]  both models, measured with plain transformers on all held-out problems")
        with ThreadPoolExecutor(2) as pool:
            before, after = pool.map(measure, (PREPARED / "model", folder / "model"))
    plot_runs([folder], folder / "learning_curve.png")
    report = summarize(read_run(folder), arguments.engine, began, before, after)
    console.print(summary(report, folder))
    (folder / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["points_gained"] >= POINTS_WANTED else 1


@contextmanager
def dashboard(overrides: list[str], options: list[str], wanted: bool, say: Callable[[str], object]) -> Iterator[None]:
    """Serve the dashboard during the run, in its own process, so that its failures do not affect the run."""
    if not wanted:
        yield
        return
    from quartet_local.guard import guarded

    command = [sys.executable, "-m", "quartet_client", "dashboard", "--config", str(HERE / "run.toml")]
    command += options + [part for override in overrides for part in ("--set", override)]
    # The guard ends the dashboard when this process ends, even if it is killed.
    page = subprocess.Popen(
        guarded(command, grace=5.0),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def print_address() -> None:
        # The first line has the address or an error; the others are read so that the pipe does not fill up.
        for count, line in enumerate(page.stdout):
            if count == 0:
                say(f"  {line.strip()}")

    reader = threading.Thread(target=print_address, daemon=True)
    reader.start()
    try:
        yield
    finally:
        page.terminate()
        page.wait()
        reader.join(timeout=1)


def trainer_python(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run one of this folder's scripts in the trainer's environment, which has torch."""
    command = [str(TRAINER_PYTHON), "-W", "ignore", str(HERE / script), *map(str, arguments)]
    return subprocess.run(command, check=False, **options)


def measure(model: Path) -> dict:
    """Return check.py's report on a model folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = trainer_python("check.py", model, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"demo: plain transformers cannot load {model}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarize(progress: "RunProgress", engine: str, began: float, before: dict, after: dict) -> dict:
    """Return the contents of demo.json."""
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
    """Return the text with the results, the files to look at and commands to try next."""
    learned = report["points_gained"] >= POINTS_WANTED
    verdict = "[green]It learned.[/]" if learned else f"[red]It should have gained {POINTS_WANTED}.[/]"
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
could already add; it learned
  to work problems out instead of guessing, and to make fewer mistakes.

  [bold]Where to look[/]
    {folder}/learning_curve.png    accuracy, reward and length over time
    {folder}/samples/              what the model wrote, with rewards and weight versions
    {folder}/metrics.jsonl         every metric of every step; also in tensorboard/ beside it
    {folder}/model/                the model, in Hugging Face format
    {folder}/logs/                 each service's log
    {folder}/demo.json             this summary

  [bold]What to try next[/]
    .quartet/envs/client/bin/quartet dashboard --run {report["run"]}      the run's dashboard, from its files
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
