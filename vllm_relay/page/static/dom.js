// SPDX-License-Identifier: Apache-2.0
// Elements, made once and changed only where they differ: what is focused stays so.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function set(target, name, value) {
  if (target[name] !== value) target[name] = value;
}

// At least as many children as are needed; those left over are hidden.
export function resized(list, length, make) {
  while (list.children.length < length) list.append(make());
  const children = [...list.children];
  children.forEach((child, place) => set(child, "hidden", place >= length));
  return children.slice(0, length);
}
