// Loads a model again, and shows how a new version does that proves itself on live requests before it takes them all.

import { html, useState } from "./htm-preact.js";
import { call } from "./connection.js";
import { Action, statusOf } from "./forms.js";
import { Problem, useRepeated } from "./repeated.js";
import { counted, duration, elapsed, moment, number, percent } from "./text.js";

const WAYS = { all: "all requests, once it is loaded", share: "a share of them first", copies: "copies of a share first" };

// A call about a model without a version says so: others may stand beside it.
export const versionOf = (row) => `?model_version=${encodeURIComponent(row.version ?? "")}`;

export function Again({ row, path, found }) {
  const [way, setWay] = useState("all");
  const run = async (given) => {
    const synchronous = { synchronous: "false" };
    if (way === "all") return statusOf(await call(`models/${path}/reload${versionOf(row)}`, { method: "POST", query: synchronous }));
    const query = { ...synchronous, ...given, share: given.share.replace(/\s*%?\s*$/, "%"), shadow: String(way === "copies") };
    return statusOf(await call(canary(row), { method: "POST", query }));
  };
  return html`<h3>Load it again</h3><div class="panel">
    <p role="status" class=${found.reload?.status === "FAILED" ? "error" : "note"}>${outcome(found)}</p>
    <p class="note">With its files and its configuration as they are now, beside the workers that serve it.</p>
    <${Action} title="Load it again" run=${run} button="Load it again">
      <label>The new version gets<select value=${way} onChange=${(event) => setWay(event.target.value)}>
        ${Object.entries(WAYS).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label>
      ${way !== "all" && html`<label>Share in %<input name="share" inputmode="decimal" size="4" required
          defaultValue=${way === "copies" ? "100" : "5"} key=${way} /></label>
        <label>Judged after requests<input name="requests" inputmode="numeric" size="6" required defaultValue="200" /></label>`}
    <//></div>`;
}

// What became of the last attempt; of a trial its own part says it.
function outcome({ reload, canary: trial }) {
  if (!reload || reload.status === "LOADING" || (trial && reload.status === "FAILED" && trial.status === "TAKEN_BACK")) return "";
  const at = moment(Date.parse(reload.startTime) / 1000);
  return reload.status === "DONE" ? `Loaded again at ${at}.` : `The attempt of ${at} failed: ${reload.reason}`;
}

const canary = (row, action = "") => `models/${encodeURIComponent(row.name)}/canary${action}${versionOf(row)}`;

// `known` is what the model's page has of the trial that goes on, or was the last; undefined if there was none.
export function Trial({ row, path, known }) {
  const [found, error] = useRepeated(`models/${path}`, {}, row.reloading);
  const own = found?.find((each) => (each.version ?? null) === row.version);  // others stand beside a model without one
  const trial = found ? own?.models[0].canary : known;
  if (!trial) return null;
  const decide = (action) => async () => statusOf(await call(canary(row, action), { method: "POST" }));
  return html`<h3>New version</h3>
    <p role="status" class=${trial.status === "TAKEN_BACK" ? "error" : ""}>${said(trial)}</p>
    ${trial.doubt && html`<p class="note">${sentence(trial.doubt)}</p>`}
    <${Problem} error=${error} />
    <div class="scroll" tabindex="0" role="region" aria-label="Both versions"><table>
      <caption>Since the trial began; the latency is that of a token, or of an answer without a text</caption>
      <thead><tr><th scope="col">Version</th><th scope="col" class="number">Requests</th>
        <th scope="col" class="number">Errors</th><th scope="col" class="number less">Refused</th><th scope="col" class="number less">Not counted</th><th scope="col" class="number">Median latency</th>
        <th scope="col" class="number less">Its 95 % interval</th></tr></thead>
      <tbody><${Version} title="Old" figures=${trial.old} /><${Version} title="New" figures=${trial.new} /></tbody>
    </table></div>
    ${trial.copies && html`<p class="note">${comparison(trial.copies)}</p>`}
    ${trial.status === "RUNNING" && html`<div class="panel row">
      <${Action} title="Promote" run=${decide("/promote")} button="Promote" />
      <${Action} title="Take back" run=${decide("/take_back")} button="Take back" danger /></div>`}`;
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function said(trial) {
  const share = `${trial.kind === "shadow" ? "Copies of " : ""}${number(trial.sharePercent, 2)} % of the requests`;
  switch (trial.status) {
    case "LOADING": return `It is loading. Then ${share} go to it.`;
    case "RUNNING": return `${share} go to it. It is judged after ${counted(trial.judgedAfter, "request")}, and taken back if they do not come within ${elapsed(trial.secondsLeft)}.`;
    case "PROMOTED": return `Promoted: ${trial.reason}.`;
    default: return `Taken back: ${trial.reason}.`;
  }
}

function Version({ title, figures }) {
  const { requests, errors, refused, uncounted = 0, medianMs, intervalMs } = figures;
  return html`<tr><th scope="row">${title}</th><td class="number">${number(requests)}</td>
    <td class=${`number ${errors ? "error" : ""}`}>${number(errors)}${errors ? ` (${percent(errors / (requests - refused))})` : ""}</td>
    <td class="number less">${number(refused)}</td>
    <td class="number less">${number(uncounted)}</td>
    <td class="number">${duration(medianMs)}</td>
    <td class="number less">${intervalMs ? intervalMs.map(duration).join(" to ") : "–"}</td></tr>`;
}

function comparison({ answers, changed, refusedByOne, skipped, logProbs, timesAsLong, interval }) {
  const parts = [
    `Of ${counted(answers, "answer")} that were compared ${number(changed)} differ`
      + (refusedByOne ? ` (${number(refusedByOne)} because one version refused the request)` : "")
      + `; ${number(skipped)} were not compared.`,
    timesAsLong === undefined ? ""
      : `A copy takes ${number(timesAsLong, 2)} times as long (${interval.map((each) => number(each, 2)).join(" to ")}).`,
    logProbs ? `Of ${counted(logProbs.compared, "token")} the log-probability shifts by ${number(logProbs.meanShift, 4)} on average.` : "",
  ];
  return parts.filter(Boolean).join(" ");
}
