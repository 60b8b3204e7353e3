// The page: its sections, from the report's JSON document.

function header() {
  const toggle = el("button", { type: "button", class: "theme" }, "");
  const dark = () =>
    (document.documentElement.dataset.theme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const tell = () => {
    toggle.textContent = dark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", `Use ${dark() ? "light" : "dark"} colours`);
  };
  toggle.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    tell();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  tell();
  return el(
    "header",
    { class: "top" },
    el(
      "div",
      { class: "strip" },
      el("span", { class: "brand" }, "pfedme"),
      el("nav", { "aria-label": "Sections" }),
      toggle,
    ),
  );
}

function opening() {
  return el(
    "div",
    { class: "opening" },
    el("h1", {}, report.title),
    report.about.map((text) => el("p", { class: "about" }, said(text))),
    section(
      "answer",
      "Does joining pay?",
      report.headline
        .map(({ where, lead, rest }) => [
          where ? el("h3", {}, where) : null,
          el("p", { class: "lead" }, said(lead)),
          ...rest.map((text) => el("p", {}, said(text))),
        ])
        .flat(),
    ),
  );
}

function notices() {
  if (!report.notices.length) return null;
  return section(
    "notices",
    "Runs without a result of their own",
    table(
      "Runs without a result of their own",
      ["run", "status", "what is known", "folder"],
      report.notices.map((n) => [
        n.run,
        el("span", { class: `chip ${n.status.replace(" ", "-")}` }, n.status),
        el("span", { class: "long" }, n.reason),
        el("code", {}, n.path),
      ]),
      [1, 2, 3],
    ),
  );
}

function results() {
  // Of a deployed run there may be nothing to show.
  const shown = groups.filter((g) => !g.deployed || Object.keys(g.final).length);
  const silent = groups.filter((g) => g.finished && !shown.includes(g));
  const unshared = silent.map((g) =>
    el("p", {}, groups.length > 1 ? `${g.label}: ${report.unshared}.` : `${report.unshared}.`),
  );
  const tables = [...new Set(shown.map((g) => g.measure))].map((key) => {
    const own = groups.map((g, k) => k).filter((k) => shown.includes(groups[k]) && groups[k].measure === key);
    const rivals = (g) => own.map((k) => groups[k]).filter((o) => o.problem === g.problem);
    const isBest = (g, pick) =>
      rivals(g).length > 1 && pick(g) === Math.max(...rivals(g).map((o) => pick(o) ?? -Infinity));
    const cell = (value, ci, best, extra) =>
      value === null || value === undefined
        ? "–"
        : el(
            "span",
            { class: best ? "best" : "" },
            show(key, value, null, false),
            ci === null || ci === undefined ? null : el("small", {}, ` ± ${show(key, ci, null, false)}`),
            extra,
          );
    const last = (g) => g.final[g.kinds.at(-1)];
    const rows = own.map((k) => {
      const g = groups[k];
      const state = g.finished
        ? plural(g.finished, "seed")
        : g.status === "running"
          ? "unfinished"
          : g.status;
      return [
        named(k),
        ...KINDS.map((kind) => {
          const f = g.final[kind];
          const error =
            f?.rmse === undefined || f?.rmse === null
              ? null
              : el("small", { class: "below" }, `RMSE ${short(+f.rmse.toPrecision(4))}`);
          return f
            ? cell(
                f.value,
                f.ci,
                isBest(g, (o) => o.final[kind]?.value),
                error,
              )
            : "–";
        }),
        last(g)
          ? cell(
              last(g).worst,
              last(g).worst_ci,
              isBest(g, (o) => last(o)?.worst),
            )
          : "–",
        state,
      ];
    });
    const m = measures[key];
    const over = own.some((k) => groups[k].finished > 1) ? ", mean ± 95 % interval over seeds" : "";
    return [
      table(
        "Results",
        ["", ...KINDS.map((kind) => kind + headOf(key)), `worst tenth${headOf(key)}`, "runs"],
        rows,
      ),
      el(
        "p",
        { class: "note" },
        `Test ${m.name} over all clients' rows${over}. ` +
          `Worst tenth: the mean over the tenth of the clients that the last of the three models does worst by.` +
          (own.some((k) => groups[k].algorithm === "alone")
            ? " Alone: each client trains by itself, and its model is a personal one."
            : ""),
      ),
    ];
  });
  return tables.length || unshared.length ? section("results", "Results", tables.flat(), unshared) : null;
}

function curves() {
  const shown = groups.map((g, k) => k).filter((k) => groups[k].curves.rounds.length > groups[k].deployed);
  const kinds = KINDS.filter((kind) => shown.some((k) => groups[k].kinds.includes(kind)));
  if (!shown.length) return null;
  let off = [new Set(), new Set()];
  const linesOf = (key, all) =>
    shown
      .filter((k) => all || !off[0].has(String(k)))
      .flatMap((k) =>
        groups[k].kinds
          .filter((kind) => (all || !off[1].has(kind)) && groups[k].curves[kind][key])
          .map((kind) => {
            const c = groups[k].curves;
            const scale = measures[key]?.scale ?? 1;
            const times = (list) => list?.map((v) => (v === null ? null : scale * v));
            return {
              group: k,
              dash: kind,
              name: shown.length > 1 ? `${groups[k].label}, ${kind}` : kind,
              x: c.rounds,
              y: times(c[kind][key]),
              ci: times(c[kind][`${key}_ci`]),
              show: (v, ci) =>
                measures[key]
                  ? show(key, v / scale, ci && ci / scale)
                  : v.toPrecision(4) + (ci ? ` ± ${ci.toPrecision(2)}` : ""),
            };
          }),
      );
  const panels = [...new Set(shown.map((k) => groups[k].measure)), "train_loss"]
    .filter((key) => linesOf(key, true).length)
    .map((key) => {
      const m = measures[key];
      const title = m ? capital(m.axis) : "Training loss";
      const all = () => linesOf(key, true);
      const known = all()
        .flatMap((l) => l.y)
        .filter((v) => v !== null);
      const log = !m && Math.min(...known) > 0 && Math.max(...known) / Math.min(...known) > 50;
      const y = m ? (key === "r2" ? { least: -0.5, most: 1 } : { least: 0, most: 100 }) : { log, least: 0 };
      const note =
        key === "r2" && Math.min(...known) < -0.5
          ? "R² below −0.5 is drawn at −0.5."
          : log
            ? "Logarithmic scale."
            : "";
      const build = () => ({
        label: `${title} against rounds, a line for each model of each run`,
        x: { label: "round" },
        y,
        lines: linesOf(key),
      });
      const numbers = numbersOf(title, ["round", ...all().map((l) => l.name)], () => {
        const at = [...new Set(all().flatMap((l) => l.x))].sort((a, b) => a - b);
        return at.map((t) => [
          count(t),
          ...all().map((l) => {
            const k = l.x.indexOf(t);
            return k < 0 || l.y[k] === null ? "–" : l.show(l.y[k], l.ci?.[k]);
          }),
        ]);
      });
      return figure(chart, build, title, note, numbers);
    });
  const redraw = () => panels.forEach(([, again]) => again());
  const legends = el(
    "div",
    { class: "legends" },
    shown.length > 1
      ? toggles(
          "Runs",
          shown.map((k) => ({ key: String(k), text: groups[k].label, picture: swatch(k) })),
          (s) => {
            off[0] = s;
            redraw();
          },
        )
      : null,
    toggles(
      "Models",
      kinds.map((kind) => ({
        key: kind,
        text: `${kind} model${kind === "global" ? "" : "s"}`,
        picture: sample({ group: shown.length > 1 ? 6 : shown[0], dash: kind }),
      })),
      (s) => {
        off[1] = s;
        redraw();
      },
    ),
  );
  const bands = groups.some((g) => g.finished > 1) ? " Bands are 95 % intervals over seeds." : "";
  return section(
    "curves",
    "Round by round",
    legends,
    el(
      "div",
      { class: "pair" },
      panels.map(([f]) => f),
    ),
    el("p", { class: "note" }, `The models of all clients, judged every few rounds.${bands}`),
  );
}

const masthead = header();
const main = el(
  "main",
  {},
  opening(),
  [notices, results, curves, parts, gains, sizes, worst, chosen, newcomers, cost, environment, again].map(
    (make) => make(),
  ),
);
document.body.append(
  masthead,
  main,
  el("footer", {}, `Made by pfedme ${report.version} from the folders of the runs.`),
);
const SHORT = {
  notices: "Unfinished",
  results: "Results",
  curves: "Rounds",
  parts: "Took part",
  gain: "Gain",
  sizes: "Sizes",
  worst: "Worst",
  lambda: "λ",
  newcomers: "Newcomers",
  cost: "Cost",
  environment: "Environment",
  again: someDeployed ? "Command" : "Again",
};
masthead
  .querySelector("nav")
  .append(
    ...[...main.querySelectorAll(":scope > section")].map(({ id }) => el("a", { href: `#${id}` }, SHORT[id])),
  );
