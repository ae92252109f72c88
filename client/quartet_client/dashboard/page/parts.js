// Makes elements, and texts of numbers and times. Strings become text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Redraws only what has changed, so that other parts keep focus, scroll position and selection.
const drawn = new Map();
export function whenChanged(name, value, draw) {
  const key = JSON.stringify(value);
  if (drawn.get(name) === key) return;
  drawn.set(name, key);
  draw(value);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(digits - 1);
}

export const percent = (value) => {
  if (value === null || value === undefined) return "–";
  const shown = 100 * value;
  return `${shown > 0 && shown < 10 ? shown.toFixed(1) : shown.toFixed(0)}\u00a0%`;
};

export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value, unit ? 2 : 1)} ${units[unit]}`;
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
