// One model: its predictions, the photo on which the query is set, the enlarged tile, and all tiles.

import { MEAN, Maps, cellAt, measure, partName } from "./maps.js";
import {
  TilePainter, drawBar, drawBoxes, drawMap, drawMissing, drawPhoto, greyCopy, shortNumber, sizeCanvas, tileGeometry,
} from "./draw.js";
import { queryName } from "./state.js";

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Step in rows and columns of a key press, or undefined. */
export const arrowOf = (event) => (event.ctrlKey || event.altKey || event.metaKey ? undefined : ARROWS[event.key]);

export const headName = (head) => (head === MEAN ? "mean of the heads" : `head ${head}`);

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
   * @param model one of about.models.
   * @param index of the model.
   * @param actions of the page: moveQuery, pin, unpin, select, hover.
   */
  constructor(model, index, actions) {
    this.model = model;
    this.index = index;
    this.actions = actions;
    this.heads = [...new Set(model.layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
    this.columns = []; // { head, label } or { part, label }: of the view
    this.build();
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
    this.bar = element("canvas", { class: "bar", "aria-hidden": "true" });
    this.zoomText = element("p", { class: "caption" });
    this.tileCanvas = element("canvas", { "aria-hidden": "true" });
    this.buttons = element("div", { class: "buttons", role: "group" });
    this.equation = element("p", { class: "equation" }, this.model.equation);
    this.tileBox = element("div", { class: "tiles" }, this.tileCanvas, this.buttons);
    this.node = element("section", { class: "model", "aria-labelledby": id },
      element("header", {},
        element("h2", { id }, name, element("span", { class: "run" }, run.join(", "))), this.predictions, this.equation),
      element("div", { class: "body" },
        element("div", { class: "stage" },
          element("figure", {}, this.photo, this.tokens, this.queryText),
          element("figure", {}, this.zoom, this.bar, this.zoomText)),
        this.tileBox));
    this.listenToPhoto();
    this.tokens.addEventListener("click", (event) => {
      if (event.target.tagName === "BUTTON") this.actions.pin(this.index, event.target.textContent);
    });
    this.listenToTiles();
    this.zoom.addEventListener("pointermove", (event) => this.readValue(event));
    this.zoom.addEventListener("pointerleave", () => this.writeZoomText());
  }

  /** Make the tiles of a view: a row a layer, a column a part of one head, or a head of one part. */
  useView(view) {
    this.columns = view === "parts" ? this.maps.evolution().map(([part, label]) => ({ part, label }))
      : [...this.heads, MEAN].map((head) => ({ head, label: String(head) }));
    const what = view === "parts" ? "what one head computes" : "a column a head";
    this.buttons.setAttribute("aria-label", `tiles of ${this.model.label}: a row a layer, ${what}`);
    this.equation.hidden = view !== "parts" || !this.model.equation;
    const name = ({ part, head }) => (part === undefined ? headName(head) : partName(part));
    this.tileButtons = this.model.layers.map((layer) => this.columns.map((column) => element("button", {
      type: "button", tabIndex: -1, "aria-label": `layer ${layer.number}, ${name(column)}`,
      title: `layer ${layer.number} (${layer.name}), ${name(column)}`,
    })));
    this.buttons.replaceChildren(...this.tileButtons.flat());
    const sizes = this.model.layers.map((layer) => this.maps.featSize(layer));
    this.painter = new TilePainter(sizes, this.columns.length);
    this.tiles = this.model.layers.map((layer) => this.columns.map((column) => this.newTile(layer, column)));
    this.selected = undefined;
  }

  newTile(layer, { head, part }) {
    const [H, W] = this.maps.featSize(layer);
    return { layer, fixed: { head, part }, values: new Float32Array(H * W), range: [0, 1], cell: 0 };
  }

  /** Load an image's entry, with the maps of the parts; a promise of the function that shows it. */
  async setEntry(entry, parts) {
    const images = [entry.photo, entry.seen ?? entry.photo].map((src) => element("img", { src, alt: "" }));
    const maps = new Maps(this.model, entry);
    await Promise.all([...images.map((image) => image.decode()), maps.load(parts)]);
    return () => this.useEntry(entry, images, maps); // the page switches all models at once
  }

  useEntry(entry, images, maps) {
    this.entry = entry;
    this.pictures = images.map((image) => ({ image, grey: greyCopy(image) }));
    this.maps = maps;
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
      const box = this.photo.getBoundingClientRect();
      const [H, W] = this.model.imgSize;
      const within = (share, size) => Math.max(0, Math.min(size - 1, Math.floor(share * size)));
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
  }

  /** The query one cell of the finest map further, in pixels [y, x]: the middle of the cell. A token lies nowhere: the
   * middle of the image takes its place. */
  neighbour(query, [down, right]) {
    const [H, W] = this.finest, [height, width] = this.model.imgSize;
    const [y, x] = typeof query === "string" ? [Math.floor(height / 2), Math.floor(width / 2)] : query;
    const step = (pixel, cells, size, by) => {
      const cell = Math.max(0, Math.min(cells - 1, Math.floor((pixel * cells) / size) + by));
      return Math.floor(((cell + 0.5) * size) / cells);
    };
    return [step(y, H, height, down), step(x, W, width, right)];
  }

  /** Whether two queries lie in the same cell of the finest map. */
  sameCell(a, b) {
    return typeof a === "string" || typeof b === "string" ? a === b : this.finestCell(a) === this.finestCell(b);
  }

  // ---- the tiles -----------------------------------------------------------------------------------------------

  listenToTiles() {
    const placeOf = (target) => {
      const index = this.tileButtons.flat().indexOf(target.closest("button"));
      return index < 0 ? null : [Math.floor(index / this.columns.length), index % this.columns.length];
    };
    const keysOf = ([row, column]) => [this.model.layers[row].number, this.columns[column]];
    this.buttons.addEventListener("pointerover", (event) => {
      const place = placeOf(event.target);
      if (place && event.pointerType === "mouse") this.actions.hover(keysOf(place));
    });
    this.buttons.addEventListener("pointerleave", () => this.actions.hover(null));
    this.buttons.addEventListener("click", (event) => {
      const place = placeOf(event.target);
      if (place) this.actions.select(...keysOf(place));
    });
    this.buttons.addEventListener("keydown", (event) => {
      const arrow = arrowOf(event), place = placeOf(event.target);
      if (!arrow || !place) return;
      event.preventDefault();
      event.stopPropagation(); // elsewhere the arrows move the query
      const row = Math.max(0, Math.min(this.model.layers.length - 1, place[0] + arrow[0]));
      const column = Math.max(0, Math.min(this.columns.length - 1, place[1] + arrow[1]));
      this.actions.select(...keysOf([row, column]));
      this.tileButtons[row][column].focus();
    });
  }

  /** The tile of a layer, head and part, or undefined where this view of this model lacks it. */
  tileOf(number, head, part) {
    return this.tiles.flat().find((tile) => tile.layer.number === number
      && (tile.fixed.part === undefined ? tile.fixed.head === head : tile.fixed.part === part));
  }

  // ---- a frame: compute, then paint ----------------------------------------------------------------------------

  /** Fit canvases and buttons to the panel's width. */
  layOut(numbers) {
    const aspect = this.model.imgSize[0] / this.model.imgSize[1];
    const width = this.tileBox.clientWidth;
    this.geometry = tileGeometry(width, this.tiles.length, this.columns.length, aspect, numbers);
    const { left, top, tile, height, strip, stepX, stepY } = this.geometry;
    this.tileButtons.forEach((row, r) => row.forEach((button, c) => Object.assign(button.style, {
      left: `${left + c * stepX}px`, top: `${top + r * stepY}px`, width: `${tile}px`, height: `${height + strip}px`,
    })));
    this.stageWidth = this.photo.parentElement.clientWidth;
    this.stageHeight = Math.round(this.stageWidth * aspect);
  }

  /** Fill all tiles with the rows of the query. */
  compute(state) {
    for (const tile of this.tiles.flat()) this.fill(tile, state);
  }

  /** Fill a tile: values, reach (of attention in units of uniform attention), entropy and distance. */
  fill(tile, state) {
    const { layer } = tile;
    tile.head = tile.fixed.head ?? state.head;
    tile.part = tile.fixed.part ?? state.part;
    tile.present = this.maps.has(layer, tile.part) && (tile.head === MEAN || layer.heads.includes(tile.head));
    if (!tile.present) return;
    tile.cell = this.maps.cellOf(layer, state.queries[this.index]);
    this.maps.row(layer, tile.head, tile.part, tile.cell, tile.values);
    tile.reach = 0;
    for (const value of tile.values) tile.reach = Math.max(tile.reach, Math.abs(value));
    if (tile.part === "attn") tile.reach *= this.numKeys(tile);
    this.measureTile(tile, tile.part);
  }

  /** Give a tile its colours: attention as far below uniform attention as above, logits as far below 0 as above. */
  colour(tile, reach, look) {
    const uniform = 1 / this.numKeys(tile);
    tile.range = tile.part === "attn" ? [uniform / reach, uniform * reach] : [-reach, reach];
    tile.table = tile.part === "attn" ? look.table : look.signed;
  }

  /** Entropy and distance of a tile's probabilities, whatever part it shows. */
  measureTile(tile, part) {
    const { layer, head, cell, values } = tile;
    if (!this.maps.has(layer, "attn")) return;
    const attn = part === "attn" ? values
      : this.maps.row(layer, head, "attn", cell, this.attn.subarray(0, values.length));
    Object.assign(tile, measure(attn, cell, this.maps.featSize(layer), this.model.imgSize));
  }

  /** Paint all of the panel. `look`: state, table, signed (that of logits), ink, shown: [layer number, head, part]. */
  paint(look) {
    const { state, ink } = look;
    const query = state.queries[this.index];
    this.look = look;
    this.shown = this.tileOf(...look.shown);
    const shows = this.rowsInView();

    drawPhoto(sizeCanvas(this.photo, this.stageWidth, this.stageHeight), this.picture().image, this.stageWidth,
      this.stageHeight, this.finestCell(query), this.finest);
    drawBoxes(this.photo.getContext("2d"), this.entry.predictions.flatMap(({ box }) => (box ? [box] : [])),
      this.model.imgSize, this.stageWidth, this.stageHeight);
    this.queryText.textContent = this.queryLine(query) + (state.pinned ? " · pinned" : "");
    for (const button of this.tokens.children) {
      button.setAttribute("aria-pressed", String(button.textContent === query));
    }

    const zoom = sizeCanvas(this.zoom, this.stageWidth, this.stageHeight);
    const bar = sizeCanvas(this.bar, this.stageWidth, 26);
    if (this.shown?.present) {
      this.paintZoom(zoom, this.stageWidth, this.stageHeight);
      drawBar(bar, this.shown.table, this.shown.range, this.stageWidth, ink);
    } else {
      drawMissing(zoom, 0, 0, this.stageWidth, this.stageHeight, ink);
    }
    this.writeZoomText();
    this.paintTiles(this.tileContext(), shows);
    this.markSelected(state);
  }

  queryLine(query) {
    const name = `query ${queryName(query)}`;
    return typeof query === "string" ? name : `${name} · framed: its cell of the ${this.finest.join("x")} map`;
  }

  finestCell(query) {
    return typeof query === "string" ? -1 : cellAt(query, this.finest, this.model.imgSize);
  }

  /** Tokens that a tile's query sees. */
  numKeys(tile = this.shown) {
    return tile.values.length + this.model.prefix.length;
  }

  paintZoom(context, width, height) {
    const { values, layer, range, cell, table, part } = this.shown;
    const opacity = part === "attn" ? this.look.state.opacity : 1;
    drawMap(context, values, this.maps.featSize(layer), range, table, this.picture().grey, opacity, cell, width, height);
  }

  /** The photo and its grey copy, or what the network saw of it. */
  picture() {
    return this.pictures[this.look.state.seen ? 1 : 0];
  }

  /** Whether a row of tiles is on the screen, or two rows from it. */
  rowsInView() {
    const { top, stepY } = this.geometry;
    const above = this.tileBox.getBoundingClientRect().top + top;
    return (row) => above + (row + 3) * stepY > 0 && above + (row - 2) * stepY < window.innerHeight;
  }

  tileContext() {
    return sizeCanvas(this.tileCanvas, this.geometry.width, this.geometry.totalHeight);
  }

  paintAllTiles() {
    this.paintTiles(this.tileContext(), () => true);
  }

  paintTiles(context, shows) {
    const { state, ink } = this.look;
    const tiles = this.tiles.map((row) => row.map((tile) => (tile.present ? tile : null)));
    this.painter.paint(context, this.geometry, tiles, {
      ink, shows, grey: this.picture().grey, opacity: state.opacity,
      labels: { rows: this.model.layers.map(({ number }) => String(number)), columns: this.columns.map(({ label }) => label) },
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
    const [number, head, part] = this.look.shown;
    const wanted = `layer ${number} · ${headName(head)}`;
    if (!this.model.layers.some((layer) => layer.number === number)) {
      return [wanted, `models are linked by layer and head, and this one has no layer ${number}: it has `
        + `${listed(this.model.layers.map((layer) => layer.number))}`];
    }
    if (head !== MEAN && !this.heads.includes(head)) {
      return [wanted, `models are linked by layer and head, and this one has no ${headName(head)}: it has `
        + `${listed(this.heads)}`];
    }
    if (!this.shown) return [`${wanted} · ${partName(part)}`, "this model has none"];
    const [H, W] = this.maps.featSize(this.shown.layer);
    const title = `layer ${number} · ${headName(head)} · ${partName(part)} · ${H}x${W} map`;
    if (!this.shown.present) return [title, "this layer has none"];
    const { entropy, distance, outside, values } = this.shown;
    if (entropy === undefined) return [title];
    const largest = Math.max(...values);
    const most = part === "attn" ? [`largest ${(100 * largest).toFixed(1)}%, ${shortNumber(largest * this.numKeys())} times uniform`]
      : [];
    if (this.model.prefix.length) most.push(`${(100 * outside).toFixed(0)}% of it to ${this.model.prefix.join(", ")}`);
    return [title, ...most, `${part === "attn" ? "" : "of its attention: "}entropy ${entropy.toFixed(2)} of at most `
      + `${Math.log(values.length).toFixed(2)} nats`
      + (distance === undefined ? "" : ` · distance ${distance.toFixed(1)} px`)];
  }

  writeZoomText(more = "") {
    const lines = this.zoomLines();
    const rest = [...lines.slice(1), ...(more ? [more] : [])];
    this.zoomText.replaceChildren(element("strong", {}, lines[0]), ...rest.flatMap((line) => [element("br"), line]));
    this.zoom.setAttribute("aria-label", `enlarged tile: ${lines.join(", ")}`);
  }

  /** The value under the pointer. */
  readValue(event) {
    if (!this.shown?.present) return;
    const [H, W] = this.maps.featSize(this.shown.layer);
    const box = this.zoom.getBoundingClientRect();
    const row = Math.max(0, Math.min(H - 1, Math.floor(((event.clientY - box.top) / box.height) * H)));
    const column = Math.max(0, Math.min(W - 1, Math.floor(((event.clientX - box.left) / box.width) * W)));
    this.writeZoomText(`row ${row}, column ${column}: ${shortNumber(this.shown.values[row * W + column])}`);
  }

  // ---- the picture ---------------------------------------------------------------------------------------------

  /** Size of this panel in the saved picture, in CSS pixels. */
  pictureSize() {
    const side = Math.min(260, Math.max(160, Math.floor((this.geometry.width - 12) / 2)));
    const height = Math.round((side * this.model.imgSize[0]) / this.model.imgSize[1]);
    return { side, height, width: Math.max(this.geometry.width, 2 * side + 12),
      totalHeight: 44 + height + 99 + this.geometry.totalHeight };
  }

  paintPicture(context) {
    const { ink, state } = this.look;
    const { side, height, width } = this.pictureSize();
    const write = (text, x, y, font) => {
      context.fillStyle = ink.text;
      context.font = font;
      context.textAlign = "left";
      context.textBaseline = "top";
      context.fillText(text, x, y, width - x);
    };
    const at = (x, y, draw) => {
      context.save();
      context.translate(x, y);
      draw();
      context.restore();
    };
    write(this.model.label, 0, 0, "bold 14px system-ui, sans-serif");
    write(this.entry.predictions.map(({ name, probability }) => `${name} ${(100 * probability).toFixed(1)}%`).join(" · "),
      0, 20, "12px system-ui, sans-serif");
    const query = state.queries[this.index];
    at(0, 44, () => drawPhoto(context, this.picture().image, side, height, this.finestCell(query), this.finest));
    write(`query ${queryName(query)}`, 0, 44 + height + 4, "12px system-ui, sans-serif");
    if (this.shown?.present) {
      at(side + 12, 44, () => this.paintZoom(context, side, height));
      at(side + 12, 44 + height + 6, () => drawBar(context, this.shown.table, this.shown.range, side, ink));
    }
    this.zoomLines().forEach((line, i) =>
      write(line, side + 12, 44 + height + 36 + 15 * i, "12px system-ui, sans-serif"));
    at(0, 44 + height + 99, () => this.paintTiles(context, () => true));
  }
}
