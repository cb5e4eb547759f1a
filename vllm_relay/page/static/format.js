// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en");
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const PLURALS = new Intl.PluralRules("en", { type: "ordinal" });
const ORDINALS = { one: "st", two: "nd", few: "rd", other: "th" };

export const count = (n) => WHOLE.format(n);
export const compact = (n) => (Math.abs(n) < 10_000 ? WHOLE.format(n) : COMPACT.format(n));
export const ordinal = (n) => `${count(n)}${ORDINALS[PLURALS.select(n)]}`;
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
// At most so many letters, whole words.
export function shortened(text, letters) {
  if (text.length <= letters) return text;
  const cut = text.slice(0, letters);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), letters / 2)).trimEnd()}…`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  for (; n >= 1000 && place < units.length - 1; place++) n /= 1000;
  return `${n.toFixed(place && n < 10 ? 1 : 0)} ${units[place]}`;
}

export function duration(seconds) {
  if (seconds < 0.95) return "under 1 s";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// 2:05
export function clock(seconds) {
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
