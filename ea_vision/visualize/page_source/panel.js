// One model: its predictions, the photo on which the query is set, the enlarged tile, and all tiles.

import { MEAN, Maps, cellAt, isAttention, measure, partName } from "./maps.js";
import {
  TilePainter, drawBar, drawBoxes, drawMap, drawMissing, drawPhoto, greyCopy, shortNumber, sizeCanvas, tileGeometry,
} from "./draw.js";
import { queryName } from "./state.js";

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const BEGINS = "the chain begins";

/** Step in rows and columns of a key press, or undefined. */
export const arrowOf = (event) => (event.ctrlKey || event.altKey || event.metaKey ? undefined : ARROWS[event.key]);

export const headName = (head) => (head === MEAN ? "mean of the heads" : `head ${head}`);

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

/** Numbers as a text: `1 to 6`, or `1, 3`. */
const listed = (numbers) => (numbers.length > 2 && numbers.at(-1) - numbers[0] === numbers.length - 1
  ? `${numbers[0]} to ${numbers.at(-1)}` : numbers.join(", "));

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
   * @param actions of the page: moveQuery, pin, select, hover.
   */
  constructor(model, index, count, actions) {
    Object.assign(this, { model, index, count, actions });
    this.heads = [...new Set(model.layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
    this.columns = []; // { head, label } or { part, label }: of the view
    this.build();
    this.listenToPhoto();
    this.listenToTiles();
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
    this.tokens.hidden = !this.model.prefix.length;
    this.zoom = element("canvas", { class: "zoom", role: "img", "aria-label": "enlarged tile" });
    this.bars = ["attn", "logits"].map((kind) => element("canvas", { class: `bar ${kind}`, "aria-hidden": "true" }));
    this.zoomText = element("p", { class: "caption" });
    this.tileCanvas = element("canvas", { "aria-hidden": "true" });
    this.buttons = element("div", { class: "buttons", role: "group" });
    this.equation = element("p", { class: "equation" }, this.model.equation);
    this.tileBox = element("div", { class: "tiles" }, this.tileCanvas, this.buttons);
    this.node = element("section", { class: "model", "aria-labelledby": id },
      element("header", {}, element("h2", { id }, name, element("span", { class: "run" }, run.join(", ")),
        element("span", { class: "run place", hidden: this.count === 1 }, `${this.index + 1} of ${this.count}`)),
      this.predictions, this.equation),
      element("div", { class: "body" },
        element("div", { class: "stage" },
          element("figure", {}, this.photo, this.tokens, this.queryText),
          element("figure", {}, this.zoom, ...this.bars, this.zoomText)),
        this.tileBox));
  }

  /** Make the tiles of a view: a row a layer, a column a part of one head, or a head of one part. */
  useView(view) {
    const parts = view === "parts";
    this.columns = parts ? this.maps.evolution().map(([part, label]) => ({ part, label }))
      : [...this.heads, MEAN].map((head) => ({ head, label: String(head) }));
    const what = parts ? "what one head computes" : "a column a head";
    this.buttons.setAttribute("aria-label", `tiles of ${this.model.label}: a row a layer, ${what}`);
    this.equation.hidden = !parts || !this.model.equation;
    const name = ({ part, head }) => (part === undefined ? headName(head) : partName(part));
    const evolved = this.model.layers.some((layer) => layer.evolves);
    this.tiles = this.model.layers.map((layer) => this.columns.map(({ head, part }) => {
      const [H, W] = this.maps.featSize(layer);
      return { layer, fixed: { head, part }, values: new Float32Array(H * W), range: [0, 1], cell: 0,
        why: parts && evolved && !layer.evolves && !this.maps.has(layer, part) && part !== "logits" ? BEGINS : "" };
    }));
    this.tileButtons = this.tiles.map((row) => row.map(({ layer, why }, c) => element("button", {
      type: "button", tabIndex: -1, "aria-label": `layer ${layer.number}, ${name(this.columns[c])}`,
      title: `layer ${layer.number} (${layer.name}), ${name(this.columns[c])}${why ? `: ${why}` : ""}`,
    })));
    this.buttons.replaceChildren(...this.tileButtons.flat());
    this.painter = new TilePainter(this.model.layers.map((layer) => this.maps.featSize(layer)), this.columns.length);
    const shown = this.columns.map(({ part }) => part), to = shown.indexOf("prev_logits");
    this.links = this.model.layers.slice(1).flatMap((next, row) => {
      const from = this.maps.handedOn(this.model.layers[row], next, ["conv_logits", "logits", "self_logits"]
        .filter((part) => shown.includes(part)));
      return parts && to >= 0 && from ? [[row, shown.indexOf(from), to]] : [];
    });
    this.selected = undefined;
  }

  /** Load an image's entry, with the maps of the parts; a promise of the function that shows it. */
  async setEntry(entry, parts) {
    const images = [entry.photo, entry.seen ?? entry.photo].map((src) => element("img", { src, alt: "" }));
    const maps = new Maps(this.model, entry);
    await Promise.all([...images.map((image) => image.decode()), maps.load(parts)]);
    return () => this.useEntry(entry, images, maps); // the page switches all models at once
  }

  useEntry(entry, images, maps) {
    Object.assign(this, { entry, maps, pictures: images.map((image) => ({ image, grey: greyCopy(image) })) });
    const sizes = this.model.layers.map((layer) => maps.featSize(layer));
    this.finest = sizes.reduce((a, b) => (b[0] * b[1] > a[0] * a[1] ? b : a));
    this.attn = new Float32Array(Math.max(...sizes.map(([H, W]) => H * W)));
    this.predictions.replaceChildren(...entry.predictions.map((prediction) => element("li", {},
      prediction.box ? this.objectButton(prediction) : element("span", {}, prediction.name),
      element("span", { class: "probability" }, `${(100 * prediction.probability).toFixed(1)}%`))));
  }

  /** An object that a detector found: a click makes the middle of its box the query. */
  objectButton({ name, box: [x1, y1, x2, y2] }) {
    const [H, W] = this.model.imgSize;
    const middle = [Math.min(H - 1, Math.floor((y1 + y2) / 2)), Math.min(W - 1, Math.floor((x1 + x2) / 2))];
    const button = element("button", { type: "button", title: "the middle of its box becomes the query" }, name);
    button.addEventListener("click", () => this.actions.pin(this.index, middle));
    return button;
  }

  // ---- the query -----------------------------------------------------------------------------------------------

  listenToPhoto() {
    const pointOf = (event) => {
      const box = this.photo.getBoundingClientRect(), [H, W] = this.model.imgSize;
      const within = (share, size) => clamp(Math.floor(share * size), 0, size - 1);
      return [within((event.clientY - box.top) / box.height, H), within((event.clientX - box.left) / box.width, W)];
    };
    this.photo.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.actions.moveQuery(this.index, pointOf(event), true);
    });
    this.photo.addEventListener("click", (event) => this.actions.pin(this.index, pointOf(event)));
    this.photo.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.actions.pin(this.index, null);
    });
    this.tokens.addEventListener("click", (event) => {
      if (event.target.tagName === "BUTTON") this.actions.pin(this.index, event.target.textContent);
    });
    this.zoom.addEventListener("pointermove", (event) => this.readValue(event));
    this.zoom.addEventListener("pointerleave", () => this.writeZoomText());
  }

  /** The query one cell of the finest map further, in pixels [y, x]: the middle of the cell. A token lies nowhere: the
   * middle of the image takes its place. */
  neighbour(query, [down, right]) {
    const [H, W] = this.finest, [height, width] = this.model.imgSize;
    const [y, x] = typeof query === "string" ? [Math.floor(height / 2), Math.floor(width / 2)] : query;
    const step = (pixel, cells, size, by) =>
      Math.floor(((clamp(Math.floor((pixel * cells) / size) + by, 0, cells - 1) + 0.5) * size) / cells);
    return [step(y, H, height, down), step(x, W, width, right)];
  }

  /** Whether two queries lie in the same cell of the finest map. */
  sameCell(a, b) {
    return typeof a === "string" || typeof b === "string" ? a === b : this.finestCell(a) === this.finestCell(b);
  }

  finestCell(query) {
    return typeof query === "string" ? -1 : cellAt(query, this.finest, this.model.imgSize);
  }

  // ---- the tiles -----------------------------------------------------------------------------------------------

  listenToTiles() {
    const placeOf = (target) => {
      const index = this.tileButtons.flat().indexOf(target.closest("button"));
      return index < 0 ? null : [Math.floor(index / this.columns.length), index % this.columns.length];
    };
    const keysOf = ([row, column]) => [this.model.layers[row].number, this.columns[column]];
    const listen = (type, act) => this.buttons.addEventListener(type, (event) => {
      const place = placeOf(event.target);
      if (place) act(event, place);
    });
    listen("pointerover", (event, place) => event.pointerType === "mouse" && this.actions.hover(keysOf(place)));
    this.buttons.addEventListener("pointerleave", () => this.actions.hover(null));
    listen("click", (event, place) => this.actions.select(...keysOf(place)));
    listen("keydown", (event, place) => {
      const arrow = arrowOf(event);
      if (!arrow) return;
      event.preventDefault();
      event.stopPropagation(); // elsewhere the arrows move the query
      const row = clamp(place[0] + arrow[0], 0, this.model.layers.length - 1);
      const column = clamp(place[1] + arrow[1], 0, this.columns.length - 1);
      this.actions.select(...keysOf([row, column]));
      this.tileButtons[row][column].focus();
    });
  }

  /** The tile of a layer, head and part, or undefined where this view of this model lacks it. */
  tileOf(number, head, part) {
    return this.tiles.flat().find((tile) => tile.layer.number === number
      && (tile.fixed.part === undefined ? tile.fixed.head === head : tile.fixed.part === part));
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
    this.geometry.width = left + this.columns.length * stepX;
    this.tileButtons.forEach((row, r) => row.forEach((button, c) => Object.assign(button.style, {
      left: `${left + c * stepX}px`, top: `${top + r * stepY}px`, width: `${tile}px`, height: `${height + strip}px`,
    })));
    this.stageWidth = this.photo.parentElement.clientWidth;
    this.stageHeight = Math.round(this.stageWidth * aspect);
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
      tile.reach = 0;
      for (const value of values) tile.reach = Math.max(tile.reach, Math.abs(value));
      if (isAttention(tile.part)) tile.reach *= this.numKeys(tile);
      if (!this.maps.has(layer, "attn")) continue;
      const attn = isAttention(tile.part) ? values
        : this.maps.row(layer, tile.head, "attn", tile.cell, this.attn.subarray(0, values.length));
      Object.assign(tile, measure(attn, tile.cell, this.maps.featSize(layer), this.model.imgSize));
    }
  }

  /** Give a tile its colours: attention as far below uniform attention as above, logits as far below 0 as above. */
  colour(tile, reach, look) {
    const uniform = 1 / this.numKeys(tile), attention = isAttention(tile.part);
    tile.range = attention ? [uniform / reach, uniform * reach] : [-reach, reach];
    tile.table = attention ? look.table : look.signed;
  }

  /** Tokens that a tile's query sees. */
  numKeys(tile = this.shown) {
    return tile.values.length + this.model.prefix.length;
  }

  /** Paint all of the panel. `look`: state, table, signed (that of logits), ink, shown: [layer number, head, part], all:
   * also rows of tiles that are not in view. */
  paint(look) {
    const { state, ink } = look, query = state.queries[this.index];
    const [width, height] = [this.stageWidth, this.stageHeight];
    this.look = look;
    this.shown = this.tileOf(...look.shown);
    const shows = look.all ? undefined : this.rowsInView();

    drawPhoto(sizeCanvas(this.photo, width, height), this.picture().image, width, height, this.finestCell(query), this.finest);
    drawBoxes(this.photo.getContext("2d"), this.entry.predictions.flatMap(({ box }) => (box ? [box] : [])),
      this.model.imgSize, width, height);
    this.queryText.textContent = `query ${queryName(query)}` + (typeof query === "string" ? ""
      : ` · framed: its cell of the ${this.finest.join("x")} map`) + (state.pinned ? " · pinned" : "");
    for (const button of this.tokens.children) {
      button.setAttribute("aria-pressed", String(button.textContent === query));
    }
    const zoom = sizeCanvas(this.zoom, width, height);
    if (this.shown?.present) {
      drawMap(zoom, this.shown, this.maps.featSize(this.shown.layer), this.picture().grey,
        isAttention(this.shown.part) ? state.opacity : 1, width, height);
    } else drawMissing(zoom, 0, 0, width, height, ink, this.shown?.why);
    this.shownBars().forEach((tile, i) => {
      this.bars[i].hidden = !tile;
      if (tile) drawBar(sizeCanvas(this.bars[i], width, 26), tile.table, tile.range, width, ink);
    });
    this.writeZoomText();
    this.paintTiles(shows);
    this.markSelected(state);
  }

  /** Of the row that is shown a tile of attention and one of logits, whose colours the bars explain. */
  shownBars() {
    const row = this.tiles.flat().filter((tile) => tile.present && tile.layer.number === this.look.shown[0]);
    const which = this.look.state.view === "parts" ? row : this.shown?.present ? [this.shown] : [];
    return [true, false].map((attention) => which.find((tile) => isAttention(tile.part) === attention));
  }

  /** The photo and its grey copy, or what the network saw of it. */
  picture() {
    return this.pictures[this.look.state.seen ? 1 : 0];
  }

  /** Whether a row of tiles is on the screen, or two rows from it. */
  rowsInView() {
    const { top, stepY } = this.geometry, above = this.tileBox.getBoundingClientRect().top + top;
    return (row) => above + (row + 3) * stepY > 0 && above + (row - 2) * stepY < window.innerHeight;
  }

  paintTiles(shows = () => true) {
    const context = sizeCanvas(this.tileCanvas, this.geometry.width, this.geometry.totalHeight);
    this.painter.paint(context, this.geometry, this.tiles, {
      ink: this.look.ink, shows, grey: this.picture().grey, opacity: this.look.state.opacity, links: this.links,
      rows: this.model.layers.map(({ number }) => String(number)), columns: this.columns.map(({ label }) => label),
    });
  }

  /** Outline the selected tile and let Tab find it. */
  markSelected(state) {
    const selected = this.tileOf(state.layer, state.head, state.part) ?? null;
    if (this.selected === selected) return;
    this.selected = selected;
    const reached = selected ?? this.tiles[0][0];
    this.tiles.forEach((row, r) => row.forEach((tile, c) => {
      this.tileButtons[r][c].tabIndex = tile === reached ? 0 : -1;
      this.tileButtons[r][c].setAttribute("aria-pressed", String(tile === selected));
    }));
  }

  /** What the enlarged tile is, as lines of text. */
  zoomLines() {
    const [number, head, part] = this.look.shown, wanted = `layer ${number} · ${headName(head)}`;
    const lacks = (what, has) => [wanted, `models are linked by layer and head, and this one has no ${what}: it has ${has}`];
    const layers = this.model.layers.map((layer) => layer.number);
    if (!layers.includes(number)) return lacks(`layer ${number}`, listed(layers));
    if (head !== MEAN && !this.heads.includes(head)) return lacks(headName(head), listed(this.heads));
    if (!this.shown) return [`${wanted} · ${partName(part)}`, "this model has none"];
    const title = `${wanted} · ${partName(part)} · ${this.maps.featSize(this.shown.layer).join("x")} map`;
    if (!this.shown.present) return [title, this.shown.why || "this layer has none"];
    const { entropy, distance, outside, values } = this.shown;
    if (entropy === undefined) return [title];
    const largest = Math.max(...values);
    const most = isAttention(part)
      ? [`largest ${(100 * largest).toFixed(1)}%, ${shortNumber(largest * this.numKeys())} times uniform`] : [];
    if (this.model.prefix.length) most.push(`${(100 * outside).toFixed(0)}% of it to ${this.model.prefix.join(", ")}`);
    return [title, ...most, `${isAttention(part) ? "" : "of its attention: "}entropy ${entropy.toFixed(2)} of at most `
      + `${Math.log(values.length).toFixed(2)} nats` + (distance === undefined ? "" : ` · distance ${distance.toFixed(1)} px`)];
  }

  writeZoomText(more = "") {
    const lines = this.zoomLines(), rest = [...lines.slice(1), ...(more ? [more] : [])];
    this.zoomText.replaceChildren(element("strong", {}, lines[0]), ...rest.flatMap((line) => [element("br"), line]));
    this.zoom.setAttribute("aria-label", `enlarged tile: ${lines.join(", ")}`);
  }

  /** The value under the pointer. */
  readValue(event) {
    if (!this.shown?.present) return;
    const [H, W] = this.maps.featSize(this.shown.layer), box = this.zoom.getBoundingClientRect();
    const row = clamp(Math.floor(((event.clientY - box.top) / box.height) * H), 0, H - 1);
    const column = clamp(Math.floor(((event.clientX - box.left) / box.width) * W), 0, W - 1);
    this.writeZoomText(`row ${row}, column ${column}: ${shortNumber(this.shown.values[row * W + column])}`);
  }
}
