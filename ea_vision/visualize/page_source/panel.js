// One model: its predictions, the photo on which the query is set, the enlarged tile, and all tiles.

import { MEAN, Maps, PARTS, cellAt, isAttention, measure } from "./maps.js";
import {
  FRAME, drawBar, drawMap, drawPhoto, drawTiles, greyCopy, shortNumber, sizeCanvas, tileGeometry,
} from "./draw.js";
import { queryName } from "./state.js";

export const headName = (head) => (head === MEAN ? "mean of the heads" : `head ${head}`);

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

/** Row and column of an event over a canvas that shows a grid of H x W. */
function cellUnder(event, canvas, [H, W]) {
  const box = canvas.getBoundingClientRect(), within = (share, size) => clamp(Math.floor(share * size), 0, size - 1);
  return [within((event.clientY - box.top) / box.height, H), within((event.clientX - box.left) / box.width, W)];
}

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

export class Panel {
  /**
   * @param model one of about.models; index: of the model; count: of all.
   * @param actions of the page: moveQuery, pin, select.
   */
  constructor(model, index, count, actions) {
    Object.assign(this, { model, index, count, actions });
    this.heads = [...new Set(model.layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
    this.build();
    this.listen();
  }

  build() {
    const id = `model-${this.index}`;
    const [name, ...run] = this.model.label.split(", "); // "name, run folder, epoch"
    this.predictions = element("ol", { class: "predictions", "aria-label": "predictions" });
    this.photo = element("canvas", {
      class: "photo", tabIndex: 0, role: "img", "aria-describedby": "keys",
      "aria-label": `photo for ${this.model.label}: arrow keys move the query, Enter pins it`,
    });
    this.queryText = element("p", { class: "caption" });
    this.tokens = element("p", { class: "tokens", role: "group", "aria-label": "tokens before the patches as queries" },
      ...this.model.prefix.map((token) => element("button", { type: "button", title: queryName(token) }, token)));
    this.zoom = element("canvas", { class: "zoom", role: "img", "aria-label": "enlarged tile" });
    this.bars = ["attn", "logits"].map((kind) => element("canvas", { class: `bar ${kind}`, "aria-hidden": "true" }));
    this.zoomText = element("p", { class: "caption" });
    this.tileCanvas = element("canvas", { "aria-hidden": "true" });
    this.buttons = element("div", { class: "buttons", role: "group", "aria-label": `tiles of ${this.model.label}` });
    this.equation = element("p", { class: "equation" }, this.model.equation);
    this.tileBox = element("div", { class: "tiles" }, this.tileCanvas, this.buttons);
    this.node = element("section", { class: "model", "aria-labelledby": id },
      element("header", {}, element("h2", { id }, name, element("span", { class: "run" }, run.join(", "))),
        this.predictions, this.equation),
      element("div", { class: "frame" }, element("div", { class: "body" },
        element("div", { class: "stage" },
          element("figure", {}, this.photo, this.tokens, this.queryText),
          element("figure", {}, this.zoom, ...this.bars, this.zoomText)),
        this.tileBox)));
  }

  listen() {
    const pixelUnder = (event) => cellUnder(event, this.photo, this.model.imgSize);
    this.photo.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.actions.moveQuery(this.index, pixelUnder(event), true);
    });
    this.photo.addEventListener("click", (event) => this.actions.pin(this.index, pixelUnder(event)));
    this.photo.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.actions.pin(this.index, null);
    });
    this.tokens.addEventListener("click", (event) => {
      if (event.target.tagName === "BUTTON") this.actions.pin(this.index, event.target.textContent);
    });
    this.zoom.addEventListener("pointermove", (event) => {
      if (!this.shown?.present) return;
      const [row, column] = cellUnder(event, this.zoom, this.shown.featSize);
      const value = shortNumber(this.shown.values[row * this.shown.featSize[1] + column]);
      this.writeZoomText(`row ${row}, column ${column}: ${value}`);
    });
    this.zoom.addEventListener("pointerleave", () => this.writeZoomText());
  }

  // ---- images, views -------------------------------------------------------------------------------------------

  /** Load an image's entry with its maps; a promise of the function that shows it. */
  async setEntry(entry) {
    const image = element("img", { src: entry.photo, alt: "" });
    const [maps] = await Promise.all([Maps.load(this.model, entry), image.decode()]);
    return () => { // the page switches all models at once
      Object.assign(this, { entry, image, maps, grey: greyCopy(image) });
      const sizes = this.model.layers.map((layer) => maps.featSize(layer));
      this.finest = sizes.reduce((a, b) => (b[0] * b[1] > a[0] * a[1] ? b : a));
      this.attn = new Float32Array(this.finest[0] * this.finest[1]);
      this.predictions.replaceChildren(...entry.predictions.map(({ name, probability }) => element("li", {}, name,
        element("span", { class: "probability" }, `${(100 * probability).toFixed(1)}%`))));
    };
  }

  /** Make the tiles of a view: a row a layer, a column a part of one head, or a head of one part. */
  useView(view) {
    const parts = view === "parts", evolved = this.model.layers.some((layer) => layer.evolves);
    this.columns = parts ? this.maps.evolution().map(([part, label]) => ({ part, label, name: PARTS[part][0] }))
      : [...this.heads, MEAN].map((head) => ({ head, label: String(head), name: headName(head) }));
    this.equation.hidden = !parts || !this.model.equation;
    this.tiles = this.model.layers.map((layer) => this.columns.map(({ head, part, name }) => {
      const featSize = this.maps.featSize(layer), [H, W] = featSize, label = `layer ${layer.number}, ${name}`;
      const why = evolved && !layer.evolves && part && part !== "logits" && !this.maps.has(layer, part)
        ? "the chain begins" : "";
      const button = element("button", { type: "button", "aria-label": label,
        title: `${label} (${layer.name})${why && ": "}${why}` });
      button.addEventListener("click", () => this.actions.select(layer.number, { head, part }));
      return { layer, featSize, why, button, fixed: { head, part }, values: new Float32Array(H * W),
        pixels: new OffscreenCanvas(W, H).getContext("2d"), data: new ImageData(W, H) };
    }));
    this.buttons.replaceChildren(...this.tiles.flat().map((tile) => tile.button));
    const shown = this.columns.map(({ part }) => part), to = shown.indexOf("prev_logits");
    this.links = this.model.layers.slice(1).flatMap((next, row) => {
      const handed = ["conv_logits", "logits", "self_logits"].filter((part) => shown.includes(part));
      const from = shown.indexOf(this.maps.handedOn(this.model.layers[row], next, handed));
      return to >= 0 && from >= 0 ? [[row, from, to]] : [];
    });
  }

  /** Fit canvases and buttons to the panel's width. */
  layOut(state, columns) {
    const aspect = this.model.imgSize[0] / this.model.imgSize[1], sheet = state.view === "heads";
    this.geometry = tileGeometry({
      width: this.tileBox.clientWidth, rows: this.tiles.length, columns, aspect,
      largest: this.count === 1 ? 160 : sheet ? 92 : 124,
      high: sheet ? Math.max(300, window.innerHeight - 120) : Infinity,
    });
    const { left, top, tile, height, strip, stepX, stepY } = this.geometry;
    this.tiles.forEach((row, r) => row.forEach(({ button }, c) => Object.assign(button.style, {
      left: `${left + c * stepX}px`, top: `${top + r * stepY}px`, width: `${tile}px`, height: `${height + strip}px`,
    })));
    this.stageWidth = this.photo.parentElement.clientWidth;
    this.stageHeight = Math.round(this.stageWidth * aspect);
  }

  // ---- the query -----------------------------------------------------------------------------------------------

  /** The middle of the next cell of the finest map, in pixels [y, x]. A token lies nowhere: the image's middle serves. */
  neighbour(query, [down, right]) {
    const [H, W] = this.finest, [height, width] = this.model.imgSize;
    const [y, x] = typeof query === "string" ? [Math.floor(height / 2), Math.floor(width / 2)] : query;
    const step = (pixel, cells, size, by) =>
      Math.floor(((clamp(Math.floor((pixel * cells) / size) + by, 0, cells - 1) + 0.5) * size) / cells);
    return [step(y, H, height, down), step(x, W, width, right)];
  }

  /** Cell of the finest map; a token by name. */
  finestCell(query) {
    return typeof query === "string" ? query : cellAt(query, this.finest, this.model.imgSize);
  }

  // ---- a frame: compute, then paint ----------------------------------------------------------------------------

  /** Fill all tiles with the rows of the query: values, reach (of attention in units of uniform attention), entropy and
   * distance of the attention, whatever part is shown. */
  compute(state) {
    for (const tile of this.tiles.flat()) {
      const { layer, values } = tile;
      tile.head = tile.fixed.head ?? state.head;
      tile.part = tile.fixed.part ?? state.part;
      tile.present = this.maps.has(layer, tile.part) && (tile.head === MEAN || layer.heads.includes(tile.head));
      if (!tile.present) continue;
      tile.cell = this.maps.cellOf(layer, state.queries[this.index]);
      this.maps.row(layer, tile.head, tile.part, tile.cell, values);
      tile.reach = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      if (isAttention(tile.part)) tile.reach *= this.numKeys(tile);
      if (!this.maps.has(layer, "attn")) continue;
      const attn = isAttention(tile.part) ? values
        : this.maps.row(layer, tile.head, "attn", tile.cell, this.attn.subarray(0, values.length));
      Object.assign(tile, measure(attn, tile.cell, tile.featSize, this.model.imgSize));
    }
  }

  /** Give a tile its colours: attention as far below uniform attention as above, logits as far below 0 as above. */
  colour(tile, reach, { table, signed }) {
    const uniform = 1 / this.numKeys(tile), attention = isAttention(tile.part);
    tile.range = attention ? [uniform / reach, uniform * reach] : [-reach, reach];
    tile.table = attention ? table : signed;
  }

  /** Tokens that a tile's query sees. */
  numKeys(tile) {
    return tile.values.length + this.model.prefix.length;
  }

  /** Paint all of the panel. `look`: state, table, signed (that of logits), ink. */
  paint({ state, ink }) {
    const query = state.queries[this.index], [width, height] = [this.stageWidth, this.stageHeight];
    const look = { ink, grey: this.grey, opacity: state.opacity };
    const { layer, head, part } = state, is = (tile) => tile.layer.number === layer && tile.head === head && tile.part === part;
    this.wanted = { layer, head, part };
    this.shown = this.tiles.flat().find(is);

    const boxes = this.entry.predictions.flatMap(({ box }) => (box ? [box] : []));
    drawPhoto(sizeCanvas(this.photo, width, height), this.image, width, height, boxes, this.model.imgSize,
      typeof query === "string" ? -1 : this.finestCell(query), this.finest);
    this.queryText.textContent = `query ${queryName(query)}` + (typeof query === "string" ? ""
      : ` · framed: its cell of the ${this.finest.join("x")} map`) + (state.pinned ? " · pinned" : "");
    for (const button of this.tokens.children) button.setAttribute("aria-pressed", String(button.textContent === query));

    drawMap(sizeCanvas(this.zoom, width, height), this.shown, look, 0, 0, width, height, FRAME);
    this.shownBars(state).forEach((tile, i) => {
      this.bars[i].hidden = !tile;
      if (tile) drawBar(sizeCanvas(this.bars[i], width, 26), tile.table, tile.range, width, ink);
    });
    this.writeZoomText();

    const { left, top, stepX, stepY } = this.geometry;
    const context = sizeCanvas(this.tileCanvas, left + this.columns.length * stepX, top + this.tiles.length * stepY);
    drawTiles(context, this.geometry, this.tiles, { ...look, links: this.links,
      rows: this.model.layers.map(({ number }) => String(number)), columns: this.columns.map(({ label }) => label) });
    for (const tile of this.tiles.flat()) tile.button.setAttribute("aria-pressed", String(tile === this.shown));
  }

  /** Of the row that is shown a tile of attention and one of logits, whose colours the bars explain. */
  shownBars({ view, layer }) {
    const row = this.tiles.flat().filter((tile) => tile.present && tile.layer.number === layer);
    const which = view === "parts" ? row : this.shown?.present ? [this.shown] : [];
    return [true, false].map((attention) => which.find((tile) => isAttention(tile.part) === attention));
  }

  /** What the enlarged tile is, as lines of text. */
  zoomLines() {
    const { layer, head, part } = this.wanted, title = `layer ${layer} · ${headName(head)} · ${PARTS[part][0]}`;
    if (!this.shown) return [title, `none in this model, which has layers ${this.model.layers.map((one) => one.number).join(", ")}`];
    const { present, why, entropy, distance, outside, values, featSize } = this.shown;
    const lines = [`${title} · ${featSize.join("x")} map`];
    if (!present) return [...lines, why || "this layer has none"];
    if (entropy === undefined) return lines;
    if (isAttention(part)) {
      const largest = Math.max(...values);
      lines.push(`largest ${(100 * largest).toFixed(1)}%, ${shortNumber(largest * this.numKeys(this.shown))} times uniform`);
    }
    if (this.model.prefix.length) lines.push(`${(100 * outside).toFixed(0)}% of it to ${this.model.prefix.join(", ")}`);
    return [...lines, `${isAttention(part) ? "" : "of its attention: "}entropy ${entropy.toFixed(2)} of at most `
      + `${Math.log(values.length).toFixed(2)} nats` + (distance === undefined ? "" : ` · distance ${distance.toFixed(1)} px`)];
  }

  writeZoomText(...more) {
    const [title, ...rest] = [...this.zoomLines(), ...more];
    this.zoomText.replaceChildren(element("strong", {}, title), ...rest.flatMap((line) => [element("br"), line]));
  }
}
