// Numbers and names for people, and DOM nodes from text. Nothing here ever parses markup.

const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** A name as a trace gives it, without what would not be seen or would turn the text around. */
function clean(name) {
  const seen = name.replace(UNSEEN, "\ufffd");
  return seen.trim() ? seen : `"${seen}"`;
}

/** The end of a long name, where names differ. */
function cut(name, length) {
  return name.length <= length ? name : `…${name.slice(name.length - length + 1)}`;
}

/** As much of the end of `name` as has room on a canvas. */
function fitting(ctx, name, room) {
  let length = Math.min(name.length, Math.floor(room / 3));
  while (length > 1 && ctx.measureText(cut(name, length)).width > room) length -= 1;
  return length > 1 ? cut(name, length) : "";
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function formatBytes(bytes) {
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < BYTE_UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${Math.round(bytes)} B` : `${bytes.toFixed(2)} ${BYTE_UNITS[unit]}`;
}

/** Without needless digits: for an axis. */
const shortBytes = (bytes) => formatBytes(bytes).replace(".00 ", " ").replace(/(\.\d)0 /, "$1 ");

function timeUnit(us) {
  const size = Math.abs(us);
  return size < 999.5 ? [1, "µs"] : size < 999500 ? [1e3, "ms"] : [1e6, "s"];
}

function formatUs(us, digits = 3) {
  const [scale, unit] = timeUnit(us);
  const value = us / scale;
  const whole = Math.abs(value) >= 10 ** digits;
  return `${whole ? value.toFixed(0) : Number(value.toPrecision(digits))} ${unit}`;
}

/** A point in time, precise to about a thousandth of what is visible. */
function formatAt(us, visible) {
  const [scale, unit] = timeUnit(visible);
  const places = Math.max(0, Math.min(6, 3 - Math.floor(Math.log10(Math.max(visible, 1e-3) / scale))));
  return `${(us / scale).toFixed(places)} ${unit}`;
}

const formatPercent = (share, places = 2) => `${(100 * share).toFixed(places)} %`;
const formatCount = (count) => Math.round(count).toLocaleString("en-US");

/** `node("td", {class: "name"}, "text", child, …)`; attributes that are null are left out. */
function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function swatch(variable) {
  const made = node("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--${variable})`;
  return made;
}

function legend(id, entries) {
  const items = entries.map(([variable, text]) => node("li", {}, swatch(variable), text));
  document.getElementById(id).replaceChildren(...items);
}

const plural = (count, noun) => `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
const byId = (id) => document.getElementById(id);
