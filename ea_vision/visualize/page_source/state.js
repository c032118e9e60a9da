// What the page shows, and its form in the address's fragment.

import { ALL, MEAN, PARTS } from "./maps.js";

/** The values that a field of the state may have, by its name; of all models together. */
function choices(about, numImages) {
  const layers = about.models.flatMap((model) => model.layers);
  return {
    image: [...Array(numImages).keys()],
    part: Object.keys(PARTS),
    layer: [...new Set(layers.map((layer) => layer.number))],
    head: [...new Set(layers.flatMap((layer) => layer.heads)), MEAN],
    style: ["fog", "cells"],
    scale: ["uniform", "tile", "layer", "all"],
    pinned: [false, true],
  };
}

/**
 * The view of a page that was just opened, whatever the models' order: the second layer of a chain with the head that the
 * previous map changes most and all pixels; of models without evolution the last layer that all have, the mean of heads, and
 * the class token where there is one.
 * @param entry of the first image.
 */
export function firstState(about, entry) {
  const first = { image: 0, pinned: false, part: "attn", style: "fog", opacity: 0.8, scale: "uniform" };
  const evolving = about.models.map((model, index) => ({ model, index, layer: model.layers.find((layer) => layer.evolves) }))
    .filter(({ layer }) => layer).sort((a, b) => a.layer.number - b.layer.number || a.model.label.localeCompare(b.model.label));
  if (evolving.length) {
    const { layer, index } = evolving[0], largest = entry.models[index].largest[layer.number];
    return { ...first, layer: layer.number, head: largest ? largest[0] : layer.heads[0], queries: about.models.map(() => ALL) };
  }
  const layer = Math.min(...about.models.map(({ layers }) => layers.at(-1).number));
  const hasClass = ({ prefix }, index) => prefix.includes("cls") && (entry.models[index].prefixes[layer] ?? 0) > 0;
  return { ...first, layer, head: MEAN, queries: about.models.map((model, index) => (hasClass(model, index) ? "cls" : ALL)) };
}

/** The pixel [y, x] of a model's input that "one pixel" begins with: of the largest change, or the middle. */
export function onePixel(about, entry, { layer }) {
  const index = about.models.findIndex((_, i) => entry.models[i].largest[layer]);
  const { imgSize: [H, W] } = about.models[Math.max(0, index)];
  return [Math.max(0, index), index < 0 ? [Math.floor(H / 2), Math.floor(W / 2)] : entry.models[index].largest[layer].slice(1)];
}

/** The fragment of a state: what differs from the first one, and always the queries. */
export function toFragment(state, first) {
  const fields = new URLSearchParams({ query: state.queries.join(";") });
  for (const [name, value] of Object.entries(state)) if (name !== "queries" && value !== first[name]) fields.set(name, value);
  return "#" + fields.toString().replaceAll("%2C", ",").replaceAll("%3B", ";");
}

/** A query of an address: `all`, a token by name or `y,x`; undefined where the model has no such token or pixel. */
function parseQuery(text, { prefix, imgSize }) {
  if (text === ALL || prefix.includes(text)) return text;
  const point = text.split(",").map((side) => (side.trim() ? Number(side) : NaN));
  const inside = point.length === 2 && point.every((side, axis) => Number.isInteger(side) && side >= 0 && side < imgSize[axis]);
  return inside ? point : undefined;
}

/** The state of a fragment, and texts that name what it asks for and there is not: that is as at first. */
export function fromFragment(fragment, about, numImages, first) {
  const state = structuredClone(first), problems = [], fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const refuse = (name, text, there) => problems.push(`The address asks for ${name} ${text}; there are ${there}.`);
  for (const [name, values] of Object.entries(choices(about, numImages))) {
    if (!fields.has(name)) continue;
    const value = values.find((one) => String(one) === fields.get(name));
    if (value !== undefined) state[name] = value;
    else refuse(name, fields.get(name), values.join(", "));
  }
  const opacity = parseFloat(fields.get("opacity") ?? state.opacity);
  if (opacity >= 0 && opacity <= 1) state.opacity = opacity;
  else refuse("opacity", fields.get("opacity"), "0 to 1");
  const asked = fields.get("query")?.split(";").slice(0, about.models.length) ?? [];
  const queries = asked.map((text, index) => parseQuery(text, about.models[index]));
  if (queries[0]) setQuery(state, 0, queries[0], about);
  queries.forEach((query, index) => {
    const { label, imgSize: [H, W] } = about.models[index];
    if (query) state.queries[index] = query;
    else refuse("query", asked[index], `all and 0,0 to ${H - 1},${W - 1} in ${label}`);
  });
  return [state, problems];
}

/**
 * Set a model's query: all pixels, [y, x] in pixels of its input, or a token before the patches by name. Other models follow,
 * scaled to their size, or where they have such a token.
 */
export function setQuery(state, model, query, about) {
  const [H, W] = about.models[model].imgSize;
  state.queries = state.queries.map((old, other) => {
    const { prefix, imgSize: [height, width] } = about.models[other];
    if (query === ALL) return ALL;
    if (typeof query === "string") return prefix.includes(query) ? query : old;
    return other === model ? query : [Math.floor((query[0] * height) / H), Math.floor((query[1] * width) / W)];
  });
}

/** `all pixels`, `pixel y 3, x 4`, or what a token before the patches is. */
export function queryName(query) {
  if (typeof query !== "string") return `pixel y ${query[0]}, x ${query[1]}`;
  return { all: "all pixels", cls: "class token", dist: "distillation token" }[query] ?? query.replace("reg", "register ");
}
