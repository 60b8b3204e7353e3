// The report's JSON document, the format of its numbers, and the parts that sections are made of.

const report = JSON.parse(document.getElementById("document").textContent);
const groups = report.groups;
const measures = report.measures;
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const KINDS = ["global", "local", "personal"];
const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** A value in the format of its measure, with its interval and unit. */
function show(key, value, ci, unit = true) {
  if (value === null || value === undefined) return "–";
  const m = measures[key];
  const text = (v) =>
    (m.digits ? (m.scale * v).toFixed(m.digits) : short(+v.toPrecision(4))).replace("-", "−");
  return text(value) + (ci ? ` ± ${text(ci)}` : "") + (unit ? unitOf(key) : "");
}

/** The unit after such a value, and after the head of a column of them. */
const unitOf = (key) => (measures[key].sign === "%" ? " %" : "");
const headOf = (key) => ` ${measures[key].sign}`;

/** A difference of two values, with its sign. */
function showGain(key, value, ci) {
  const m = measures[key];
  const size = (v) => (m.digits ? (m.scale * v).toFixed(m.digits - 1) : String(+v.toPrecision(3)));
  const text = size(Math.abs(value));
  const sign = +text === 0 ? "" : value > 0 ? "+" : "−";
  const half = ci ? ` ± ${size(ci)}` : "";
  return sign + text + half + (m.sign === "%" ? " points" : "");
}

function showBytes(value) {
  if (value === null) return "–";
  if (value === 0) return "none";
  const power = Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

function showSeconds(value) {
  if (value === null) return "–";
  if (value < 90) return `${value.toFixed(1)} s`;
  return value < 5400 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** A sentence whose numbers are kept together with their units. */
const said = (text) => text.replace(/(\d) (%|points)/g, "$1\u00a0$2");

/**
 * A table in its own scrollable box; the first column is text, the others are numbers. On a narrow screen a row
 * becomes a list of its cells, each with its head, unless `stack` is false, for tables with many rows.
 */
function table(label, head, rows, wide, stack = true) {
  const heads = head.map((name) => (typeof name === "string" ? name : name.textContent));
  const cell = (tag, value, k, extra) =>
    el(tag, { class: k === 0 || wide?.includes(k) ? "text" : "", ...extra }, value);
  return el(
    "div",
    { class: stack ? "scroll stack" : "scroll", role: "region", "aria-label": label, tabindex: 0 },
    // The roles repeat those of the elements, which lose them if they are not displayed as a table.
    el(
      "table",
      { role: "table" },
      el(
        "thead",
        { role: "rowgroup" },
        el(
          "tr",
          { role: "row" },
          head.map((name, k) => cell("th", name, k, { scope: "col", role: "columnheader" })),
        ),
      ),
      el(
        "tbody",
        { role: "rowgroup" },
        rows.map((row) =>
          el(
            "tr",
            { role: "row" },
            row.map((value, k) =>
              k
                ? cell("td", value, k, { role: "cell", "data-head": heads[k], "data-empty": value === "–" })
                : cell("th", el("span", { class: "first" }, value), k, { scope: "row", role: "rowheader" }),
            ),
          ),
        ),
      ),
    ),
  );
}

/** The numbers of a chart as a table, which is built when it is opened. */
function numbersOf(label, head, rows) {
  const box = el("details", { class: "numbers" }, el("summary", {}, "The numbers as a table"));
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(table(label, head, rows(), [], false));
  });
  return box;
}

/** A chart with its title, a note below it and its numbers; returns [figure, redraw]. */
function figure(draw, build, title, note, numbers) {
  const host = el("div", { class: "plot" });
  const made = el(
    "figure",
    {},
    el("h3", {}, title),
    host,
    note ? el("figcaption", {}, said(note)) : null,
    numbers,
  );
  return [made, draw(host, build)];
}

/** A section that is closed at first. */
function folded(id, title, ...children) {
  return el(
    "section",
    { id, class: "folded", "aria-labelledby": `${id}-title` },
    el("details", { class: "fold" }, el("summary", {}, el("h2", { id: `${id}-title` }, title)), ...children),
  );
}

function section(id, title, ...children) {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    ...children,
  );
}

/** Buttons that are on or off; `change` is called with the set of those that are off. */
function toggles(label, items, change) {
  const off = new Set();
  return el(
    "div",
    { class: "legend", role: "group", "aria-label": label },
    items.map(({ key, text, picture }) => {
      const button = el(
        "button",
        { type: "button", "aria-pressed": "true", "data-toggle": key },
        picture,
        text,
      );
      button.addEventListener("click", () => {
        if (!off.delete(key)) off.add(key);
        button.setAttribute("aria-pressed", String(!off.has(key)));
        change(off);
      });
      return button;
    }),
  );
}

const swatch = (k, points) => sample({ group: k, points });

/** A run's name next to its colour, with the kind of model if one is given, and a remark if there is one. */
function named(k, points, kind) {
  const text = kind ? `${groups[k].label}, ${kind}` : groups[k].label;
  const picture = kind ? sample({ group: k, dash: kind }) : swatch(k, points);
  const name = el("span", { class: "name" }, picture, text);
  return groups[k].aside ? [name, el("small", { class: "below" }, groups[k].aside)] : name;
}

/** The limits of an axis of a metric. */
const limits = (key) =>
  measures[key].sign === "%"
    ? { least: 0, most: 100 }
    : { least: key === "r2" ? -0.5 : 0, most: ["r2", "auc", "f1"].includes(key) ? 1 : Infinity };

/** The lines of the baselines in a chart of a metric for some groups. */
function baselines(key, own, which = "value") {
  const found = [...new Set(own.map((k) => groups[k].problem))].map((p) => report.baselines[p]);
  return found
    .filter((b) => b && (b[which] ?? null) !== null && (which === "of_client" || b.measure === key))
    .map((b) => ({ at: measures[key].scale * b[which], text: b.name }));
}

/** How many of the clients a chart shows, if not all. */
const sampled = (clients) =>
  clients.client.length < clients.of
    ? ` A sample of ${count(clients.client.length)} of ${count(clients.of)} clients is drawn.`
    : "";
