// The sections about what runs claim about privacy, what they cost, and how to repeat them.

const someDeployed = groups.some((g) => g.deployed);

function privacy() {
  const pairs = (facts) =>
    el(
      "dl",
      {},
      facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
  const boxes = report.privacy.map(({ label, claim, facts, not_covered: uncovered }) => [
    groups.length > 1 ? el("h3", {}, label) : null,
    el("p", {}, claim),
    pairs(facts),
    uncovered.length ? el("p", {}, "ε says nothing about:") : null,
    uncovered.length
      ? el(
          "ul",
          {},
          uncovered.map((line) => el("li", {}, line)),
        )
      : null,
  ]);
  return boxes.length ? section("privacy", "Differential privacy", boxes.flat()) : null;
}

function cost() {
  const own = groups.map((g, k) => k).filter((k) => groups[k].cost);
  if (!own.length) return null;
  const whole = (v) => (v === null ? "–" : count(Math.round(v)));
  return folded(
    "cost",
    "Cost",
    table(
      "Cost",
      [
        "",
        "compilation",
        "training",
        "evaluation",
        "total sent",
        "numbers in the model",
        "gradients per round",
        "gradients in all rounds",
      ],
      own.map((k) => {
        const c = groups[k].cost;
        return [
          named(k),
          showSeconds(c.compile_s),
          showSeconds(c.train_s),
          showSeconds(c.eval_s),
          showBytes(c.bytes),
          whole(c.size),
          whole(c.gradients),
          whole(c.gradients_in_all),
        ];
      }),
    ),
    el(
      "p",
      { class: "note" },
      "Time is for one run, on average over seeds. Sent: rounds × cohort × the model to the client and back, " +
        "in float32. Gradients are on mini-batches, for one client that takes part; a Hessian-vector product " +
        "counts as two." +
        (someDeployed
          ? " For a deployed run, training is its total time, including waiting for clients."
          : ""),
    ),
  );
}

function again() {
  const copy = (text, word) => {
    const button = el("button", { type: "button", class: "copy" }, word);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        const area = el("textarea", { class: "away" });
        area.value = text;
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = word), 1500);
    });
    return button;
  };
  // Lines break between options and not inside them.
  const options = (text) => text.split(/ (?=--)/).flatMap((part, k) => [k ? " " : "", el("span", {}, part)]);
  const line = (text) =>
    el("div", { class: "command" }, el("pre", {}, el("code", {}, options(text))), copy(text, "Copy"));
  const all = groups.flatMap((g) => g.commands);
  const children = groups.map((g) => [
    groups.length > 1 ? el("h3", {}, g.label) : null,
    line(g.commands[0]),
    g.commands.length > 1
      ? el(
          "details",
          { class: "numbers" },
          el("summary", {}, `${plural(g.commands.length - 1, "more seed")}`),
          g.commands.slice(1).map(line),
        )
      : null,
  ]);
  return groups.length
    ? section(
        "again",
        someDeployed ? (all.length > 1 ? "The commands" : "The command") : "Run it again",
        children.flat(),
        all.length > 1 ? el("p", {}, copy(all.join("\n"), `Copy all ${all.length} commands`)) : null,
      )
    : null;
}

function environment() {
  const boxes = report.environments.map(({ facts, groups: of }) => [
    report.environments.length > 1 ? el("h3", {}, of.join(", ")) : null,
    el(
      "dl",
      {},
      Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    ),
  ]);
  return boxes.length ? folded("environment", "Environment", boxes.flat()) : null;
}
