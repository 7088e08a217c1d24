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

/**
 * A chart with `draw(lines, options)` and `close()`. Each line has `label`, `place` (of its color), `x`, `y` and `missing` (steps
 * of values that are not finite); options are `smooth` (0 to below 1), `log`, `unit` of x.
 */
export function chart(title, sync) {
  const canvas = el("div", { class: "canvas" });
  const legend = el("ul", { class: "legend" });
  const notes = el("p", { class: "muted small" });
  const values = el("details", { on: { toggle: () => values.open && drawTable() } }, el("summary", {}, "Values as a table"));
  const body = el("div");
  values.append(body);
  const heading = el("figcaption", { title }, title);
  const figure = el("figure", { class: "chart", tabindex: "0", "aria-label": `Chart of ${title}. Arrow keys move along the steps.`,
    on: { keydown: move } }, heading, canvas, legend, notes, values);
  let plot = null, lines = [], options = {}, signature = "", zoomed = false;

  function data() {
    const tables = lines.map((line) => {
      const y = options.log ? line.y.map((value) => (value > 0 ? value : null)) : line.y;
      return options.smooth > 0 ? [line.x, y, average(y, options.smooth)] : [line.x, y];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  function create(content) {
    plot?.destroy();
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const series = lines.flatMap((line) => {
      const { color, dash } = style(line.place);
      const raw = { stroke: color, dash, width: 1.5, points: { show: line.x.length < 3 } };
      return options.smooth > 0 ? [{ ...raw, width: 1, alpha: 0.3 }, { ...raw, width: 2 }] : [raw];
    });
    plot = new uPlot(
      {
        width: width(),
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: sync }, y: false },
        scales: { x: { time: false }, y: options.log ? { distr: 3 } : {} },
        axes: [{ ...axis, size: 30 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(tickText) }],
        series: [{}, ...series],
        hooks: {
          setCursor: [() => drawLegend(plot?.cursor.idx ?? null)],
          setScale: [(self, key) => key === "x" && self.data[0].length && (zoomed = self.scales.x.min > self.data[0][0] ||
            self.scales.x.max < self.data[0].at(-1))],
        },
      },
      content,
      canvas,
    );
  }

  /** The newest value of a line, or the one at or before a place of the pointer. */
  function valueAt(place, position) {
    const column = plot.data[1 + place * (options.smooth > 0 ? 2 : 1)];
    for (let index = position ?? column.length - 1; index >= 0; index--) {
      if (column[index] !== null && column[index] !== undefined) return [plot.data[0][index], column[index]];
    }
    return [null, null];
  }

  function drawLegend(position) {
    if (!plot) return;
    fill(legend, lines.map((line, place) => {
      const [x, value] = valueAt(place, position);
      const unit = options.unit === "step" ? `step ${number(x)}` : `${number(x)} min`;
      return el("li", {}, el("span", { class: `swatch ${style(line.place).name}` }), el("span", { class: "run-name" }, line.label), " ",
        el("strong", { class: "value", "data-run": line.id, title: String(value) }, number(value)),
        el("span", { class: "muted small" }, x === null ? "" : ` at ${unit}`));
    }));
  }

  function drawTable() {
    const steps = plot.data[0], stride = Math.max(1, Math.ceil(steps.length / TABLE_ROWS));
    const rows = [];
    for (let index = (steps.length - 1) % stride; index < steps.length; index += stride) {
      rows.push([number(steps[index]), ...lines.map((_, place) => number(valueAt(place, index)[1]))]);
    }
    fill(body, table(title, [options.unit, ...lines.map((line) => line.label)], rows));
  }

  function move(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction || !plot || event.target !== figure) return;
    event.preventDefault();
    const steps = plot.data[0], at = plot.cursor.idx ?? steps.length - 1;
    const index = Math.min(Math.max(at + direction, 0), steps.length - 1);
    plot.setCursor({ left: plot.valToPos(steps[index], "x"), top: HEIGHT / 2 });
    announce(`${title}, ${options.unit} ${number(steps[index])}: ` + lines.map((line, place) => `${line.label} ${number(valueAt(place, index)[1])}`).join(", "));
  }

  function draw(newLines, newOptions) {
    lines = newLines;
    options = newOptions;
    const content = data();
    const next = JSON.stringify([lines.map((line) => [line.place, line.x.length < 3]), options, matchMedia("(prefers-color-scheme: dark)").matches]);
    if (!plot || next !== signature) {
      signature = next;
      create(content);
    } else plot.setData(content, !zoomed);
    drawLegend(null);
    const missing = lines.filter((line) => line.missing.length).map((line) => `${line.label}: not finite at step ${line.missing.slice(0, 5).join(", ")}` +
      (line.missing.length > 5 ? ", …" : ""));
    const hidden = options.log && lines.some((line) => line.y.some((value) => value !== null && value <= 0));
    notes.textContent = [...missing, hidden && "Values of 0 or less are not shown on a logarithmic scale."].filter(Boolean).join(". ");
    if (values.open) drawTable();
  }

  const width = () => Math.max(canvas.clientWidth, 120);
  const resize = new ResizeObserver(() => plot && plot.width !== width() && plot.setSize({ width: width(), height: HEIGHT }));
  resize.observe(canvas);
  return {
    figure,
    draw,
    close: () => {
      resize.disconnect();
      plot?.destroy();
    },
  };
}
