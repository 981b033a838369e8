// Plots that move: lines of the last minutes in an SVG, drawn again when a value comes.

import { make } from "./dom.js";

const SPAN = 120; // values in a line
const [WIDTH, HEIGHT] = [240, 70];

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export class Plot {
  // `lines` are the names of two lines; `write` writes a value with its unit. `top` is the value at
  // the upper edge; without it, the highest value is there.
  constructor(title, lines, write, top = 0) {
    this.top = top;
    this.write = write;
    this.lines = lines;
    this.values = lines.map(() => []);
    this.svg = shape("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
    });
    this.drawn = lines.map((_, index) => shape("polyline", { class: `line${index}`, points: "" }));
    this.svg.append(shape("path", { class: "axis", d: `M0 ${HEIGHT}H${WIDTH}` }), ...this.drawn);
    this.now = lines.map(() => make("span"));
    this.most = make("p");
    const legend = lines.map((name, index) => make("p", {},
      make("span", { className: `mark${index}` }, index ? "╌ " : "━ "), `${name}: `, this.now[index]));
    this.element = make("figure", {}, make("figcaption", {}, title), ...legend, this.svg, this.most);
  }

  // Add a value to each line; null where there is none.
  add(values) {
    values.forEach((value, index) => {
      this.values[index].push(value);
      if (this.values[index].length > SPAN) this.values[index].shift();
      this.now[index].textContent = value === null ? "–" : this.write(value);
    });
    const known = this.values.flat().filter((value) => value !== null);
    const highest = known.length ? this.write(Math.max(...known)) : "–";
    this.most.textContent = `highest of 2 minutes: ${highest}`;
    const top = this.top || Math.max(0, ...known);
    this.values.forEach((line, index) => {
      const left = SPAN - line.length;
      const points = line.flatMap((value, x) => value === null ? [] : [
        `${((left + x) * WIDTH / (SPAN - 1)).toFixed(1)},${(HEIGHT - 1 - value / (top || 1) * (HEIGHT - 4)).toFixed(1)}`,
      ]);
      if (points.length === 1) points.push(points[0]); // its round ends make a dot
      this.drawn[index].setAttribute("points", points.join(" "));
    });
  }
}
