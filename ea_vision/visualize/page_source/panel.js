// One model: the layers of a chain, how the chosen one came by its map, and all layers and heads.

import { ALL, CHANGED, MEAN, Maps, PARTS, cellAt, isAttention, measure } from "./maps.js";
import { drawMap, greyCopy, scaledCopy, shortNumber, sizeCanvas } from "./draw.js";
import { queryName } from "./state.js";

const FULL = 4; // times uniform attention: full colour of what changed

export const headName = (head) => (head === MEAN ? "mean of the heads" : `head ${head}`);

export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

/** An element with properties and children; text goes in as text, never as HTML. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** The largest width of `count` tiles in lines in `width` x `high` pixels, at least `least`: more lines where one is too narrow. */
function fit(count, width, high, aspect, gap, least, largest) {
  for (let lines = 1; ; lines++) {
    const each = Math.ceil(count / lines);
    const side = Math.floor(Math.min((width - (each - 1) * gap) / each, (high / lines - 20) / aspect, largest));
    if (side >= least || each === 1) return Math.max(20, Math.min(side, largest));
    if (high / (lines + 1) - 20 < least * aspect) return Math.max(least, Math.min(Math.floor((width - (each - 1) * gap) / each), 72));
  }
}

export class Panel {
  /**
   * @param model one of about.models; index: of the model; count: of all.
   * @param actions of the page: select.
   */
  constructor(model, index, count, actions) {
    Object.assign(this, { model, index, count, actions });
    this.heads = [...new Set(model.layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
    const id = `model-${index}`, [name, ...run] = model.label.split(", "); // "name, run folder, epoch"
    this.predictions = element("ol", { class: "predictions", "aria-label": "predictions" });
    this.caption = element("p", { class: "caption" });
    this.layerRow = element("div", { class: "row layers", role: "group", "aria-label": `layers of ${model.label}` });
    this.howTitle = element("h3");
    this.howRow = element("div", { class: "row" });
    this.howNote = element("p", { class: "caption" }, `+ and \u2212: a cell gains or loses more than uniform attention; full colour at ${FULL} times`);
    this.equation = element("p", { class: "caption equation" });
    this.logitRow = element("div", { class: "row" });
    this.logits = element("details", {}, element("summary", {}, "how did this map come about? its logits"), this.equation, this.logitRow);
    this.logits.addEventListener("toggle", actions.redraw);
    this.how = element("div", { class: "how" }, this.howTitle, this.howRow, this.howNote, this.logits);
    this.blocks = element("div", { class: "blocks", role: "group", "aria-label": `tiles of ${model.label}` });
    this.evidenceRow = element("div", { class: "row" });
    this.evidence = element("details", {}, element("summary", {}, "why these classes? the evidence in the maps"), this.evidenceRow);
    this.sheet = element("div", { class: "sheet" },
      element("h3", {}, `All layers × heads, and the mean of heads${count > 1 ? `: ${name}` : ""}`), this.blocks, this.evidence);
    this.node = element("section", { class: "model", "aria-labelledby": id },
      element("div", { class: "part" }, element("header", {},
        element("h2", { id }, name, element("span", { class: "run" }, run.join(", "))), this.predictions, this.caption), this.layerRow),
      this.how, this.sheet);
    this.numbers = element("p");
  }

  // ---- images, tiles -------------------------------------------------------------------------------------------

  /** Load an image's entry with its maps; a promise of the function that shows it. */
  async setEntry(entry) {
    const image = element("img", { src: entry.photo, alt: "" });
    const [maps] = await Promise.all([Maps.load(this.model, entry), image.decode()]);
    return () => { // the page switches all models at once
      Object.assign(this, { entry, image, maps, grey: greyCopy(image), copies: new Map(), arranged: "" });
      const sizes = this.model.layers.map((layer) => maps.featSize(layer));
      this.finest = sizes.reduce((a, b) => (b[0] * b[1] > a[0] * a[1] ? b : a));
      this.attn = new Float32Array(this.finest[0] * this.finest[1]);
      this.aspect = this.model.imgSize[0] / this.model.imgSize[1];
      this.equation.textContent = entry.equation; // learned gates differ from epoch to epoch
      this.predictions.replaceChildren(...entry.predictions.map(({ name, probability }) => element("li", {}, name,
        element("span", { class: "probability" }, `${(100 * probability).toFixed(1)}%`))));
      const shown = entry.predictions.filter(({ evidence }) => evidence);
      this.evidence.hidden = !shown.length;
      this.evidenceRow.replaceChildren(...shown.map(({ name, evidence }) => element("div", { class: "cell" },
        element("img", { src: evidence, alt: `evidence of ${name}` }), element("span", {}, name))));
    };
  }

  /** The chosen layer of this model; undefined if it has none of this number. */
  chosen({ layer }) {
    return this.model.layers.find(({ number }) => number === layer);
  }

  /** The layers of the chain that a layer is in; without evolution neighbours whose maps have one size. */
  chain(layer) {
    const { layers } = this.model, evolving = layers.some((one) => one.evolves), chains = [];
    layers.forEach((one, i) => {
      const same = i && String(this.maps.featSize(one)) === String(this.maps.featSize(layers[i - 1]));
      if (!same || evolving && !one.evolves) chains.push([]);
      chains.at(-1).push(one);
    });
    return chains.find((chain) => chain.includes(layer)) ?? chains[0];
  }

  /** A tile of a layer. fixed: its head and part, where it has its own; else they are those of the page. */
  newTile(layer, fixed, text, name, ...below) {
    const featSize = this.maps.featSize(layer), [H, W] = featSize, label = `layer ${layer.number}, ${name}`;
    const canvas = element("canvas"), button = element("button", { type: "button", class: "tile", title: label, "aria-label": label }, canvas);
    button.addEventListener("click", () => this.actions.select({ layer: layer.number, ...fixed.head === undefined ? {} : { head: fixed.head } }));
    return { layer, featSize, fixed, button, canvas, node: element("div", { class: "cell" }, button, ...(text ? [element("span", {}, text)] : []), ...below),
      values: new Float32Array(H * W), pixels: new OffscreenCanvas(W, H).getContext("2d"), data: new ImageData(W, H) };
  }

  /** Make the tiles anew where another layer is chosen: rows of the chain and of its steps, thumbnails of heads, the sheet. */
  arrange(state) {
    const chosen = this.chosen(state), layer = chosen ?? this.model.layers[0], all = [...this.heads, MEAN];
    if (this.arranged === `${state.layer}`) return;
    const chain = this.chain(layer), sign = (text) => element("div", { class: "sign", "aria-hidden": "true" }, text);
    this.layerTiles = chain.map((one) => this.newTile(one, {}, `layer ${one.number}`, "large"));
    chain.forEach((one, i) => i && one.evolves && this.layerTiles[i].node.prepend(sign("\u2192")));
    this.layerRow.replaceChildren(...this.layerTiles.map(({ node }) => node));
    const steps = chosen?.evolves ? this.maps.steps(chosen) : [], previous = `layer ${layer.number - 1}\u2019s map`;
    const changes = chosen && this.maps.has(chosen, "attn_own_alone") && this.maps.has(chosen, "attn");
    this.how.hidden = !changes && steps.length < 2;
    this.howRow.hidden = this.howNote.hidden = !changes;
    this.howTiles = !changes ? [] : [["attn_own_alone", `without ${previous}`], ["attn", `with ${previous}`], [CHANGED, `what ${previous} changed`]]
      .map(([part, heading]) => this.newTile(chosen, { part }, heading, heading));
    this.howRow.replaceChildren(...this.howTiles.map(({ node }) => node));
    this.logits.hidden = steps.length < 2;
    this.logitTiles = this.logits.hidden ? [] : steps.map(([part, heading]) => this.newTile(chosen, { part }, heading, PARTS[part][0]));
    this.logitTiles.forEach(({ node }, i) => steps[i][2] && node.prepend(sign(steps[i][2])));
    this.logitRow.replaceChildren(...this.logitTiles.map(({ node }) => node));
    this.headTiles = [...layer.heads, MEAN].map((head) => this.newTile(layer, { head }, String(head), `thumbnail of ${headName(head)}`));
    if (!this.sheetTiles || !this.arranged) {
      this.sheetTiles = this.model.layers.map((one) => all.filter((head) => head === MEAN || one.heads.includes(head))
        .map((head) => this.newTile(one, { head }, "", headName(head))));
      this.blocks.replaceChildren(...this.sheetTiles.map((row, i) => element("div", { class: "block" },
        element("span", {}, `layer ${this.model.layers[i].number}`), element("div", { class: "row" }, ...row.map(({ node }) => node)))));
    }
    this.arranged = `${state.layer}`;
  }

  /** Tiles of all rows; `heads`: with the thumbnails. */
  tiles(heads) {
    return [...this.layerTiles, ...this.howTiles, ...(this.logits.open ? this.logitTiles : []), ...(heads ? this.headTiles : []), ...this.sheetTiles.flat()];
  }

  /** Choose the tiles' widths for the panel's. thumb: of the heads' thumbnails; gap: between layers. */
  layOut(thumb, gap) {
    const width = this.layerRow.clientWidth || 300, narrow = window.innerWidth <= 700, { aspect, count } = this;
    const high = narrow ? [150, 130, 120][count - 1] : 280, set = (tiles, side) => tiles.forEach((tile) => { tile.side = side; });
    set(this.layerTiles, fit(this.layerTiles.length, width - 2, high, aspect, gap, 64, 260));
    set(this.howTiles, fit(this.howTiles.length, width - 2, narrow ? 130 : 200, aspect, 8, 50, 180));
    set(this.logitTiles, fit(this.logitTiles.length, width - 2, narrow ? 110 : 150, aspect, 26, 50, 140));
    set(this.headTiles, thumb);
    const each = this.sheetTiles[0].length, room = narrow ? 240 / count : 230;
    let side = 72;
    while (side > 26) {
      const across = Math.max(1, Math.floor((width + 18) / (each * (side + 3) + 15)));
      if (each * (side + 3) - 3 <= width && Math.ceil(this.sheetTiles.length / across) * (side * aspect + 25) <= room) break;
      side -= 2;
    }
    set(this.sheetTiles.flat(), side);
  }

  // ---- the query -----------------------------------------------------------------------------------------------

  /** The middle of the next cell of the finest map, in pixels [y, x]. What lies nowhere begins in the image's middle. */
  neighbour(query, [down, right]) {
    const [H, W] = this.finest, [height, width] = this.model.imgSize;
    const [y, x] = typeof query === "string" ? [Math.floor(height / 2), Math.floor(width / 2)] : query;
    const step = (pixel, cells, size, by) =>
      Math.floor(((clamp(Math.floor((pixel * cells) / size) + by, 0, cells - 1) + 0.5) * size) / cells);
    return [step(y, H, height, down), step(x, W, width, right)];
  }

  /** Cell of the finest map; a token, or all pixels, by name. */
  finestCell(query) {
    return typeof query === "string" ? query : cellAt(query, this.finest, this.model.imgSize);
  }

  // ---- a frame: compute, then paint ----------------------------------------------------------------------------

  /** Fill a tile with the row of the query; reach: of attention in units of uniform attention. */
  compute(tile, state) {
    const { layer, values, fixed } = tile, query = state.queries[this.index];
    tile.head = fixed.head ?? state.head;
    tile.part = fixed.part ?? state.part;
    const parts = tile.part === CHANGED ? ["attn", "attn_own_alone"] : [tile.part];
    tile.present = parts.every((part) => this.maps.has(layer, part)) && (tile.head === MEAN || layer.heads.includes(tile.head));
    tile.cell = this.maps.cellOf(layer, query);
    if (!tile.present) return;
    this.maps.row(layer, tile.head, parts[0], query, values);
    if (tile.part === CHANGED) {
      const alone = this.maps.row(layer, tile.head, parts[1], query, this.attn.subarray(0, values.length)), keys = this.numKeys(tile);
      values.forEach((value, cell) => { values[cell] = (value - alone[cell]) * keys; });
    }
    tile.reach = values.reduce((most, value) => Math.max(most, value === -Infinity ? 0 : Math.abs(value)), 0);
    if (isAttention(tile.part)) tile.reach *= this.numKeys(tile);
  }

  /** Give a tile its colours: attention as far below uniform attention as above, logits as far below 0 as above. */
  colour(tile, reach, { tables, fog }) {
    const uniform = 1 / this.numKeys(tile), top = fog ? 2 : reach, changed = tile.part === CHANGED, end = changed ? FULL : reach;
    tile.range = isAttention(tile.part) ? [uniform / top, uniform * top] : [-end, end];
    tile.table = isAttention(tile.part) ? (fog ? tables.fog : tables.cells) : changed ? tables.changes : tables.signed;
  }

  /** Keys that the query of a tile, or of a `look`, sees; of all pixels, and of a token, the most that a pixel's sees. */
  numKeys({ layer, cell }) {
    const keys = this.maps.entry.keys[layer.number];
    return keys[cell] ?? Math.max(...keys);
  }

  /** The photo, or its grey copy, as large as tiles of a size. */
  copy(kind, width, height) {
    const key = [kind, width, height, window.devicePixelRatio].join();
    if (!this.copies.has(key)) this.copies.set(key, scaledCopy(this[kind], width, height));
    return this.copies.get(key);
  }

  /** Paint all tiles. `look`: state, tables, fog, ink. */
  paint({ state, ink, fog }, heads) {
    for (const tile of this.tiles(heads)) {
      const { side } = tile, height = Math.max(1, Math.round(side * this.aspect));
      const photo = this.copy(fog && isAttention(tile.part) ? "image" : "grey", side, height);
      drawMap(sizeCanvas(tile.canvas, side, height), tile, { photo, fog, opacity: state.opacity, ink }, side, height);
      tile.node.style.width = `${side}px`;
      tile.node.style.setProperty("--height", `${height}px`);
      const pressed = tile.layer.number === state.layer && tile.head === state.head && tile.part === state.part;
      tile.button.setAttribute("aria-pressed", String(pressed));
    }
    this.howTitle.textContent = this.sentence(state);
    const [title, ...rest] = this.lines(state);
    this.caption.textContent = title;
    this.numbers.replaceChildren(...(this.count > 1 ? [this.model.label, element("br")] : []), ...rest.flatMap((line) => [line, element("br")]));
  }

  /** How much of the attention the previous map moved, in a sentence. */
  sentence(state) {
    const layer = this.chosen(state), query = state.queries[this.index];
    const difference = layer && this.maps.difference(layer, state.head, query);
    if (difference === undefined) return `How layer ${state.layer} came by its map`;
    const whose = query === ALL || state.head === MEAN ? "of a query\u2019s attention moves on average" : "of this query\u2019s attention moves";
    return `Layer ${layer.number}, ${headName(state.head)}: ${Math.round(100 * difference)}% ${whose} because of layer ${layer.number - 1}`;
  }

  /** What is chosen, as lines of text: its name, then its numbers. */
  lines(state) {
    const layer = this.chosen(state), { head, part } = state, query = state.queries[this.index];
    const title = `layer ${state.layer} · ${headName(head)} · ${queryName(query)}${part === "attn" ? "" : ` · ${PARTS[part][0]}`}`;
    if (!layer) return [`none in this model, which has layers ${this.model.layers.map((one) => one.number).join(", ")}`];
    const numbers = this.look(layer, head, part, query);
    const lacksHead = head !== MEAN && !layer.heads.includes(head);
    if (lacksHead) return [`layer ${state.layer} · no ${headName(head)} here, but ${layer.heads.join(", ")}`];
    if (!numbers) return [title, "this layer has none"];
    const { values, featSize, entropy, distance, outside } = numbers, largest = Math.max(...values), lines = [`${title} · ${featSize.join("x")} map`];
    if (isAttention(part)) lines.push(`largest ${(100 * largest).toFixed(1)}%, ${shortNumber(largest * this.numKeys(numbers))} times uniform`);
    if (entropy === undefined) return lines;
    const { prefixes, shares } = this.maps.entry, tokens = this.model.prefix.slice(0, prefixes[layer.number]); // or none
    if (tokens.length && shares[layer.number]) lines.push(`${(100 * outside).toFixed(0)}% of it to ${tokens.join(", ")}`);
    const most = Math.log(Math.min(values.length, this.numKeys(numbers)));
    lines.push(`entropy of its attention ${entropy.toFixed(2)} of at most ${most.toFixed(2)} nats`);
    return distance === undefined ? lines : [...lines, `mean distance ${distance.toFixed(1)} px`];
  }

  /** Numbers of a map: values row by row, and of its attention entropy (nats), distance (pixels), and the share of tokens. */
  look(layer, head, part, query) {
    if (!this.maps.has(layer, part) || (head !== MEAN && !layer.heads.includes(head))) return null;
    const featSize = this.maps.featSize(layer), cell = this.maps.cellOf(layer, query), count = featSize[0] * featSize[1];
    const values = this.maps.row(layer, head, part, query, new Float32Array(count));
    if (!this.maps.has(layer, "attn")) return { layer, values, featSize, cell };
    const attn = isAttention(part) ? values : this.maps.row(layer, head, "attn", query, this.attn.subarray(0, count));
    return { layer, values, featSize, cell, ...measure(attn, cell, featSize, this.model.imgSize) };
  }
}
