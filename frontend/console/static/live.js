// Charts of the last minutes, of all models or of one, and the end of the server's log.

import { html, useEffect, useRef, useState } from "./htm-preact.js";
import { SPANS, chart as follow, store } from "./connection.js";
import { clock, moment, number, percent } from "./text.js";

const HEIGHT = 160;
const HOUR_REFRESH_MS = 10000;  // a point of the hour is one of ten seconds
const END_PX = 20;  // of the log, that count as its end
const LATENCIES = ["p50", "p95", "p99"];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];  // steps of an axis of counts
const share = (value) => (value === null || value === undefined ? null : value * 100);
const CHARTS = [
  { title: "Tokens/s", series: ["generated"], of: (point) => [point.tokens], shown: (value) => number(value, 1) },
  { title: "Requests", series: ["running", "queue"], of: (point) => [point.running, point.queue],
    shown: (value) => number(value), steps: WHOLE },
  { title: "Requests/s", series: ["ended"], of: (point) => [point.requests], shown: (value) => number(value, 1) },
  { title: "Time to first token, ms", series: LATENCIES, shown: (value) => number(value),
    of: (point) => [point.ttft_p50, point.ttft_p95, point.ttft_p99] },
  { title: "Time between tokens, ms", series: LATENCIES, shown: (value) => number(value, 1),
    of: (point) => [point.itl_p50, point.itl_p95, point.itl_p99] },
  { title: "KV cache and prefix hits, %", series: ["KV cache", "prefix hits"], shown: (value) => number(value, 1),
    of: (point) => [share(point.kv), share(point.hits)], most: 100 },
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
    scales: {
      x: { range: () => [store.time - SPANS[store.span], store.time] },
      y: { range: (_, low, high) => [0, chart.most ?? ((high ?? 0) * 1.1 || 1)] },
    },
    axes: [
      { ...axis, values: (_, splits, axisIndex, space, step) => splits.map((at) => clock(at, step < 60)) },
      { ...axis, size: 60, ...(chart.steps ? { incrs: chart.steps } : {}) },
    ],
    hooks: { setLegend: [showLast] },
    series: [{ label: "Time", value: (_, at) => (at === null ? "–" : moment(at)) }, ...chart.series.map((label, index) => ({
      label, stroke: strokes[index], width: 2, points: { show: false }, spanGaps: false,
      value: (_, value) => chart.shown(value),
    }))],
  };
}

// The legend has the newest values while the pointer is elsewhere.
function showLast(plot) {
  const last = plot.data[0].length - 1;
  if (plot.cursor.idx === null && last >= 0 && plot.legend.idx !== last) plot.setLegend({ idx: last }, false);
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
    const sized = new ResizeObserver(() => {
      const width = place.current.clientWidth;
      if (width) plot.current?.setSize({ width, height: HEIGHT });
    });
    sized.observe(place.current);
    return () => {
      sized.disconnect();
      removeEventListener("theme", redraw);
      system.removeEventListener("change", redraw);
    };
  }, []);
  const data = [points.map((point) => point.time), ...chart.series.map((_, index) =>
    points.map((point) => chart.of(point)[index] ?? null))];
  const empty = !data.slice(1).flat().some(Boolean);  // a scale beside nothing would be made up
  useEffect(() => {
    plot.current = new globalThis.uPlot(options(chart, place.current.clientWidth || 1), data, place.current);
    return () => plot.current.destroy();
  }, [theme]);
  useEffect(() => {
    plot.current.setData(data);
    showLast(plot.current);
  });
  const last = points.length ? chart.of(points.at(-1)) : [];
  const text = chart.series.map((name, index) => `${name} ${chart.shown(last[index])}`).join(", ");
  return html`<figure class="panel"><figcaption>${chart.title}</figcaption>
    <div role="img" aria-label=${`${chart.title}: ${text}`}>
      <p class="nothing" hidden=${!empty}>${store.span === "hour" ? "Nothing in the last hour."
        : "Nothing in the last five minutes."}</p>
      <div ref=${place} hidden=${empty}></div></div></figure>`;
}

export function Live({ label: fixed }) {
  const [label, setLabel] = useState(fixed ?? "");
  const [span, setSpan] = useState("minutes");
  useEffect(() => {
    follow(label, span);
    if (span !== "hour") return undefined;
    const timer = setInterval(() => { if (!document.hidden) follow(label, span); }, HOUR_REFRESH_MS);
    return () => clearInterval(timer);
  }, [label, span, store.connections]);
  useEffect(() => () => { follow(null); }, []);
  const points = store.charted === label && store.span === span ? store.points : [];
  const row = label ? store.models.get(label) ?? {} : store.totals;
  const measured = [...store.models.values()].filter((each) => "tokens" in each || each.label === label)
    .map((each) => each.label);
  return html`<h2>Live</h2>
    <div class="row"><label>Model<select value=${label} onChange=${(event) => setLabel(event.target.value)}>
      <option value="">all models</option>${measured.map((name) => html`<option value=${name}>${name}</option>`)}
    </select></label>
    <label>Time<select value=${span} onChange=${(event) => setSpan(event.target.value)}>
      <option value="minutes">last five minutes</option><option value="hour">last hour</option></select></label></div>
    <dl class="figures">
      <div><dt>Tokens/s</dt><dd>${number(row.tokens, 1)}</dd></div>
      <div><dt>Running</dt><dd>${number(row.running)}</dd></div><div><dt>Queue</dt><dd>${number(row.queue)}</dd></div>
      <div><dt>TTFT p50</dt><dd>${row.ttft ? `${number(row.ttft[0])} ms` : "–"}</dd></div>
      <div><dt>Token gap p50</dt><dd>${row.itl ? `${number(row.itl[0], 1)} ms` : "–"}</dd></div>
      <div><dt>KV cache</dt><dd>${percent(row.kv)}</dd></div><div><dt>Prefix hits</dt><dd>${percent(row.hits)}</dd></div>
    </dl>
    <p class="note">Times are percentiles of the requests that ended in the last ten seconds, exact to 2 %.${span === "hour"
      ? " A point is ten seconds: rates are their mean, numbers of requests and KV cache their peak." : ""}</p>
    <div class="plots">${CHARTS.map((chart) => html`<${Chart} key=${`${chart.title} ${span} ${label}`} chart=${chart} points=${points} />`)}</div>
    <${Log} />`;
}

const levelOf = (line) => /\b(CRITICAL|ERROR|WARNING)\b/.exec(line.slice(0, 60))?.[1] ?? "";

function Log() {
  const [wanted, setWanted] = useState("");
  const [held, setHeld] = useState(null);  // the lines that are shown while it is paused
  const place = useRef();
  const lines = (held ?? store.log).filter(([, line]) => line.toLowerCase().includes(wanted.toLowerCase()));
  const atEnd = useRef(true);  // a reader who has scrolled up stays there
  const scrolled = ({ target }) => {
    atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < END_PX;
  };
  useEffect(() => {
    if (!held && atEnd.current) place.current.scrollTop = place.current.scrollHeight;
  }, [lines.at(-1)?.[0], held]);
  return html`<h3>Log</h3>
    <div class="row"><label>Lines with<input type="search" onInput=${(event) => setWanted(event.target.value)} /></label>
      <button aria-pressed=${held !== null} onClick=${() => setHeld(held ? null : store.log)}>
        ${held ? "Continue" : "Pause"}</button></div>
    <pre ref=${place} onScroll=${scrolled} class="log panel" role="log" aria-live="off" tabindex="0" aria-label="Log">${lines.map(
      ([count, line]) => html`<div key=${count} class=${levelOf(line)}>${line}</div>`)}</pre>`;
}
