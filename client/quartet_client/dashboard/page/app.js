// Polls the dashboard's JSON and draws it. All strings in it are untrusted: models and users wrote them.
import { LineChart, VersionTimeline, smoothed } from "./charts.js";
import { byId, bytes, clock, h, number, percent, span, whenChanged } from "./parts.js";
import { drawSamples, gotSamples } from "./samples.js";

const POLL = 1000; // milliseconds
const PATIENCE = 6000;

const SIGNS = {
  healthy: "✓", finished: "✓", attention: "!", waiting: "…", stalled: "■", failed: "✕", cancelled: "■", unknown: "?", recorded: "i",
};
const ENDED = new Set(["finished", "failed", "cancelled"]);
const UNJUDGED = "no verifier judges whether answers are right";
const NO_STEP = "No step has been done yet.";
const axis = (value) => number(value, 2);

const charts = {
  accuracy: new LineChart(byId("chart-accuracy"), { title: "Answer accuracy", unit: "% of answers that are right",
    format: percent, high: 1, fromX: 0, empty: NO_STEP }),
  reward: new LineChart(byId("chart-reward"), { title: "Reward", unit: "mean of a step's completions", low: null,
    fromX: 0, empty: NO_STEP }),
  tokens: new LineChart(byId("chart-tokens"), { title: "Tokens", unit: "per second, trained on", format: axis,
    fromX: 0, empty: NO_STEP }),
  completions: new LineChart(byId("chart-completions"), { title: "Completions", unit: "per second, trained on",
    format: axis, fromX: 0, empty: NO_STEP }),
  staleness: new LineChart(byId("chart-staleness"), { title: "Staleness", unit: "in weight versions", format: axis,
    fromX: 0, empty: NO_STEP }),
};
const timeline = new VersionTimeline(byId("chart-weights"));

function drawVerdict({ level, word, sentence }, run) {
  byId("verdict").dataset.level = level;
  byId("sign").textContent = SIGNS[level] ?? "?";
  byId("word").textContent = word;
  byId("sentence").textContent = sentence;
  whenChanged("spoken", [word], () => { byId("spoken").textContent = `${word}. ${sentence}`; });
  document.title = `${SIGNS[level] ?? "?"} ${word}${run ? ` · step ${run.steps_done} · ${run.id || "no run"}` : ""}`;
}

function drawHead(state) {
  const { run } = state;
  byId("run").textContent = run.id ? `run ${run.id}` : "no run yet";
  const facts = [];
  if (run.began) facts.push(`${span((run.ended ?? state.now) - run.began)} ${run.ended ? "long" : "so far"}`);
  if (run.groups_per_step) facts.push(`${run.groups_per_step} prompts × ${run.group_size} completions a step`);
  if (run.max_staleness !== undefined) facts.push(`staleness at most ${run.max_staleness}`);
  byId("facts").textContent = facts.join(" · ");
  byId("fresh").textContent = `as of ${clock(state.now)}`;
  whenChanged("progress", [run.steps_done, run.max_steps], () => {
    const label = run.max_steps ? `Step ${number(run.steps_done)} of ${number(run.max_steps)}` : `Step ${number(run.steps_done)}`;
    const bar = run.max_steps
      ? h("progress", { max: run.max_steps, value: Math.min(run.steps_done, run.max_steps), "aria-label": label }) : null;
    byId("progress").replaceChildren(...[h("span", {}, label), bar].filter(Boolean));
  });
}

function drawFigures({ last, by_whom, evaluations, run }) {
  const recent = (figure, format) => (figure ? `mean of ${figure.of} steps: ${format(figure.mean)}` : run.steps_done ? "not reported" : "no step yet");
  const figure = (name, value, note) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, note)));
  const tiles = evaluations.slice(0, 2).map(({ set, by_whom: by, points, interval, quoted, incomplete }) => {
    const end = points[points.length - 1];
    if (incomplete || !end) return figure(`Accuracy: ${set}`, "–", incomplete || UNJUDGED);
    const [low, high, judged] = interval;
    const sure = judged ? ` (95%: ${percent(low)} to ${percent(high)}, n = ${judged})` : "";
    const more = Object.entries(quoted).map(([name, value]) => `, ${name} ${percent(value)}`).join("");
    return figure(`Accuracy${by}: ${set}`, percent(end[1]),
      `at version ${end[0]}${sure}${more}; ${percent(points[0][1])} at version ${points[0][0]}`);
  });
  for (const { set, reward, version } of evaluations.slice(0, 2)) {
    const [mean, ...each] = reward.split(" (");
    if (reward) tiles.push(figure(`Reward: ${set}`, mean, `(${each.join(" (")} at version ${version}`));
  }
  const plain = [
    ["Reward", "reward", (value) => number(value)],
    [`Training accuracy${by_whom}`, "accuracy", percent],
    ["Trained tokens per second", "tokens_per_second", (value) => number(value)],
    ["Staleness", "staleness_mean", (value) => number(value)],
    ["Answer tokens", "length", (value) => number(value)],
    ["Seconds a step", "step_seconds", (value) => number(value)],
    ["Trainer idle", "idle", percent],
  ];
  for (const [name, key, format] of plain) {
    const note = key === "accuracy" && !last[key] && run.steps_done ? UNJUDGED : recent(last[key], format);
    tiles.push(figure(name, format(last[key]?.last), note));
  }
  byId("figures").replaceChildren(...tiles);
}

function drawCharts({ lines, by_whom, verifiers, evaluations, run }) {
  const empty = run.steps_done ? "The steps of this run do not report it." : NO_STEP;
  for (const chart of Object.values(charts)) chart.options.empty = empty;
  if (run.steps_done) charts.accuracy.options.empty = `–: ${UNJUDGED}.`;
  const training = { name: `training${by_whom}, smoothed`, points: smoothed(lines.accuracy), color: 1, dash: 0 };
  const raw = { name: "each step", points: lines.accuracy, color: 1, dash: 0, thin: true };
  const held = evaluations.map(({ set, by_whom: by, points }, index) => (
    { name: `held out: ${set}${by}`, points, color: 2 + (index % 4), dash: 1 + (index % 3), mark: 1 + (index % 3), marks: true }));
  charts.accuracy.show([raw, training, ...held]);
  charts.reward.show([{ name: "each step", points: lines.reward, color: 1, dash: 0, thin: true },
    { name: "smoothed", points: smoothed(lines.reward), color: 1, dash: 0 },
    ...Object.entries(verifiers).map(([name, points], index) => (
      { name, points: smoothed(points), color: 2 + (index % 4), dash: 1 + (index % 3) }))]);
  for (const [key, line] of [["tokens", "tokens_per_second"], ["completions", "completions_per_second"]]) {
    charts[key].show([{ name: "each step", points: lines[line], color: 3, dash: 0, thin: true },
      { name: "smoothed", points: smoothed(lines[line]), color: 3, dash: 0 }]);
  }
  charts.staleness.show([{ name: "mean", points: lines.staleness_mean, color: 1, dash: 0 },
    { name: "most", points: lines.staleness_max, color: 2, dash: 1 }]);
}

const PHASES = { waiting_for_batch: "waiting for a batch (idle)", training: "training", publishing: "sending weights",
  evaluating: "evaluating", checkpointing: "saving checkpoints" };

function drawPhases(phases) {
  const entries = Object.entries(PHASES).map(([key, name], index) => ({ name, index, seconds: phases[key] ?? 0 }));
  const total = entries.reduce((sum, each) => sum + each.seconds, 0);
  const title = h("h3", {}, "Where a step's time goes ", h("span", { class: "unit" }, "trainer, mean of the last steps"));
  if (!total) return byId("phases").replaceChildren(title, h("p", { class: "empty" }, NO_STEP));
  const bar = h("div", { id: "phase-bar", "aria-hidden": "true" }, entries.map((each) => {
    const part = h("i", { class: `ph${each.index}` });
    part.style.flexGrow = String(each.seconds / total);
    return part;
  }));
  const rows = entries.map((each) => h("tr", {}, h("td", {}, h("span", { class: `key ph${each.index}`, "aria-hidden": "true" }),
    ` ${each.name}`), h("td", {}, `${number(each.seconds)} s`), h("td", {}, percent(each.seconds / total))));
  const head = h("thead", { class: "soft" }, h("tr", {}, ["phase", "seconds a step", "share"].map((name) => h("th", { scope: "col" }, name))));
  byId("phases").replaceChildren(title, bar, h("table", {}, head, h("tbody", {}, rows)));
}

const STATES = { serving: "● serving", waiting: "◐ waiting", away: "✕ away", stopped: "○ stopped", unknown: "○ not asked yet" };

function meter(idle, how) {
  const fill = h("i");
  fill.style.width = `${100 * idle}%`;
  return h("div", { class: "soft" }, `idle ${percent(idle)} ${how}`, h("div", { class: "meter", "aria-hidden": "true" }, fill));
}

function drawServices(services) {
  byId("services").replaceChildren(...services.map((service) => {
    const members = service.members.map((member) => {
      const facts = [member.state];
      // A member's values are up to a few seconds old: left out where the line above has the service's own.
      const more = service.kind === "rollout" && !(service.state === "serving" && service.members.length === 1);
      if (more) facts.unshift(member.version >= 0 ? `version ${member.version}` : "no weights");
      if (member.waiting_for) facts.push(`waits for ${member.waiting_for}`);
      if (more && member.gauges.tokens_per_second !== undefined) facts.push(`${number(member.gauges.tokens_per_second)} generated tokens/s`);
      return h("div", { class: "member" }, h("b", {}, member.id), h("div", {}, facts.join(", ")));
    });
    return h("li", { "data-state": service.state },
      h("h3", {}, service.kind, h("span", {}, STATES[service.state])),
      h("p", {}, service.doing || " "),
      service.idle ? meter(service.idle.fraction, service.idle.how) : null,
      members,
      service.address ? h("p", { class: "soft" }, service.address) : null);
  }));
}

const FLOW = [
  ["queued", "Queued", "prompts that wait"], ["leased", "At rollouts", "being answered"],
  ["ready", "Ready", "groups for the trainer"], ["leased_to_trainer", "At the trainer", "in a step's batch"],
  ["trained", "Trained", "until a checkpoint"], ["committed", "Committed", "durable, since the start"],
];
const MORE = [
  ["submitted", "submitted"], ["untrained_in_flight", "evaluation and serving prompts under way"],
  ["dropped", "dropped by filters"], ["stale", "too old, asked again"], ["redelivered", "delivered again"],
  ["duplicates", "put twice, refused"], ["dead", "set aside as dead"],
];

function drawFlow(queues) {
  if (!queues) {
    byId("flow").replaceChildren(h("li", { class: "soft" }, "Unknown: the broker has not answered yet."));
    return byId("flow-more").replaceChildren();
  }
  byId("flow").replaceChildren(...FLOW.map(([key, name, note]) => (
    h("li", {}, name, h("b", {}, number(queues[key])), h("small", {}, note)))));
  const more = MORE.map(([key, name]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(queues[key]))));
  more.push(h("div", {}, h("dt", {}, "experience in Redis"), h("dd", {}, bytes(queues.experience_bytes))));
  byId("flow-more").replaceChildren(...more);
}

const LEVELS = { error: "✕ error", warning: "! warning", info: "i" };

function drawFailures({ notices, dead, queues }) {
  const item = (level, at, text, source) => h("li", { "data-level": level },
    h("b", {}, LEVELS[level] ?? level), h("span", {}, text), h("span", { class: "soft" }, [clock(at), source].filter(Boolean).join(" · ")));
  const deaths = dead.prompts.map((each) => item("warning", each.at,
    `Prompt ${each.id} was set aside after ${each.attempts} ${each.attempts === 1 ? "attempt" : "attempts"}: ${each.reasons.join("; ") || "no reason was kept"}`, each.prompt));
  const more = dead.total > dead.prompts.length
    ? [h("p", { class: "soft" }, `${dead.total} prompts are set aside; quartet dead list shows all of them.`)] : [];
  const items = [...deaths, ...notices.map((each) => item(each.level, each.at, each.text, each.source))];
  byId("failures").replaceChildren(...more, items.length ? h("ul", {}, items)
    : h("p", { class: "soft" }, queues ? "None: no prompt was set aside, no weight update failed, no service reported a problem."
      : "Unknown: the broker has not answered yet."));
}

function draw(state) {
  drawVerdict(state.verdict, state.run);
  drawHead(state);
  whenChanged("figures", [state.last, state.by_whom, state.evaluations], () => drawFigures(state));
  whenChanged("charts", [state.lines, state.evaluations], () => drawCharts(state));
  whenChanged("phases", state.phases, drawPhases);
  whenChanged("services", state.services, drawServices);
  whenChanged("flow", state.queues, drawFlow);
  whenChanged("failures", [state.notices, state.dead, Boolean(state.queues)], () => drawFailures(state));
  const { run, weights } = state;
  // The lanes grow with time: drawn again every two seconds while the run goes on, and on each change.
  const elapsed = run.began ? (run.ended ?? state.now) - run.began : 0;
  whenChanged("weights", [weights, state.broker_away ? 0 : Math.round(elapsed / 2)], () => timeline.show(weights, elapsed));
}

async function ask(name) {
  const answer = await fetch(`api/${name}`, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.json();
}

let samplesSeen = -1;
let lostAt = null;
let lastRun = null;
let lastVerdict = null;

async function poll() {
  let state;
  try {
    state = await ask("state");
    if (state.samples !== samplesSeen) {
      const answer = await ask("samples");
      samplesSeen = answer.seen;
      gotSamples(answer.groups);
    }
  } catch (error) {
    lostAt ??= Date.now();
    const sentence = `The quartet dashboard program has not answered for ${span((Date.now() - lostAt) / 1000)}: it was ` +
      "ended, or cannot be reached. What is shown below is old. This page retries.";
    // A run that has ended keeps its verdict.
    const gone = " The quartet dashboard program has ended since; this is what it showed last.";
    drawVerdict(lastVerdict && ENDED.has(lastVerdict.level) ? { ...lastVerdict, sentence: lastVerdict.sentence + gone }
      : { level: "unknown", word: "This page is cut off", sentence }, lastRun);
    console.warn(error);
    return;
  }
  lostAt = null;
  [lastRun, lastVerdict] = [state.run, state.verdict];
  draw(state);
  document.documentElement.dataset.drawn = "yes";
}

async function keepPolling() {
  await poll();
  setTimeout(keepPolling, document.hidden ? 5 * POLL : POLL);
}

drawSamples();
keepPolling();
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
