// The list of models, and one model: its workers, values and memory, and what the management API can do with it.

import { html, useEffect, useReducer, useRef, useState } from "./htm-preact.js";
import { announce, call, store } from "./connection.js";
import { Action, statusOf } from "./forms.js";
import { Again, Trial, versionOf } from "./trial.js";
import { counted, elapsed, gib, moment, number, percent, size } from "./text.js";

const PAGE = 50;
const REFRESH_MS = 5000;
const STATUSES = { Healthy: "Healthy", PENDING: "Loading", Unhealthy: "Unhealthy", FAILED: "Failed" };

export const statusName = (status) => STATUSES[status] ?? status;
const link = (label) => `#model/${encodeURIComponent(label)}`;

// --- the list ---

const filters = { wanted: "", status: "", page: 0 };  // they stay while a model is shown

export function Models() {
  const [, update] = useReducer((count) => count + 1, 0);
  const place = useRef();
  const { wanted, status, page } = filters;
  const change = (more) => { Object.assign(filters, more); update(); };
  const turn = (to) => {
    change({ page: to });
    place.current.scrollIntoView({ block: "start", behavior: "instant" });  // the button is below the last row
  };
  const matching = [...store.models.values()].filter((row) =>
    row.label.toLowerCase().includes(wanted.toLowerCase()) && (!status || row.status === status));
  const pages = Math.max(1, Math.ceil(matching.length / PAGE));
  const here = Math.min(page, pages - 1);
  const shown = matching.slice(here * PAGE, (here + 1) * PAGE);
  const filter = (name) => (event) => change({ [name]: event.target.value, page: 0 });
  return html`<h2>Models</h2>
    <div class="row">
      <label>Find<input type="search" value=${wanted} onInput=${filter("wanted")} /></label>
      <label>State<select value=${status} onChange=${filter("status")}>
        <option value="">all</option>
        ${Object.entries(STATUSES).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label>
    </div>
    <div class="scroll" ref=${place} tabindex="0" role="region" aria-label="Models"><table>
      <caption aria-live="polite">${counted(matching.length, "model")}${pages > 1 ? `, page ${here + 1} of ${pages}` : ""}</caption>
      <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col" class="number less">Workers</th>
        <th scope="col" class="number less">Running</th><th scope="col" class="number less">Queue</th>
        <th scope="col" class="number">Tokens/s</th><th scope="col" class="number less">TTFT p50</th>
        <th scope="col" class="number less">KV cache</th><th scope="col" class="less">Handler</th></tr></thead>
      <tbody>${shown.map((row) => html`<tr key=${row.label} class=${row.status}>
        <th scope="row"><a class="name" title=${row.label} href=${link(row.label)}>${row.label}</a>
          ${row.reason && html`<p class="error reason">${row.reason}</p>`}</th>
        <td><${State} row=${row} /><${Loading} row=${row} /></td>
        <td class="number less">${row.workers ? row.workers.ready : "–"}</td>
        <td class="number less">${number(row.running)}</td><td class="number less">${number(row.queue)}</td>
        <td class="number">${number(row.tokens, 1)}</td>
        <td class="number less">${row.ttft ? `${number(row.ttft[0])} ms` : "–"}</td>
        <td class="number less">${percent(row.kv)}</td><td class="less">${row.handler}</td></tr>`)}</tbody>
    </table></div>
    ${pages > 1 && html`<nav class="row" aria-label="Pages">
      <button disabled=${!here} onClick=${() => turn(here - 1)}>Previous</button>
      <span>Page ${here + 1} of ${pages}</span>
      <button disabled=${here === pages - 1} onClick=${() => turn(here + 1)}>Next</button></nav>`}
    <${Register} />`;
}

function State({ row }) {
  return html`<span class=${`state ${row.status}`}>${statusName(row.status)}${row.trying ? ", a new version is tried" : row.reloading ? ", reloading" : ""}</span>`;
}

// How far the loading of a model is.
export function Loading({ row }) {
  if (!row.loading) return null;
  const { what, done, total, since, rate, left, unit } = row.loading;
  const inBytes = unit === "bytes";
  const amount = (count) => (inBytes ? size(count) : number(count));
  const parts = [
    total ? `${amount(done)} of ${amount(total)}${inBytes ? "" : ` ${unit}`} (${number(Math.floor(100 * done / total))} %)`
      : done ? `${amount(done)}${inBytes ? "" : ` ${unit}`}` : "",
    rate && done < (total ?? Infinity) ? `${inBytes ? size(rate) : number(rate, 1)}/s` : "",
    left ? `${elapsed(left)} left` : "",
  ].filter(Boolean).join(", ");
  return html`<div class="note loading">${what}${parts && `: ${parts}`}; ${elapsed(store.time - since)} so far
    ${total ? html`<progress aria-label=${`Loading ${row.label}`} value=${done} max=${total}></progress>` : ""}</div>`;
}

// What became of the last registration or unregistration. It stays until the next one begins.
export function Outcome() {
  const { label, text } = store.outcome ?? {};
  const row = label === undefined ? undefined : store.models.get(label);
  const known = useRef(null);  // the last outcome whose model was in the list
  if (row) known.current = store.outcome;
  const gone = !row && store.outcome !== null && known.current === store.outcome;
  const failed = row?.status === "FAILED";
  const said = text ?? (label === undefined || failed ? "" : gone ? `${label} is no longer registered.`
    : row?.status === "Healthy" ? `${label} can serve.` : `${label} is loading.`);
  return html`<div class=${`outcome ${failed ? "FAILED" : ""}`} hidden=${!store.outcome}>
    <p class="done" role="status">${said}</p>
    ${failed && html`<p class="error" role="alert">${label} could not be loaded: ${row.reason}</p>`}
    ${row && !failed && html`<${Loading} row=${row} />`}
    <button onClick=${() => announce(null)}>Dismiss</button></div>`;
}


// The label of the model that a registration has begun to load, by the address that the server gives it.
const labelOf = (response) =>
  response.headers.get("location").split("/").slice(1).map(decodeURIComponent).join(":");

// The options of a text with NAME=VALUE in each line, as in serving.properties.
function optionsOf(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter((line) => line && !line.startsWith("#"));
  return Object.fromEntries(lines.map((line) => {
    const [name, ...value] = line.split("=");
    if (!name.trim() || !value.length) throw new Error(`"${line}" is no option; it takes NAME=VALUE`);
    return [name.trim(), value.join("=").trim()];
  }));
}

function Register() {
  const run = async ({ settings, ...given }) => {
    announce(null);
    const more = optionsOf(settings);
    const filled = Object.fromEntries(Object.entries(given).filter(([, text]) => text !== ""));
    const twice = Object.keys(more).find((name) => Object.hasOwn(filled, name));
    if (twice) throw new Error(`${twice} stands in the options and in a field of its own; give it once`);
    const body = { ...filled, ...more, synchronous: false };
    announce({ label: labelOf(await call("models", { method: "POST", body })) });
  };
  return html`<details class="panel"><summary>Register a model</summary>
    <${Action} title="Register a model" run=${run} button="Register">
      <label class="wide">URL: a directory, s3://bucket/prefix, or owner/name<input name="url" required size="40" /></label>
      <label>Name<input name="model_name" /></label><label>Version<input name="model_version" size="6" /></label>
      <label>Minimum workers<input name="min_worker" inputmode="numeric" size="4" /></label>
      <label>Maximum workers<input name="max_worker" inputmode="numeric" size="4" /></label>
      <label class="wide">Options, one in each line (option.dtype=bf16)
        <textarea name="settings" rows="3" cols="40" spellcheck="false"></textarea></label>
    <//></details>`;
}

// --- one model ---

export function Model({ label }) {
  const row = store.models.get(label);
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const [turn, setTurn] = useState(0);
  const refresh = () => setTurn((count) => count + 1);
  const path = row && [row.name, row.version].filter((part) => part !== null).map(encodeURIComponent).join("/");
  useEffect(() => {
    if (!path) return;
    const controller = new AbortController();
    let timer = 0;
    call(`console/models/${path}`, { signal: controller.signal })
      .then((response) => response.json())
      .then((body) => { setFound(body); setError(""); })
      .catch((raised) => { if (!controller.signal.aborted) setError(raised.message); })
      .finally(() => { if (!controller.signal.aborted) timer = setTimeout(refresh, REFRESH_MS); });
    return () => { controller.abort(); clearTimeout(timer); };
  }, [path, turn, row?.status, row?.reloading]);
  if (!row) {
    return html`<p><a href="#models">All models</a></p><h2>No such model</h2><p>There is no model ${label}.</p>`;
  }
  return html`<p><a href="#models">All models</a></p>
    <h2>${label} <${State} row=${row} /></h2>
    <${Loading} row=${row} />
    ${row.reason && html`<p class="error">${row.reason}</p>`}
    ${error && store.state === "open" && html`<p class="error" role="alert">${error}</p>`}
    <dl class="figures">
      <div><dt>Handler</dt><dd class="text">${row.handler || "–"}</dd></div>
      <div><dt>Running</dt><dd>${number(row.running)}</dd></div><div><dt>Queue</dt><dd>${number(row.queue)}</dd></div>
      <div><dt>Tokens/s</dt><dd>${number(row.tokens, 1)}</dd></div><div><dt>KV cache</dt><dd>${percent(row.kv)}</dd></div>
    </dl>
    ${found && html`<p class="note">${found.modelUrl}</p>
      ${(found.warnings ?? []).map((warning) => html`<p class="note">Warning: ${warning}</p>`)}
      ${(row.reloading || found.canary) && html`<${Trial} row=${row} path=${path} known=${found.canary} />`}
      <${Workers} found=${found} />
      ${found.memory && html`<${Memory} found=${found} />`}
      <${Again} row=${row} path=${path} found=${found} />
      <${Manage} row=${row} path=${path} refresh=${refresh} />
      <${Adapters} row=${row} found=${found} refresh=${refresh} />
      ${found.options && html`<${Configuration} options=${found.options} />`}`}`;
}

function Workers({ found }) {
  const workers = found.workerGroups.flatMap((group) => group.workers.map((worker) => ({ ...worker, ...group.device })));
  const bounds = found.workerGroups.map((group) => `${group.minWorkers} to ${group.maxWorkers}`).join(", ");
  return html`<h3>Workers</h3><div class="scroll" tabindex="0" role="region" aria-label="Workers"><table>
    <caption>Wanted: ${bounds || "not known yet"}</caption>
    <thead><tr><th scope="col">Worker</th><th scope="col">State</th><th scope="col">Device</th>
      <th scope="col" class="number">Process</th><th scope="col" class="number">In flight</th>
      <th scope="col">Ready since</th></tr></thead>
    <tbody>${workers.map((worker) => html`<tr><th scope="row">${worker.id}</th><td>${worker.status}</td>
      <td>${worker.deviceType}${worker.deviceId >= 0 ? ` ${worker.deviceId}` : ""}</td>
      <td class="number">${worker.pid}</td><td class="number">${worker.requestsInFlight}</td>
      <td class="moment">${moment(Date.parse(worker.startTime) / 1000)}</td></tr>`)}</tbody></table></div>`;
}

function Memory({ found }) {
  const { memory, resident } = found;
  const figures = [
    ["Weights, estimated", gib(memory.weights_bytes)],
    ["KV cache that is needed at most", memory.kv_tokens === null ? "unknown" : `${number(memory.kv_tokens)} tokens`],
    ["KV cache that the worker reserves", memory.kv_reserved_bytes === null ? "on demand" : gib(memory.kv_reserved_bytes)],
    ["KV cache that fits", memory.kv_tokens_that_fit === null ? "unknown" : `${number(memory.kv_tokens_that_fit)} tokens`],
    ["Free now", gib(memory.available_bytes)],
    ...Object.entries(resident).map(([worker, bytes]) => [`In RAM: ${worker}`, gib(bytes)]),
  ];
  return html`<h3>Memory against the estimate</h3>
    <p class="note">The estimate is that of one worker${memory.devices > 1
      ? `, on each of its ${memory.devices} devices` : ""} (${memory.device_kind}).</p>
    <dl class="figures">${figures.map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>`;
}

function Manage({ row, path, refresh }) {
  const dialog = useRef();
  const scale = async (given) => {
    await call(`models/${path}${versionOf(row)}`, { method: "PUT", query: given });
    refresh();
    return `${row.label} is scaled.`;
  };
  const unregister = async () => {
    announce(null);
    await call(`models/${path}${versionOf(row)}`, { method: "DELETE" });
    dialog.current?.close();
    location.hash = "models";
    announce({ text: `${row.label} is unregistered.` });
  };
  return html`<h3>Scale and unregister</h3><div class="panel">
    <${Action} title="Scale" run=${scale} button="Scale">
      <label>Minimum workers<input name="min_worker" inputmode="numeric" size="4" /></label>
      <label>Maximum workers<input name="max_worker" inputmode="numeric" size="4" /></label>
    <//>
    <button class="danger" onClick=${() => dialog.current.showModal()}>Unregister</button>
    <dialog ref=${dialog} aria-labelledby="unregister-title">
      <h2 id="unregister-title">Unregister ${row.label}?</h2>
      <p>Its requests finish first. Then its workers end.</p>
      <${Action} title="Unregister" run=${unregister} button="Unregister" danger>
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button><//>
    </dialog></div>`;
}

function Adapters({ row, found, refresh }) {
  const enabled = (found.options ?? []).find((option) => option.key === "option.enable_lora")?.value;
  if (!enabled) return null;
  const path = `models/${encodeURIComponent(row.name)}/adapters`;
  const register = async (given) => {
    const response = await call(`${path}${versionOf(row)}`, { method: "POST", body: given });
    refresh();
    return statusOf(response);
  };
  const unregister = (name) => async () => {
    const response = await call(`${path}/${encodeURIComponent(name)}${versionOf(row)}`, { method: "DELETE" });
    refresh();
    return statusOf(response);
  };
  return html`<h3>Adapters</h3><div class="panel">
    ${found.adapters.length ? "" : html`<p>None is registered.</p>`}
    ${found.adapters.map((name) => html`<${Action} key=${name} title=${`Unregister adapter ${name}`}
      run=${unregister(name)} button=${`Unregister ${name}`} danger><code>${name}</code><//>`)}
    <${Action} title="Register an adapter" run=${register} button="Register adapter">
      <label>Name<input name="name" required /></label>
      <label>Source<input name="src" required size="40" /></label><//></div>`;
}

const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function Configuration({ options }) {
  const [wanted, setWanted] = useState("");
  const [all, setAll] = useState(false);
  const shown = options.filter((option) => (all || option.layer !== "default") && option.key.toLowerCase().includes(wanted.toLowerCase()));
  return html`<h3>Configuration</h3>
    <div class="row"><label>Find a key<input type="search" onInput=${(event) => setWanted(event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} />
        Defaults, too</label></div>
    <table class="stacked" role="table"><caption>${shown.length} of ${counted(options.length, "key")}</caption>
      <thead role="rowgroup"><tr role="row">${["Key", "Value", "Layer", "Meaning"].map((title) =>
        html`<th scope="col" role="columnheader">${title}</th>`)}</tr></thead>
      <tbody role="rowgroup">${shown.map((option) => html`<tr key=${option.key} role="row">
        <th scope="row" role="rowheader"><code>${option.key}</code></th>
        <td role="cell"><code>${written(option.value)}</code></td>
        <td role="cell">${option.layer}${option.place && html`<br /><span class="note">${option.place}</span>`}</td>
        <td role="cell" class="note">${option.meaning}${option.note && html` <em>(${option.note})</em>`}</td></tr>`)}</tbody>
    </table>`;
}
