// Sampled groups, one at a time: the newest, until the reader selects one.
import { byId, clock, h, number } from "./parts.js";

const FEW = 4; // completions that are shown before "all"
let groups = [];
let held = null; // id of the group that the reader looks at; null: the newest
let all = false;

const isRight = (completion) => completion.outcome === "correct";
const onlyWrong = () => byId("wrong").checked;
const shown = () => groups.filter((group) => !onlyWrong() || group.completions.some((each) => !isRight(each)));

export function gotSamples(fresh) {
  groups = fresh;
  if (held !== null && !groups.some((group) => group.instance_id === held)) held = null;
  drawSamples();
}

export function drawSamples() {
  const list = shown();
  const index = held === null ? 0 : Math.max(0, list.findIndex((group) => group.instance_id === held));
  byId("newer").disabled = index <= 0;
  byId("older").disabled = index >= list.length - 1;
  byId("follow").setAttribute("aria-pressed", String(held === null));
  byId("samples-place").textContent = list.length ? `${index + 1} of the last ${list.length}` : "";
  byId("sample").replaceChildren(...(list.length ? group(list[index]) : [h("p", { class: "soft" }, groups.length
    ? "No sampled group has a wrong answer." : "No sample yet: the broker sends some of the finished groups.")]));
}

function text(label, content, kind = "") {
  return h("div", {}, h("p", { class: "label" }, label), h("p", { class: `said ${kind}`, dir: "auto" }, content || "(nothing)"));
}

function group(each) {
  const completions = all ? each.completions : each.completions.slice(0, FEW);
  const rest = each.completions.length - completions.length;
  const facts = [each.purpose === "evaluate" ? "evaluation" : each.purpose, each.rollout, each.at ? clock(each.at) : ""];
  const right = each.completions.filter(isRight).length;
  const references = Object.entries(each.references);
  const judge = each.completions[0]?.verifiers?.find((one) => one.ans_acc !== null);
  const button = h("button", { type: "button", "aria-expanded": String(all) },
    all ? `Show ${FEW} only` : `Show all ${each.completions.length}`);
  button.addEventListener("click", () => {
    all = !all;
    held = each.instance_id;
    drawSamples();
  });
  return [
    h("div", { class: "group" }, h("div", { class: "asked" }, text("Prompt", each.prompt),
      references.length ? references.map(([column, read]) => text(`Reference: ${column}`, read)) : text("Reference", "(none is read)")),
      h("p", { class: "soft" }, `${right} of ${each.completions.length} right${judge ? ` by ${judge.name}` : ""} · ${facts.filter(Boolean).join(" · ")}`)),
    h("div", { class: "texts" }, completions.map(completion)),
    ...(rest > 0 || all && each.completions.length > FEW ? [h("p", {}, button)] : []),
  ];
}

// Returns what is before </think> and what is after it; a text that begins with <think> and lacks it is all thought.
function splitThought(text) {
  const body = text.trimStart().replace(/^<think>/, "");
  const end = body.indexOf("</think>");
  if (end >= 0) return [body.slice(0, end).trim(), body.slice(end + "</think>".length).trim()];
  return text.trimStart().startsWith("<think>") ? [body.trim(), ""] : ["", text.trim()];
}

function verifier({ name, reward, weight, outcome, reason }) {
  if (outcome === "unspecified") return h("p", { class: "soft" }, `${name}: abstained`);
  const times = weight ? ` × weight ${number(weight)}` : "";
  return h("p", { class: "soft" }, `${name}: reward ${number(reward)}${times}, ${outcome.replaceAll("_", " ")}${reason ? `: ${reason}` : ""}`);
}

function completion(each) {
  const scored = each.reward !== undefined && each.reward !== null;
  const right = isRight(each);
  const [thought, answer] = splitThought(each.text);
  const verdict = scored ? `${right ? "✓" : "✕"} ${each.outcome.replaceAll("_", " ")}, reward ${number(each.reward)}` : "not scored";
  const made = [...new Set(each.version_spans.map(([version]) => version))];
  const versions = made.length > 1 ? `versions ${made.join(", ")}` : `version ${made[0] ?? "unknown"}`;
  const ending = { length: ", cut off at the length limit", abort: ", aborted" }[each.finish_reason] ?? "";
  return h("article", { "data-right": scored ? (right ? "yes" : "no") : "" },
    h("h3", {}, each.seat ? `${each.seat}: ${verdict}` : verdict),
    each.reason ? h("p", { class: "soft" }, each.reason, each.parsed_answer ? ` (read: ${each.parsed_answer})` : "") : null,
    (each.verifiers ?? []).map(verifier),
    each.turn_rewards ? h("p", { class: "soft" }, `turns: ${each.turn_rewards.map((one) => one === null ? "–" : number(one)).join(", ")}`) : null,
    thought ? text("Thought", thought, "thought") : h("p", { class: "label" }, "No thought"),
    text("Answer", answer),
    h("p", { class: "soft" }, `${each.tokens} tokens, weights of ${versions}${ending}`));
}

function step(by) {
  const list = shown();
  const index = held === null ? 0 : Math.max(0, list.findIndex((each) => each.instance_id === held));
  held = list[Math.min(list.length - 1, Math.max(0, index + by))]?.instance_id ?? null;
  drawSamples();
}

byId("newer").addEventListener("click", () => step(-1));
byId("older").addEventListener("click", () => step(1));
byId("follow").addEventListener("click", () => {
  held = null;
  drawSamples();
});
byId("wrong").addEventListener("change", drawSamples);
