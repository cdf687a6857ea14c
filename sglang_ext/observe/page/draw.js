// Drawings from plain data: no state, no network. Colours are classes, see style.css.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function swatch(colour) {
  return element("span", { class: `swatch ${colour}`, "aria-hidden": "true" });
}

/** One column for each rate from 0 to 1; null leaves a gap. */
export function sparkline(rates, label) {
  const [step, height] = [2, 22];
  const width = rates.length * step;
  const svg = shape("svg", { class: "spark", width, height, role: "img", "aria-label": label });
  svg.append(shape("line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }));
  rates.forEach((rate, index) => {
    if (rate === null) return;
    const tall = Math.max(1.5, rate * height);
    svg.append(shape("rect", { x: index * step, y: height - tall, width: step - 0.4, height: tall }));
  });
  return svg;
}

/** Parts of a whole side by side; each has a name, an amount and a colour. */
export function stackedBar(parts, whole, label) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": label });
  for (const { name, amount, colour } of parts) {
    const part = element("span", { class: colour, title: `${name}: ${number(amount)}` });
    part.style.width = `${(100 * amount) / whole}%`;
    bar.append(part);
  }
  return bar;
}

/** A bar of one part, red from 90 % on. */
export function meter(part) {
  const inner = element("span");
  inner.style.width = `${Math.min(100, 100 * part)}%`;
  const high = part > 0.9 ? "meter high" : "meter";
  return element("span", { class: high, "aria-hidden": "true" }, inner);
}

/** Rows of cells; a cell is text, a node, or a list of them. The first of a row is its name. */
export function table(target, columns, rows, nothing) {
  const head = element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
  const body = element("tbody");
  for (const row of rows) {
    const cells = row.map((cell, index) => {
      const kind = index ? "td" : "th";
      const attributes = index ? { "data-label": columns[index] } : { scope: "row" };
      return element(kind, attributes, ...[cell].flat());
    });
    body.append(element("tr", {}, ...cells));
  }
  if (!rows.length) body.append(element("tr", {}, element("td", { class: "empty", colspan: columns.length }, nothing)));
  target.replaceChildren(head, body);
}

/**
 * The tree on its side: a run begins where its text begins and is as wide as it has tokens; it is as
 * tall as the leaves behind it. `runs` come parents first, as the server lists them.
 */
export function icicle(runs, colourOf, [width, height]) {
  const placed = place(runs);
  const longest = Math.max(1, ...runs.map((run) => run.start + run.tokens));
  const label = `${runs.length} runs of pages; the arrow keys walk through them`;
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application", "aria-label": label,
  });
  const leaves = Math.max(1, placed.leaves);
  for (const [index, run] of runs.entries()) {
    const { top, tall } = placed.runs[index];
    // An edge around a line would hide the line.
    const thin = (height * tall) / leaves < 4 ? " thin" : "";
    svg.append(shape("rect", {
      x: (width * run.start) / longest, width: Math.max(1, (width * run.tokens) / longest),
      y: (height * top) / leaves, height: Math.max(0.8, (height * tall) / leaves),
      class: colourOf(run) + thin, "data-index": index,
    }));
  }
  return svg;
}

function place(runs) {
  const parents = runs.map(() => -1);
  const path = [];
  runs.forEach((run, index) => {
    path.length = Math.min(path.length, run.level);
    parents[index] = path.length ? path[path.length - 1] : -1;
    path.push(index);
  });
  const tall = runs.map(() => 0);
  for (let index = runs.length - 1; index >= 0; index -= 1) {
    tall[index] ||= 1;
    if (parents[index] >= 0) tall[parents[index]] += tall[index];
  }
  const next = new Map([[-1, 0]]);
  const placed = runs.map((_, index) => {
    const top = next.get(parents[index]);
    next.set(parents[index], top + tall[index]);
    next.set(index, top);
    return { top, tall: tall[index] };
  });
  return { runs: placed, leaves: next.get(-1) };
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const percent = (part) => (part === null || part === undefined ? "–" : `${(100 * part).toFixed(1)} %`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const units = [["d", 86400], ["h", 3600], ["m", 60]];
  const [unit, size] = units.find(([, one]) => seconds >= one);
  return `${Number((seconds / size).toFixed(1))} ${unit}`;
}
