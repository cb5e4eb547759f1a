// SPDX-License-Identifier: Apache-2.0
// What the page asks the server to do: pin, unpin, evict. Each gives back what to tell the user.

import { ask, reasonOf } from "./feed.js";
import { plural } from "../format.js";

async function answerOf(path, method, body) {
  const options = { method, body: body && JSON.stringify(body) };
  const response = await ask(path, options);
  if (!response.ok) throw new Error(await reasonOf(response));
  return response.status === 204 ? null : response.json();
}

export class Commands {
  pins = []; // as GET /relay/pins has them
  #reading = Promise.resolve();
  #next = null; // not begun yet
  #made = new Map(); // ids of the pins that were made here, of "source/node"

  // Those who ask meanwhile get what is read after it.
  readPins() {
    this.#next ??= this.#reading.then(async () => {
      this.#next = null;
      this.pins = (await answerOf("pins", "GET")).pins;
    });
    this.#reading = this.#next.catch(() => {});
    return this.#next;
  }

  pinOf({ source, id }) {
    const pin = this.#made.get(`${source}/${id}`);
    return this.pins.some((each) => each.id === pin) ? pin : null;
  }

  async pin({ source, id }) {
    const pin = await answerOf("pins", "POST", { source, node: id });
    this.#made.set(`${source}/${id}`, pin.id);
    this.pins.push(pin);
    return `Pinned as ${pin.id}: ${plural(pin.blocks, "block")} stay.`;
  }

  async unpin(pin) {
    await answerOf(`pins/${encodeURIComponent(pin)}`, "DELETE");
    this.pins = this.pins.filter((each) => each.id !== pin);
    return `Unpinned ${pin}.`;
  }

  async evict({ source, id }) {
    const { evicted_blocks } = await answerOf("forest/evict", "POST", { source, node: id });
    return `Evicted ${plural(evicted_blocks, "block")}.`;
  }
}
