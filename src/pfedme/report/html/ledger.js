// Who took part in the rounds of a deployed run: a grid of clients and rounds, a table and lists.

const OUTCOMES = report.outcomes;
const GLYPHS = { dropped: "×", failed: "!", late: "…", absent: "–" };
const MEANING = {
  counted: "counted",
  dropped: "dropped: not fit to be counted",
  failed: "failed: an error arrived, or too few other replies did",
  late: "late: nothing arrived in time",
  absent: "absent: not connected",
};
const showNorm = (value) => (value === null ? "–" : short(+value.toPrecision(4)));
const showEffect = (value) =>
  value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)} %`;

/** The main outcome of a cell: the most frequent one other than `counted`, if there is any. */
function leading(cell) {
  const wrong = cell.outcomes.map((n, k) => (k ? n : 0));
  const most = Math.max(...wrong);
  return OUTCOMES[most ? wrong.indexOf(most) : 0];
}

/** The number of rounds in a cell, and whether any of them took several attempts. */
const total = (cell) => cell.outcomes.reduce((a, b) => a + b, 0);
const repeated = (cell) => cell.tries > total(cell);

/** The rounds of a column. */
function roundsOf(grid, column) {
  const [first, last] = [column * grid.each + 1, Math.min(grid.rounds, (column + 1) * grid.each)];
  return first === last ? count(first) : `${count(first)}–${count(last)}`;
}

const outcomesOf = (cell) =>
  total(cell) === 1
    ? leading(cell)
    : OUTCOMES.flatMap((name, k) => (cell.outcomes[k] ? [`${count(cell.outcomes[k])} ${name}`] : [])).join(
        ", ",
      );

function tipOf(grid, cell) {
  const mean = total(cell) > 1 ? "mean " : "";
  const known = (name, value, text) => (value === null ? [] : [{ name, value: text }]);
  return {
    title: `${grid.clients[cell.row]}, round${grid.each > 1 ? "s" : ""} ${roundsOf(grid, cell.column)}`,
    rows: [
      { name: "outcome", value: outcomesOf(cell) },
      { name: "attempts", value: count(cell.tries) },
      ...known("rows", cell.rows, count(cell.rows ?? 0)),
      ...known(`${mean}‖w_i − w‖`, cell.norm, showNorm(cell.norm)),
      ...known("shortened to", cell.clipped, showNorm(cell.clipped)),
      ...known(`${mean}effect on the step`, cell.effect, showEffect(cell.effect)),
    ],
    note: cell.reason && capital(cell.reason),
  };
}

/** A grid of clients and rounds: `build()` returns {label, grid}. */
function grid(host, build) {
  return responsive(host, (width) => {
    const { label, grid: g } = build();
    const columns = Math.ceil(g.rounds / g.each);
    const letters = Math.max(6, ...g.clients.map((name) => name.length));
    const left = Math.min(14 + 7.2 * letters, width * 0.32);
    const fits = Math.floor((left - 10) / 7.2);
    const wide = Math.min(44, (width - left - 4) / Math.max(1, columns));
    const high = 20;
    const bottom = g.clients.length * high + 4;
    const height = bottom + 40;
    const svg = mark("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": label,
      class: "chart",
    });
    g.clients.forEach((name, k) => {
      const cut = name.length > fits ? `${name.slice(0, fits - 1)}…` : name;
      const y = k * high + 4;
      svg.append(
        mark("text", { x: left - 8, y: y + 13, "text-anchor": "end" }, cut),
        mark("rect", { x: left, y, width: wide * columns, height: high - 3, class: "trough", rx: 2 }),
      );
    });
    const gap = wide > 6 ? 1.5 : wide > 3 ? 0.5 : 0;
    const spots = g.cells.map((cell) => ({ cell, x: left + cell.column * wide, y: cell.row * high + 4 }));
    for (const { cell, x, y } of spots) {
      const name = leading(cell);
      const share = 1 - cell.outcomes[0] / total(cell);
      // Problems stay visible, however many rounds are in the cell.
      const part = share && share < 1 ? Math.min(high - 6, Math.max(4, share * (high - 3))) : high - 3;
      const block = (outcome, from, length) =>
        mark("rect", {
          x,
          y: y + from,
          width: Math.max(0.5, wide - gap),
          height: length,
          class: `block cell ${outcome}`,
          "data-client": g.clients[cell.row],
          "data-column": cell.column,
        });
      svg.append(block(name, 0, part));
      if (part < high - 3) svg.append(block("counted", part, high - 3 - part));
      const middle = x + (wide - gap) / 2;
      if (GLYPHS[name] && wide >= 11 && part === high - 3)
        svg.append(
          mark("text", { x: middle, y: y + 13, "text-anchor": "middle", class: "glyph" }, GLYPHS[name]),
        );
      if (repeated(cell)) {
        const size = Math.min(6, Math.max(2, wide - gap));
        const corner = `M${x + wide - gap - size},${y}h${size}v${size}z`;
        svg.append(mark("path", { d: corner, class: "again" }));
      }
    }
    const every = linearTicks(1, Math.max(2, g.rounds), Math.max(2, Math.floor((wide * columns) / 60)));
    for (const t of every.filter((v) => Number.isInteger(v) && v >= 1 && v <= g.rounds)) {
      const x = left + (Math.floor((t - 1) / g.each) + 0.5) * wide;
      svg.append(mark("text", { x, y: bottom + 14, "text-anchor": "middle" }, short(t)));
    }
    svg.append(
      mark("text", { x: left + (wide * columns) / 2, y: height - 6, "text-anchor": "middle" }, "round"),
    );

    const tip = tooltip(host);
    const cursor = mark("g", { class: "cursor" });
    svg.append(cursor);
    const leave = () => (cursor.replaceChildren(), tip.hide());
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top].map((v) => (v * width) / box.width);
      const spot = spots.find(({ x, y }) => px >= x && px < x + wide && py >= y && py < y + high);
      if (!spot) return leave();
      const around = { x: spot.x - 1, y: spot.y - 1, width: wide - gap + 2, height: high - 1, rx: 2 };
      cursor.replaceChildren(mark("rect", { ...around, class: "ring" }));
      return tip.show(spot.x + wide / 2, spot.y + high / 2, tipOf(g, spot.cell));
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
    return [svg, host.lastChild];
  });
}

/** A picture of an outcome, for the legend. */
function outcomeSample(name) {
  const shape = mark("rect", { x: 0, y: 0, width: 14, height: 12, rx: 2, class: `block cell ${name}` });
  const glyph =
    GLYPHS[name] && mark("text", { x: 7, y: 10, "text-anchor": "middle", class: "glyph" }, GLYPHS[name]);
  return mark("svg", { viewBox: "0 0 14 12", class: "sample outcome", "aria-hidden": "true" }, shape, glyph);
}

function clientsOf(part) {
  const told = part.table.some((c) => c.rows !== null);
  const cut = part.table.some((c) => c.shortened);
  const box = table(
    `Clients, ${part.label}`,
    [
      "client",
      "drawn for",
      "took part in",
      ...OUTCOMES.slice(1),
      ...(told ? ["rows"] : []),
      "mean ‖w_i − w‖",
      ...(cut ? ["shortened"] : []),
      "mean effect on the step",
    ],
    part.table.map((c) => [
      c.client,
      plural(c.asked, "round"),
      ...c.outcomes.map(count),
      ...(told ? [c.rows === null ? "–" : count(c.rows)] : []),
      showNorm(c.norm),
      ...(cut ? [count(c.shortened)] : []),
      showEffect(c.effect),
    ]),
  );
  box.classList.add("tall");
  return box;
}

/** A list of problems, with the client and the reason. */
function namedList(title, { of, lines }, file) {
  if (!of) return null;
  const times = (l) => (l.times ? ` (${l.times > 1 ? `${count(l.times)} times, ` : ""}${l.rounds})` : "");
  return [
    el("h3", {}, title),
    el(
      "ul",
      { class: "named" },
      lines.map((l) => el("li", {}, el("strong", {}, l.client), `${times(l)}: ${l.reason}`)),
    ),
    of > lines.length ? el("p", { class: "note" }, `${count(of - lines.length)} more are in ${file}.`) : null,
  ];
}

function parts() {
  if (!report.parts.length) return null;
  const several = report.parts.length > 1;
  const seen = OUTCOMES.filter((name, k) => report.parts.some((p) => p.outcomes[k]));
  const again = report.parts.some((p) => p.grid.cells.some(repeated));
  const corner = mark(
    "svg",
    { viewBox: "0 0 14 12", class: "sample outcome", "aria-hidden": "true" },
    mark("rect", { x: 0, y: 0, width: 14, height: 12, rx: 2, class: "trough" }),
    mark("path", { d: "M7,0h7v7z", class: "again" }),
  );
  const keys = [
    ...seen.map((name) => el("span", { class: "key" }, outcomeSample(name), MEANING[name])),
    ...(again ? [el("span", { class: "key" }, corner, "repeated: the last attempt is shown")] : []),
  ];
  const blocks = report.parts.map((part) => {
    const g = part.grid;
    const all = part.outcomes.reduce((a, b) => a + b, 0);
    const sums = OUTCOMES.flatMap((name, k) =>
      part.outcomes[k] ? [`${count(part.outcomes[k])} ${k ? "" : "were "}${name}`] : [],
    ).join(", ");
    const times = part.repeated ? ` ${plural(part.repeated, "round")} had to be repeated.` : "";
    const binned =
      g.each > 1
        ? ` A column stands for ${g.each} rounds: the upper part of a cell is the share that was not counted, in ` +
          "the colour of the most frequent outcome."
        : "";
    const some =
      g.clients.length < part.clients
        ? ` ${count(g.clients.length)} of ${count(part.clients)} clients are drawn, those with the most problems ` +
          "first."
        : "";
    const asked = `In ${plural(part.rounds, "round")}, clients were asked ${count(all)} times: ${sums}.`;
    const cut = part.shortened
      ? ` ${plural(part.shortened, "update")} ${part.shortened > 1 ? "were" : "was"} shortened.`
      : "";
    const note = asked + cut + times + binned + some;
    const numbers = numbersOf(
      `Contributions, ${part.label}`,
      [
        "client",
        g.each > 1 ? "rounds" : "round",
        "outcome",
        "attempts",
        "rows",
        "‖w_i − w‖",
        "shortened to",
        "effect on the step",
        "reason",
      ],
      () =>
        g.cells.map((c) => [
          g.clients[c.row],
          roundsOf(g, c.column),
          outcomesOf(c),
          count(c.tries),
          c.rows === null ? "–" : count(c.rows),
          showNorm(c.norm),
          showNorm(c.clipped),
          showEffect(c.effect),
          el("span", { class: "long" }, c.reason || "–"),
        ]),
    );
    const label = `What happened to each client's contribution to each round, ${part.label}. ${note}`;
    const build = () => ({ label, grid: g });
    const left = part.clients - part.table.length;
    return [
      all ? figure(grid, build, several ? part.label : "Clients and rounds", note, numbers)[0] : null,
      all ? el("h3", {}, several ? `The clients of ${part.label}` : "Client by client") : null,
      all ? clientsOf(part) : null,
      left ? el("p", { class: "note" }, `${plural(left, "more client")} are in ledger.csv.`) : null,
      namedList("Refused at the agreement", part.refused, "record.json"),
      namedList("Uploads that were dropped", part.dropped, "ledger.csv"),
      namedList("Errors instead of uploads", part.failed, "ledger.csv"),
    ].flat();
  });
  return section(
    "parts",
    "Who took part",
    keys.length ? el("div", { class: "legends" }, el("div", { class: "legend" }, keys)) : null,
    blocks.flat(),
    el(
      "p",
      { class: "note" },
      "A client takes part in the rounds for which it is drawn and in which its upload is counted. " +
        "‖w_i − w‖ is the distance of its upload from the shared model that it was sent; an upload that is " +
        "farther away than usual in its round and the rounds before is shortened to the usual length. Its " +
        "effect on the step is how much longer the step of the shared model was than it would have been " +
        "without this client, in percent of the step; if negative, the step was shorter. Means are over the " +
        "rounds in which it took part.",
    ),
  );
}
