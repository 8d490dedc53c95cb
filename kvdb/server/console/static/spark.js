// A line of the latest values, one for each look, the newest at the right.

const POINTS = 60;

export function spark(values, top) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const shown = values.slice(-POINTS);
  const points = shown.map((value, at) => `${100 - (shown.length - 1 - at) * (100 / (POINTS - 1))},${22 - 20 * Math.min(1, value / top)}`);
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("points", points.length === 1 ? "" : points.join(" ")); // one point is no line
  svg.append(line);
  return svg;
}
