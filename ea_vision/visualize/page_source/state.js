// What the page shows, and its form in the address's fragment.

import { MEAN, PARTS } from "./maps.js";

export const CHOICES = {
  view: ["parts", "heads"],
  part: PARTS.map(([part]) => part),
  scale: ["tile", "layer", "all"],
};
const FLAGS = ["pinned", "link", "seen"];

/** The view of a page that was just opened: of the second layer of a chain, which has all that a layer may have. */
export function firstState(about) {
  const { layers } = about.models[0];
  const evolves = about.models.some((model) => model.layers.some((layer) => layer.evolves));
  return {
    image: 0,
    queries: about.models.map(({ imgSize: [H, W] }) => [Math.floor(H / 2), Math.floor(W / 2)]), // pixels [y, x]
    pinned: false,
    view: evolves ? "parts" : "heads",
    part: "attn",
    layer: (layers.find((layer) => layer.evolves) ?? layers[Math.floor((layers.length - 1) / 2)]).number,
    head: layers[0].heads[0],
    opacity: 0.8,
    scale: "layer",
    colours: Object.keys(about.colours)[0],
    link: true,
    seen: false,
  };
}

/** The fragment of a state: what differs from the first one, and always the query. */
export function toFragment(state, about) {
  const first = firstState(about), fields = new URLSearchParams();
  fields.set("query", (state.link ? state.queries.slice(0, 1) : state.queries).map(String).join(";"));
  for (const [name, value] of Object.entries(state)) {
    if (name === "queries" || value === first[name]) continue;
    fields.set(name, FLAGS.includes(name) ? (value ? "1" : "0") : value);
  }
  return "#" + fields.toString().replaceAll("%2C", ",").replaceAll("%3B", ";");
}

/** The state of a fragment, and texts that name what it asks for and there is not: that is as at first. */
export function fromFragment(fragment, about, numImages) {
  const state = firstState(about), problems = [];
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  /** Take a field, of the values that there are: a function from its text to what is shown. */
  const take = (name, values, there, shown) => {
    if (!fields.has(name)) return;
    const value = values.find((one) => String(one) === fields.get(name));
    if (value !== undefined) state[name] = value;
    else problems.push(`The address asks for ${name} ${fields.get(name)}; ${there}.${shown ? ` Shown is ${shown()}.` : ""}`);
  };
  take("image", [...Array(numImages).keys()], `the images of this page are 0 to ${numImages - 1}`);
  const layers = new Map(about.models.flatMap((model) => model.layers.map((layer) => [layer.number, layer])));
  take("layer", [...layers.keys()], `this page has layers ${[...layers.keys()].join(", ")}`, () => `layer ${state.layer}`);
  const heads = [...new Set([...layers.values()].flatMap((layer) => layer.heads)), MEAN];
  take("head", heads, `this page has heads ${heads.join(", ")}`, () => `head ${state.head}`);
  for (const [name, values] of Object.entries({ ...CHOICES, colours: Object.keys(about.colours) })) {
    take(name, values, `there are ${values.join(", ")}`, () => state[name]);
  }
  if (fields.has("opacity")) {
    const value = Number(fields.get("opacity"));
    if (fields.get("opacity") && value >= 0 && value <= 1) state.opacity = value;
    else problems.push(`The address asks for opacity ${fields.get("opacity")}; it lies between 0 and 1.`);
  }
  for (const name of FLAGS) if (fields.has(name)) state[name] = fields.get(name) === "1";
  (fields.get("query") ?? "").split(";").slice(0, about.models.length).forEach((text, index) => {
    const model = about.models[index], [H, W] = model.imgSize;
    if (model.prefix.includes(text)) return setQuery(state, index, text, about);
    const point = text.split(",").map((side) => (side.trim() ? Number(side) : NaN));
    const inside = point.length === 2 && point.every(Number.isInteger)
      && point[0] >= 0 && point[0] < H && point[1] >= 0 && point[1] < W;
    if (inside) return setQuery(state, index, point, about);
    if (text) {
      problems.push(`The address asks for query ${text}; the input of ${model.label} has ${H}x${W} pixels, `
        + `from 0,0 to ${H - 1},${W - 1}. Shown is ${queryName(state.queries[index])}.`);
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
    const { prefix, imgSize: [height, width] } = about.models[other];
    if (typeof query === "string") return prefix.includes(query) ? query : old;
    return [Math.floor((query[0] * height) / H), Math.floor((query[1] * width) / W)];
  });
}

/** `y 3, x 4`, or what a token before the patches is. */
export function queryName(query) {
  if (typeof query !== "string") return `y ${query[0]}, x ${query[1]}`;
  return { cls: "class token", dist: "distillation token" }[query] ?? query.replace("reg", "register ");
}
