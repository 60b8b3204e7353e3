// A search for one client among all clients of the page.

const MATCHES = 8;

function find() {
  if (!report.find.length) return null;
  const everyone = report.find.flatMap((f, place) =>
    f.client.map((name, k) => ({ place, k, name, low: name.toLowerCase() })),
  );
  const held = everyone.length;
  const all = report.find.reduce((sum, f) => sum + f.of, 0);
  const input = el("input", {
    id: "find-name",
    type: "text",
    role: "combobox",
    autocomplete: "off",
    spellcheck: "false",
    "aria-autocomplete": "list",
    "aria-expanded": "false",
    "aria-controls": "find-list",
    "aria-describedby": "find-status",
    placeholder: everyone[0].name,
  });
  const list = el("ul", { id: "find-list", role: "listbox", "aria-label": "Clients that match" });
  list.hidden = true;
  const status = el("p", { id: "find-status", class: "note", role: "status" }, whole());
  const result = el("div", { class: "found", "aria-live": "polite" });
  let matches = [];
  let active = -1;

  function whole() {
    return held < all
      ? `${count(held)} of ${count(all)} clients are on this page; the others are in clients.csv.`
      : `${plural(all, "client")}.`;
  }

  /** The clients whose names match: exact matches first, then names that begin with the text, then others. */
  function matching(text) {
    const low = text.trim().toLowerCase();
    if (!low) return [];
    const rank = (c) => (c.low === low ? 0 : c.low.startsWith(low) ? 1 : c.low.includes(low) ? 2 : 3);
    const ranks = [[], [], []];
    for (const c of everyone) ranks[rank(c)]?.push(c);
    return ranks.flat();
  }

  const title = (c) => (report.find.length > 1 ? `${c.name} ${report.find[c.place].where}` : c.name);

  function open() {
    const shown = matches.slice(0, MATCHES);
    list.replaceChildren(
      ...shown.map((c, k) => {
        const option = el("li", { id: `find-${k}`, role: "option", "aria-selected": String(k === active) });
        option.textContent = title(c);
        option.addEventListener("pointerdown", (event) => {
          event.preventDefault();
          choose(c);
        });
        return option;
      }),
    );
    list.hidden = !shown.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    if (active >= 0) input.setAttribute("aria-activedescendant", `find-${active}`);
    else input.removeAttribute("aria-activedescendant");
  }

  function close() {
    active = -1;
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }

  function choose(c) {
    input.value = c.name;
    close();
    status.textContent = whole();
    result.replaceChildren(...aboutClient(c, title(c)));
  }

  input.addEventListener("input", () => {
    matches = matching(input.value);
    active = -1;
    open();
    result.replaceChildren();
    const more = matches.length > MATCHES ? `, of which ${MATCHES} are listed` : "";
    const some = `${plural(matches.length, "client")} ${matches.length === 1 ? "matches" : "match"}${more}.`;
    const none = `No client's name contains this. ${held < all ? whole() : ""}`;
    status.textContent = !input.value.trim() ? whole() : matches.length ? some : none;
    if (matches.length === 1 || (matches.length && matches[0].name === input.value)) {
      result.replaceChildren(...aboutClient(matches[0], title(matches[0])));
    }
  });
  input.addEventListener("keydown", (event) => {
    const last = Math.min(matches.length, MATCHES) - 1;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (list.hidden) matches = matching(input.value);
      const step = event.key === "ArrowDown" ? 1 : -1;
      active = list.hidden ? -1 : active + step;
      if (active > last) active = 0;
      if (active < 0) active = step > 0 ? 0 : last;
      if (matches.length) open();
      event.preventDefault();
    } else if (event.key === "Enter" && matches.length) {
      choose(matches[Math.max(0, active)]);
      event.preventDefault();
    } else if (event.key === "Escape") {
      if (list.hidden) {
        input.value = "";
        result.replaceChildren();
        status.textContent = whole();
      }
      close();
    }
  });
  input.addEventListener("blur", close);
  return section(
    "find",
    "Find your site",
    el("label", { for: "find-name" }, "Name of a client"),
    el("div", { class: "combo" }, input, list),
    status,
    result,
  );
}

/** Everything that the page knows about a client. */
function aboutClient({ place, k }, title) {
  const f = report.find[place];
  const known = (v) => v !== null && v !== undefined;
  const scores = f.scores.filter((s) => known(s.values[k]));
  const rows = scores.map((s) => [named(s.group, false, s.kind), show(s.measure, s.values[k])]);
  const gains = f.gains.filter((g) => known(g.gain[k]));
  const ciOf = (g) => g.ci?.[k] ?? null;
  const word = (g) => {
    const ci = ciOf(g);
    if (ci === null) return "no interval";
    return g.gain[k] - ci > 0 ? "gains" : g.gain[k] + ci < 0 ? "loses" : "undecided";
  };
  return [
    el("h3", {}, title),
    el(
      "p",
      {},
      `${known(f.n_train[k]) ? plural(f.n_train[k], "training row") : "Training rows unknown"}, ` +
        `${known(f.n_test[k]) ? plural(f.n_test[k], "test row") : "test rows unknown"}.`,
    ),
    gains.length ? el("h4", {}, "Gain over training alone") : null,
    gains.length
      ? el(
          "ul",
          { class: "named" },
          gains.map((g) =>
            el(
              "li",
              {},
              `${g.label}: `,
              el("strong", {}, showGain(g.measure, g.gain[k], ciOf(g))),
              ` (${word(g)}). Joined ${show(g.measure, g.mine[k])}, alone ${show(g.measure, g.alone[k])}.`,
              g.choice ? ` It chose ${g.choice[k]}.` : "",
            ),
          ),
        )
      : null,
    rows.length ? table(`Scores of ${title}`, ["model", capital(scoreName(scores))], rows) : null,
    rows.length || gains.length ? null : el("p", {}, "It has no test rows, so it has no scores."),
  ].filter((part) => part !== null);
}

const scoreName = (scores) => [...new Set(scores.map((s) => `test ${measures[s.measure].name}`))].join(", ");
