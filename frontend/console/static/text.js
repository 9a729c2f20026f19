// How numbers, sizes, counts and moments read on the page.

const GIB = 2 ** 30;
const MIB = 2 ** 20;

const isMissing = (value) => value === null || value === undefined;

export const number = (value, digits = 0) =>
  isMissing(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
export const percent = (share) => (isMissing(share) ? "–" : `${number(share * 100, 1)} %`);
export const gib = (bytes) => (isMissing(bytes) ? "unknown" : `${number(bytes / GIB, 2)} GiB`);
export const size = (bytes) => (bytes >= GIB ? gib(bytes) : bytes >= MIB / 10 || !bytes ? `${number(bytes / MIB, 1)} MiB`
  : `${number(bytes / 1024, 1)} KiB`);
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

const two = (part) => String(part).padStart(2, "0");

// The time of day of a moment in seconds, where the browser is; 24 hours, as in the log.
export function clock(seconds, withSeconds = true) {
  const date = new Date(seconds * 1000);
  const parts = [date.getHours(), date.getMinutes(), ...(withSeconds ? [date.getSeconds()] : [])];
  return parts.map(two).join(":");
}

// A moment in seconds as ISO 8601 has it, where the browser is.
export function moment(seconds) {
  const date = new Date(seconds * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(seconds)}`;
}

export function elapsed(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 120 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export const duration = (ms) => (isMissing(ms) ? "–"
  : ms < 10 ? `${number(ms, 2)} ms` : ms < 10000 ? `${number(ms)} ms` : `${number(ms / 1000, 1)} s`);
