// One chart: uPlot in a figure whose legend has the values as text, for the pointer, the keyboard and screen readers.

import uPlot from "./vendor/uPlot.esm.js";
import { announce, el, fill, number, table } from "./dom.js";

const HEIGHT = 190;
const DASHES = [[], [6, 3], [2, 3]];
const COLORS = 8;
const TABLE_ROWS = 50;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The class of the n-th run's swatch, and its color and dashes. */
export function style(place) {
  const color = place % COLORS, dash = Math.floor(place / COLORS) % DASHES.length;
  return { name: `run-${color}`, color: css(`--run-${color}`), dash: DASHES[dash] };
}

/** Ticks are multiples of a round number, so that all their digits count. */
function tickText(tick) {
  if (tick === null) return "";
  const size = Math.abs(tick);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? String(Number(tick.toPrecision(6)).toExponential()) : String(Number(tick.toPrecision(9)));
}

function average(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + 1 - weight;
    return sum / norm;
  });
}

/** A chart of a title; charts with the same `sync` share the position of the pointer. */
export function chart(title, sync) {
  return new Chart(title, sync);
}

class Chart {
  #plot = null;
  #lines = [];
  #options = {};
  #signature = "";
  #isZoomed = false;
  #canvas = el("div", { class: "canvas" });
  #legend = el("ul", { class: "legend" });
  #notes = el("p", { class: "muted small" });
  #table = el("div");
  #values = el("details", { on: { toggle: () => this.#values.open && this.#drawTable() } },
    el("summary", {}, "Values as a table"), this.#table);
  #resize = new ResizeObserver(() => this.#plot && this.#plot.width !== this.#width() &&
    this.#plot.setSize({ width: this.#width(), height: HEIGHT }));

  constructor(title, sync) {
    this.title = title;
    this.sync = sync;
    this.figure = el("figure", { class: "chart", tabindex: "0", "aria-label": `Chart of ${title}. Arrow keys move along the steps.`,
      on: { keydown: (event) => this.#move(event) } },
    el("figcaption", { title }, title), this.#canvas, this.#legend, this.#notes, this.#values);
    this.#resize.observe(this.#canvas);
  }

  /**
   * Draw lines, each with `label`, `place` (of its color), `x`, `y` and `missing` (steps of values that are not finite); options
   * are `smooth` (0 to below 1), `log`, `unit` of x.
   */
  draw(lines, options) {
    this.#lines = lines;
    this.#options = options;
    const content = this.#data(), dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const signature = JSON.stringify([lines.map((line) => [line.place, line.x.length < 3]), options, dark]);
    if (!this.#plot || signature !== this.#signature) {
      this.#signature = signature;
      this.#create(content);
    } else this.#plot.setData(content, !this.#isZoomed);
    this.#drawLegend(null);
    this.#notes.textContent = this.#remarks();
    if (this.#values.open) this.#drawTable();
  }

  close() {
    this.#resize.disconnect();
    this.#plot?.destroy();
  }

  #width() {
    return Math.max(this.#canvas.clientWidth, 120);
  }

  #data() {
    const { log, smooth } = this.#options;
    const tables = this.#lines.map((line) => {
      const y = log ? line.y.map((value) => (value > 0 ? value : null)) : line.y;
      return smooth > 0 ? [line.x, y, average(y, smooth)] : [line.x, y];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  #create(content) {
    this.#plot?.destroy();
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const setScale = (self, key) => {
      const [x] = self.data;
      if (key === "x" && x.length) this.#isZoomed = self.scales.x.min > x[0] || self.scales.x.max < x.at(-1);
    };
    this.#plot = new uPlot(
      {
        width: this.#width(),
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: this.sync }, y: false },
        scales: { x: { time: false }, y: this.#options.log ? { distr: 3 } : {} },
        axes: [{ ...axis, size: 30 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(tickText) }],
        series: [{}, ...this.#lines.flatMap((line) => this.#series(line))],
        hooks: { setCursor: [() => this.#drawLegend(this.#plot?.cursor.idx ?? null)], setScale: [setScale] },
      },
      content,
      this.#canvas,
    );
  }

  #series(line) {
    const { color, dash } = style(line.place);
    const raw = { stroke: color, dash, width: 1.5, points: { show: line.x.length < 3 } };
    return this.#options.smooth > 0 ? [{ ...raw, width: 1, alpha: 0.3 }, { ...raw, width: 2 }] : [raw];
  }

  /** The newest value of a line, or the one at or before a position of the pointer. */
  #valueAt(place, position) {
    const column = this.#plot.data[1 + place * (this.#options.smooth > 0 ? 2 : 1)];
    for (let index = position ?? column.length - 1; index >= 0; index--) {
      if (column[index] !== null && column[index] !== undefined) return [this.#plot.data[0][index], column[index]];
    }
    return [null, null];
  }

  #drawLegend(position) {
    if (!this.#plot) return;
    fill(this.#legend, this.#lines.map((line, place) => {
      const [x, value] = this.#valueAt(place, position);
      const unit = this.#options.unit === "step" ? `step ${number(x)}` : `${number(x)} min`;
      return el("li", {}, el("span", { class: `swatch ${style(line.place).name}` }), el("span", { class: "run-name" }, line.label), " ",
        el("strong", { class: "value", "data-run": line.id, title: String(value) }, number(value)),
        el("span", { class: "muted small" }, x === null ? "" : ` at ${unit}`));
    }));
  }

  #drawTable() {
    const [steps] = this.#plot.data, stride = Math.max(1, Math.ceil(steps.length / TABLE_ROWS));
    const rows = [];
    for (let index = (steps.length - 1) % stride; index < steps.length; index += stride) {
      rows.push([number(steps[index]), ...this.#lines.map((_, place) => number(this.#valueAt(place, index)[1]))]);
    }
    fill(this.#table, table(this.title, [this.#options.unit, ...this.#lines.map((line) => line.label)], rows));
  }

  /** Which values the chart does not show. */
  #remarks() {
    const missing = this.#lines.filter((line) => line.missing.length).map((line) =>
      `${line.label}: not finite at step ${line.missing.slice(0, 5).join(", ")}${line.missing.length > 5 ? ", …" : ""}`);
    const isHidden = this.#options.log && this.#lines.some((line) => line.y.some((value) => value !== null && value <= 0));
    return [...missing, isHidden && "Values of 0 or less are not shown on a logarithmic scale."].filter(Boolean).join(". ");
  }

  #move(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction || !this.#plot || event.target !== this.figure) return;
    event.preventDefault();
    const [steps] = this.#plot.data, at = this.#plot.cursor.idx ?? steps.length - 1;
    const index = Math.min(Math.max(at + direction, 0), steps.length - 1);
    this.#plot.setCursor({ left: this.#plot.valToPos(steps[index], "x"), top: HEIGHT / 2 });
    announce(`${this.title}, ${this.#options.unit} ${number(steps[index])}: ` +
      this.#lines.map((line, place) => `${line.label} ${number(this.#valueAt(place, index)[1])}`).join(", "));
  }
}
