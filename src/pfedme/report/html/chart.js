"use strict";
// Charts in SVG: lines, points and bars over axes, with a tooltip. Data is only ever set as text.

const COLOURS = 7;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== null && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== null));
  return node;
}

/** An HTML element. */
function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
function mark(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** The class that gives elements of a group their colour. */
const colour = (group) => `c${group % COLOURS}`;

/** A number on an axis: 0.001, 20, 5,000, 20k. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size > 0 && size < 1e-4) return String(+value.toPrecision(3));
  return (+value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 }).replace("-", "−");
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.8);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-6); k * step <= high + 1e-6 * step; k++)
    ticks.push(+(k * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high, count) {
  if (high / low < 4) return linearTicks(low, high, Math.max(2, count));
  const within = (parts, every) => {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const part of e % every === 0 ? parts : []) {
        const tick = +(part * 10 ** e).toPrecision(1);
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    }
    return ticks;
  };
  const all = [within([1, 2, 5], 1), within([1, 3], 1), within([1], 1), within([1], 2), within([1], 3)];
  const most = Math.max(2, count);
  return all.find((ticks) => ticks.length > 1 && ticks.length <= most) ?? all[0].slice(0, most);
}

/** An axis that holds all values: from numbers to pixels, with its ticks. */
function axis({ values, log = false, least = -Infinity, most = Infinity, round = false }, range, count) {
  const known = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  let low = Math.max(
    least,
    known.reduce((a, b) => Math.min(a, b), Infinity),
  );
  let high = Math.min(
    most,
    known.reduce((a, b) => Math.max(a, b), -Infinity),
  );
  if (!known.length) [low, high] = log ? [1, 10] : [0, 1];
  const single = low === high;
  if (log && low === high) [low, high] = [low / 2, high * 2];
  if (!log && low === high)
    [low, high] = [low - Math.abs(low) * 0.05 - 0.5, high + Math.abs(high) * 0.05 + 0.5];
  if (log) [low, high] = [low / (high / low) ** 0.03, high * (high / low) ** 0.03];
  const ticks =
    single && !round ? [known[0] ?? low] : log ? logTicks(low, high, count) : linearTicks(low, high, count);
  if (round && !log && ticks.length > 1) {
    const step = ticks[1] - ticks[0];
    if (ticks[0] - low > 1e-9 * step) ticks.unshift(+(ticks[0] - step).toPrecision(12));
    if (high - ticks.at(-1) > 1e-9 * step) ticks.push(+(ticks.at(-1) + step).toPrecision(12));
    [low, high] = [Math.max(least, ticks[0]), Math.min(most, ticks.at(-1))];
  }
  const f = log ? Math.log10 : (v) => v;
  const place = (v) => {
    const inside = Math.min(high, Math.max(low, v));
    return range[0] + ((f(inside) - f(low)) / (f(high) - f(low))) * (range[1] - range[0]);
  };
  return Object.assign(place, { ticks: ticks.filter((t) => t >= low - 1e-9 && t <= high + 1e-9), low, high });
}

/** A point's symbol, different for each of the first groups. */
function symbol(group, x, y, r, attributes) {
  const shapes = [
    null,
    `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    `M${x},${y - 1.3 * r}l${1.3 * r},${2.3 * r}h${-2.6 * r}z`,
    `M${x},${y - 1.4 * r}l${1.4 * r},${1.4 * r}l${-1.4 * r},${1.4 * r}l${-1.4 * r},${-1.4 * r}z`,
  ];
  const d = shapes[group % shapes.length];
  return d ? mark("path", { d, ...attributes }) : mark("circle", { cx: x, cy: y, r, ...attributes });
}

/** A short line or a symbol, for legends and tooltips. */
function sample({ group, dash, points }) {
  const line = mark("line", { x1: 1, x2: 23, y1: 6, y2: 6, class: `line ${colour(group)} ${dash ?? ""}` });
  const shape = points && symbol(group, 12, 6, 4, { class: `point ${colour(group)}` });
  return mark("svg", { viewBox: "0 0 24 12", class: "sample", "aria-hidden": "true" }, shape ?? line);
}

/** Shows what is under the pointer, next to it and within its host. */
function tooltip(host) {
  const box = el("div", { class: "tip", role: "status" });
  box.hidden = true;
  host.append(box);
  return {
    hide: () => (box.hidden = true),
    show(x, y, { title, rows, note }) {
      box.replaceChildren(
        el("strong", {}, title),
        el(
          "table",
          {},
          rows.map((row) =>
            el(
              "tr",
              {},
              el("td", {}, row.sample ? sample(row.sample) : "", row.name),
              el("td", {}, row.value),
            ),
          ),
        ),
        ...(note ? [el("p", {}, note)] : []),
      );
      box.hidden = false;
      const room = host.clientWidth - box.offsetWidth;
      const left = x + 14 <= room ? x + 14 : x - 14 - box.offsetWidth;
      const beside = Math.max(0, Math.min(host.clientHeight - box.offsetHeight, y - box.offsetHeight / 2));
      box.style.left = `${Math.max(0, Math.min(room, left))}px`;
      box.style.top = `${left < 0 ? host.clientHeight : beside}px`; // below a chart that is too narrow
    },
  };
}

/** Draws what `draw(width)` returns into `host`, and again when its width changes; returns a function that redraws. */
function responsive(host, draw) {
  let width = 0;
  const again = () => {
    width = host.clientWidth;
    if (width > 0) host.replaceChildren(...draw(width));
  };
  new ResizeObserver(() => host.clientWidth !== width && again()).observe(host);
  // Drawn at the width of a printed page, so that letters keep their size.
  addEventListener("beforeprint", () => host.replaceChildren(...draw(host.closest(".pair") ? 340 : 680)));
  addEventListener("afterprint", again);
  return again;
}

/**
 * Lines and points over two axes. `build()` returns
 *   label          what the chart shows, for screen readers
 *   x, y           {label, log, least, most, also: values to leave room for, ticks: false}
 *   lines          [{group, dash, name, x: [], y: [], ci: [], show: y => text}]
 *   points         [{group, tone, x, y, ci, shift, tip: {title, rows}}]
 *   spread         the share of the width by which points with a shift of 1 are moved sideways
 *   rules          horizontal lines: [{at, text}]
 *   diagonal       whether y = x is drawn
 *   square         whether it is as high as it is wide
 */
function chart(host, build) {
  return responsive(host, (width) => {
    const { label, x, y, lines = [], points = [], rules = [], spread = 0, diagonal, square } = build();
    const height = square ? Math.min(300, width) : Math.round(Math.min(330, Math.max(230, width * 0.62)));
    const bottom = height - (x.ticks === false ? 26 : 44);
    const ends = (v, ci) => (ci ? [v - ci, v + ci] : [v]);
    const ys = [
      ...lines.flatMap((l) => l.y.flatMap((v, k) => (v === null ? [] : ends(v, l.ci?.[k])))),
      ...points.flatMap((p) => ends(p.y, p.ci)),
      ...rules.map((r) => r.at),
      ...(y.also ?? []),
    ];
    const up = axis({ ...y, values: ys, round: true }, [bottom, 12], Math.max(4, Math.floor(bottom / 46)));
    const left = 12 + 7 * Math.max(...up.ticks.map((t) => short(t).length));
    const xs = [...lines.flatMap((l) => l.x), ...points.map((p) => p.x), ...(x.also ?? [])];
    const across = axis(
      { ...x, values: xs },
      [left + (points.length ? 8 : 0), width - 14],
      Math.floor((width - left) / 76),
    );

    const svg = mark("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": label,
      class: "chart",
    });
    for (const t of up.ticks) {
      svg.append(
        mark("line", { x1: left, x2: width - 8, y1: up(t), y2: up(t), class: "grid" }),
        mark("text", { x: left - 7, y: up(t) + 4, "text-anchor": "end" }, short(t)),
      );
    }
    svg.append(mark("line", { x1: left, x2: width - 8, y1: bottom, y2: bottom, class: "axis" }));
    for (const t of x.ticks === false ? [] : across.ticks) {
      svg.append(
        mark("line", { x1: across(t), x2: across(t), y1: bottom, y2: bottom + 4, class: "axis" }),
        mark("text", { x: across(t), y: bottom + 17, "text-anchor": "middle" }, short(t)),
      );
    }
    if (x.label)
      svg.append(mark("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, x.label));
    for (const { at, text } of rules) {
      const y = up(at);
      svg.append(mark("line", { x1: left, x2: width - 8, y1: y, y2: y, class: text ? "rule base" : "rule" }));
    }
    if (diagonal) {
      const [low, high] = [Math.max(across.low, up.low), Math.min(across.high, up.high)];
      const corners = { x1: across(low), y1: up(low), x2: across(high), y2: up(high) };
      svg.append(mark("line", { ...corners, class: "diagonal" }));
    }

    for (const line of lines) {
      const at = line.x.map((v, k) => k).filter((k) => line.y[k] !== null);
      const path = (list) =>
        list.map(([a, b], k) => `${k ? "L" : "M"}${a.toFixed(1)},${b.toFixed(1)}`).join("");
      const band = at.filter((k) => line.ci && line.ci[k] !== null);
      if (band.length > 1) {
        const edge = (k, side) => [across(line.x[k]), up(line.y[k] + side * line.ci[k])];
        const around = [...band.map((k) => edge(k, 1)), ...band.reverse().map((k) => edge(k, -1))];
        svg.append(mark("path", { d: `${path(around)}z`, class: `band ${colour(line.group)}` }));
      }
      const way = at.map((k) => [across(line.x[k]), up(line.y[k])]);
      svg.append(
        mark("path", {
          d: path(way),
          class: `line ${colour(line.group)} ${line.dash ?? ""}`,
          "data-line": line.name,
        }),
      );
      for (const [cx, cy] of line.dots ? way : way.slice(-1)) {
        svg.append(mark("circle", { cx, cy, r: 3, class: `dot ${colour(line.group)}` }));
      }
    }

    const many = points.length > 400;
    const spots = points.map((p) => ({
      p,
      cx: across(p.x) + (p.shift ?? 0) * spread * (width - left),
      cy: up(p.y),
    }));
    for (const { p, cx } of spots) {
      if (!p.ci) continue;
      svg.append(
        mark("line", {
          x1: cx,
          x2: cx,
          y1: up(p.y - p.ci),
          y2: up(p.y + p.ci),
          class: `bar ${p.tone ?? colour(p.group)}`,
        }),
      );
    }
    for (const { p, cx, cy } of spots) {
      svg.append(symbol(p.group, cx, cy, many ? 2 : 3.4, { class: `point ${p.tone ?? colour(p.group)}` }));
    }

    for (const { at, text } of rules.filter((r) => r.text)) {
      const y = up(at) - 5 < 20 ? up(at) + 14 : up(at) - 5;
      svg.append(mark("text", { x: width - 12, y, "text-anchor": "end", class: "base" }, text));
    }

    const tip = tooltip(host);
    const cursor = mark("g", { class: "cursor" });
    svg.append(cursor);
    const stops = [...new Set(lines.flatMap((l) => l.x))].sort((a, b) => a - b);
    const nearest = (list, far) =>
      list.reduce((best, item) => (far(item) < far(best) ? item : best), list[0]);
    const onLines = (px, py) => {
      const t = nearest(stops, (s) => Math.abs(across(s) - px));
      const here = lines
        .map((line) => ({ line, v: line.y[line.x.indexOf(t)], ci: line.ci?.[line.x.indexOf(t)] }))
        .filter(({ v }) => v !== undefined && v !== null)
        .sort((a, b) => b.v - a.v);
      cursor.replaceChildren(
        mark("line", { x1: across(t), x2: across(t), y1: 12, y2: bottom, class: "guide" }),
        ...here.map(({ line, v }) =>
          mark("circle", { cx: across(t), cy: up(v), r: 3.5, class: `dot ${colour(line.group)}` }),
        ),
      );
      tip.show(across(t), py, {
        title: `${x.label} ${short(+t.toPrecision(4))}`,
        rows: here
          .slice(0, 12)
          .map(({ line, v, ci }) => ({ sample: line, name: line.name, value: line.show(v, ci) })),
      });
    };
    const onPoints = (px, py) => {
      const spot = nearest(spots, (s) => Math.hypot(s.cx - px, s.cy - py));
      if (Math.hypot(spot.cx - px, spot.cy - py) > 30) return leave();
      cursor.replaceChildren(mark("circle", { cx: spot.cx, cy: spot.cy, r: 6.5, class: "ring" }));
      return tip.show(spot.cx, spot.cy, spot.p.tip);
    };
    const leave = () => (cursor.replaceChildren(), tip.hide());
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const at = [event.clientX - box.left, event.clientY - box.top].map((v) => (v * width) / box.width);
      if (spots.length) onPoints(...at);
      else if (stops.length) onLines(...at);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
    return [svg, host.lastChild];
  });
}
