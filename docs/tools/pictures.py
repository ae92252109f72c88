"""The pictures of docs/concepts.md and README.md, as SVG for light and dark pages.

.quartet/envs/dev/bin/python docs/tools/pictures.py        writes docs/pictures/*.svg
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"

# Okabe and Ito's colors, which color-blind readers can distinguish; text is dark on their light tints.
TINTS = {"broker": "#fbe3c2", "reward": "#cdeee3", "rollout": "#d2e7f7", "trainer": "#f3d9e8", "plain": "#eeeeee"}
EDGES = {"broker": "#b36b00", "reward": "#00785a", "rollout": "#0067a3", "trainer": "#a8507f", "plain": "#666666"}
STYLE = """\
  <style>
    text { font: 15px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1c1c1c }
    .name { font-weight: 650; font-size: 17px }
    .small { font-size: 13px }
    .mono { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, monospace }
    .line { fill: none; stroke: #444444; stroke-width: 1.8 }
    .weights { fill: none; stroke: #a8507f; stroke-width: 4 }
    .page { fill: #ffffff; stroke: #d9d9d9 }
    .label { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round }
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">
      <path d="M0 0 8 4 0 8z" fill="#444444"/>
    </marker>
    <marker id="heavy" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="4" markerHeight="4" orient="auto">
      <path d="M0 0 8 4 0 8z" fill="#a8507f"/>
    </marker>
  </defs>
"""


def picture(width: int, height: int, title: str, description: str, parts: list[str]) -> str:
    """Return an SVG with a title and a description for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-labelledby="title description">\n  <title id="title">{title}</title>\n'
        f'  <desc id="description">{description}</desc>\n{STYLE}'
        f'  <rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>\n'
        + "".join(f"  {part}\n" for part in parts)
        + "</svg>\n"
    )


def box(x: int, y: int, width: int, height: int, kind: str, name: str, *lines: str) -> str:
    """Return a box with a title and text."""
    middle = x + width // 2
    top = y + height // 2 - 10 * len(lines) + 5
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{TINTS[kind]}" stroke="{EDGES[kind]}" '
        f'stroke-width="1.6"/>'
        + text(middle, top, name, "name")
        + "".join(text(middle, top + 20 * (index + 1), line, "small") for index, line in enumerate(lines))
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Return a text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def arrow(path: str, kind: str = "line") -> str:
    """Return an arrow along a path."""
    marker = "heavy" if kind == "weights" else "tip"
    return f'<path class="{kind}" d="{path}" marker-end="url(#{marker})"/>'


def services() -> str:
    """Return the picture of the four services and the calls between them."""
    return picture(
        860,
        420,
        "Four services",
        "A client gives prompts to the broker. The rollout takes prompts from it, has completions scored by the reward "
        "service, and puts groups back. The trainer takes batches, commits them, and sends weights to the rollout.",
        [
            box(30, 70, 130, 70, "plain", "client", "Python, any gRPC"),
            box(330, 60, 200, 90, "broker", "broker", "queue, leases, staleness", "all state in Redis"),
            box(630, 60, 200, 90, "trainer", "trainer", "ColossalAI", "checkpoints on its disk"),
            box(330, 270, 200, 100, "rollout", "rollouts", "vLLM", "as many as you like,", "come and go"),
            box(30, 275, 200, 90, "reward", "reward", "math, code in a sandbox,", "your own verifiers"),
            arrow("M160 95H328"),
            text(244, 86, "prompts", "small label"),
            arrow("M330 120H162"),
            text(244, 138, "results", "small label"),
            arrow("M530 95H628"),
            text(579, 86, "batches", "small label"),
            arrow("M630 120H532"),
            text(579, 138, "commits", "small label"),
            arrow("M405 150V268"),
            text(398, 215, "prompts", "small label", "end"),
            arrow("M455 270V152"),
            text(462, 215, "groups", "small label", "start"),
            arrow("M330 305H232"),
            text(281, 296, "completions", "small label"),
            arrow("M230 335H328"),
            text(281, 353, "scores", "small label"),
            arrow("M730 150V320H538", "weights"),
            text(722, 240, "weights", "label", "end"),
            text(722, 260, "Gloo, NCCL or files", "small label", "end"),
        ],
    )


def life() -> str:
    """Return the picture of a prompt group's states."""
    states = (
        ("QUEUED", "a prompt waits", "plain"),
        ("LEASED", "at a rollout", "rollout"),
        ("READY", "scored, in Redis", "broker"),
        ("LEASED", "in a step's batch", "trainer"),
        ("TRAINED", "in the weights", "trainer"),
        ("COMMITTED", "in a checkpoint", "trainer"),
    )
    parts = []
    for index, (name, what, kind) in enumerate(states):
        x = 20 + index * 158
        parts.append(box(x, 90, 134, 66, kind, name, what))
        if index:
            parts.append(arrow(f"M{x - 24} 123H{x - 2}"))
    return picture(
        970,
        290,
        "The life of a prompt group",
        "Queued, leased to a rollout, ready, leased to the trainer for a step, trained, committed. It goes back to the "
        "queue when a lease expires or it grew stale; it may be dropped by the trainer's filters or set aside as dead.",
        [
            *parts,
            arrow("M245 90C245 40 100 40 92 88"),
            text(172, 78, "lease expired", "small label"),
            arrow("M403 90C400 0 110 5 82 88"),
            text(322, 24, "grew stale", "small label", "start"),
            arrow("M720 90C715 45 570 45 562 88"),
            text(640, 42, "the trainer died: same step, same batch", "small label"),
            box(178, 210, 134, 56, "plain", "DEAD", "kept with reasons"),
            arrow("M245 156V208"),
            text(253, 188, "failed too often", "small label", "start"),
            box(494, 210, 134, 56, "plain", "DROPPED", "kept as a number"),
            arrow("M561 156V208"),
            text(569, 188, "filtered", "small label", "start"),
        ],
    )


def gate() -> str:
    """Return the timeline of bounded staleness."""
    parts = [
        text(20, 34, "max_staleness = 1: generation of the next batch goes on while the trainer trains", "", "start")
    ]
    width = 150
    for index in range(5):
        x = 120 + index * width
        parts.append(
            f'<rect x="{x + 3}" y="60" width="{width - 6}" height="44" rx="6" fill="{TINTS["rollout"]}" '
            f'stroke="{EDGES["rollout"]}"/>' + text(x + width / 2, 87, f"groups by v{max(0, index - 1)}", "small")
        )
        if index:
            parts.append(
                f'<rect x="{x + 3}" y="140" width="{width - 6}" height="44" rx="6" fill="{TINTS["trainer"]}" '
                f'stroke="{EDGES["trainer"]}"/>' + text(x + width / 2, 167, f"step {index - 1} → v{index}", "small")
            )
            parts.append(arrow(f"M{x - 14} 104L{x + 10} 138"))
        if index < 4 and index:
            parts.append(arrow(f"M{x + width - 8} 140L{x + width + 16} 108", "weights"))
    parts += [
        text(20, 87, "rollouts", "name", "start"),
        text(20, 167, "trainer", "name", "start"),
        text(120, 216, "Thin: batches. Thick: weights. A rollout may start a prompt only while", "small", "start"),
        text(
            120, 240, "accepted + running groups &lt; (version + max_staleness + 1) × groups_per_step", "mono", "start"
        ),
    ]
    return picture(
        900,
        262,
        "Bounded staleness",
        "With max_staleness 1 the rollouts make the next batch while the trainer trains on the one before; new weights "
        "arrive after each step. A rollout may start a prompt only while accepted plus running groups are fewer than "
        "version plus max_staleness plus 1, times groups per step.",
        parts,
    )


PICTURES = {"services": services, "life": life, "gate": gate}
