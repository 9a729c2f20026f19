// The requests that ended last, and one of them: what it waited for, as bars.

import { html, useState } from "./htm-preact.js";
import { store } from "./connection.js";
import { Problem, useRepeated } from "./repeated.js";
import { clock, counted, duration, moment, number } from "./text.js";

const STAGES = {
  reading: ["Reading", "its head and body arrived, and its model was found"],
  queue: ["Queue", "it waited for room in a worker"],
  prefill: ["Prefill", "the prompt was computed, up to the first token"],
  decode: ["Decode", "the other tokens were computed"],
  generation: ["Generation", "the engine returned the whole output at once"],
  model: ["Model", "the worker had it, up to the first byte of its answer"],
  sending: ["Sending", "the rest of the answer went to the client"],
};
const STATUS_FAILED = 400;

const filters = { model: "", id: "", failed: false, page: 0 };  // they stay while a request is shown

export function Requests() {
  const [given, setGiven] = useState(filters);
  const change = (more) => { Object.assign(filters, { page: 0, ...more }); setGiven({ ...filters }); };
  const { model, id, failed, page } = given;
  const query = { model, id, page: String(page), ...(failed ? { failed: "yes" } : {}) };
  const [found, error] = useRepeated("console/requests", query, true);
  const labels = [...store.models.keys()];
  const pages = found?.pages ?? 1;
  return html`<h2>Requests</h2>
    <div class="row">
      <label>Model<select value=${model} onChange=${(event) => change({ model: event.target.value })}>
        <option value="">all models</option>
        ${model && !labels.includes(model) && html`<option value=${model}>${model}</option>`}
        ${labels.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      <label>Id has<input type="search" value=${id} onInput=${(event) => change({ id: event.target.value })} /></label>
      <label class="check"><input type="checkbox" checked=${failed}
        onChange=${(event) => change({ failed: event.target.checked })} />Without success only</label>
    </div>
    <${Problem} error=${error} />
    ${found && html`<div class="scroll" tabindex="0" role="region" aria-label="Requests that ended"><table>
      <caption>${`${counted(found.matching, "request")}${pages > 1 ? `, page ${found.page + 1} of ${pages}` : ""};`} the server has the last ${
        number(found.kept)} of ${number(found.ended)} that ended</caption>
      <thead><tr><th scope="col">Request</th><th scope="col" class="less">Arrived</th><th scope="col">Model</th>
        <th scope="col" class="number">Status</th><th scope="col" class="number">Time</th>
        <th scope="col" class="number less">Queue</th><th scope="col" class="number less">First token</th>
        <th scope="col" class="number less">Prompt</th><th scope="col" class="number less">Output</th></tr></thead>
      <tbody>${found.rows.map((row) => html`<tr key=${row.number} class=${row.code >= STATUS_FAILED ? "FAILED" : ""}>
        <th scope="row"><a href=${`#request/${row.number}`} title=${row.id} class="name">${row.number}</a></th>
        <td class="less">${clock(row.time)}</td><td><span class="name">${row.model || "–"}</span></td>
        <td class=${`number ${row.code >= STATUS_FAILED ? "error" : ""}`}>${row.code}</td>
        <td class="number">${duration(row.duration)}</td><td class="number less">${duration(row.queue)}</td>
        <td class="number less">${duration(row.ttft)}</td><td class="number less">${number(row.prompt_tokens)}</td>
        <td class="number less">${number(row.output_tokens)}</td></tr>`)}</tbody></table></div>
      ${pages > 1 && html`<nav class="row" aria-label="Pages">
        <button disabled=${found.page === 0} onClick=${() => change({ page: found.page - 1 })}>Previous</button>
        <span>Page ${found.page + 1} of ${pages}</span>
        <button disabled=${found.page >= pages - 1} onClick=${() => change({ page: found.page + 1 })}>Next</button></nav>`}`}`;
}

export function RequestPage({ label }) {
  const [found, error] = useRepeated(`console/requests/${encodeURIComponent(label)}`, {}, false);
  return html`<p><a href="#requests">All requests</a></p><h2>Request ${label}</h2>
    <${Problem} error=${error} />${found && html`<${Details} found=${found} />`}`;
}

function Details({ found }) {
  const facts = [
    ["Id", found.id], ["Model", found.model || "–"], ["Adapter", found.adapter], ["Route", found.route],
    ["Arrived", moment(found.time)], ["Client", found.client], ["Trace", found.trace], ["Ended by", found.finish],
    ["Error", found.error],
  ].filter(([, text]) => text);
  const figures = [
    ["Status", found.code], ["Time", duration(found.duration)], ["First token", duration(found.ttft)],
    ["Between tokens", duration(found.token_gap)], ["Prompt tokens", number(found.prompt_tokens)],
    ["Of them cached", number(found.cached_tokens)], ["Output tokens", number(found.output_tokens)],
    ...(found.sequences > 1 ? [["Sequences", number(found.sequences)]] : []),
  ];
  return html`<dl class="figures">${figures.map(([name, text]) =>
      html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    <dl class="facts">${facts.map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    <h3>Where its time went</h3>
    <table class="stages"><thead><tr><th scope="col">Stage</th><th scope="col" class="number">Time</th>
        <th scope="col" class="number less">Share</th><th scope="col">From arrival to end</th></tr></thead>
      <tbody>${found.stages.map((stage) => html`<${Stage} key=${stage[0]} stage=${stage} whole=${found.duration} />`)}</tbody>
    </table>
    ${found.attempts.length > 0 && html`<h3>Workers that lost it</h3>
      <ul>${found.attempts.map(([sent, lost]) => html`<li>From ${duration(sent)} to ${duration(lost)} after its arrival</li>`)}</ul>`}
    ${found.prompt !== null && html`<h3>Body</h3><p class="note">Its first 2 KiB, because log_prompts has the server log it.</p>
      <pre class="panel body" tabindex="0" aria-label="Body">${found.prompt}</pre>`}`;
}

function Stage({ stage: [name, began, length], whole }) {
  const [title, meaning] = STAGES[name] ?? [name, ""];
  const percent = (part) => (whole > 0 ? Math.min(100, 100 * part / whole) : 0);
  return html`<tr><th scope="row">${title}<p class="note">${meaning}</p></th>
    <td class="number">${duration(length)}</td><td class="number less">${number(percent(length), 1)} %</td>
    <td class="track"><div class=${`bar ${name}`} role="img"
      aria-label=${`${title}: from ${duration(began)} to ${duration(began + length)}`}
      style=${{ marginLeft: `${percent(began)}%`, width: `${percent(length)}%` }}></div></td></tr>`;
}
