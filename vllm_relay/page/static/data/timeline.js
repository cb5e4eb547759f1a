// SPDX-License-Identifier: Apache-2.0
// The last minutes of all sources: what is shown is moved back and forth in them.

import { Forest } from "./forest.js";

export const KEPT_S = 600;
const KEPT_RECORDS = 400_000; // nodes in snapshots and deltas, those kept for undoing not counted

export class Timeline {
  forests = new Map(); // of each source, as they are shown
  entries = []; // {t, source, event, data, undo, records, summary}
  shown = 0; // how many entries are applied
  following = true; // the newest is what is shown
  #records = 0;
  #stats = new Map(); // of each source, the newest

  // kept_s: Infinity where a recording is held, which ends by itself
  constructor(kept_s = KEPT_S, keptRecords = kept_s === Infinity ? Infinity : KEPT_RECORDS) {
    this.kept_s = kept_s;
    this.keptRecords = keptRecords;
  }

  get records() {
    return this.#records;
  }

  get newest_s() {
    return this.entries.length ? this.entries[this.entries.length - 1].t : 0;
  }

  get oldest_s() {
    return this.entries.length ? this.entries[0].t : 0;
  }

  get shown_s() {
    return this.entries.length ? this.entries[Math.max(this.shown - 1, 0)].t : 0;
  }

  // Sources that the server no longer has are gone; new ones come in its order.
  setSources(t, sources) {
    const known = new Set(sources.map((source) => source.id));
    for (const id of this.forests.keys())
      if (!known.has(id) && this.#stats.has(id)) this.push(t, "gone", { source: id });
    const forests = new Map();
    for (const { id, name } of sources) {
      forests.set(id, this.forests.get(id) ?? new Forest(id, name));
      forests.get(id).name = name;
    }
    for (const [id, forest] of this.forests) if (!forests.has(id)) forests.set(id, forest);
    this.forests = forests;
  }

  // Takes an event of the feed that happened at t, in seconds.
  push(t, event, data) {
    if (!this.forests.has(data.source))
      this.forests.set(data.source, new Forest(data.source, `source ${data.source}`));
    if (event === "gone") this.#stats.delete(data.source);
    else this.#stats.set(data.source, data.stats);
    const lists = [data.nodes, data.added, data.changed, data.removed];
    const records = lists.reduce((sum, list) => sum + (list?.length ?? 0), 1);
    const summary = summarize(this.#stats.values());
    t = Math.max(t, this.newest_s);
    this.entries.push({ t, source: data.source, event, data, undo: null, records, summary });
    this.#records += records;
    if (this.following) {
      this.#show(this.entries.length);
      this.forests.get(data.source).layOut(); // refuses what is no forest
    }
    this.#forget();
  }

  // Shows what was there at t.
  seek(t) {
    let low = 0;
    let high = this.entries.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.entries[middle].t <= t) low = middle + 1;
      else high = middle;
    }
    this.#show(Math.max(low, Math.min(1, this.entries.length)));
  }

  step(entries) {
    const place = Math.max(this.shown + entries, 1);
    this.#show(Math.min(place, this.entries.length));
  }

  pause() {
    this.following = false;
  }

  follow() {
    this.following = true;
    this.#show(this.entries.length);
  }

  #show(wanted) {
    while (this.shown < wanted) {
      const entry = this.entries[this.shown];
      const undo = this.#forestOf(entry).apply(entry);
      entry.undo = undo;
      this.shown++;
    }
    while (this.shown > wanted) {
      const entry = this.entries[--this.shown];
      this.#forestOf(entry).apply(entry.undo);
      entry.undo = null;
    }
  }

  #forestOf(entry) {
    return this.forests.get(entry.source);
  }

  // What is shown while it is forgotten moves on to the oldest that is kept.
  #forget() {
    const oldest_s = this.newest_s - this.kept_s;
    let gone = 0;
    let records = this.#records;
    while (gone < this.entries.length - 1) {
      const entry = this.entries[gone];
      if (entry.t >= oldest_s && records <= this.keptRecords) break;
      records -= entry.records;
      gone++;
    }
    if (!gone) return;
    if (this.shown < gone + 1) this.#show(gone + 1);
    this.entries.splice(0, gone);
    this.shown -= gone;
    this.#records = records;
  }
}

// The figures of all sources together.
export function summarize(all) {
  const sum = { memory: {}, running: 0, waiting: {}, read: 0, attended: 0, hits: 0, queries: 0 };
  sum.longContextBytes = null;
  for (const stats of all) {
    if (!stats) continue;
    for (const [kind, blocks] of Object.entries(stats.memory_blocks))
      sum.memory[kind] = (sum.memory[kind] ?? 0) + blocks;
    for (const [reason, requests] of Object.entries(stats.waiting))
      sum.waiting[reason] = (sum.waiting[reason] ?? 0) + requests;
    sum.running += stats.running;
    sum.read += stats.kv_tokens_read;
    sum.attended += stats.kv_tokens_logical;
    if (stats.long_context_bytes !== null)
      sum.longContextBytes = (sum.longContextBytes ?? 0) + stats.long_context_bytes;
    sum.hits += stats.prefix_hit_tokens;
    sum.queries += stats.prefix_query_tokens;
  }
  return sum;
}
