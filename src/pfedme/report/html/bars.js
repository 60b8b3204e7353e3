// Charts of bars in SVG.

/** Horizontal bars: `build()` returns {label, bars: [{name, value, text, group}]}. */
function bars(host, build) {
  return responsive(host, (width) => {
    const { label, bars: list } = build();
    const left = 14 + 7 * Math.max(...list.map((b) => b.name.length));
    const right = 12 + 7 * Math.max(...list.map((b) => b.text.length));
    const most = Math.max(1, ...list.map((b) => b.value));
    const height = 24 * list.length + 4;
    const svg = mark("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": label,
      class: "chart",
    });
    list.forEach((b, k) => {
      const y = 24 * k + 4;
      const length = (b.value / most) * (width - left - right);
      svg.append(
        mark("text", { x: left - 8, y: y + 13, "text-anchor": "end", class: b.value ? "" : "faint" }, b.name),
        mark("rect", { x: left, y, width: width - left - right, height: 18, class: "trough", rx: 3 }),
        mark("rect", { x: left, y, width: length, height: 18, class: `block ${colour(b.group)}`, rx: 3 }),
        mark("text", { x: left + length + 6, y: y + 13, class: b.value ? "" : "faint" }, b.text),
      );
    });
    return [svg];
  });
}

/** A text truncated to so many characters. */
const cutTo = (text, most) => (text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`);

/**
 * Named bars to both sides of zero, with intervals. `build()` returns
 *   label    what the chart shows
 *   bars     [{name, value, ci, tone, text, tip}]
 *   also     values to leave room for
 *   least, most
 *   unit     the label of the axis
 */
function gainBars(host, build) {
  return responsive(host, (width) => {
    const { label, bars: list, also = [], least, most, unit } = build();
    const line = 22;
    const letters = Math.floor((width * (width < 500 ? 0.3 : 0.34)) / 6.6);
    const names = list.map((b) => cutTo(b.name, letters));
    const left = 14 + 6.6 * Math.max(...names.map((name) => name.length));
    const right = 16 + 6.6 * Math.max(...list.map((b) => b.text.length));
    const bottom = line * list.length + 8;
    const height = bottom + 40;
    const ends = list.flatMap((b) => [b.value - (b.ci ?? 0), b.value + (b.ci ?? 0)]);
    const across = axis(
      { values: [0, ...ends, ...also], least, most },
      [left + 4, width - right],
      Math.max(2, Math.floor((width - left - right) / 60)),
    );
    const svg = mark("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": label,
      class: "chart",
    });
    for (const t of across.ticks) {
      svg.append(
        mark("line", { x1: across(t), x2: across(t), y1: 4, y2: bottom, class: t ? "grid" : "rule" }),
        mark("text", { x: across(t), y: bottom + 15, "text-anchor": "middle" }, short(t)),
      );
    }
    svg.append(mark("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, unit));
    const tip = tooltip(host);
    list.forEach((b, k) => {
      const y = line * k + 6;
      const [from, to] = [across(Math.min(0, b.value)), across(Math.max(0, b.value))];
      const row = mark(
        "g",
        { class: `gain-bar ${b.tone}` },
        mark("rect", { x: 0, y: y - 2, width, height: line, class: "reach" }),
        mark("text", { x: left - 6, y: y + 13, "text-anchor": "end" }, names[k]),
        mark("rect", { x: from, y: y + 2, width: Math.max(1, to - from), height: line - 8, class: "block" }),
        b.ci
          ? mark("path", {
              d: `M${across(b.value - b.ci)},${y + 5}v8m0,-4H${across(b.value + b.ci)}m0,-4v8`,
              class: "whisker",
            })
          : null,
        mark("text", { x: width - 4, y: y + 13, "text-anchor": "end" }, b.text),
      );
      const tell = () => tip.show(to, y + line, b.tip);
      row.addEventListener("pointermove", tell);
      row.addEventListener("pointerdown", tell);
      svg.append(row);
    });
    svg.addEventListener("pointerleave", () => tip.hide());
    return [svg, host.lastChild];
  });
}
