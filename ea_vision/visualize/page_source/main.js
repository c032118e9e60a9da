// The page: reads what it was given, keeps the state, draws a frame when something changed.

import { EVOLUTION, MEAN, PARTS, isAttention, partName } from "./maps.js";
import { colourTable, copyElement, setFineness, setFont } from "./draw.js";
import { firstState, fromFragment, queryName, setQuery, toFragment } from "./state.js";
import { Panel, arrowOf, element, headName } from "./panel.js";

const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);
const entries = [...document.querySelectorAll("script.image")].map((script) => JSON.parse(script.textContent));
const tables = Object.fromEntries(Object.entries(about.colours).map(([name, base64]) => [name, colourTable(base64)]));
const signed = colourTable(about.signed);
const toolbar = byId("toolbar");

let state = firstState(about);
let hovered = null; // [layer number, column] under the mouse
let frame = 0; // the request of the next one
let lastFrame = 0; // milliseconds that drawing took
let toLayOut = true;
let showing = Promise.resolve(); // the last change of image or part
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
    const same = point === null || panels[model].sameCell(state.queries[model], point);
    state.pinned = !(state.pinned && same);
    if (point !== null) setQuery(state, model, point, about);
    schedule();
  },
  select(layer, { head = state.head, part = state.part }) {
    complain("");
    Object.assign(state, { layer, head, part });
    writeControls();
    schedule();
  },
  hover(place) {
    hovered = place;
    schedule();
  },
};
const panels = about.models.map((model, index) => new Panel(model, index, about.models.length, actions));

function complain(text) {
  byId("message").textContent = text;
  byId("message").hidden = !text;
}

// ---- showing images and parts ---------------------------------------------------------------------------------------

/** Parts that the view needs; entropy and distance are of the attention. */
function neededParts() {
  return [...new Set([state.part, "attn", ...(state.view === "parts" ? EVOLUTION.map(([part]) => part) : [])])];
}

/** Load what image, view and part need, then show it; of several changes in a row the last one counts. */
function show() {
  const { image, part, view } = state, parts = neededParts(), wanted = entries[image].models;
  showing = (async () => {
    const switches = await Promise.all(panels.map(async (panel, index) => {
      if (panel.entry !== wanted[index]) return panel.setEntry(wanted[index], parts);
      await panel.maps.load(parts);
      return () => {};
    }));
    if (state.image !== image || state.part !== part || state.view !== view) return;
    switches.forEach((use) => use());
    if (view === "parts" && panels.every((panel) => panel.maps.evolution().length < 3)) {
      state.view = "heads"; // one head's attention alone is no evolution
      return show();
    }
    panels.forEach((panel) => panel.useView(view));
    toLayOut = true;
    offerParts();
    schedule();
  })().catch((error) => complain(`This page cannot show its maps: ${error.message}`));
  return showing;
}

/** Enable the parts that the image has; a part that it lacks gives way to the first that it has. */
function offerParts() {
  const available = new Set(panels.flatMap((panel) =>
    (state.view === "parts" ? panel.maps.evolution().map(([part]) => part) : panel.maps.parts())));
  for (const input of byId("parts").querySelectorAll("input")) {
    input.disabled = !available.has(input.value);
    input.parentElement.title = input.disabled ? "not in this page, or none of its layers has it" : "";
  }
  if (!available.has(state.part)) {
    state.part = PARTS.map(([part]) => part).find((part) => available.has(part));
    show();
  }
  writeControls();
}

function applyFragment() {
  const [asked, problems] = fromFragment(location.hash, about, entries.length);
  state = asked;
  complain(problems.join(" "));
  writeControls();
  show();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function schedule() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}

/** Fit all panels; models side by side have tiles of one size, and rows and stages that begin alike. */
function layOut() {
  const columns = Math.max(...panels.map((panel) => panel.columns.length));
  const headers = panels.map((panel) => panel.node.firstChild);
  headers.forEach((header) => { header.style.minHeight = ""; });
  const beside = panels.length > 1 && panels[0].node.offsetTop === panels.at(-1).node.offsetTop;
  const tallest = Math.max(...headers.map((header) => header.offsetHeight));
  headers.forEach((header) => { header.style.minHeight = beside ? `${tallest}px` : ""; });
  panels.forEach((panel) => panel.layOut(state, beside ? columns : panel.columns.length));
}

function draw() {
  if (!panels.every((panel) => panel.tiles && panel.maps.isLoaded(neededParts()))) return;
  const begin = performance.now();
  if (toLayOut) layOut();
  toLayOut = false;
  paint(false);
  lastFrame = performance.now() - begin;
  clearTimeout(later);
  later = setTimeout(finish, 200);
}

/** Paint all models: rows of tiles that are in view, or all. */
function paint(all) {
  panels.forEach((panel) => panel.compute(state));
  const style = getComputedStyle(document.body);
  const look = {
    state,
    all,
    table: tables[state.colours],
    signed,
    ink: { text: style.color, faint: getComputedStyle(byId("part-help")).color, accent: style.accentColor },
    shown: [hovered?.[0] ?? state.layer, hovered?.[1].head ?? state.head, hovered?.[1].part ?? state.part],
  };
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

/** When the hand rests: tiles that are not in view, the spoken status, the address, which may not change too often. */
function finish() {
  panels.forEach((panel) => panel.paintTiles());
  const fragment = toFragment(state, about);
  const hasAddress = location.protocol !== "about:"; // a page inside a notebook has none
  if (hasAddress && location.hash !== fragment) history.replaceState(null, "", fragment);
  const spoken = `query ${queryName(state.queries[0])}; ` + panels[0].zoomLines().join(", ");
  if (byId("status").textContent !== spoken) byId("status").textContent = spoken;
}

// ---- controls -------------------------------------------------------------------------------------------------------

function buildControls() {
  byId("parts").append(...PARTS.map(([part, name]) => element("label", {},
    element("input", { type: "radio", name: "part", value: part, disabled: true }), name)));
  const heads = [...new Set(panels.flatMap((panel) => panel.heads))].sort((a, b) => a - b);
  toolbar.elements.head.append(...[...heads, MEAN].map((head) => element("option", { value: String(head) }, String(head))));
  toolbar.elements.colours.append(...Object.keys(about.colours).map((name) => element("option", {}, name)));
  byId("link").hidden = panels.length < 2;
  byId("seen").hidden = !entries.some((entry) => entry.models.some((view) => view.seen));
  byId("version").textContent = about.version;
  byId("models").append(...panels.map((panel) => panel.node));
  byId("images").hidden = entries.length < 2;
  byId("images").append(...(about.epochs ? [element("label", { class: "epochs" }, element("output", {}),
    element("input", { type: "range", name: "image", min: 0, max: entries.length - 1, "aria-label": "epoch" }))]
    : entries.map((entry, index) => element("label", { title: entry.name },
      element("input", { type: "radio", name: "image", value: String(index), "aria-label": entry.name }),
      element("img", { src: entry.models[0].photo, alt: "" }), element("span", {}, entry.name)))));
}

function writeControls() {
  const { elements } = toolbar;
  for (const name of ["opacity", "scale", "colours", "head"]) elements[name].value = String(state[name]);
  for (const name of ["link", "seen"]) elements[name].checked = state[name];
  for (const input of document.querySelectorAll("input[type=radio]")) input.checked = input.value === String(state[input.name]);
  if (about.epochs) byId("images").querySelector("input").value = state.image;
  if (about.epochs) byId("images").querySelector("output").textContent =
    `${entries[state.image].name} · ${state.image + 1} of ${entries.length}`;
  byId("parts").hidden = state.view === "parts";
  byId("one-head").hidden = state.view !== "parts";
  byId("part-help").textContent = state.view === "parts" ? "what one head computes, from left to right, layer after layer"
    : PARTS.find(([part]) => part === state.part)[2];
}

function onControl({ target: { name, type, value, checked } }) {
  if (!(name in state)) return;
  const isNumber = name === "opacity" || name === "image" || name === "head" && value !== MEAN;
  state[name] = type === "checkbox" ? checked : isNumber ? Number(value) : value;
  if (name === "link" && checked) setQuery(state, 0, state.queries[0], about);
  complain("");
  writeControls();
  if (["view", "part", "image"].includes(name)) show();
  schedule();
}

/** Arrows move the query, unless what has the focus needs them itself. */
function onKey(event) {
  if (event.key === "Escape") {
    state.pinned = false;
    schedule();
  }
  const arrow = arrowOf(event), { target } = event;
  if (!arrow || !panels[0].maps || target.closest?.("input, select, .buttons")) return;
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
  layOut();
  const look = paint(true), box = main.getBoundingClientRect();
  const width = box.width + 2 * margin, height = box.height + heading + 2 * margin;
  const canvas = element("canvas", { width: fine * width, height: fine * height }), context = canvas.getContext("2d");
  context.scale(fine, fine);
  context.fillStyle = getComputedStyle(body).backgroundColor;
  context.fillRect(0, 0, width, height);
  setFont(context, 14, look.ink.text);
  context.fillText(`${entries[state.image].name} · ${state.view === "parts" ? headName(state.head)
    : partName(state.part)}`, margin, margin);
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
toolbar.addEventListener("submit", (event) => event.preventDefault());
toolbar.addEventListener("input", onControl);
byId("images").addEventListener("input", onControl);
byId("save").addEventListener("click", save);
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", applyFragment);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
new ResizeObserver(() => {
  toLayOut = true;
  schedule();
}).observe(byId("models"));
applyFragment();

/** For the console and for tests: the state, a tile's numbers, the time of a frame. */
window.explorer = {
  ready: () => showing.then(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))),
  state: () => structuredClone(state),
  fragment: () => toFragment(state, about),
  frameTime: () => lastFrame, // milliseconds
  links: (model) => panels[model].links,
  /** What a tile shows: values row by row, the ends of its colours, entropy (nats), distance (pixels). */
  tile(model, layer, head, part = state.part) {
    const panel = panels[model];
    const tile = panel.tiles?.flat().find((one) => one.layer.number === layer && one.head === head && one.part === part);
    if (!tile?.present) return null;
    const { values, cell, entropy, distance, outside, range } = tile;
    return { values: [...values], cell, featSize: panel.maps.featSize(tile.layer), entropy, distance, outside, range };
  },
};
