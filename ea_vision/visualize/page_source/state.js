// What the page shows, and its form in the address's fragment.

import { MEAN, PARTS } from "./maps.js";

export const SCALES = ["tile", "layer", "all"];
export const VIEWS = ["parts", "heads"];
export const THEMES = ["auto", "light", "dark"];

/** The view of a page that was just opened. */
export function firstState(about) {
  const { layers } = about.models[0];
  return {
    image: 0,
    queries: about.models.map(({ imgSize: [H, W] }) => [Math.floor(H / 2), Math.floor(W / 2)]), // pixels [y, x]
    pinned: false,
    view: about.models.some((model) => model.layers.some(({ before }) => Object.keys(before).length)) ? "parts" : "heads",
    part: "attn",
    layer: layers[Math.floor((layers.length - 1) / 2)].number,
    head: layers[0].heads[0],
    opacity: 0.8,
    scale: "layer",
    colours: Object.keys(about.colours)[0],
    numbers: true,
    link: true,
    seen: false,
    theme: "auto",
  };
}

/** The fragment of a state: what differs from the first one, and always the query. */
export function toFragment(state, about) {
  const first = firstState(about);
  const fields = new URLSearchParams();
  const queries = state.link ? state.queries.slice(0, 1) : state.queries;
  fields.set("query", queries.map(String).join(";"));
  for (const name of ["image", "view", "part", "layer", "head", "opacity", "scale", "colours", "theme"]) {
    if (state[name] !== first[name]) fields.set(name, state[name]);
  }
  for (const name of ["pinned", "numbers", "link", "seen"]) {
    if (state[name] !== first[name]) fields.set(name, state[name] ? "1" : "0");
  }
  return "#" + fields.toString().replaceAll("%2C", ",").replaceAll("%3B", ";");
}

/**
 * The state of a fragment, and what to say of it: [state, texts]. What is missing or makes no sense is as at first; of
 * an image, layer or head that there is not, a text says so.
 */
export function fromFragment(fragment, about, numImages) {
  const state = firstState(about);
  const problems = [];
  const asked = (name, there, what, instead) => {
    if (fields.has(name) && !there) problems.push(`The address asks for ${name} ${fields.get(name)}; ${what}. ${instead}`);
  };
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const number = (name, low, high) => {
    const value = Number(fields.get(name));
    return fields.get(name) && value >= low && value <= high ? value : state[name];
  };
  const among = (name, values) => (values.includes(fields.get(name)) ? fields.get(name) : state[name]);
  const flag = (name) => (fields.has(name) ? fields.get(name) === "1" : state[name]);

  state.image = Math.floor(number("image", 0, numImages - 1));
  asked("image", String(state.image) === fields.get("image"),
    numImages ? `the images of this page are 0 to ${numImages - 1}` : "this page has no image yet", "");
  state.view = among("view", VIEWS);
  state.part = among("part", PARTS.map(([part]) => part));
  const layers = new Map(about.models.flatMap((model) => model.layers.map((layer) => [String(layer.number), layer])));
  if (layers.has(fields.get("layer"))) state.layer = Number(fields.get("layer"));
  asked("layer", layers.has(fields.get("layer")), `this page has layers ${[...layers.keys()].join(", ")}`,
    `Shown is layer ${state.layer}.`);
  const heads = [...new Set([...layers.values()].flatMap((layer) => layer.heads.map(String))), MEAN];
  if (heads.includes(fields.get("head"))) state.head = fields.get("head") === MEAN ? MEAN : Number(fields.get("head"));
  asked("head", heads.includes(fields.get("head")), `this page has heads ${heads.join(", ")}`,
    `Shown is head ${state.head}.`);
  state.opacity = number("opacity", 0, 1);
  state.scale = among("scale", SCALES);
  state.colours = among("colours", Object.keys(about.colours));
  state.theme = among("theme", THEMES);
  for (const name of ["pinned", "numbers", "link", "seen"]) state[name] = flag(name);
  (fields.get("query") ?? "").split(";").slice(0, about.models.length).forEach((text, model) => {
    if (about.models[model].prefix.includes(text)) return setQuery(state, model, text, about);
    const point = text.split(",").map((side) => (side.trim() ? Number(side) : NaN));
    const [H, W] = about.models[model].imgSize;
    const inside = point.length === 2 && point.every(Number.isInteger)
      && point[0] >= 0 && point[0] < H && point[1] >= 0 && point[1] < W;
    if (inside) setQuery(state, model, point, about);
    else if (text) {
      problems.push(`The address asks for query ${text}; the input of ${about.models[model].label} has ${H}x${W} pixels, `
        + `from 0,0 to ${H - 1},${W - 1}. Shown is ${queryName(state.queries[model])}.`);
    }
  });
  return [state, problems];
}

/**
 * Set a model's query: [y, x] in pixels of its input, or a token before the patches by name. Linked models follow,
 * scaled to their size, or where they have such a token.
 */
export function setQuery(state, model, query, about) {
  const [H, W] = about.models[model].imgSize;
  state.queries = state.queries.map((old, other) => {
    if (other === model) return query;
    if (!state.link) return old;
    if (typeof query === "string") return about.models[other].prefix.includes(query) ? query : old;
    const [y, x] = query;
    const [height, width] = about.models[other].imgSize;
    return [Math.floor((y * height) / H), Math.floor((x * width) / W)];
  });
}

/** `y 3, x 4`, or what a token before the patches is. */
export function queryName(query) {
  if (typeof query !== "string") return `y ${query[0]}, x ${query[1]}`;
  return { cls: "class token", dist: "distillation token" }[query] ?? query.replace("reg", "register ");
}
