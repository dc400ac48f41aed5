// Elements, numbers and small pictures. Text is always set as text: names come from clients, too.

const SVG = "http://www.w3.org/2000/svg";

// C0 and C1 without tab and line break; marks, embeddings, overrides and isolates of direction (Unicode TR 9)
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** `text` with each character that would act instead of being seen, such as one that turns the text behind it around, written out. */
export const visible = (text) =>
  typeof text === "string" ? text.replace(UNSEEN, (found) => `\\u{${found.codePointAt(0).toString(16)}}`) : text;

/** An element with attributes (`on…` are listeners, `class` as usual) and children. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : name === "value" ? value : visible(value));
  }
  element.append(...children.flat().filter((child) => child !== null).map(visible));
  return element;
}

/** Make `parent` show `items` in this order. Elements are kept by key, so that focus and selection stay. */
export function sync(parent, items, key, make) {
  const kept = new Map([...parent.children].map((element) => [element.dataset.key, element]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = kept.get(name);
    kept.delete(name);
    if (!element) {
      element = make(item);
      element.dataset.key = name;
    }
    const state = JSON.stringify(item);
    if (element.state !== state) {
      element.state = state;
      element.show(item);
      nameCells(element, parent.closest("table.cards"));
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const gone of kept.values()) gone.remove();
}

/** Have each cell of `row` know the name of its column, which it shows on a phone. */
function nameCells(row, table) {
  const names = table?.tHead.rows[0].cells ?? [];
  [...names].forEach((name, at) => row.cells[at]?.setAttribute("data-label", name.querySelector(".quiet") ? "" : name.textContent));
}

/** Make `select` offer these values, after an empty one that is called `first`; what was chosen stays if it can. */
export function choices(select, values, first) {
  const state = JSON.stringify(values);
  if (select.state === state) return;
  select.state = state;
  const before = select.value;
  select.replaceChildren(...(first ? [h("option", { value: "" }, first)] : []), ...values.map((value) => h("option", { value }, value)));
  if (values.includes(before)) select.value = before;
}

/** A table row with the contents `cells(item)`. `keep` are cells that are made once. */
export function row(cells, names = []) {
  const element = h("tr");
  element.show = (item) => {
    cells(item, element).forEach((content, at) => {
      const cell = element.children[at] ?? element.appendChild(h("td", { class: names[at] ?? null }));
      if (content !== undefined) cell.replaceChildren(...[content].flat().map(visible));
    });
  };
  return element;
}

export const seconds = (s) => {
  if (s === null || s === undefined) return "–";
  if (s === 0) return "0";
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
};

export const lasting = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

/** A cost in units, or in millionths of a currency. */
export const money = (cost, currency) => {
  if (!currency) return count(cost);
  const amount = cost / 1e6;
  return `${amount && amount < 0.01 ? "below 0.01" : amount.toFixed(2)} ${currency}`;
};

export const count = (n) => {
  if (n === null || n === undefined) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (n >= 10 * size) return `${Math.round(n / size)}${unit}`;
    if (n >= size) return `${(n / size).toFixed(1)}${unit}`;
  }
  return n >= 100 || Number.isInteger(n) ? String(Math.round(n)) : n.toFixed(1);
};

export const share = (part) => (part === null || part === undefined ? "–" : `${Math.round(part * 100)} %`);

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });

/** A bar for a share of 0 to 1; `tick` marks another share. */
export function bar(part, { width = 90, tick = null, bad = false } = {}) {
  const drawn = svg("svg", { width, height: 12, viewBox: `0 0 ${width} 12`, "aria-hidden": "true" },
    svg("rect", { class: "track", x: 0, y: 2, width, height: 8, rx: 2 }),
    svg("rect", { class: bad ? "fill bad" : "fill", x: 0, y: 2, width: clamp(part) * width, height: 8, rx: 2 }));
  if (tick !== null) drawn.append(svg("line", { class: "mark", x1: at(tick, width), x2: at(tick, width), y1: 0, y2: 12 }));
  return drawn;
}

/** One duration's quantiles and its target: a bar to the median, a thin bar to p95, a dot at p99. */
export function bullet(measure, isKept, width = 240) {
  const most = 1.05 * Math.max(measure.p99_s, measure.target_s ? 1.5 * measure.target_s : 0) || 1;
  const x = (value) => at(value / most, width);
  const tone = isKept === false ? " bad" : "";
  const drawn = svg("svg", { width, height: 16, viewBox: `0 0 ${width} 16`, "aria-hidden": "true" },
    svg("rect", { class: "track", x: 0, y: 3, width, height: 10, rx: 2 }),
    svg("rect", { class: `soft${tone}`, x: 0, y: 5, width: x(measure.p95_s), height: 6, rx: 1 }),
    svg("rect", { class: `fill${tone}`, x: 0, y: 3, width: x(measure.p50_s), height: 10, rx: 2 }),
    svg("circle", { class: `fill${tone}`, cx: x(measure.p99_s), cy: 8, r: 3 }));
  if (measure.target_s) drawn.append(svg("line", { class: "mark", x1: x(measure.target_s), x2: x(measure.target_s), y1: 0, y2: 16 }));
  return drawn;
}

/** The first `held` of `blocks` as cells; a cell stands for several blocks where there are many. */
export function strip(held, blocks, { width = 420, most = 60 } = {}) {
  const cells = Math.max(1, Math.min(blocks, most));
  const cell = width / cells;
  const drawn = svg("svg", { width: "100%", height: 16, viewBox: `0 0 ${width} 16`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", x: 0, y: 1, width, height: 14 }),
    svg("rect", { class: "fill", x: 0, y: 1, width: (width * held) / Math.max(1, blocks), height: 14 }));
  for (let edge = 1; edge < cells; edge++) {
    drawn.append(svg("line", { class: "grid", x1: edge * cell, x2: edge * cell, y1: 0, y2: 16 }));
  }
  return drawn;
}

/** A trend of at most `most` numbers, the newest at the right edge, from 0 to their highest. */
export function trend(values, most) {
  const highest = Math.max(...values, 1e-9);
  const left = most - values.length;
  const points = values.map((value, i) => `${left + i},${(20 - (18 * value) / highest).toFixed(2)}`);
  const drawn = svg("svg", { viewBox: `0 0 ${most - 1} 21`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    drawn.append(svg("polygon", { class: "under", points: `${left},21 ${points.join(" ")} ${most - 1},21` }),
      svg("polyline", { class: "trend", points: points.join(" ") }));
  }
  return drawn;
}

const clamp = (part) => Math.min(1, Math.max(0, part || 0));
const at = (part, width) => Math.min(width - 2, Math.max(1, part * width));
