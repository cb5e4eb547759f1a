// SPDX-License-Identifier: Apache-2.0
// One source's prefix forest: events are applied to it, and each gives back what undoes it.

// What the feed says does not fit what it said before; only a new snapshot helps.
export class FeedError extends Error {}

const LAID_OUT = new Set(["parent", "tokens"]);

class Node {
  constructor(fields) {
    Object.assign(this, fields);
    this.above = null;
    this.children = []; // in the order of their ids
    // set by layOut: where it begins, tokens of it and all below it, rows from the top and below
    this.start = this.width = this.depth = this.height = 0;
  }

  fields() {
    const { above, children, start, width, depth, height, ...fields } = this;
    return fields;
  }

  // from the root down to this node
  path() {
    const path = [];
    for (let node = this; node; node = node.above) path.push(node);
    return path.reverse();
  }

  prefixTokens() {
    return this.path().reduce((sum, node) => sum + node.tokens, 0);
  }
}

export class Forest {
  nodes = new Map();
  roots = [];
  stats = null;
  time_s = 0;
  gone_s = null; // since when it is gone, as entries of the timeline say it
  structure = 0; // another number whenever layOut would find something else
  #laidOut = -1;
  #total = 0;
  #rows = 0;

  constructor(id, name) {
    this.id = id;
    this.name = name;
  }

  // Applies {event: snapshot | delta | gone | restore, data, t}; what is returned undoes it.
  apply({ event, data, t }) {
    if (event === "delta") return this.#applyDelta(data);
    const { nodes, roots, stats, time_s, gone_s } = this;
    const before = { nodes, roots, stats, time_s, gone_s };
    if (event === "restore") {
      Object.assign(this, data);
      this.structure++;
    } else {
      this.#replace(event === "gone" ? { nodes: [], stats: null, time_s } : data);
      this.gone_s = event === "gone" ? t : null;
    }
    return { event: "restore", data: before };
  }

  #replace({ nodes, stats, time_s }) {
    this.nodes = new Map();
    this.roots = [];
    this.#add(nodes);
    this.stats = stats;
    this.time_s = time_s;
    this.structure++;
  }

  #applyDelta({ added = [], changed = [], removed = [], stats, time_s }) {
    const undo = { added: [], changed: [], removed: [], stats: this.stats, time_s: this.time_s };
    this.#add(added);
    undo.removed = added.map((node) => node.id);
    let moved = added.length > 0 || removed.length > 0;
    for (const change of changed) {
      const node = this.#find(change.id);
      const before = { id: node.id };
      for (const [name, value] of Object.entries(change)) {
        if (name === "id") continue;
        moved ||= LAID_OUT.has(name) && node[name] !== value;
        before[name] = node[name];
        if (name === "parent") this.#move(node, value);
        else node[name] = value;
      }
      undo.changed.push(before);
    }
    const leaving = removed.map((id) => this.#find(id));
    for (const node of leaving) {
      undo.added.push(node.fields());
      this.nodes.delete(node.id);
    }
    const parents = new Set();
    for (const node of leaving) {
      if (node.children.some((child) => this.nodes.has(child.id)))
        throw new FeedError(`node ${node.id} was removed, and its children were not`);
      if (!node.above || this.nodes.has(node.above.id)) parents.add(node.above);
    }
    for (const parent of parents) {
      const list = parent ? parent.children : this.roots;
      const kept = list.filter((node) => this.nodes.has(node.id));
      if (parent) parent.children = kept;
      else this.roots = kept;
    }
    this.stats = stats;
    this.time_s = time_s;
    if (moved) this.structure++;
    return { event: "delta", data: undo };
  }

  #add(list) {
    const nodes = list.map((fields) => new Node(fields));
    for (const node of nodes) {
      if (this.nodes.has(node.id)) throw new FeedError(`node ${node.id} was added twice`);
      this.nodes.set(node.id, node);
    }
    const lists = new Set();
    for (const node of nodes) {
      node.above = node.parent === null ? null : this.#find(node.parent);
      const siblings = this.siblings(node);
      if (siblings.length && siblings[siblings.length - 1].id > node.id) lists.add(siblings);
      siblings.push(node);
    }
    for (const siblings of lists) siblings.sort((a, b) => a.id - b.id);
  }

  #move(node, parent) {
    const old = this.siblings(node);
    old.splice(old.indexOf(node), 1);
    node.parent = parent;
    node.above = parent === null ? null : this.#find(parent);
    const siblings = this.siblings(node);
    const place = siblings.findIndex((each) => each.id > node.id);
    siblings.splice(place < 0 ? siblings.length : place, 0, node);
  }

  siblings(node) {
    return node.above ? node.above.children : this.roots;
  }

  #find(id) {
    const node = this.nodes.get(id);
    if (!node) throw new FeedError(`the feed speaks of node ${id}, which it never added`);
    return node;
  }

  // Widths in tokens: a node's own and those of all below it, which begin where it begins.
  layOut() {
    if (this.#laidOut !== this.structure) {
      const order = [];
      const pending = [...this.roots].reverse();
      while (pending.length) {
        const node = pending.pop();
        node.depth = node.above ? node.above.depth + 1 : 0;
        node.width = node.tokens;
        node.height = 1;
        order.push(node);
        for (let i = node.children.length; i--;) pending.push(node.children[i]);
      }
      if (order.length !== this.nodes.size)
        throw new FeedError("some nodes of the feed are below themselves");
      this.#rows = 0;
      for (let i = order.length; i--;) {
        const { above, width, height, depth } = order[i];
        this.#rows = Math.max(this.#rows, depth + 1);
        if (!above) continue;
        above.width += width;
        above.height = Math.max(above.height, height + 1);
      }
      this.#total = placeInRow(this.roots, 0);
      for (const node of order) placeInRow(node.children, node.start);
      this.#laidOut = this.structure;
    }
    return { total: this.#total, rows: this.#rows };
  }
}

function placeInRow(nodes, start) {
  for (const node of nodes) {
    node.start = start;
    start += node.width;
  }
  return start;
}
