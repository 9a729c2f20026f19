// Charts of the last minutes, of all models or of one, and the end of the server's log.

import { html, useEffect, useRef, useState } from "./htm-preact.js";
import { store } from "./connection.js";
import { number, percent } from "./models.js";

const HEIGHT = 160;
const LATENCIES = ["p50", "p95", "p99"];
const CHARTS = [
  { title: "Tokens/s", series: ["generated"], of: (point) => [point.tokens], shown: (value) => number(value, 1) },
  { title: "Requests", series: ["running", "queue"], of: (point) => [point.running, point.queue], shown: number },
  { title: "Requests/s", series: ["ended"], of: (point) => [point.requests], shown: (value) => number(value, 1) },
  { title: "Time to first token, ms", series: LATENCIES, of: (point) => point.ttft ?? [null, null, null], shown: number },
  { title: "Time between tokens, ms", series: LATENCIES, of: (point) => point.itl ?? [null, null, null],
    shown: (value) => number(value, 1) },
  { title: "KV cache and prefix hits, %", series: ["KV cache", "prefix hits"], shown: (value) => number(value, 1),
    of: (point) => [point.kv, point.hits].map((share) => (share === null ? null : share * 100)) },
];

// A custom property with light-dark() is resolved only where it is a colour.
function resolved(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function options(chart, width) {
  const [ink, line] = [resolved("--quiet"), resolved("--line")];
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const strokes = ["--first", "--second", "--third"].map(resolved);
  return {
    width, height: HEIGHT, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, Math.max((high ?? 0) * 1.1, 1)] } },
    axes: [axis, { ...axis, size: 60 }],
    series: [{}, ...chart.series.map((label, index) => ({
      label, stroke: strokes[index], width: 2, points: { show: false }, spanGaps: false,
      value: (_, value) => chart.shown(value),
    }))],
  };
}

function Chart({ chart, points }) {
  const place = useRef();
  const plot = useRef(null);
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const redraw = () => setTheme((count) => count + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", redraw);
    system.addEventListener("change", redraw);
    const sized = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    sized.observe(place.current);
    return () => {
      sized.disconnect();
      removeEventListener("theme", redraw);
      system.removeEventListener("change", redraw);
    };
  }, []);
  const data = [points.map((point) => point.time), ...chart.series.map((_, index) =>
    points.map((point) => chart.of(point)[index]))];
  useEffect(() => {
    plot.current = new globalThis.uPlot(options(chart, place.current.clientWidth), data, place.current);
    return () => plot.current.destroy();
  }, [theme]);
  useEffect(() => { plot.current.setData(data); });
  const last = points.length ? chart.of(points.at(-1)) : [];
  const text = chart.series.map((name, index) => `${name} ${chart.shown(last[index])}`).join(", ");
  return html`<figure class="panel"><figcaption>${chart.title}</figcaption>
    <div ref=${place} role="img" aria-label=${`${chart.title}: ${text}`}></div></figure>`;
}

export function Live({ label: fixed }) {
  const [label, setLabel] = useState(fixed ?? "");
  const points = store.histories.get(label) ?? [];
  const row = label ? store.models.get(label) ?? {} : store.totals;
  const measured = [...store.histories.keys()].filter(Boolean).sort();
  return html`<h2>Live</h2>
    <div class="row"><label>Model<select value=${label} onChange=${(event) => setLabel(event.target.value)}>
      <option value="">all models</option>${measured.map((name) => html`<option value=${name}>${name}</option>`)}
    </select></label></div>
    <dl class="figures">
      <div><dt>Tokens/s</dt><dd>${number(row.tokens, 1)}</dd></div>
      <div><dt>Running</dt><dd>${number(row.running)}</dd></div><div><dt>Queue</dt><dd>${number(row.queue)}</dd></div>
      <div><dt>TTFT p50</dt><dd>${row.ttft ? `${number(row.ttft[0])} ms` : "–"}</dd></div>
      <div><dt>Token gap p50</dt><dd>${row.itl ? `${number(row.itl[0], 1)} ms` : "–"}</dd></div>
      <div><dt>KV cache</dt><dd>${percent(row.kv)}</dd></div><div><dt>Prefix hits</dt><dd>${percent(row.hits)}</dd></div>
    </dl>
    <p class="note">Times are those of the requests that ended in the last ten seconds.</p>
    <div class="plots">${CHARTS.map((chart) => html`<${Chart} key=${`${chart.title} ${label}`} chart=${chart} points=${points} />`)}</div>
    <${Log} />`;
}

const levelOf = (line) => /\b(CRITICAL|ERROR|WARNING)\b/.exec(line.slice(0, 60))?.[1] ?? "";

function Log() {
  const [wanted, setWanted] = useState("");
  const [held, setHeld] = useState(null);  // the lines that are shown while it is paused
  const place = useRef();
  const lines = (held ?? store.log).filter(([, line]) => line.toLowerCase().includes(wanted.toLowerCase()));
  useEffect(() => { if (!held) place.current.scrollTop = place.current.scrollHeight; }, [lines.at(-1)?.[0], held]);
  return html`<h3>Log</h3>
    <div class="row"><label>Lines with<input type="search" onInput=${(event) => setWanted(event.target.value)} /></label>
      <button aria-pressed=${held !== null} onClick=${() => setHeld(held ? null : store.log)}>
        ${held ? "Continue" : "Pause"}</button></div>
    <pre ref=${place} class="log panel" role="log" aria-live="off" tabindex="0" aria-label="Log">${lines.map(
      ([count, line]) => html`<div key=${count} class=${levelOf(line)}>${line}</div>`)}</pre>`;
}
