// The page: reads what it was given, keeps the state, draws a frame when something changed.

import { EVOLUTION, MEAN, PARTS, partName } from "./maps.js";
import { colourTable } from "./colours.js";
import { firstState, fromFragment, queryName, setQuery, toFragment } from "./state.js";
import { keep, keptBefore } from "./kept.js";
import { Panel, arrowOf, element, headName } from "./panel.js";

const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);
const entries = [...document.querySelectorAll("script.image")].map((script) => JSON.parse(script.textContent));
const tables = Object.fromEntries(Object.entries(about.colours).map(([name, base64]) => [name, colourTable(base64)]));

let state = firstState(about);
let hovered = null; // [layer number, column] under the mouse
const signed = colourTable(about.signed);
let frame = 0; // the request of the next one
let lastFrame = 0; // milliseconds that drawing took
let toLayOut = true;
let showing = Promise.resolve(); // the last change of image or part

const actions = {
  /** A hovering mouse moves the query unless it is pinned. */
  moveQuery(model, point, hovering) {
    if (hovering && state.pinned) return;
    change(() => setQuery(state, model, point, about));
  },
  /** Pin the query at a point, or where it is (null); again at the same place lets go. */
  pin(model, point) {
    change(() => {
      const same = point === null || panels[model].sameCell(state.queries[model], point);
      state.pinned = !(state.pinned && same);
      if (point !== null) setQuery(state, model, point, about);
    });
  },
  select(layer, { head = state.head, part = state.part }) {
    complain("");
    change(() => Object.assign(state, { layer, head, part }));
    writeControls();
  },
  hover(place) {
    hovered = place;
    schedule();
  },
};
const panels = about.models.map((model, index) => new Panel(model, index, actions));

function complain(text) {
  byId("message").textContent = text;
  byId("message").hidden = !text;
}

// ---- changing the state ---------------------------------------------------------------------------------------------

function change(apply) {
  apply();
  schedule();
}

/** Parts that the view needs; entropy and distance are of the attention. */
function neededParts() {
  return [...new Set([state.part, "attn", ...(state.view === "parts" ? EVOLUTION.map(([part]) => part) : [])])];
}

/** Load what image, view and part need, then show it; of several changes in a row the last one counts. */
function show() {
  const { image, part, view } = state;
  const wanted = entries[image];
  const parts = neededParts();
  showing = (async () => {
    const switches = await Promise.all(panels.map(async (panel, index) => {
      if (panel.entry !== wanted.models[index]) return panel.setEntry(wanted.models[index], parts);
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
  if (entries.length) show();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function schedule() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}

const isReady = () => entries.length > 0 && panels.every((panel) => panel.tiles && panel.maps.isLoaded(neededParts()));

function draw() {
  if (!isReady()) return;
  const begin = performance.now();
  if (toLayOut) panels.forEach((panel) => panel.layOut(state.numbers));
  toLayOut = false;
  panels.forEach((panel) => panel.compute(state));
  const style = getComputedStyle(document.body);
  const look = {
    state,
    table: tables[state.colours],
    signed,
    ink: { text: style.color, faint: getComputedStyle(byId("part-help")).color },
    shown: hovered ? [hovered[0], hovered[1].head ?? state.head, hovered[1].part ?? state.part]
      : [state.layer, state.head, state.part],
  };
  shareScales(look);
  panels.forEach((panel) => panel.paint(look));
  lastFrame = performance.now() - begin;
  finishLater();
}

/**
 * One scale of colours for each tile, for the tiles of a layer, or for all, over all models; attention has one, logits
 * have another. That of attention reaches to twice uniform attention at least: what looks everywhere alike must not look
 * strong.
 */
function shareScales(look) {
  const tiles = panels.flatMap((panel) => panel.tiles.flat().filter((tile) => tile.present).map((tile) => [panel, tile]));
  const reaches = new Map();
  const groupOf = ({ layer, part }, index) => [part === "attn",
    state.scale === "all" ? "" : state.scale === "layer" ? layer.number : index].join();
  tiles.forEach(([, tile], index) => {
    const group = groupOf(tile, index), least = tile.part === "attn" ? 2 : 1e-12;
    reaches.set(group, Math.max(reaches.get(group) ?? least, tile.reach));
  });
  tiles.forEach(([panel, tile], index) => panel.colour(tile, reaches.get(groupOf(tile, index)), look));
}

/**
 * When the hand rests: tiles that are not in view, the address and the spoken status. Browsers limit how often an
 * address may change.
 */
let later = 0;
function finishLater() {
  clearTimeout(later);
  later = setTimeout(() => {
    panels.forEach((panel) => panel.paintAllTiles());
    const fragment = toFragment(state, about);
    const hasAddress = location.protocol !== "about:"; // a page inside a notebook has none
    if (hasAddress && location.hash !== fragment) history.replaceState(null, "", fragment);
    const spoken = `query ${queryName(state.queries[0])}; ` + panels[0].zoomLines().join(", ");
    if (byId("status").textContent !== spoken) byId("status").textContent = spoken;
  }, 200);
}

// ---- controls -------------------------------------------------------------------------------------------------------

const toolbar = byId("toolbar");

function buildControls() {
  byId("parts").append(...PARTS.map(([part, name]) => element("label", {},
    element("input", { type: "radio", name: "part", value: part, disabled: true }), name)));
  const heads = [...new Set(panels.flatMap((panel) => panel.heads))].sort((a, b) => a - b);
  toolbar.elements.head.append(...[...heads, MEAN].map((head) => element("option", { value: String(head) }, String(head))));
  toolbar.elements.colours.append(...Object.keys(about.colours).map((name) => element("option", {}, name)));
  byId("link").hidden = panels.length < 2;
  byId("seen").hidden = !about.upload && !entries.some((entry) => entry.models.some((view) => view.seen));
  byId("version").textContent = about.version;
  byId("settings").open = window.innerWidth >= 700;
  byId("models").append(...panels.map((panel) => panel.node));
  entries.forEach(addThumbnail);
  byId("toolbar").hidden = byId("models").hidden = entries.length === 0; // of a server that was given no image yet
}

function addThumbnail(entry, index) {
  byId("images").append(element("label", { title: entry.name },
    element("input", { type: "radio", name: "image", value: String(index), "aria-label": entry.name }),
    element("img", { src: entry.models[0].photo, alt: "" }), element("span", {}, entry.name)));
  byId("images").hidden = entries.length < 2;
}

function writeControls() {
  const { elements } = toolbar;
  for (const name of ["opacity", "scale", "colours", "theme", "head"]) elements[name].value = String(state[name]);
  for (const input of byId("views").querySelectorAll("input")) input.checked = input.value === state.view;
  byId("parts").hidden = state.view === "parts";
  for (const name of ["numbers", "link", "seen"]) elements[name].checked = state[name];
  for (const input of byId("parts").querySelectorAll("input")) input.checked = input.value === state.part;
  for (const input of byId("images").querySelectorAll("input")) input.checked = input.value === String(state.image);
  byId("part-help").textContent = state.view === "parts" ? "what one head computes, from left to right, layer after layer"
    : PARTS.find(([part]) => part === state.part)[2];
  if (state.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
}

function onControl({ target: { name, type, value, checked } }) {
  if (!(name in state)) return;
  const isNumber = name === "opacity" || name === "image" || name === "head" && value !== MEAN;
  state[name] = type === "checkbox" ? checked : isNumber ? Number(value) : value;
  if (name === "link" && checked) setQuery(state, 0, state.queries[0], about);
  if (name === "numbers") toLayOut = true;
  writeControls();
  if (["view", "part", "image"].includes(name)) show();
  schedule();
}

/** Arrows move the query, unless what has the focus needs them itself. */
function onKey(event) {
  if (event.key === "Escape") change(() => { state.pinned = false; });
  const arrow = arrowOf(event);
  const { target } = event;
  if (!arrow || !panels[0].maps || target.closest?.("input, select, .buttons")) return;
  event.preventDefault();
  const index = Math.max(0, panels.findIndex((panel) => panel.node.contains(target)));
  actions.moveQuery(index, panels[index].neighbour(state.queries[index], arrow), false);
}

// ---- the picture ----------------------------------------------------------------------------------------------------

/** The view as a canvas, twice as fine as the page. */
function paintPicture() {
  const margin = 16, between = 24, head = 28, scale = 2;
  const sizes = panels.map((panel) => panel.pictureSize());
  const width = sizes.reduce((sum, size) => sum + size.width + between, 2 * margin - between);
  const height = Math.max(...sizes.map((size) => size.totalHeight)) + head + 2 * margin;
  const canvas = element("canvas", { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.body);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, width, height);
  context.fillStyle = style.color;
  context.font = "13px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText(`${entries[state.image].name} · ${partName(state.part)}`, margin, margin, width - 2 * margin);
  let x = margin;
  panels.forEach((panel, index) => {
    context.save();
    context.translate(x, margin + head);
    panel.paintPicture(context);
    context.restore();
    x += sizes[index].width + between;
  });
  return canvas;
}

async function save() {
  const blob = await new Promise((resolve) => paintPicture().toBlob(resolve, "image/png"));
  const stem = entries[state.image].name.replace(/\.\w+$/, "").replace(/[^\w-]+/g, "-");
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: `attention-${stem}-${state.part}.png` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// ---- images sent to the server of --serve ---------------------------------------------------------------------------

/** Send files in turn, and show the last that was taken; what was wrong with others is said together. */
async function upload(files) {
  const wrong = [];
  complain("");
  document.body.classList.add("waiting");
  for (const file of files) {
    try {
      const entry = await send(file);
      addEntry(entry);
      state.image = entries.length - 1;
      await keep(about.upload.session, entry).catch((error) =>
        wrong.push(`${file.name} will not outlast a reload: ${error.message}`));
    } catch (error) {
      wrong.push(`${file.name}: ${error.message}`);
    }
  }
  document.body.classList.remove("waiting");
  complain(wrong.join("; "));
  writeControls();
  if (entries.length) await show();
}

async function send(file) {
  if (file.size > about.upload.maxBytes) {
    throw new Error(`it has ${(file.size / 1e6).toFixed(1)} MB; at most ${about.upload.maxBytes / 1e6} MB are taken`);
  }
  const response = await fetch(`image?name=${encodeURIComponent(file.name)}`, {
    method: "POST", body: file, headers: { "Content-Type": file.type || "application/octet-stream" },
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function addEntry(entry) {
  entries.push(entry);
  addThumbnail(entry, entries.length - 1);
  byId("toolbar").hidden = byId("models").hidden = false;
}

async function takeUploads() {
  byId("upload").hidden = false;
  byId("upload-limits").textContent =
    `or drop some here: up to ${about.upload.maxBytes / 1e6} MB and ${about.upload.maxPixels / 1e6} megapixels each`;
  byId("upload").querySelector("input").addEventListener("change", ({ target }) => {
    if (target.files.length) upload([...target.files]);
    target.value = "";
  });
  const dropping = (on) => (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", on);
  };
  document.addEventListener("dragover", dropping(true));
  document.addEventListener("dragleave", dropping(false));
  document.addEventListener("drop", (event) => {
    dropping(false)(event);
    if (event.dataTransfer.files.length) upload([...event.dataTransfer.files]);
  });
  const kept = await keptBefore(about.upload.session).catch(() => []); // a browser that keeps nothing
  kept.forEach(addEntry);
}

// ---- start ----------------------------------------------------------------------------------------------------------

buildControls();
if (about.upload) await takeUploads();
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
  /** Milliseconds that drawing the last frame took. */
  frameTime: () => lastFrame,
  /** What a tile shows: values row by row, the ends of its colours, entropy (nats), distance (pixels). */
  tile(model, layer, head, part = state.part) {
    const panel = panels[model];
    const tile = panel.tiles?.flat().find((one) => one.layer.number === layer && one.head === head && one.part === part);
    if (!tile?.present) return null;
    const { values, cell, entropy, distance, outside, range } = tile;
    return { values: [...values], cell, featSize: panel.maps.featSize(tile.layer), entropy, distance, outside, range,
      name: `layer ${layer}, ${headName(head)}` };
  },
  MEAN,
};
