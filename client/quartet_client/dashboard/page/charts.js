// Line charts and the timeline of weight versions, as inline SVG. Each chart can be read without seeing it: a summary in
// its label, its values by arrow keys, and as a table.
import { h, number, s, span } from "./parts.js";

// A line differs from another by color, dash and marker.
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const HEIGHT = 190;
const MARGIN = { left: 46, right: 12, top: 10, bottom: 34 };

function niceTicks(low, high, count) {
  const range = high - low || 1;
  const raw = range / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw - 1e-12);
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + 1e-9 * range; value += step) {
    ticks.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return ticks;
}

function marker(kind, x, y, color, size = 3.5) {
  const shapes = [
    () => s("circle", { cx: x, cy: y, r: size }),
    () => s("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size }),
    () => s("path", { d: `M${x} ${y - size - 1}l${size + 1} ${2 * size}h${-2 * size - 2}z` }),
    () => s("path", { d: `M${x} ${y - size - 1}l${size + 1} ${size + 1}l${-size - 1} ${size + 1}l${-size - 1} ${-size - 1}z` }),
  ];
  const shape = shapes[kind % shapes.length]();
  shape.setAttribute("fill", `var(--c${color})`);
  return shape;
}

function lineSample(line, index) {
  const box = s("svg", { viewBox: "0 0 30 10", "aria-hidden": "true" });
  const dash = DASHES[(line.dash ?? index) % DASHES.length];
  box.append(s("path", { d: "M0 5h30", stroke: `var(--c${line.color})`, "stroke-width": line.thin ? 1.2 : 2.4,
    "stroke-opacity": line.thin ? 0.55 : 1, "stroke-dasharray": dash, fill: "none" }));
  if (line.marks) box.append(marker(line.mark ?? index, 15, 5, line.color));
  return box;
}

// The exponential moving average, without its pull to zero at the start, as TensorBoard draws it.
export function smoothed(points, weight = 0.85) {
  let total = 0;
  return points.map(([x, y], index) => {
    total = weight * total + (1 - weight) * y;
    return [x, total / (1 - weight ** (index + 1))];
  });
}

function nearest(points, x) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

export class LineChart {
  // options: title, unit, xLabel, format(value), low, high (bounds of y; null: the data's), empty
  constructor(figure, options) {
    this.options = { xLabel: "optimizer steps", format: (value) => number(value), low: 0, high: null, ...options };
    this.lines = [];
    this.cursor = null;
    this.legend = h("div", { class: "legend" });
    this.place = h("div");
    this.spoken = h("p", { class: "unseen", "aria-live": "polite" });
    this.table = h("div");
    const details = h("details", {}, h("summary", {}, "Values as a table"), this.table);
    details.addEventListener("toggle", () => this.drawTable());
    this.details = details;
    const unit = options.unit ? h("span", { class: "unit" }, ` ${options.unit}`) : null;
    figure.append(h("h3", {}, options.title, unit), this.legend, this.place, this.spoken, details);
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  // lines: [{name, points: [[x, y]], color, thin?, marks?}]
  show(lines) {
    this.lines = lines.filter((line) => line.points.length);
    this.draw();
  }

  summary() {
    const { title, unit, format, xLabel } = this.options;
    const texts = this.lines.filter((line) => !line.thin).map((line) => {
      const ys = line.points.map((point) => point[1]);
      return `${line.name}: from ${format(ys[0])} to ${format(ys[ys.length - 1])}, ` +
        `least ${format(Math.min(...ys))}, most ${format(Math.max(...ys))}`;
    });
    return `${title}${unit ? `, ${unit}` : ""}, over ${xLabel}. ${texts.join(". ")}. Arrow keys read values.`;
  }

  draw() {
    const width = Math.floor(this.place.clientWidth);
    if (!width) return;
    const hadFocus = this.svg && document.activeElement === this.svg;
    this.details.hidden = !this.lines.length;
    if (!this.lines.length) {
      this.svg = null;
      this.legend.replaceChildren();
      this.place.replaceChildren(h("p", { class: "empty" }, this.options.empty));
      return;
    }
    const points = this.lines.flatMap((line) => line.points);
    const xs = points.map((point) => point[0]);
    const ys = points.map((point) => point[1]);
    const [firstX, lastX] = [Math.min(...xs), Math.max(...xs)];
    const left = Math.min(firstX, this.options.fromX ?? firstX);
    const right = lastX > left ? lastX : left + 1;
    let low = this.options.low ?? Math.min(...ys);
    let high = this.options.high ?? Math.max(...ys);
    if (this.options.high === null) high += 0.06 * (high - low);
    if (high - low < 1e-9) [low, high] = [low - (this.options.low === null ? 0.5 : 0), high + 0.5];
    low = Math.min(low, ...ys);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const toX = (x) => MARGIN.left + (inner.width * (x - left)) / (right - left);
    const toY = (y) => MARGIN.top + inner.height * (1 - (y - low) / (high - low));
    this.scale = { toX, toY, left, right, inner };

    const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", tabindex: 0,
      "aria-label": this.summary() });
    for (const tick of niceTicks(low, high, 4)) {
      const y = toY(tick);
      svg.append(s("path", { class: "grid", d: `M${MARGIN.left} ${y}h${inner.width}` }));
      svg.append(s("text", { class: "tick", x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.options.format(tick)));
    }
    const whole = niceTicks(left, right, Math.max(2, inner.width / 80)).filter((tick) => Number.isInteger(tick));
    for (const tick of whole) {
      const x = toX(tick);
      svg.append(s("path", { class: "axis", d: `M${x} ${HEIGHT - MARGIN.bottom}v4` }));
      svg.append(s("text", { class: "tick", x, y: HEIGHT - MARGIN.bottom + 16, "text-anchor": "middle" }, number(tick)));
    }
    svg.append(s("path", { class: "axis", d: `M${MARGIN.left} ${HEIGHT - MARGIN.bottom}h${inner.width}` }));
    svg.append(s("text", { class: "tick", x: width - MARGIN.right, y: HEIGHT - 3, "text-anchor": "end" }, this.options.xLabel));
    this.lines.forEach((line, index) => svg.append(this.drawLine(line, index, toX, toY)));
    this.marks = s("g");
    svg.append(this.marks);
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("pointerleave", () => this.moveTo(null));
    svg.addEventListener("blur", () => this.moveTo(null));
    svg.addEventListener("keydown", (event) => this.key(event));
    this.place.replaceChildren(svg);
    this.svg = svg;
    if (hadFocus) svg.focus({ preventScroll: true });
    this.moveTo(this.cursor);
    this.drawTable();
  }

  drawLine(line, index, toX, toY) {
    const path = line.points.map(([x, y], at) => `${at ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
    const dash = DASHES[(line.dash ?? index) % DASHES.length];
    const group = s("g", {}, s("path", { d: path, fill: "none", stroke: `var(--c${line.color})`,
      "stroke-width": line.thin ? 1.2 : 2.4, "stroke-opacity": line.thin ? 0.45 : 1, "stroke-dasharray": dash,
      "stroke-linejoin": "round" }));
    if (line.marks || line.points.length === 1) {
      const every = Math.ceil(line.points.length / 40);
      line.points.forEach(([x, y], at) => {
        if ((line.points.length - 1 - at) % every === 0) group.append(marker(line.mark ?? index, toX(x), toY(y), line.color));
      });
    }
    return group;
  }

  drawLegend() {
    const at = this.cursor;
    const entries = this.lines.map((line, index) => {
      const point = at === null ? line.points[line.points.length - 1] : nearest(line.points, at);
      return h("span", {}, lineSample(line, index), `${line.name} `, h("b", {}, this.options.format(point[1])));
    });
    const where = at === null ? [] : [h("span", { class: "soft" }, `at ${number(Math.round(at))}`)];
    this.legend.replaceChildren(...entries, ...where);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const { left, right, inner } = this.scale;
    const x = left + ((event.clientX - box.left - MARGIN.left) / inner.width) * (right - left);
    this.moveTo(Math.min(right, Math.max(left, x)));
  }

  key(event) {
    const main = this.lines.reduce((most, line) => (line.points.length > most.points.length ? line : most));
    const xs = main.points.map((point) => point[0]);
    let index = this.cursor === null ? xs.length - 1 : xs.indexOf(nearest(main.points, this.cursor)[0]);
    if (event.key === "ArrowLeft") index -= this.cursor === null ? 0 : 1;
    else if (event.key === "ArrowRight") index += 1;
    else if (event.key === "Home") index = 0;
    else if (event.key === "End") index = xs.length - 1;
    else if (event.key === "Escape") return this.moveTo(null);
    else return;
    event.preventDefault();
    this.moveTo(xs[Math.min(xs.length - 1, Math.max(0, index))]);
    const texts = this.lines.map((line) => `${line.name} ${this.options.format(nearest(line.points, this.cursor)[1])}`);
    this.spoken.textContent = `${number(Math.round(this.cursor))}: ${texts.join(", ")}`;
  }

  moveTo(x) {
    this.cursor = x;
    this.marks.replaceChildren();
    if (x !== null) {
      const { toX, toY, inner } = this.scale;
      this.marks.append(s("path", { class: "cursor", d: `M${toX(x)} ${MARGIN.top}v${inner.height}` }));
      this.lines.forEach((line, index) => {
        const [px, py] = nearest(line.points, x);
        if (!line.thin) this.marks.append(marker(line.mark ?? index, toX(px), toY(py), line.color, 4.5));
      });
    }
    this.drawLegend();
  }

  drawTable() {
    if (!this.details.open || !this.lines.length) return;
    const main = this.lines.reduce((most, line) => (line.points.length > most.points.length ? line : most));
    const every = Math.ceil(main.points.length / 16);
    const chosen = main.points.filter((_, at) => (main.points.length - 1 - at) % every === 0);
    const head = h("tr", {}, h("th", { scope: "col" }, this.options.xLabel),
      this.lines.map((line) => h("th", { scope: "col" }, line.name)));
    const rows = chosen.map(([x]) => h("tr", {}, h("td", {}, number(Math.round(x))),
      this.lines.map((line) => h("td", {}, this.options.format(nearest(line.points, x)[1])))));
    this.table.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
  }
}

const LANE = 30;

// A lane for the trainer and one for each rollout; a box is the time in which it had one version.
export class VersionTimeline {
  constructor(figure) {
    this.text = h("div", { class: "legend" });
    this.place = h("div");
    figure.append(h("h3", {}, "Weight versions ", h("span", { class: "unit" }, "who had which, over the time of the run")),
      this.text, this.place);
    this.data = null;
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  show(weights, elapsed) {
    this.data = weights;
    this.elapsed = elapsed;
    this.draw();
  }

  draw() {
    const width = Math.floor(this.place.clientWidth);
    if (!width || !this.data) return;
    const { published, rollouts } = this.data;
    if (!published.length && !rollouts.length) {
      this.place.replaceChildren(h("p", { class: "empty" }, "No weight update yet."));
      return;
    }
    const newest = published.length ? published[published.length - 1][1] : null;
    const lanes = [];
    if (published.length) lanes.push({ name: "published", points: published, note: "by the trainer", kind: "" });
    for (const rollout of rollouts) {
      const behind = newest === null ? 0 : newest - rollout.version;
      const note = !rollout.live ? "gone" : behind > 0 ? `${behind} behind` : "current";
      lanes.push({ name: rollout.id, points: rollout.points, note, kind: " rollout", ends: !rollout.live });
    }
    const first = Math.min(...lanes.flatMap((lane) => lane.points.map((point) => point[0])));
    const last = Math.max(this.elapsed, ...lanes.flatMap((lane) => lane.points.map((point) => point[0])), first + 1);
    const toX = (x) => 2 + ((width - 4) * (x - first)) / (last - first);
    const height = lanes.length * (LANE + 18) + 30;
    const texts = lanes.map((lane) => `${lane.name}: version ${lane.points[lane.points.length - 1][1]}, ${lane.note}`);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `Weight versions over ${span(last - first)}. ${texts.join(". ")}.` });
    lanes.forEach((lane, index) => this.drawLane(svg, lane, index * (LANE + 18), toX, last));
    const y = height - 24;
    svg.append(s("path", { class: "axis", d: `M2 ${y}h${width - 4}` }));
    svg.append(s("text", { class: "tick", x: 2, y: y + 16 }, `first weights, at ${span(first)}`));
    svg.append(s("text", { class: "tick", x: width - 2, y: y + 16, "text-anchor": "end" }, `${span(last)} since the run began`));
    this.place.replaceChildren(svg);
  }

  drawLane(svg, lane, top, toX, last) {
    const newest = lane.points[lane.points.length - 1];
    svg.append(s("text", { class: "lane", x: 2, y: top + 13 }, lane.name.length > 34 ? `…${lane.name.slice(-33)}` : lane.name));
    svg.append(s("text", { class: "lane", x: toX(last), y: top + 13, "text-anchor": "end" }, `version ${newest[1]}, ${lane.note}`));
    let labeled = -100;
    lane.points.forEach(([x, version], index) => {
      const next = index + 1 < lane.points.length ? lane.points[index + 1][0] : lane.ends ? x : last;
      const [from, to] = [toX(x), toX(next)];
      svg.append(s("rect", { class: (index % 2 ? "odd" : "even") + lane.kind, x: from, y: top + 18,
        width: Math.max(1, to - from), height: LANE - 8 }));
      const label = String(version);
      const needed = 7 * label.length + 4;
      if (from - labeled >= 30 && (to - from >= needed || to - from < 14) && from + needed < toX(last)) {
        svg.append(s("text", { class: "lane-in", x: from + 2, y: top + 33 }, label));
        labeled = from;
      }
    });
  }
}
