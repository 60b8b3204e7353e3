// How the models do: the chosen metric, the others, and calibration.

/** A value with its interval, for a table; in a narrow table the interval is below. */
function scored(key, value, ci, best, narrow) {
  if (value === null || value === undefined) return "–";
  const half = ` ± ${show(key, ci, null, false)}`;
  return el(
    "span",
    { class: best ? "best" : "" },
    show(key, value, null, false),
    ci === null || ci === undefined ? null : el("small", { class: narrow ? "below" : null }, half),
  );
}

/** The name of the baseline of a problem. */
const baselineName = (b) => (b.label === null ? capital(b.name) : `${capital(b.name)}: ${b.label}`);

function results() {
  // For a deployed run there may be nothing to show.
  const shown = groups.filter((g) => !g.deployed || Object.keys(g.final).length);
  const silent = groups.filter((g) => g.finished && !shown.includes(g));
  const unshared = silent.map((g) =>
    el("p", {}, groups.length > 1 ? `${g.label}: ${report.unshared}.` : `${report.unshared}.`),
  );
  const tables = [...new Set(shown.map((g) => g.measure))].map((key) => {
    const own = groups.map((g, k) => k).filter((k) => shown.includes(groups[k]) && groups[k].measure === key);
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
        ...KINDS.map((kind) =>
          g.final[kind] ? scored(key, g.final[kind].value, g.final[kind].ci, g.best[kind]) : "–",
        ),
        last(g) ? scored(key, last(g).worst, last(g).worst_ci) : "–",
        state,
      ];
    });
    const problems = [...new Set(own.map((k) => groups[k].problem))];
    for (const b of problems.map((p) => report.baselines[p])) {
      if (!b || b.measure !== key) continue;
      const name = [baselineName(b), el("small", { class: "below" }, "needs no learning")];
      rows.push([name, scored(key, b.value), "–", "–", scored(key, b.worst), "–"]);
    }
    const m = measures[key];
    const over = own.some((k) => groups[k].finished > 1) ? " ± is over seeds." : " ± is over test rows.";
    const alone = own.some((k) => groups[k].algorithm === "alone")
      ? " Alone: each client trains on its own, and its model counts as personal."
      : "";
    const marked = own.some((k) => Object.values(groups[k].best).some(Boolean))
      ? " Bold: better than all others in the column with every seed, and beyond the 98 % interval of the " +
        "difference over clients and seeds."
      : "";
    const whys = [...new Set(own.map((k) => groups[k].why).filter(Boolean))];
    return [
      whys.map((text) => el("p", {}, said(text))),
      table(
        "Results",
        ["", ...KINDS.map((kind) => kind + headOf(key)), `worst tenth${headOf(key)}`, "runs"],
        rows,
      ),
      el(
        "p",
        { class: "note" },
        `${capital(`test ${m.name}`)} over all clients' rows.${over}${marked} ` +
          `Worst tenth: the mean over the tenth of the clients for which the last of the three models does worst.` +
          alone,
      ),
    ].flat();
  });
  return tables.length || unshared.length
    ? section("results", "Results", tables.flat(), unshared, metricTables(), calibration())
    : null;
}

/** Every metric of every model, folded. */
function metricTables() {
  const own = groups.map((g, k) => k).filter((k) => Object.keys(groups[k].metrics).length);
  const sorts = [...new Set(own.map((k) => groups[k].usual))];
  return sorts.map((usual) => {
    const mine = own.filter((k) => groups[k].usual === usual);
    const first = groups[mine[0]].measure;
    const all = Object.keys(groups[mine[0]].metrics[groups[mine[0]].kinds[0]]);
    const entries = mine.flatMap((k) =>
      groups[k].kinds.map((kind) => ({ name: named(k, false, kind), of: groups[k].metrics[kind] })),
    );
    for (const p of new Set(mine.map((k) => groups[k].problem))) {
      const k = mine.find((j) => groups[j].problem === p && groups[j].metrics.baseline);
      if (k === undefined) continue;
      entries.push({ name: baselineName(report.baselines[p]), of: groups[k].metrics.baseline });
    }
    const keys = [first, ...all.filter((key) => key !== first)].filter((key) =>
      entries.some(({ of }) => (of[key]?.[0] ?? null) !== null),
    );
    if (keys.length < 2) return null;
    const rows = entries.map(({ name, of }) => [
      name,
      ...keys.map((key) => scored(key, of[key]?.[0], of[key]?.[1], false, true)),
    ]);
    const heads = keys.map((key) => capital(measures[key].title));
    const better = keys.filter((key) => measures[key].lower).map((key) => measures[key].name);
    const positives = [...new Set(mine.map((k) => groups[k].positive).filter(Boolean))];
    const note =
      (usual === "r2"
        ? "RMSE and MAE are in the label's own unit."
        : positives.length
          ? `Recall, precision and F1 are for ${positives.join(", ")}.`
          : "Recall, precision and F1 are for the rarer of two classes, or means over several classes.") +
      (better.length ? ` Lower is better for ${better.join(", ")}.` : "");
    return el(
      "details",
      { class: "numbers metrics" },
      el("summary", {}, "All metrics"),
      table("All metrics", ["", ...heads], rows),
      el("p", { class: "note" }, note),
    );
  });
}

/** How often predictions with a given probability came true, a small chart for each run. */
function calibration() {
  const own = groups.map((g, k) => k).filter((k) => Object.keys(groups[k].calibration).length);
  if (!own.length) return null;
  const figures = own.map((k) => {
    const g = groups[k];
    const lines = Object.entries(g.calibration).map(([kind, bins]) => ({
      group: k,
      dash: kind,
      name: kind,
      x: bins.map((b) => b.predicted),
      y: bins.map((b) => b.observed),
      dots: true,
      show: (v) => v.toFixed(3),
    }));
    const build = () => ({
      label: `Observed against predicted probability, ${g.label}: ${lines.map((l) => l.name).join(", ")}`,
      square: true,
      diagonal: true,
      x: { label: "predicted", least: 0, most: 1, also: [0, 1] },
      y: { least: 0, most: 1, also: [0, 1] },
      lines,
    });
    const numbers = numbersOf(`Calibration, ${g.label}`, ["model", "predicted", "observed", "rows"], () =>
      Object.entries(g.calibration).flatMap(([kind, bins]) =>
        bins.map((b) => [kind, b.predicted.toFixed(3), b.observed.toFixed(3), count(Math.round(b.rows))]),
      ),
    );
    const [made] = figure(chart, build, g.label, null, numbers);
    const keys = lines.map((l) => el("span", { class: "key" }, sample(l), l.name));
    made.querySelector("h3").after(el("div", { class: "legend" }, keys));
    return made;
  });
  return [
    el("h3", { class: "apart" }, "Calibration"),
    el(
      "p",
      { class: "note" },
      "How often (vertical) predictions with a given probability (horizontal) came true, over groups of test " +
        "rows. On the diagonal, probabilities can be taken at face value.",
    ),
    el("div", { class: "small-charts" }, figures),
  ];
}
