// SPDX-License-Identifier: Apache-2.0
// Which moment is shown: of the feed, now or one of the last minutes; of a recording, any.

export class Playback {
  #running = null; // of a recording: {at_s, since_ms} while it runs

  // onChange() when another moment is shown, onError(error) when it cannot be
  constructor(timeline, { recorded, onChange, onError }) {
    this.timeline = timeline;
    this.recorded = recorded;
    this.onChange = onChange;
    this.onError = onError;
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
    this.#move(() => this.timeline.seek(this.shown_s));
    if (this.atEnd) this.#running = null;
    return !this.atEnd;
  }

  #move(move) {
    try {
      move();
    } catch (error) {
      this.#running = null;
      this.onError(error);
    }
    this.onChange();
  }

  play(at_s) {
    this.#running = { at_s, since_ms: performance.now() };
    this.#move(() => this.timeline.seek(at_s));
  }

  toggle() {
    const { timeline } = this;
    if (this.#running) this.#running = null;
    else if (this.recorded) return this.play(this.atEnd ? timeline.oldest_s : timeline.shown_s);
    else if (!timeline.following) return this.goLive();
    else timeline.pause();
    this.onChange();
  }

  seek(t) {
    if (this.#running) return this.play(t);
    this.timeline.pause();
    this.#move(() => this.timeline.seek(t));
  }

  step(entries) {
    this.#running = null;
    this.timeline.pause();
    this.#move(() => this.timeline.step(entries));
  }

  goLive() {
    if (this.recorded) return this.seek(this.timeline.newest_s);
    this.#move(() => this.timeline.follow());
  }
}
