// The maps of one model on one image, as page.py packed them: value = low + step * code.

export const MEAN = "mean";

export const PARTS = {
  attn: ["attention", "after the softmax: probabilities"],
  logits: ["logits", "what entered the softmax"],
  conv_logits: ["after conv.", "what the evolution's convolution gives, after its ReLU"],
  prev_logits: ["previous", "the logits that the layer before handed on"],
  self_logits: ["own", "the layer's own dot products and position terms"],
  attn_own_alone: ["own alone", "the attention of the layer's own logits alone, at the same scale"],
};

/** What the first view shows of a layer, from left to right: [part, heading]. */
const EVOLUTION = [
  ["prev_logits", "previous"], ["self_logits", "+ own"], ["conv_logits", "\u2192 convolved"], ["logits", "\u2192 logits"],
  ["attn", "\u2192 attention"], ["attn_own_alone", "own alone"],
];

export const isAttention = (part) => part.startsWith("attn");

/** Row-major index of the cell of an H x W map that a pixel [y, x] of a height x width input lies in. */
export const cellAt = ([y, x], [H, W], [height, width]) => Math.floor((y * H) / height) * W + Math.floor((x * W) / width);

export const bytesOfBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** Uncompress a zlib stream (RFC 1950), a Uint8Array; a promise of an ArrayBuffer. */
async function inflate(bytes) {
  if (!window.DecompressionStream) throw new Error("it needs a browser of May 2023 or later (DecompressionStream)");
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

export class Maps {
  /** Inflate all maps of an image; a promise. See the constructor for `model` and `entry`. */
  static async load(model, entry) {
    const streams = await Promise.all(Object.entries(entry.streams).map(async ([part, text]) =>
      [part, await inflate(bytesOfBase64(text))]));
    return new Maps(model, entry, Object.fromEntries(streams));
  }

  /**
   * @param model one of about.models: imgSize, prefix, layers.
   * @param entry the model's share of an image's entry: photo, predictions, featSizes, places, streams.
   * @param buffers part of a stream -> ArrayBuffer.
   */
  constructor(model, entry, buffers) {
    Object.assign(this, { model, entry, buffers });
  }

  has(layer, part) {
    return part in this.entry.places[layer.number];
  }

  /** Parts that some layer has, in the order of PARTS. */
  parts() {
    return Object.keys(PARTS).filter((part) => this.model.layers.some((layer) => this.has(layer, part)));
  }

  /** Whether a part of a layer is stored as the same map as a part of another one. */
  same(layer, a, other, b) {
    const [one, two] = [this.entry.places[layer.number][a], this.entry.places[other.number][b]];
    return one !== undefined && two !== undefined && one[0] === two[0] && one[1] === two[1];
  }

  /** The columns of the first view: logits have none where they are a layer's convolved, or its own, logits. */
  evolution() {
    const present = this.parts();
    const needless = this.model.layers.every((layer) => !this.has(layer, "logits")
      || this.same(layer, "logits", layer, "conv_logits") || this.same(layer, "logits", layer, "self_logits"));
    const drawn = EVOLUTION.filter(([part]) => present.includes(part) && !(part === "logits" && needless
      && present.includes("self_logits")));
    return present.includes("prev_logits") ? drawn
      : drawn.map(([part, label]) => [part, part === "self_logits" ? "logits" : label]);
  }

  /** Of a layer the part among `shown` that the layer after it takes for its previous logits; undefined without one. */
  handedOn(layer, next, shown) {
    return shown.find((part) => this.same(layer, part, next, "prev_logits"));
  }

  featSize(layer) {
    return this.entry.featSizes[layer.number];
  }

  /** Row-major index of the map's cell that a pixel lies in; of a token before the patches, by name, -1 for the first. */
  cellOf(layer, query) {
    if (typeof query === "string") return -1 - this.model.prefix.indexOf(query);
    return cellAt(query, this.featSize(layer), this.model.imgSize);
  }

  /** Stored rows of a head: those of the tokens before the patches come first. */
  rowsAHead(layer) {
    return this.model.prefix.length + this.featSize(layer)[0] * this.featSize(layer)[1];
  }

  /**
   * What a query attends to.
   * @param head number of the head, or MEAN: of the heads that the page has.
   * @param cell of the query, from cellOf.
   * @param out Float32Array of H * W, filled and returned.
   */
  row(layer, head, part, cell, out) {
    out.fill(0);
    const { low, step, codes } = this.array(layer, part), heads = head === MEAN ? layer.heads : [head];
    for (const one of heads) {
      const index = layer.heads.indexOf(one) * this.rowsAHead(layer)
        + (cell < 0 ? -1 - cell : this.model.prefix.length + cell);
      const base = low[index] / heads.length, slope = step[index] / heads.length, start = index * out.length;
      for (let j = 0; j < out.length; j++) out[j] += base + slope * codes[start + j];
    }
    return out;
  }

  /** Views into an inflated stream: low, step (K * T), mean (K * N, over the pixels' queries) and codes (K * T * N); T: with
   * the tokens before the patches. */
  array(layer, part) {
    const [stream, offset] = this.entry.places[layer.number][part], [H, W] = this.featSize(layer);
    const rows = layer.heads.length * this.rowsAHead(layer), buffer = this.buffers[stream];
    return {
      low: new Float32Array(buffer, offset, rows),
      step: new Float32Array(buffer, offset + 4 * rows, rows),
      mean: new Float32Array(buffer, offset + 8 * rows, layer.heads.length * H * W),
      codes: new Uint8Array(buffer, offset + 8 * rows + 4 * layer.heads.length * H * W, rows * H * W),
    };
  }
}

/**
 * Entropy in nats and mean distance from the query in pixels of the input (undefined of a token that has no place), and
 * `outside`, what is missing to a sum of 1: the share of tokens before the patches, and rounding.
 * @param attn probabilities of a row, H * W; what is missing is shared out.
 */
export function measure(attn, cell, [H, W], [height, width]) {
  const row = Math.floor(cell / W), col = cell % W;
  const down = height / H, right = width / W;
  let sum = 0, logs = 0, path = 0;
  for (let i = 0, j = 0; i < H; i++) {
    for (let k = 0; k < W; k++, j++) {
      const p = attn[j];
      if (p <= 0) continue;
      sum += p;
      logs += p * Math.log(p);
      path += p * Math.hypot((i - row) * down, (k - col) * right);
    }
  }
  return { entropy: Math.max(0, Math.log(sum) - logs / sum), distance: cell < 0 ? undefined : path / sum,
    outside: Math.max(0, 1 - sum) };
}
