// Small plots in SVG: bars and one curve. Sizes are those of the viewBox; colours come from the style sheet.

const WIDTH = 320;
const HEIGHT = 84;
const BOX = { left: 34, right: 8, top: 10, bottom: 18 };
const MOST = 60; // steps shown

function draw(svg, tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.textContent = text;
  svg.append(element);
}

/** Clears the plot, draws axes up to `top`, and returns how to place a point. */
function frame(svg, top, label, unit = "") {
  svg.replaceChildren();
  svg.setAttribute("aria-label", label);
  const floor = HEIGHT - BOX.bottom;
  const y = (value) => floor - (value / top) * (floor - BOX.top);
  for (const value of [0, top / 2, top]) {
    draw(svg, "line", { x1: BOX.left, x2: WIDTH - BOX.right, y1: y(value), y2: y(value), class: "axis" });
    draw(svg, "text", { x: BOX.left - 5, y: y(value) + 3, "text-anchor": "end" }, `${+value.toFixed(1)}${unit}`);
  }
  return { y, floor, width: WIDTH - BOX.left - BOX.right };
}

/** The least of 1, 2, 5, 10, 20, 50 ... that is not below. */
function round(value) {
  const scale = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * scale).find((step) => step >= value);
}

export function drawRate(svg, note, rates, plain) {
  const shown = rates.slice(-MOST);
  const label = rates.length ? `${rates.at(-1).toFixed(0)} now` : "none yet";
  const measured = plain ? `plain decoding: ${plain.toFixed(0)}` : "plain decoding was not measured";
  note.textContent = `${label}, ${measured}`;
  const { y, width } = frame(svg, round(Math.max(plain ?? 0, ...shown, 10)), `Tokens per second: ${label}, ${measured}`);
  if (plain) {
    draw(svg, "line", { x1: BOX.left, x2: WIDTH - BOX.right, y1: y(plain), y2: y(plain), class: "plain" });
    draw(svg, "text", { x: WIDTH - BOX.right, y: y(plain) - 3, "text-anchor": "end" }, "plain");
  }
  const x = (i) => BOX.left + (width * i) / Math.max(1, shown.length - 1);
  const points = shown.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  if (shown.length > 1) draw(svg, "polyline", { points, class: "curve" });
}

export function drawSteps(svg, note, steps) {
  const shown = steps.slice(-MOST);
  const total = steps.reduce((sum, step) => sum + step.drafted + step.own, 0);
  const label = steps.length ? `mean ${(total / steps.length).toFixed(2)} over ${steps.length} steps` : "none yet";
  note.textContent = label;
  const most = Math.max(2, ...shown.map((step) => step.drafted + step.own));
  const { y, floor, width } = frame(svg, most + (most % 2), `Tokens per step: ${label}`);
  const wide = width / MOST;
  shown.forEach((step, i) => {
    const bar = { x: BOX.left + i * wide, width: Math.max(1, wide - 1) };
    draw(svg, "rect", { ...bar, y: y(step.drafted), height: floor - y(step.drafted), class: "drafted" });
    const top = y(step.drafted + step.own);
    draw(svg, "rect", { ...bar, y: top, height: y(step.drafted) - top, class: "own" });
  });
}

export function drawAcceptance(svg, note, totals) {
  const shares = totals.marginal_acceptance.slice(0, 16);
  const label = totals.drafts ? `${totals.drafts} drafts, AL ${totals.al.toFixed(2)}` : "no drafts yet";
  note.textContent = label;
  const { y, floor, width } = frame(svg, 100, `Acceptance by position: ${label}`, "%");
  const wide = width / Math.max(8, shares.length);
  shares.forEach((share, i) => {
    const bar = { x: BOX.left + i * wide + 1, width: wide - 2, y: y(100 * share), height: floor - y(100 * share) };
    draw(svg, "rect", { ...bar, class: "drafted" });
    draw(svg, "text", { x: BOX.left + (i + 0.5) * wide, y: HEIGHT - 5, "text-anchor": "middle" }, String(i + 1));
  });
}
