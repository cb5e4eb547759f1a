// SPDX-License-Identifier: Apache-2.0
// Which moment is shown: of the feed, now or one of the last minutes; of a recording, any.

export class Playback {
  #running = null; // of a recording: {at_s, since_ms} while it runs

  // onChange() when another moment is shown
  constructor(timeline, { recorded, onChange }) {
    this.timeline = timeline;
    this.recorded = recorded;
    this.onChange = onChange;
    if (recorded) timeline.pause();
  }

  get atEnd() {
    return this.timeline.shown === this.timeline.entries.length;
  }

  // nothing happens by itself
  get stands() {
    return this.recorded ? !this.#running : !this.timeline.following;
  }

  get shown_s() {
    if (!this.#running) return this.timeline.shown_s;
    return this.#running.at_s + (performance.now() - this.#running.since_ms) / 1000;
  }

  // Whether more is to come.
  advance() {
    if (!this.#running) return false;
    this.timeline.seek(this.shown_s);
    if (this.atEnd) this.#running = null;
    return !this.atEnd;
  }

  play(at_s) {
    this.#running = { at_s, since_ms: performance.now() };
    this.timeline.seek(at_s);
    this.onChange();
  }

  toggle() {
    const { timeline } = this;
    if (this.#running) this.#running = null;
    else if (this.recorded) return this.play(this.atEnd ? timeline.oldest_s : timeline.shown_s);
    else if (timeline.following) timeline.pause();
    else timeline.follow();
    this.onChange();
  }

  seek(t) {
    if (this.#running) return this.play(t);
    this.timeline.pause();
    this.timeline.seek(t);
    this.onChange();
  }

  step(entries) {
    this.#running = null;
    this.timeline.pause();
    this.timeline.step(entries);
    this.onChange();
  }

  goLive() {
    if (this.recorded) return this.seek(this.timeline.newest_s);
    this.timeline.follow();
    this.onChange();
  }
}
