"""`make bench`: benchmarks, each in its own environment, one after the other, with a table at the end.

    .quartet/envs/dev/bin/python benchmarks/run.py [--list] [--write] [--all | NAME ...]

Without names those that have a goal (GOALS), within an hour; `--all`: the others too. Each measures ours and a named
peer or limit in the same run. The table is printed and written to `.quartet/results/bench.json`; with `--write` each
benchmark's rows also go to `benchmarks/RESULTS.md` when it has succeeded, where the other rows are kept. If a benchmark
fails or exceeds its time limit, the others still run, and the exit status is 1.
"""

import argparse
import ast
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from measuring import ENVIRONMENTS, GRACE_SECONDS, ROOT, Figure, guard

RESULTS = ROOT / ".quartet" / "results"
TAIL_LINES = 20
PAGE = ROOT / "benchmarks" / "RESULTS.md"
SECTION = "\n## "  # begins a section of the page that another program writes, e.g. tests/learning/curves.py


@dataclass(frozen=True)
class Benchmark:
    """A program of this folder."""

    name: str
    environment: str
    limit: float  # seconds


BENCHMARKS = (
    Benchmark("start", "dev", 1800),
    Benchmark("broker", "dev", 600),
    Benchmark("scale", "dev", 900),
    Benchmark("long_runs", "dev", 900),
    Benchmark("reward", "reward", 240),
    Benchmark("reward_service", "reward", 120),
    Benchmark("texts", "reward", 120),
    Benchmark("programs", "reward", 300),
    Benchmark("sandbox", "reward", 180),
    Benchmark("learner", "trainer", 120),
    Benchmark("memory", "trainer", 300),
    Benchmark("trl_grpo", "dev", 900),
    Benchmark("trl_lengths", "dev", 3600),
    Benchmark("overlap", "dev", 900),
    Benchmark("weights", "trainer", 240),
    Benchmark("weights_memory", "trainer", 300),
    Benchmark("loading_memory", "trainer", 600),
    Benchmark("weight_stall", "rollout", 900),
    Benchmark("engines", "dev", 2400),
    Benchmark("agents", "dev", 2100),
    Benchmark("hostile_agents", "dev", 1500),
    Benchmark("simulate", "dev", 600),
)

# The page's first table: a figure, how its peer's name begins, and the ratio to be reached.
GOALS = (
    ("broker: ragged groups, 32 a call, arrays to arrays", "redis-py", 0.55),
    ("broker: ragged groups, 128 a call, arrays to arrays", "redis-py", 0.65),
    ("scale: p99 of LeasePrompts, 256 rollouts at half speed", "limit", 1.0),
    ("reward: GSM8K, answers equal to the reference", "math-verify", 8.0),
    ("reward_service: added by gRPC at p50", "limit", 1.0),
    ("programs: 164 programs with assert-style tests", "a Python process", 0.4),
    ("sandbox: executions", "bubblewrap", 3.0),
    ("learner: step of 32 completions, prompts of 256 tokens, shared", "plain PyTorch", 0.5),
    ("memory: step of 4096 tokens", "plain PyTorch", 0.5),
    ("weights: 500 MB in 300 tensors", "one flat Gloo broadcast", 0.8),
    ("engines: vllm, 125 M parameters", "bare AsyncLLM", 0.95),
    ("agents: episodes over HTTP, 30 M parameters", "in process", 0.9),
    ("trl_grpo: 0.3 M, transformers engine", "TRL", 1.6),
    ("trl_lengths: 30 M, prompts of 256, 2 × 8, transformers engine", "TRL", 3.0),
    ("trl_lengths: 30 M, prompts of 1,024, 2 × 8, transformers engine", "TRL", 3.0),
    ("trl_lengths: 125 M, prompts of 256, 2 × 8, transformers engine", "TRL", 3.0),
    ("trl_lengths: 30 M, prompts of 256, arithmetic of training", "matrix products", 0.7),
    ("overlap: step, max_staleness 1", "the longer", 1.1),
    ("start: command to first step, transformers", "limit", 1.0),
    ("long_runs: resume after 20,000 steps", "after 100", 1.5),
)


@dataclass
class Outcome:
    """The result of a benchmark."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    failure: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks of this checkout.")
    known = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: those with a goal")
    parser.add_argument("--all", action="store_true", help="run those without a goal, too")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md too")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{each.name:10} {each.environment} environment" for each in BENCHMARKS))
        return 0
    for name in arguments.names:
        if name not in known:
            parser.error(f"no benchmark is called '{name}'; there are {', '.join(known)}")
    with_goal = {title.partition(":")[0] for title, _, _ in GOALS}
    chosen = arguments.names or [name for name in known if arguments.all or name in with_goal]
    RESULTS.mkdir(parents=True, exist_ok=True)
    load, began = os.getloadavg()[0], time.monotonic()
    conditions = {
        "command": " ".join(["benchmarks/run.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "load_before": round(load, 1),
    }
    outcomes: list[Outcome] = []
    for benchmark in BENCHMARKS:
        if benchmark.name not in chosen:
            continue
        print(f"{benchmark.name} …", end=" ", flush=True)
        begun = time.monotonic()
        outcomes.append(outcome := run(benchmark))
        print(f"{outcome.failure or 'done'}, {time.monotonic() - begun:.0f} s", flush=True)
        conditions |= {"minutes": round((time.monotonic() - began) / 60), "load_after": round(os.getloadavg()[0], 1)}
        if arguments.write and not outcome.failure:
            every = merged(rows_of([outcome], conditions["date"]), [benchmark.name])
            PAGE.write_text(page(conditions, "\n".join(first_table(every)), tables(every)))
    print("\n" + "\n".join(table([HEADING, *rows_of(outcomes, conditions["date"])])))
    record = {**conditions, "benchmarks": [asdict(outcome) for outcome in outcomes]}
    (RESULTS / "bench.json").write_text(json.dumps(record, indent=2) + "\n")
    failed = [outcome for outcome in outcomes if outcome.failure]
    for outcome in failed:
        print(f"\n{outcome.name} FAILED: {outcome.failure}")
    print(f"\nbench.json and logs are in {RESULTS.relative_to(ROOT)}")
    return 1 if failed else 0


def run(benchmark: Benchmark) -> Outcome:
    """Run it as a process and read the line that it prints last."""
    outcome = Outcome(benchmark.name)
    python = ENVIRONMENTS / benchmark.environment / "bin" / "python"
    program = ROOT / "benchmarks" / f"{benchmark.name}.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    environment.setdefault("HOME", str(ROOT / ".quartet" / "cache"))
    log = RESULTS / f"bench-{benchmark.name}.log"
    with log.open("w") as output:
        command = guard.guarded([str(python), str(program)], GRACE_SECONDS)
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, text=True
        )
        try:
            printed, _ = process.communicate(timeout=benchmark.limit)
        except subprocess.TimeoutExpired:
            outcome.failure = f"not done after {benchmark.limit:.0f} s"
            return outcome
        finally:
            end(process)
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        outcome.failure = "\n    ".join([f"it ended with status {process.returncode}", *lines])
        return outcome
    outcome.figures = [Figure(**figure) for figure in json.loads(printed.splitlines()[-1])]
    if strays := [figure.name for figure in outcome.figures if not figure.name.startswith(f"{benchmark.name}:")]:
        outcome.failure = f"figures whose name does not begin with '{benchmark.name}:' {strays}"
    return outcome


def end(process: subprocess.Popen) -> None:
    """Send SIGTERM twice: the guard forwards the first, and kills everything at the second."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(GRACE_SECONDS + 1)
            except subprocess.TimeoutExpired:
                continue


Row = tuple[str, ...]
HEADING: Row = ("benchmark", "measured", "peer or limit", "", "ratio", "on")


def rows_of(outcomes: list[Outcome], date: str) -> list[Row]:
    """A row a figure."""
    rows = []
    for figure in [figure for outcome in outcomes for figure in outcome.figures]:
        ratio = f"{figure.ours / figure.peer:.2f} ({figure.better} is better)"
        ours = f"{number(figure.ours)} {figure.unit}"
        rows.append((figure.name, ours, figure.peer_name, f"{number(figure.peer)} {figure.unit}", ratio, date))
    return rows


def rows_of_page(text: str) -> list[Row]:
    """Return the rows of the existing page, without those of other sections."""
    lines = text.partition(SECTION)[0].splitlines()
    cells = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines if line[:1] == "|"]
    return [row for row in cells if len(row) == len(HEADING) and row != HEADING and set(row[0]) != {"-"}]


def table(rows: list[Row]) -> list[str]:
    """Markdown that is readable as it stands. The first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]


def merged(fresh: list[Row], names: list[str]) -> list[Row]:
    """Return the new page's rows: new ones of the benchmarks that ran, the existing ones of the others."""
    before = rows_of_page(PAGE.read_text()) if PAGE.exists() else []
    rows = []
    for benchmark in BENCHMARKS:
        source = fresh if benchmark.name in names else before
        rows += [row for row in source if of(row) == benchmark.name]
    return rows


def first_table(rows: list[Row]) -> list[str]:
    """Return the table of the figures that have a goal."""
    chosen: list[Row] = [("what", "measured", "peer or limit", "ratio", "goal")]
    for name, peer, goal in GOALS:
        for row in rows:
            if row[0] == name and row[2].startswith(peer):
                ratio, _, better = row[4].partition(" ")
                least = "at least" if better.startswith("(higher") else "at most"
                chosen.append((name, row[1], f"{row[2]}: {row[3]}", ratio, f"{least} {goal:g}"))
    return table(chosen)


def of(row: Row) -> str:
    """The benchmark that a row is of: its name begins with it."""
    return row[0].partition(":")[0]


def tables(rows: list[Row]) -> str:
    """Return a table for each benchmark, below the first line of its docstring."""
    parts = []
    for benchmark in BENCHMARKS:
        if mine := [row for row in rows if of(row) == benchmark.name]:
            program = ROOT / "benchmarks" / f"{benchmark.name}.py"
            summary = (ast.get_docstring(ast.parse(program.read_text())) or "").splitlines()[0]
            parts.append("\n".join([f"### {benchmark.name}", "", summary, "", *table([HEADING, *mine])]))
    return "\n\n".join(parts)


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def commit() -> str:
    """The commit that is measured, in short; with a plus if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """The machine in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({cpu_model()}), {memory:.0f} GiB of memory"


def cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "model unknown"


def page(conditions: dict, first: str, body: str) -> str:
    before = PAGE.read_text() if PAGE.exists() else ""
    _, mark, sections = before.partition(SECTION)
    return f"""# Benchmarks

Last written by `{conditions["command"]}` on {conditions["date"]} at commit {conditions["commit"]}, in
{conditions["minutes"]} minutes; `--write NAME` replaces the rows of one benchmark.
Machine then: {conditions["machine"]}; rows of another date may be of another one.
Load average then {conditions["load_before"]} before and {conditions["load_after"]} after: ours and the peer were
measured in turn under the same load, so trust the ratios more than the figures.

{first}

{body}

The ratio is measured / peer. The docstring of each program in this folder describes what is compared, and why the peer
is fair.
{mark}{sections}"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
