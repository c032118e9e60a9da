// The page: reads what it was given, keeps the state, draws a frame when something changed.

import { ALL, CHANGED, PARTS, isAttention } from "./maps.js";
import { FRAME, colourTable, copyElement, drawBar, drawPhoto, fogTable, setFineness, setFont, sizeCanvas } from "./draw.js";
import { firstState, fromFragment, onePixel, queryName, setQuery, toFragment } from "./state.js";
import { Panel, clamp, element, headName } from "./panel.js";

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);
const entries = [...document.querySelectorAll("script.image")].map((script) => JSON.parse(script.textContent));
const tables = { cells: colourTable(about.colours), signed: colourTable(about.signed), changes: colourTable(about.changes), fog: fogTable() };
const toolbar = byId("toolbar"), photo = document.querySelector(".photo"), first = firstState(about, entries[0]);

let state = structuredClone(first);
let frame = 0; // the request of the next one
let showing = Promise.resolve(); // the last change of image
let later = 0; // the timer of what is done when the hand rests

const panels = about.models.map((model, index) => new Panel(model, index, about.models.length, { select, redraw: schedule }));
const complain = (text) => { byId("message").textContent = text; };

/** Ask from a pixel, a token or all pixels; `pinned`: whether a hovering mouse leaves the query alone. */
function ask(query, pinned, model = 0) {
  state.pinned = pinned;
  setQuery(state, model, query, about);
  schedule();
}

function select(changes) {
  Object.assign(state, changes);
  complain("");
  writeControls();
  schedule();
}

// ---- showing images -------------------------------------------------------------------------------------------------

/** Load the image, then show it; of several changes in a row the last one counts. */
function show() {
  const { image } = state, wanted = entries[image].models;
  showing = (async () => {
    const switches = await Promise.all(panels.map((panel, index) =>
      (panel.entry === wanted[index] ? () => {} : panel.setEntry(wanted[index]))));
    if (state.image !== image) return;
    switches.forEach((use) => use());
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
  const [asked, problems] = fromFragment(location.hash, about, entries.length, first);
  state = asked;
  complain(problems.join(" "));
  show();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function schedule() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!panels.every((panel) => panel.maps)) return;
    paint();
    clearTimeout(later);
    later = setTimeout(finish, 200);
  });
}

/** Paint all models, and the photo and the heads of the first one that has the chosen layer. */
function paint() {
  const style = getComputedStyle(document.body), faint = getComputedStyle(byId("query")).color;
  const look = { state, tables, fog: state.style === "fog", ink: { text: style.color, faint, accent: style.accentColor } };
  panels.forEach((panel) => panel.arrange(state));
  const leader = panels.find((panel) => panel.chosen(state)) ?? panels[0], heads = byId("heads");
  if (heads.firstChild !== leader.headTiles[0].node) heads.replaceChildren(...leader.headTiles.map(({ node }) => node));
  const columns = Math.min(leader.headTiles.length, 5);
  const thumb = clamp(Math.floor(heads.clientWidth / columns) - 6, 24, 56), gap = document.querySelector(".layers .sign") ? 26 : 4;
  panels.forEach((panel) => panel.layOut(thumb, gap));
  panels.forEach((panel) => panel.tiles(panel === leader).forEach((tile) => panel.compute(tile, state)));
  shareScales(look, leader);
  panels.forEach((panel) => panel.paint(look, panel === leader));
  paintPhoto();
  paintBars(look, leader);
}

function paintPhoto() {
  const [panel] = panels, query = state.queries[0], { imgSize } = panel.model;
  const width = Math.min(250, byId("query").clientWidth || 250), height = Math.round(width * panel.aspect);
  const boxes = panel.entry.predictions.flatMap(({ box }) => (box ? [box] : []));
  const cell = typeof query === "string" ? -1 : panel.finestCell(query);
  drawPhoto(sizeCanvas(photo, width, height), panel.image, width, height, boxes, imgSize, cell, panel.finest);
  byId("query").textContent = `${queryName(query)}${state.pinned && typeof query !== "string" ? " · pinned" : ""}`;
  for (const button of byId("asked").children) {
    const { query: asked } = button.dataset;
    button.setAttribute("aria-pressed", String(asked ? asked === query : typeof query !== "string"));
  }
}

/** What the colours of attention and of logits mean, by the chosen layer's. */
function paintBars({ ink, fog }, leader) {
  const width = Math.min(220, byId("heads").clientWidth || 220), tiles = [...leader.howTiles, ...leader.logitTiles, ...leader.layerTiles, ...leader.headTiles];
  const shown = [true, false].map((attention) => tiles.find((tile) =>
    tile.present && tile.part !== CHANGED && isAttention(tile.part) === attention && tile.layer.number === state.layer));
  ["bar-attn", "bar-logits"].forEach((id, i) => {
    byId(id).hidden = !shown[i] || (fog && i === 0);
    if (!byId(id).hidden) drawBar(sizeCanvas(byId(id), width, 26), shown[i].table, shown[i].range, width, ink);
  });
  byId("bar-text").textContent = !shown[0] ? "" : fog
    ? "full fog: half of uniform attention or less; clear: twice or more; line: uniform" : "attention, in times uniform";
}

/**
 * One scale of colours for each tile, for the tiles of a layer, or for all, over all models; attention has one, logits
 * have another. That of attention reaches to twice uniform attention at least: what looks everywhere alike must not look
 * strong. With the scale uniform it reaches to 8 times, and logits share by layer. Fog is always from half to twice.
 */
function shareScales(look, leader) {
  const tiles = panels.flatMap((panel) => panel.tiles(panel === leader).filter((tile) => tile.present).map((tile) => [panel, tile]));
  const reaches = new Map();
  const groupOf = ({ layer, part }, index) =>
    [isAttention(part), { all: "", uniform: layer.number, layer: layer.number, tile: index }[state.scale]].join();
  tiles.forEach(([, tile], index) => {
    const group = groupOf(tile, index), least = isAttention(tile.part) ? 2 : 1e-12;
    reaches.set(group, Math.max(reaches.get(group) ?? least, tile.reach));
  });
  tiles.forEach(([panel, tile], index) => {
    const uniform = state.scale === "uniform" && isAttention(tile.part);
    panel.colour(tile, uniform ? 8 : reaches.get(groupOf(tile, index)), look);
  });
}

/** When the hand rests: the spoken status, and the address, which may not change too often. */
function finish() {
  const fragment = toFragment(state, first);
  // a page inside a notebook has no address
  if (location.protocol !== "about:" && location.hash !== fragment) history.replaceState(null, "", fragment);
  byId("status").textContent = panels[0].lines(state).join(", ");
}

// ---- controls -------------------------------------------------------------------------------------------------------

function buildControls() {
  const button = (query, text) => element("button", { type: "button", title: queryName(query) }, text);
  const known = about.models.map(({ prefix }, index) => prefix.slice(0, Math.max(...Object.values(entries[0].models[index].prefixes))));
  const tokens = [...new Set(known.flat())];
  const named = [ALL, ...tokens].map((query) => [query, button(query, query === ALL ? "all pixels" : query)]);
  for (const [query, node] of named) {
    node.dataset.query = query;
    const owner = Math.max(0, known.findIndex((prefix) => prefix.includes(query)));
    node.addEventListener("click", () => ask(query, query !== ALL, owner));
  }
  const one = element("button", { type: "button" }, "one pixel");
  one.addEventListener("click", () => {
    const [model, pixel] = onePixel(about, entries[state.image], state);
    ask(pixel, true, model);
  });
  byId("asked").append(named[0][1], one, ...named.slice(1).map(([, node]) => node));
  toolbar.elements.part.append(...Object.entries(PARTS).map(([value, [name]]) => element("option", { value }, name)));
  byId("version").textContent = about.version;
  byId("models").style.setProperty("--count", panels.length);
  byId("models").append(...panels.map((panel) => panel.node));
  byId("numbers").append(...panels.map((panel) => panel.numbers));
  byId("images").hidden = entries.length < 2;
  byId("images").append(...(about.epochs ? [element("label", { class: "epochs" }, element("output"),
    element("input", { type: "range", name: "image", min: 0, max: entries.length - 1, "aria-label": "epoch" }))]
    : entries.map((entry, index) => element("label", { title: entry.name },
      element("input", { type: "radio", name: "image", value: String(index), "aria-label": entry.name }),
      element("img", { src: entry.models[0].photo, alt: "" }), element("span", {}, entry.name)))));
  for (const [name, value] of Object.entries({ tabIndex: 0, role: "img", "aria-describedby": "keys",
    "aria-label": "photo: arrow keys move the query, Enter pins it" })) {
    if (name in photo) photo[name] = value;
    else photo.setAttribute(name, value);
  }
}

function writeControls() {
  for (const name of ["part", "style", "scale", "opacity"]) toolbar.elements[name].value = String(state[name]);
  for (const input of byId("images").querySelectorAll("input")) {
    if (about.epochs) input.value = state.image;
    else input.checked = Number(input.value) === state.image;
  }
  if (about.epochs) byId("images").querySelector("output").textContent =
    `${entries[state.image].name} · ${state.image + 1} of ${entries.length}`;
}

function onControl({ target: { name, value } }) {
  select({ [name]: name === "opacity" || name === "image" ? Number(value) : value });
  if (name === "image") show();
}

/** The pixel of the first model's input under an event on the photo. */
function pixelUnder(event) {
  const box = photo.getBoundingClientRect(), [H, W] = about.models[0].imgSize;
  const within = (share, size) => clamp(Math.floor(share * size), 0, size - 1);
  return [within((event.clientY - box.top) / box.height, H), within((event.clientX - box.left) / box.width, W)];
}

/** A click pins the pixel; one in the pinned cell lets go. */
function onPin(pixel) {
  const [panel] = panels, same = state.pinned && panel.finestCell(pixel) === panel.finestCell(state.queries[0]);
  ask(pixel, !same);
}

/** Arrows move the query, unless what has the focus needs them itself. */
function onKey(event) {
  const { key, target } = event, [query] = state.queries;
  if (key === "Escape") ask(ALL, false);
  if (target === photo && (key === "Enter" || key === " ") && typeof query !== "string") {
    event.preventDefault();
    onPin(query);
  }
  if (!ARROWS[key] || event.ctrlKey || event.altKey || event.metaKey || !panels[0].maps || target.closest?.("input, select")) return;
  event.preventDefault();
  ask(panels[0].neighbour(query, ARROWS[key]), state.pinned);
}

// ---- the picture ----------------------------------------------------------------------------------------------------

/** The view as a canvas, twice as fine as the page. */
function paintPicture() {
  const margin = 16, fine = 2, main = document.querySelector("main");
  setFineness(fine);
  panels.forEach((panel) => panel.copies.clear());
  paint();
  const box = main.getBoundingClientRect(), style = getComputedStyle(document.body);
  const width = box.width + 2 * margin, height = box.height + 2 * margin;
  const canvas = element("canvas", { width: fine * width, height: fine * height }), context = canvas.getContext("2d");
  context.scale(fine, fine);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, width, height);
  setFont(context, 14, style.color);
  context.translate(margin - box.left, margin - box.top);
  copyElement(context, main, style.accentColor);
  setFineness(0);
  panels.forEach((panel) => panel.copies.clear());
  schedule();
  return canvas;
}

async function save() {
  const blob = await new Promise((resolve) => paintPicture().toBlob(resolve, "image/png"));
  const what = [entries[state.image].name.replace(/\.\w+$/, ""), `layer ${state.layer}`, headName(state.head)];
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: `attention-${what.join("-").replace(/[^\w-]+/g, "-")}.png` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// ---- start ----------------------------------------------------------------------------------------------------------

buildControls();
for (const controls of [toolbar, byId("images")]) controls.addEventListener("input", onControl);
byId("save").addEventListener("click", save);
byId("more").addEventListener("toggle", schedule);
photo.addEventListener("pointermove", (event) => {
  if (event.pointerType === "mouse" && !state.pinned) ask(pixelUnder(event), false);
});
photo.addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse" && !state.pinned) ask(ALL, false);
});
photo.addEventListener("click", (event) => onPin(pixelUnder(event)));
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", applyFragment);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
new ResizeObserver(schedule).observe(document.querySelector("main"));
applyFragment();

/** For the console and for tests: the state, and a map's numbers. */
window.explorer = {
  ready: () => showing.then(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))),
  state: () => structuredClone(state),
  fragment: () => toFragment(state, first),
  difference: (model, layer, head) => panels[model].maps.difference(panels[model].chosen({ layer }), head, state.queries[model]),
  /** What a tile shows: values row by row, the ends of its colours, entropy (nats), distance (pixels). */
  tile(model, layer, head, part = state.part) {
    const panel = panels[model], own = panel.chosen({ layer }), numbers = own && panel.look(own, head, part, state.queries[model]);
    if (!numbers) return null;
    const drawn = panel.tiles(true).find((tile) => tile.layer === own && tile.head === head && tile.part === part);
    return { ...numbers, values: [...numbers.values], range: drawn?.range };
  },
};
