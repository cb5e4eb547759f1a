// SPDX-License-Identifier: Apache-2.0
// What all sources did and hold, in numbers.

import { byId, element, resized, say, set } from "../dom.js";
import { bytes, compact, count, percent, plural } from "../format.js";

// what the feed calls the reasons for which requests wait
const REASONS = { prefix: "for a shared prefix", capacity: "for room", blocked: "blocked" };
const KINDS = ["running", "pinned", "modules", "cached", "free"];

// of what summarize() of timeline.js found
export function showFigures(sum) {
  const { read, attended, memory } = sum;
  say(byId("saved"), attended ? percent(1 - read / attended) : "–");
  say(byId("read"), compact(read));
  say(byId("attended"), compact(attended));
  set(byId("read"), "title", count(read));
  set(byId("attended"), "title", count(attended));
  byId("read-bar").style.width = `${attended ? (100 * read) / attended : 0}%`;
  const { hits, queries } = sum;
  say(byId("hit-rate"), queries ? percent(hits / queries) : "–");
  byId("hit-bar").style.width = `${queries ? (100 * hits) / queries : 0}%`;

  const waiting = Object.entries(sum.waiting).filter(([, requests]) => requests);
  const waiters = waiting.reduce((all, [, requests]) => all + requests, 0);
  say(byId("running"), count(sum.running));
  say(byId("waiting"), count(waiters));
  const reasons = waiting
    .sort(([, a], [, b]) => b - a)
    .map(([why, n]) => `${count(n)} ${REASONS[why] ?? why}`);
  say(byId("reasons"), reasons.join(" · ") || "nobody waits");

  const { total = 0, free = 0 } = memory;
  say(byId("used"), total ? percent(1 - free / total) : "–");
  say(byId("total"), `of ${plural(total, "block")} in use or cached`);
  showMemory(byId("memory"), memory);
  const kinds = KINDS.filter((kind) => memory[kind]).map((kind) => [
    kind,
    `${compact(memory[kind])} ${kind}`,
  ]);
  if (sum.longContextBytes !== null)
    kinds.push([null, `${bytes(sum.longContextBytes)} of long contexts in host memory`]);
  resized(byId("kinds"), kinds.length, makeKind).forEach((item, place) => {
    const [kind, text] = kinds[place];
    set(item.firstChild, "hidden", kind === null);
    item.firstChild.dataset.memory = kind;
    say(item.lastChild, text);
  });
}

export function showMemory(bar, memory) {
  const total = Math.max(memory.total ?? 0, 1);
  resized(bar, KINDS.length, () => element("i")).forEach((part, place) => {
    part.dataset.memory = KINDS[place];
    part.style.width = `${(100 * (memory[KINDS[place]] ?? 0)) / total}%`;
  });
}

const makeKind = () => element("li", {}, element("i"), element("span"));
