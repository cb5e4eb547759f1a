// SPDX-License-Identifier: Apache-2.0
// Ramps of one hue each, of even steps in lightness: told apart by colour-blind eyes too.

const RAMPS = {
  light: {
    hits: ["#e1e7ee", "#cbdbeb", "#aecae4", "#86b1d8", "#5b95c8", "#3a79b3", "#215d99", "#0f417a"],
    age: ["#eceae6", "#dfe3dc", "#c3d8d0", "#9dc8be", "#70b3a8", "#46998f", "#247d75", "#0b5f5a"],
  },
  dark: {
    hits: ["#232a34", "#26374b", "#294866", "#2d5c87", "#3470a6", "#4486c0", "#609fd8", "#85bcec"],
    age: ["#282a2b", "#27383a", "#274c4c", "#2a6462", "#2f7a76", "#3d918b", "#56aaa2", "#7cc6bb"],
  },
};
const AGES_S = [600, 300, 120, 60, 30, 10, 3]; // where the ramp's steps are, oldest first

export const STEPS = 8;

export const COLOURINGS = {
  hits: {
    title: "Hits",
    step: (node) => (node.hits < 1 ? 0 : Math.min(STEPS - 1, 1 + Math.floor(Math.log2(node.hits)))),
    ends: ["no hit", "64 hits or more"],
  },
  age: {
    title: "Last used",
    step(node, now_s) {
      const age_s = now_s - node.last_used_s;
      let step = 0;
      while (step < AGES_S.length && age_s < AGES_S[step]) step++;
      return step;
    },
    ends: ["10 min ago or longer", "now"],
  },
};

// What a canvas draws with: the ramp, its inks, and what page.css names.
export function paletteOf(theme, colouring) {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  const ramp = RAMPS[theme][colouring];
  return {
    theme,
    ramp,
    inks: ramp.map(inkOn),
    surface: named("surface"),
    ink: named("ink"),
    accent: named("running"),
    accentInk: named("on-running"),
    pinned: named("pinned"),
    chart: { attended: named("line"), read: named("running"), line: named("line") },
    font: style.fontFamily || "sans-serif",
    rem: Number.parseFloat(style.fontSize),
  };
}

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16) / 255);
  const linear = [r, g, b].map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.2 ? "#10161d" : "#f4f7fa";
}
