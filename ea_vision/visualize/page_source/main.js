// The page: reads what it was given, keeps the state, draws a frame when something changed.

import { MEAN, PARTS, isAttention } from "./maps.js";
import { colourTable, copyElement, setFineness, setFont } from "./draw.js";
import { firstState, fromFragment, queryName, setQuery, toFragment } from "./state.js";
import { Panel, element, headName } from "./panel.js";

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);
const entries = [...document.querySelectorAll("script.image")].map((script) => JSON.parse(script.textContent));
const [table, signed] = [colourTable(about.colours), colourTable(about.signed)];
const toolbar = byId("toolbar");

let state = firstState(about);
let frame = 0; // the request of the next one
let toLayOut = true;
let showing = Promise.resolve(); // the last change of image or view
let later = 0; // the timer of what is done when the hand rests

const actions = {
  /** A hovering mouse moves the query unless it is pinned. */
  moveQuery(model, point, hovering) {
    if (hovering && state.pinned) return;
    setQuery(state, model, point, about);
    schedule();
  },
  /** Pin the query at a point, or where it is (null); again at the same place lets go. */
  pin(model, point) {
    const { [model]: panel } = panels, old = state.queries[model];
    const same = point === null || panel.finestCell(point) === panel.finestCell(old);
    state.pinned = !(state.pinned && same);
    if (point !== null) setQuery(state, model, point, about);
    schedule();
  },
  select(layer, { head = state.head, part = state.part }) {
    Object.assign(state, { layer, head, part });
    complain("");
    writeControls();
    schedule();
  },
};
const panels = about.models.map((model, index) => new Panel(model, index, about.models.length, actions));

const complain = (text) => { byId("message").textContent = text; };

// ---- showing images and views ---------------------------------------------------------------------------------------

/** Load the image, then show it in the view; of several changes in a row the last one counts. */
function show() {
  const { image } = state, wanted = entries[image].models;
  showing = (async () => {
    const switches = await Promise.all(panels.map((panel, index) =>
      (panel.entry === wanted[index] ? () => {} : panel.setEntry(wanted[index]))));
    if (state.image !== image) return;
    switches.forEach((use) => use());
    // one head's attention alone is no evolution
    if (panels.every((panel) => panel.maps.evolution().length < 3)) state.view = "heads";
    panels.forEach((panel) => panel.useView(state.view));
    toLayOut = true;
    offerParts();
    schedule();
  })().catch((error) => complain(`This page cannot show its maps: ${error.message}`));
}

/** Enable the parts that the image has; a part that it lacks gives way to the first that it has. */
function offerParts() {
  const available = new Set(panels.flatMap((panel) => panel.maps.parts()));
  for (const option of toolbar.elements.part.options) option.disabled = !available.has(option.value);
  if (!available.has(state.part)) [state.part] = available;
  writeControls();
}

function applyFragment() {
  const [asked, problems] = fromFragment(location.hash, about, entries.length);
  state = asked;
  complain(problems.join(" "));
  show();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function schedule() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!panels.every((panel) => panel.tiles)) return;
    paint();
    clearTimeout(later);
    later = setTimeout(finish, 200);
  });
}

/** Paint all models; tiles of models side by side have one size. */
function paint() {
  const columns = Math.max(...panels.map((panel) => panel.columns.length));
  if (toLayOut) panels.forEach((panel) => panel.layOut(state, columns));
  toLayOut = false;
  panels.forEach((panel) => panel.compute(state));
  const style = getComputedStyle(document.body), faint = getComputedStyle(byId("part-help")).color;
  const look = { state, table, signed, ink: { text: style.color, faint, accent: style.accentColor } };
  shareScales(look);
  panels.forEach((panel) => panel.paint(look));
  return look;
}

/**
 * One scale of colours for each tile, for the tiles of a layer, or for all, over all models; attention has one, logits
 * have another. That of attention reaches to twice uniform attention at least: what looks everywhere alike must not look
 * strong.
 */
function shareScales(look) {
  const tiles = panels.flatMap((panel) => panel.tiles.flat().filter((tile) => tile.present).map((tile) => [panel, tile]));
  const reaches = new Map();
  const groupOf = ({ layer, part }, index) =>
    [isAttention(part), { all: "", layer: layer.number, tile: index }[state.scale]].join();
  tiles.forEach(([, tile], index) => {
    const group = groupOf(tile, index), least = isAttention(tile.part) ? 2 : 1e-12;
    reaches.set(group, Math.max(reaches.get(group) ?? least, tile.reach));
  });
  tiles.forEach(([panel, tile], index) => panel.colour(tile, reaches.get(groupOf(tile, index)), look));
}

/** When the hand rests: the spoken status, and the address, which may not change too often. */
function finish() {
  const fragment = toFragment(state, about);
  // a page inside a notebook has no address
  if (location.protocol !== "about:" && location.hash !== fragment) history.replaceState(null, "", fragment);
  byId("status").textContent = `query ${queryName(state.queries[0])}; ${panels[0].zoomLines().join(", ")}`;
}

// ---- controls -------------------------------------------------------------------------------------------------------

function buildControls() {
  const { elements } = toolbar, heads = [...new Set(panels.flatMap((panel) => panel.heads))].sort((a, b) => a - b);
  elements.part.append(...Object.entries(PARTS).map(([value, [name]]) => element("option", { value }, name)));
  elements.head.append(...[...heads, MEAN].map((head) => element("option", {}, String(head))));
  byId("version").textContent = about.version;
  byId("models").append(...panels.map((panel) => panel.node));
  byId("images").hidden = entries.length < 2;
  byId("images").append(...(about.epochs ? [element("label", { class: "epochs" }, element("output"),
    element("input", { type: "range", name: "image", min: 0, max: entries.length - 1, "aria-label": "epoch" }))]
    : entries.map((entry, index) => element("label", { title: entry.name },
      element("input", { type: "radio", name: "image", value: String(index), "aria-label": entry.name }),
      element("img", { src: entry.models[0].photo, alt: "" }), element("span", {}, entry.name)))));
}

function writeControls() {
  const { elements } = toolbar, parts = state.view === "parts";
  for (const name of ["opacity", "scale", "view", "head", "part"]) elements[name].value = String(state[name]);
  for (const input of byId("images").querySelectorAll("input")) {
    if (about.epochs) input.value = state.image;
    else input.checked = Number(input.value) === state.image;
  }
  if (about.epochs) byId("images").querySelector("output").textContent =
    `${entries[state.image].name} · ${state.image + 1} of ${entries.length}`;
  elements.part.parentElement.hidden = parts;
  elements.head.parentElement.hidden = !parts;
  byId("part-help").textContent = parts ? "what one head computes, from left to right, layer after layer"
    : PARTS[state.part][1];
}

function onControl({ target: { name, value } }) {
  const isNumber = name === "opacity" || name === "image" || name === "head" && value !== MEAN;
  state[name] = isNumber ? Number(value) : value;
  complain("");
  writeControls();
  if (name === "view" || name === "image") show();
  schedule();
}

/** Arrows move the query, unless what has the focus needs them itself. */
function onKey(event) {
  if (event.key === "Escape") {
    state.pinned = false;
    schedule();
  }
  const arrow = ARROWS[event.key], { target } = event;
  if (!arrow || event.ctrlKey || event.altKey || event.metaKey || !panels[0].maps || target.closest?.("input, select")) return;
  event.preventDefault();
  const index = Math.max(0, panels.findIndex((panel) => panel.node.contains(target)));
  actions.moveQuery(index, panels[index].neighbour(state.queries[index], arrow), false);
}

// ---- the picture ----------------------------------------------------------------------------------------------------

/** The view as a canvas, twice as fine as the page: the models side by side, whatever the window's width. */
function paintPicture() {
  const margin = 16, heading = 26, fine = 2, main = byId("models"), body = document.body;
  const columns = Math.max(...panels.map((panel) => panel.columns.length));
  body.classList.add("picture");
  main.style.cssText = `width: ${panels.length * Math.max(640, 340 + 29 * columns)}px; `
    + `grid-template-columns: repeat(${panels.length}, minmax(0, 1fr))`;
  setFineness(fine);
  toLayOut = true;
  const look = paint(), box = main.getBoundingClientRect();
  const width = box.width + 2 * margin, height = box.height + heading + 2 * margin;
  const canvas = element("canvas", { width: fine * width, height: fine * height }), context = canvas.getContext("2d");
  context.scale(fine, fine);
  context.fillStyle = getComputedStyle(body).backgroundColor;
  context.fillRect(0, 0, width, height);
  setFont(context, 14, look.ink.text);
  context.fillText(`${entries[state.image].name} · ${state.view === "parts" ? headName(state.head)
    : PARTS[state.part][0]}`, margin, margin);
  context.translate(margin - box.left, margin + heading - box.top);
  copyElement(context, main, look.ink.accent);
  body.classList.remove("picture");
  main.style.cssText = "";
  setFineness(0);
  toLayOut = true;
  schedule();
  return canvas;
}

async function save() {
  const blob = await new Promise((resolve) => paintPicture().toBlob(resolve, "image/png"));
  const what = [entries[state.image].name.replace(/\.\w+$/, ""), state.view === "parts" ? `head ${state.head}` : state.part];
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: `attention-${what.join("-").replace(/[^\w-]+/g, "-")}.png` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// ---- start ----------------------------------------------------------------------------------------------------------

buildControls();
for (const controls of [toolbar, byId("images")]) controls.addEventListener("input", onControl);
byId("save").addEventListener("click", save);
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", applyFragment);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
new ResizeObserver(() => {
  toLayOut = true;
  schedule();
}).observe(byId("models"));
applyFragment();

/** For the console and for tests: the state, a tile's numbers. */
window.explorer = {
  ready: () => showing.then(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))),
  state: () => structuredClone(state),
  fragment: () => toFragment(state, about),
  links: (model) => panels[model].links,
  /** What a tile shows: values row by row, the ends of its colours, entropy (nats), distance (pixels). */
  tile(model, layer, head, part = state.part) {
    const tile = panels[model].tiles.flat().find((one) => one.layer.number === layer && one.head === head && one.part === part);
    if (!tile?.present) return null;
    const { values, cell, featSize, entropy, distance, outside, range } = tile;
    return { values: [...values], cell, featSize, entropy, distance, outside, range };
  },
};
