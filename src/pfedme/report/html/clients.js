// The sections of the page about single clients.

/** Up to so many clients' gains are drawn as named bars; with more, each client is a point. */
const NAMED = 40;

/** The content of a tooltip about a client. */
function about(title, clients, k, rows) {
  return {
    title,
    rows: [
      ...rows,
      { name: "training rows", value: count(clients.n_train[k]) },
      { name: "test rows", value: count(clients.n_test[k]) },
    ],
  };
}

function gains() {
  if (!report.gains.length) return null;
  // One scale for all charts of a measure, so that they can be compared side by side.
  const ends = (key) =>
    report.gains
      .filter((g) => g.measure === key)
      .flatMap(({ clients: c }) => c.gain.flatMap((v, k) => [v - (c.ci?.[k] ?? 0), v + (c.ci?.[k] ?? 0)]))
      .map((v) => measures[key].scale * v);
  const panels = report.gains.map((g) => {
    const c = g.clients;
    const m = measures[g.measure];
    const also = [ends(g.measure)].map((all) => [
      all.reduce((a, b) => Math.min(a, b), 0),
      all.reduce((a, b) => Math.max(a, b), 0),
    ])[0];
    const tone = (k) => {
      const ci = c.ci?.[k] ?? Infinity;
      return c.gain[k] - ci > 0 ? "up" : c.gain[k] + ci < 0 ? "down" : "even";
    };
    const points = c.client.map((name, k) => ({
      group: 0,
      tone: tone(k),
      x: k,
      y: m.scale * c.gain[k],
      ci: c.ci && m.scale * c.ci[k],
      tip: about(`Client ${name}`, c, k, [
        { name: c.choice ? "recommended" : "joined", value: show(g.measure, c.mine[k]) },
        { name: "alone", value: show(g.measure, c.alone[k]) },
        { name: "gain", value: showGain(g.measure, c.gain[k], c.ci?.[k]) },
        ...(c.choice ? [{ name: "choice", value: c.choice[k] }] : []),
      ]),
    }));
    const sure =
      g.up === undefined
        ? `${count(g.above)} are above and ${count(g.below)} below alone; there are no intervals for single clients.`
        : `${count(g.up)} gain and ${count(g.down)} lose beyond their own interval.`;
    const mean = showGain(g.measure, g.mean, g.mean_ci);
    const note = `${mean} on average over ${plural(c.of, "client")}; ${sure}${sampled(c)}`;
    const label = `Gain over training alone of each client, ${g.label}. ${note}`;
    const reach = m.sign === "%" ? 100 : g.measure === "r2" ? 2 : Infinity;
    const bounds = { least: -reach, most: reach };
    const byName = c.of <= NAMED;
    const build = () =>
      byName
        ? {
            label,
            also,
            ...bounds,
            unit: m.sign === "%" ? "points" : m.name,
            bars: points
              .map((p, k) => ({
                ...{ name: c.client[k], value: p.y, ci: p.ci, tone: p.tone, tip: p.tip },
                text: signed(g.measure, c.gain[k]),
              }))
              .reverse(),
          }
        : {
            label,
            rules: [{ at: 0 }],
            points,
            x: { label: "clients, by their gain", ticks: false },
            y: { also, ...bounds },
          };
    const head = [
      "client",
      "training rows",
      "test rows",
      c.choice ? "recommended" : "joined",
      "alone",
      "gain",
      ...(c.choice ? ["choice"] : []),
    ];
    const numbers = numbersOf(`Gains, ${g.label}`, head, () =>
      c.client.map((name, k) => [
        name,
        count(c.n_train[k]),
        count(c.n_test[k]),
        show(g.measure, c.mine[k]),
        show(g.measure, c.alone[k]),
        showGain(g.measure, c.gain[k], c.ci?.[k]),
        ...(c.choice ? [c.choice[k]] : []),
      ]),
    );
    return figure(byName ? gainBars : chart, build, g.label, note, numbers)[0];
  });
  const unitOfGain = ({ sign, name, lower }) =>
    sign === "%" ? `points of test ${name}` : lower ? `reduction of ${name}` : name;
  const unit = [...new Set(report.gains.map((g) => unitOfGain(measures[g.measure])))].join(" or ");
  const interval = report.gains.some((g) => g.clients.ci)
    ? "; thin lines are 95 % intervals over a client's own test rows"
    : "";
  const key = ["up", "even", "down"].map((tone, k) =>
    el(
      "span",
      { class: "key" },
      mark(
        "svg",
        { viewBox: "0 0 12 12", class: "sample small", "aria-hidden": "true" },
        mark("circle", { cx: 6, cy: 6, r: 4, class: `point ${tone}` }),
      ),
      ["gains", "undecided", "loses"][k],
    ),
  );
  const paired = report.gains.some((g) => g.paired)
    ? " For models that clients chose, intervals are paired over the client's test rows."
    : "";
  const unpaired = report.gains.some((g) => !g.paired && g.clients.ci)
    ? (paired ? " Compared with a run of alone, they are" : " They are") +
      " as wide as if the two models' errors were independent."
    : "";
  const methods = report.methods.map(({ label, measure, usual, methods: m }) => [
    report.methods.length > 1 ? el("h3", {}, label) : null,
    table(
      "Methods",
      [
        "model",
        ...["over all rows", "client mean", "worst tenth"].map((h) => h + headOf(measure)),
        ...(usual === measure ? [] : [measures[usual].title]),
        "harmed %",
      ],
      Object.entries(m).map(([name, v]) => [
        METHODS[name] ?? name,
        ...[measure, "mean", "worst_decile"].map((k) => show(measure, v[k], null, false)),
        ...(usual === measure ? [] : [show(usual, v[usual], null, false)]),
        show("accuracy", v.harmed, null, false),
      ]),
    ),
  ]);
  const otherwise = report.methods.filter((m) => m.usual !== m.measure);
  const harmedBy = [...new Set(otherwise.map((m) => measures[m.usual].name))];
  return section(
    "gain",
    "What each client gains over training alone",
    el("div", { class: "legends" }, el("div", { class: "legend" }, key)),
    el("div", { class: panels.length > 1 ? "pair" : "" }, panels),
    el("p", { class: "note" }, `Gain in ${unit}${interval}.${paired}${unpaired}`),
    methods.flat(),
    methods.length
      ? el(
          "p",
          { class: "note" },
          "Recommended: the model that each client chose for itself. " +
            `Harmed: more than one point${harmedBy.length ? ` of ${harmedBy.join(" or ")}` : ""} below alone, ` +
            "beyond the client's interval.",
        )
      : null,
  );
}

const METHODS = { given: "pFedMe at the given λ", "own-lambda": "own λ, joined" };

function sizes() {
  const shown = groups.map((g, k) => k).filter((k) => groups[k].clients?.client.length);
  if (!shown.length) return null;
  let off = new Set();
  const figures = [...new Set(shown.map((k) => groups[k].of_client))].map((key) => {
    const m = measures[key];
    const own = shown.filter((k) => groups[k].of_client === key);
    const every = own.flatMap((k) => groups[k].clients.n_train);
    const sizes = new Set(every).size;
    const spread = sizes === 1 ? 0.4 : sizes <= 12 ? 0.02 : 0;
    const points = () =>
      own
        .filter((k) => !off.has(String(k)))
        .flatMap((k) => {
          const { clients: c, kinds, label } = groups[k];
          return c.client
            .map((name, i) => ({
              group: k,
              x: c.n_train[i],
              y: c[kinds.at(-1)][i] === null ? null : m.scale * c[kinds.at(-1)][i],
              shift: 2 * ((0.618034 * (i + 1)) % 1) - 1,
              tip: about(`Client ${name}`, c, i, [
                { sample: { group: k, points: true }, name: label, value: "" },
                ...kinds.map((kind) => ({ name: kind, value: show(key, c[kind][i]) })),
              ]),
            }))
            .filter((p) => p.y !== null);
        });
    const models =
      own.length > 1
        ? own.map((k) => `${groups[k].label}: ${groups[k].kinds.at(-1)} model`).join(", ")
        : `${groups[own[0]].kinds.at(-1)} models`;
    const aside = spread ? " Clients of the same size are spread sideways." : "";
    const note = `${own.length > 1 ? models : capital(models)}.${aside}${sampled(groups[own[0]].clients)}`;
    const build = () => ({
      label: `Test ${m.name} of each client against its training rows. ${note}`,
      rules: baselines(key, own, "of_client"),
      points: points(),
      spread,
      x: { label: "training rows of the client", log: true },
      y: limits(key),
    });
    const head = ["client", "run", "training rows", "test rows", ...KINDS];
    const numbers = numbersOf(`Clients`, head, () =>
      own.flatMap((k) =>
        groups[k].clients.client.map((name, i) => {
          const c = groups[k].clients;
          return [
            name,
            groups[k].label,
            count(c.n_train[i]),
            count(c.n_test[i]),
            ...KINDS.map((kind) => (c[kind] ? show(key, c[kind][i]) : "–")),
          ];
        }),
      ),
    );
    return figure(chart, build, capital(m.axis), note, numbers);
  });
  const legend =
    shown.length > 1
      ? el(
          "div",
          { class: "legends" },
          toggles(
            "Runs",
            shown.map((k) => ({ key: String(k), text: groups[k].label, picture: swatch(k, true) })),
            (s) => {
              off = s;
              figures.forEach(([, again]) => again());
            },
          ),
        )
      : null;
  return section(
    "sizes",
    "By the size of the client",
    legend,
    figures.map(([f]) => f),
  );
}

function worst() {
  const known = report.worst.filter((w) => w.clients.length);
  const others = known.some((w) => w.beside.length > 1) ? ", next to what the other runs reach for them" : "";
  if (!known.length) return null;
  const box = el("div", {});
  const draw = (w) => {
    const rows = w.clients.map((c) => [
      c.client,
      count(c.n_train),
      count(c.n_test),
      ...w.beside.map((k, i) => show(groups[k].of_client, c.values[i], null, false)),
    ]);
    box.replaceChildren(
      table(
        "The worst clients",
        [
          "client",
          "training rows",
          "test rows",
          ...w.beside.map((k) =>
            el("span", { class: "name" }, swatch(k), groups[k].label + headOf(groups[k].of_client)),
          ),
        ],
        rows,
      ),
    );
  };
  const buttons = known.map((w) => {
    const button = el(
      "button",
      { type: "button", "aria-pressed": String(w === known[0]) },
      swatch(w.group),
      groups[w.group].label,
    );
    button.addEventListener("click", () => {
      buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      draw(w);
    });
    return button;
  });
  draw(known[0]);
  return section(
    "worst",
    "The clients that do worst",
    known.length > 1
      ? el(
          "div",
          { class: "legends" },
          el("div", { class: "legend choice", role: "group", "aria-label": "Worst with" }, buttons),
        )
      : null,
    box,
    el(
      "p",
      { class: "note" },
      `The ten clients for which the run's last model (personal, else local, else global) does worst${others}.`,
    ),
  );
}

function chosen() {
  if (!report.chosen.length) return null;
  const figures = report.chosen.map(({ label, group, counts }) => {
    const all = counts.reduce((sum, c) => sum + c.clients, 0);
    const build = () => ({
      label: `How many clients chose which model, ${label}`,
      bars: counts.map((c) => ({ group, name: c.label, value: c.clients, text: count(c.clients) })),
    });
    return figure(
      bars,
      build,
      label,
      `${plural(all, "client")}, from the most shared model to the client's own.`,
      numbersOf(`Choices, ${label}`, ["model", "clients"], () =>
        counts.map((c) => [c.label, count(c.clients)]),
      ),
    )[0];
  });
  return section(
    "lambda",
    "The λ that clients chose",
    el("div", { class: figures.length > 1 ? "pair" : "" }, figures),
  );
}

function columns() {
  if (!report.columns.length) return null;
  const parts = report.columns.map(({ label, sentences, picture, caption }) =>
    el(
      "figure",
      { class: "picture" },
      report.columns.length > 1 ? el("h3", {}, label) : null,
      el(
        "ul",
        {},
        sentences.map((text) => el("li", {}, text)),
      ),
      el("img", { src: `data:image/png;base64,${picture}`, alt: `Which columns matter, ${label}. ${caption}` }),
      el("figcaption", {}, caption),
    ),
  );
  return section(
    "columns",
    "Which columns matter",
    el("div", { class: parts.length > 1 ? "pair" : "" }, parts),
  );
}

function newcomers() {
  if (!report.newcomers.length) return null;
  const figures = report.newcomers.map((n) => {
    const m = measures[n.measure];
    const names = Object.keys(n.methods);
    const lines = names.map((name, k) => ({
      group: k,
      dash: `m${k}`,
      name: METHODS[name] ?? name,
      x: n.rows,
      y: n.methods[name].map((v) => (v === null ? null : m.scale * v)),
      show: (v) => show(n.measure, v / m.scale),
    }));
    const build = () => ({
      label: `Mean test ${m.name} of newcomers against their training rows, a line for each model, ${n.label}`,
      x: { label: "training rows", log: true },
      y: limits(n.measure),
      rules: baselines(n.measure, [n.group], "mean"),
      lines,
    });
    const legend = el(
      "div",
      { class: "legend" },
      lines.map((l) => el("span", { class: "key" }, sample(l), l.name)),
    );
    const [made] = figure(
      chart,
      build,
      `${n.label}: client mean of ${m.axis}`,
      null,
      numbersOf(`Newcomers, ${n.label}`, ["training rows", "clients", ...names], () =>
        n.rows.map((r, k) => [
          count(r),
          count(n.clients[k]),
          ...lines.map((l) => (l.y[k] === null ? "–" : l.show(l.y[k]))),
        ]),
      ),
    );
    made.querySelector("h3").after(legend);
    return made;
  });
  return section(
    "newcomers",
    "Newcomers",
    el("p", {}, "Clients that took no part in training, by the number of rows that they were given."),
    el("div", { class: figures.length > 1 ? "pair" : "" }, figures),
  );
}
