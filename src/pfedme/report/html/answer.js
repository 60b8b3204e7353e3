// The top of the page: the question, whether joining pays, and how the models were trained.

const ANSWERS = {
  yes: { word: "Yes", sign: "✓", tone: "good" },
  no: { word: "No", sign: "✗", tone: "bad" },
  "cannot tell": { word: "Cannot tell", sign: "?", tone: "open" },
};

/** A number with its sign: +1.2, −0.4, 0.0. */
function signed(key, value) {
  const m = measures[key] ?? measures.accuracy;
  const size = Math.abs(m.scale * value);
  const text = m.digits ? size.toFixed(m.digits - 1) : short(+size.toPrecision(3));
  return (+text === 0 ? "" : value > 0 ? "+" : "−") + text;
}

/** The gain and its interval on a line with zero. */
function intervalPicture(v, tone) {
  const ends = [Math.min(0, v.low), Math.max(0, v.high)];
  const room = 0.08 * (ends[1] - ends[0]) || 1;
  const at = (x) => 200 * ((x - ends[0] + room) / (ends[1] - ends[0] + 2 * room));
  return mark(
    "svg",
    { viewBox: "0 0 200 26", class: `interval ${tone}`, "aria-hidden": "true" },
    mark("line", { x1: 0, x2: 200, y1: 13, y2: 13, class: "axis" }),
    mark("line", { x1: at(0), x2: at(0), y1: 3, y2: 23, class: "zero" }),
    mark("line", { x1: at(v.low), x2: at(v.high), y1: 13, y2: 13, class: "span" }),
    mark("circle", { cx: at(v.gain), cy: 13, r: 5, class: "middle" }),
  );
}

function verdictOf(v) {
  const { word, sign, tone } = ANSWERS[v.verdict];
  const m = measures[v.metric] ?? measures.accuracy;
  const known = v.gain !== null;
  const ends = known && v.low !== null && v.high !== null;
  const size = signed(v.metric, v.gain);
  const gain = m.lower
    ? `${m.name} ${v.gain < 0 ? "higher" : "lower"} by ${size.replace(/^[+−]/, "")}`
    : size + (m.sign === "%" ? " points" : ` of ${m.name}`);
  // If an error is higher, its interval is too.
  const reach = m.lower && v.gain < 0 ? [-v.high, -v.low] : [v.low, v.high];
  const headline = [
    known ? gain : null,
    ends ? `${Math.round(100 * (v.level || 0.95))} % interval ${reach.map((end) => signed(v.metric, end)).join(" to ")}` : null,
    v.clients === null || v.clients === undefined ? null : plural(v.clients, "client"),
  ].filter((part) => part !== null);
  const who =
    v.gaining === null || v.gaining === undefined
      ? ""
      : ` ${plural(v.gaining, "client")} ${v.gaining === 1 ? "gains" : "gain"} and ` +
        `${count(v.losing ?? 0)} ${v.losing === 1 ? "loses" : "lose"} beyond their own interval.`;
  const what = v.joined ? `Compared: ${v.joined} against training alone.` : "";
  const kind = m.sign === "%" && m.name !== "accuracy" ? ` Points are percentage points of ${m.name}.` : "";
  return el(
    "div",
    { class: `verdict ${tone}` },
    el(
      "p",
      { class: "lead" },
      el("span", { class: "badge" }, el("span", { "aria-hidden": "true" }, `${sign} `), word),
      el("span", { class: "sr" }, ": "),
      said(headline.join(", ") + (headline.length ? "." : "")),
    ),
    ends ? intervalPicture(v, tone) : null,
    what || who ? el("p", {}, said(what + who + kind)) : null,
    v.why ? el("p", {}, said(`${capital(v.why)}${/[.!?]$/.test(v.why) ? "" : "."}`)) : null,
  );
}

function opening() {
  const tones = report.headline.flatMap((h) => h.verdicts).map((v) => ANSWERS[v.verdict].tone);
  const answer = section(
    "answer",
    "Does joining pay?",
    report.headline
      .map(({ where, verdicts, lead, rest, improving }) => [
        where ? el("h3", {}, where) : null,
        ...verdicts.map(verdictOf),
        improving
          ? el("p", { class: "warning" }, el("span", { "aria-hidden": "true" }, "⚠ "), said(improving))
          : null,
        lead ? el("p", { class: "lead" }, said(lead)) : null,
        ...rest.map((text) => el("p", {}, said(text))),
      ])
      .flat(),
  );
  answer.className = new Set(tones).size === 1 ? tones[0] : "open";
  return el(
    "div",
    { class: "opening" },
    el("h1", {}, report.title),
    report.about.map((text) => el("p", { class: "about" }, said(text))),
    answer,
    groups.some((g) => g.finished)
      ? el("p", { class: "note" }, "± is the half-width of a 95 % interval everywhere on this page.")
      : null,
  );
}

function training() {
  const own = groups.map((g, k) => k).filter((k) => groups[k].training.length);
  if (!own.length) return null;
  const children = own.map((k) => {
    const { training: lists, label } = groups[k];
    return [
      own.length > 1 ? el("h3", {}, label) : null,
      ...lists.map(({ seeds, improving, sentences }) =>
        el(
          "ul",
          { class: "named" },
          lists.length > 1
            ? el("li", {}, `Seed${seeds.length > 1 ? "s" : ""} ${seeds.join(", ")}:`)
            : null,
          sentences.map((text) => el("li", {}, said(text))),
          improving
            ? el(
                "li",
                { class: "warning" },
                el("span", { "aria-hidden": "true" }, "⚠ "),
                "Validation loss was still falling when training ended.",
              )
            : null,
        ),
      ),
    ];
  });
  return section("training", "How it was trained", children.flat());
}
