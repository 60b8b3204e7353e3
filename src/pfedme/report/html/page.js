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

function notices() {
  if (!report.notices.length) return null;
  return section(
    "notices",
    "Runs without their own result",
    table(
      "Runs without their own result",
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
      const y = m ? limits(key) : { log, least: 0 };
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
        rules: m ? baselines(key, shown) : [],
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
  const names = [...new Set(report.baselines.filter(Boolean).map((b) => b.name))].join(" or ");
  const base = names ? ` The line named ${names} is the baseline, which needs no learning.` : "";
  return section(
    "curves",
    "Round by round",
    legends,
    el(
      "div",
      { class: "pair" },
      panels.map(([f]) => f),
    ),
    el("p", { class: "note" }, `The models of all clients, evaluated every few rounds.${bands}${base}`),
  );
}

const masthead = header();
const main = el(
  "main",
  {},
  opening(),
  [
    ...[notices, find, results, training, curves, parts, gains, sizes, worst, chosen, columns, newcomers],
    ...[privacy, cost, environment, again],
  ].map((make) => make()),
);
document.body.append(
  masthead,
  main,
  el("footer", {}, `Made by pfedme ${report.version} from the folders of the runs.`),
);
const SHORT = {
  notices: "Unfinished",
  find: "Find",
  results: "Results",
  training: "Training",
  curves: "Rounds",
  parts: "Took part",
  gain: "Gain",
  sizes: "Sizes",
  worst: "Worst",
  lambda: "λ",
  columns: "Columns",
  newcomers: "Newcomers",
  privacy: "Privacy",
  cost: "Cost",
  environment: "Environment",
  again: someDeployed ? "Command" : "Again",
};
masthead
  .querySelector("nav")
  .append(
    ...[...main.querySelectorAll(":scope > section")].map(({ id }) => el("a", { href: `#${id}` }, SHORT[id])),
  );

const folds = [...main.querySelectorAll("details.fold")];
// A link to a closed section opens it, and printing opens all sections.
addEventListener("hashchange", () => {
  const fold = folds.find((f) => `#${f.parentNode.id}` === location.hash);
  if (fold) fold.open = true;
});
let shut = [];
addEventListener("beforeprint", () => {
  shut = folds.filter((f) => !f.open);
  shut.forEach((f) => (f.open = true));
});
addEventListener("afterprint", () => shut.forEach((f) => (f.open = false)));
