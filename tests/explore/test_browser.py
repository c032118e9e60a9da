"""The page in a real browser: Debian's chromium, driven by Playwright.

Skipped if either is missing; with EA_VISION_REQUIRE_BROWSER=1 (`make test-browser`) this is a failure instead.
EA_VISION_CHROMIUM names another chromium.
"""

import json
import os
import re
import shutil
from itertools import product

import matplotlib
import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ea_vision import evolve
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize import plot_strip, show_page
from ea_vision.visualize.explore import STORED_PARTS, Explorer, build_page
from ea_vision.visualize.figure_request import record
from ea_vision.visualize.map_style import MapStyle, norm_of
from ea_vision.zoo.loaded import load_model
from tests.data.photos import picture
from tests.models.zoo import TINY, stirred
from tests.recorder.networks import CAIT, small_swin

CHROMIUM = os.environ.get("EA_VISION_CHROMIUM") or shutil.which("chromium")
if os.environ.get("EA_VISION_REQUIRE_BROWSER") != "1":
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium: apt-get install chromium", allow_module_level=True)


# ---- browser, pages -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(explorer, entries, tmp_path_factory):
    return write_page(build_page(explorer, entries), tmp_path_factory.mktemp("page"))


def write_page(text, folder):
    """Return the address of a page as a file."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def open_page(browser, address):
    """Opens pages. At the test's end no page may have used the network, raised an error or written to its console."""
    contexts = []
    wrong = []

    def open_it(fragment="", url=address, width=1280, height=800, **options):
        def check(request):
            if not request.url.startswith((url, "data:", "blob:")):
                wrong.append(f"request: {request.url}")

        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("request", check)
        page.goto(url + fragment)
        settle(page)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def show(open_page, tmp_path):
    """Opens the page of networks and an image."""

    def show_it(networks, fragment="", image=picture(0), layers=None, **options):
        text = show_page(networks, image, layers).text
        return open_page(fragment, url=write_page(text, tmp_path), **options)

    return show_it


def settle(page):
    """Wait until all is drawn; a page may be in a frame of this one."""
    page.evaluate("window.explorer?.ready()")


def state(page):
    settle(page)
    return page.evaluate("explorer.state()")


def check_state(page, **expected):
    assert expected.items() <= state(page).items()


def tile(page, *place):
    """Return what the tile of (model, layer, head) or (model, layer, head, part) shows."""
    settle(page)
    return page.evaluate("place => explorer.tile(...place)", place)


def canvas_pixels(page, label, shown):
    """Return (N, 3): the colours in the middle of the cells of the tile with this label; shown: from `tile`."""
    pixels = page.evaluate(
        """([label, [H, W]]) => {
      const canvas = document.querySelector(`[aria-label="${label}"] canvas`);
      const copy = new OffscreenCanvas(canvas.width, canvas.height);
      const context = copy.getContext("2d", { willReadFrequently: true });
      context.drawImage(canvas, 0, 0);
      const at = (cell, cells, size) => Math.floor((cell + 0.5) * size / cells);
      return Array.from({length: H * W}, (_, i) => [...context.getImageData(
        at(i % W, W, canvas.width), at(Math.floor(i / W), H, canvas.height), 1, 1).data]);
    }""",
        [label, shown["featSize"]],
    )
    return np.array(pixels)[:, :3].astype(int)


def check_colours(page, label, shown, colours, cells):
    """Check the colours, (N, 3) or more, of these cells of a tile."""
    drawn = canvas_pixels(page, label, shown)
    assert np.abs(drawn - colours[:, :3])[cells].max() <= 6  # a neighbour in the table


def rows_of(recording, number, query, head, part="attn"):
    """Return the rows (K, Q, N) of a recorded part over the pixels: of a query, or of "all"; of a head, or of all heads
    for their "mean"."""
    maps = recording.maps[number]
    heads = slice(None) if head == "mean" else [head]
    queries = slice(maps.num_prefix_tokens, None)
    if query != "all":
        queries = [maps.token(recording.cell(number, query))]
    rows = maps[part][0, heads][:, queries, maps.num_prefix_tokens :]
    return rows.double().numpy()


def check_row(shown, recording, number, query, head, part="attn"):
    """Check that a tile is the recorded map of a query, rounded to 8 bits, or the exact mean of all queries."""
    rows = rows_of(recording, number, query, head, part)
    step = np.ptp(rows, -1) / 255
    largest = np.abs(rows).max(-1)
    tolerance = 1e-5 * largest if query == "all" else 1e-5 * largest + 0.501 * step
    difference = np.array(shown["values"]) - rows.mean((0, 1))
    assert np.abs(difference).max() <= tolerance.mean()


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image, query", [(0, "5,90"), (1, "63,0"), (1, "all")])
def test_tiles_equal_numpy(open_page, explorer, recordings, image, query):
    """Every part of the first and last head and the mean of heads, of both models and images."""
    page = open_page(f"#image={image}&query={query}")
    for index, seen in enumerate(state(page)["queries"]):
        recording = recordings[image, index]
        for layer in explorer.layers[index]:
            recorded = recording.maps[layer.number].recorded()
            for head, part in product((0, layer.num_heads - 1, "mean"), STORED_PARTS):
                shown = tile(page, index, layer.number, head, part)
                assert (shown is None) == (part not in recorded)
                if shown:
                    check_row(shown, recording, layer.number, seen, head, part)


@pytest.mark.parametrize("query", ["all", "40,50"])
def test_the_change_by_the_previous_map_is_exact(open_page, recordings, query):
    """Half the sum of absolute differences from the attention of the own logits alone; of heads and queries the mean of
    these, and the sentence above the tiles."""
    page = open_page(f"#layer=9&head=2&query={query}")
    [seen, _] = state(page)["queries"]
    for head in ("mean", 2):
        attn = rows_of(recordings[0, 0], 9, seen, head)
        alone = rows_of(recordings[0, 0], 9, seen, head, "attn_own_alone")
        expected = np.abs(attn - alone).sum(-1).mean() / 2
        shown = page.evaluate("head => explorer.difference(0, 9, head)", head)
        assert shown == pytest.approx(expected, abs=1e-5)
    title = page.locator(".how h3").first.inner_text()
    assert title.startswith(f"Layer 9, head 2: {expected:.0%} of ")
    assert title.endswith("because of layer 8")


def test_what_changed_is_drawn_in_colours(open_page, recordings):
    """Attention minus that of the own logits alone in units of uniform attention, full colour at 4 times."""
    page = open_page("#layer=9&head=2&query=40,50&opacity=1")
    attn = rows_of(recordings[0, 0], 9, (40, 50), 2)
    alone = rows_of(recordings[0, 0], 9, (40, 50), 2, "attn_own_alone")
    change = 24 * (attn - alone)[0, 0]
    colours = matplotlib.colormaps["PuOr_r"](matplotlib.colors.Normalize(-4, 4)(change), bytes=True)
    shown = tile(page, 0, 9, 2)
    plain = (np.abs(change) <= 1) & (np.arange(24) != shown["cell"])
    assert plain.any()
    check_colours(page, "layer 9, what layer 8\u2019s map changed", shown, colours, plain)


def test_entropy_and_distance_equal_numpy(open_page, recordings):
    page = open_page("#query=40,50&part=logits")  # of the attention, whatever part is shown
    recording = recordings[0, 0]
    for number in (8, 9, 21):
        height, width = recording.maps[number].feat_size
        row, column = recording.cell(number, (40, 50))
        [[p]] = rows_of(recording, number, (40, 50), 3)
        rows, columns = np.divmod(np.arange(height * width), width)
        path = np.hypot((rows - row) * 64 / height, (columns - column) * 96 / width)
        shown = tile(page, 0, number, 3)
        entropy = -(p * np.log(np.maximum(p, 1e-30))).sum()
        assert shown["entropy"] == pytest.approx(entropy, abs=0.02)
        assert shown["distance"] == pytest.approx((p * path).sum(), abs=0.2)


@pytest.mark.parametrize("part", ["logits", "attn"])
def test_drawn_cells_are_the_values_in_the_colour_map(open_page, part):
    """With the scales and colours of the figures: log attention around uniform attention, logits around 0."""
    page = open_page(f"#query=20,30&layer=9&head=2&opacity=1&part={part}&scale=tile&style=cells")
    shown = tile(page, 0, 9, 2)
    values = np.array(shown["values"])
    if part == "logits":
        end = np.abs(values).max()
        norm = matplotlib.colors.Normalize(-end, end)
    else:
        values = values * len(values)
        norm = norm_of([values], MapStyle(scale="all"))
    colours = MapStyle().colormap(part)(norm(values), bytes=True)
    inside = np.arange(len(values)) != shown["cell"]
    check_colours(page, "layer 9, large", shown, colours, inside)


def test_fog_covers_the_photo_below_uniform_attention(show):
    """No photo is left at half of uniform attention, all of it at twice; its share is linear in the logarithm, and the
    line runs where it is a half. The photo is black."""
    black = Image.new("RGB", (64, 64))
    page = show("ea_conv_transformer_cifar", "#query=all&layer=2&head=0", black, [1, 2, 3])
    shown = tile(page, 0, 2, 0)
    relative = np.array(shown["values"]) * len(shown["values"])
    shares = np.clip((np.log2(relative) + 1) / 2, 0, 1)
    beside_line = np.abs(shares - 0.5) > 0.15
    assert 10 < beside_line.sum()
    fog = 255 * 0.83 * (1 - shares[:, None])
    check_colours(page, "layer 2, large", shown, fog, beside_line)


# ---- query ----------------------------------------------------------------------------------------------------------


def test_the_mouse_asks_from_a_pixel_and_a_click_pins_it(open_page):
    page = open_page()
    photo = page.locator(".photo")
    box = photo.bounding_box()

    def at(y, x):
        return {"x": (x + 0.5) * box["width"] / 96, "y": (y + 0.5) * box["height"] / 64}

    everywhere = {"queries": ["all", "all"], "pinned": False}
    check_state(page, **everywhere)
    before = tile(page, 0, 9, 0)["values"]
    photo.hover(position=at(10, 80))
    check_state(page, queries=[[10, 80], [5, 26]], pinned=False)  # linked models follow
    assert tile(page, 0, 9, 0)["values"] != before
    page.locator("h1").hover()
    check_state(page, **everywhere)  # beside the photo it is all pixels again
    photo.click(position=at(50, 20))
    photo.hover(position=at(10, 80))
    check_state(page, queries=[[50, 20], [25, 6]], pinned=True)  # a pinned query stays
    assert "pinned" in page.locator("#query").inner_text()
    page.keyboard.press("Escape")
    check_state(page, **everywhere)
    page.get_by_label("layer 9, head 0", exact=True).click()
    page.get_by_role("button", name="one pixel").click()
    entry = json.loads(page.locator("script.image").first.text_content())
    assert state(page)["queries"][0] == entry["models"][0]["largest"]["9"][1:]


def test_arrows_move_the_query_by_a_cell_and_stop_at_the_edge(open_page):
    page = open_page("#query=2,2")
    H, W = tile(page, 0, 8, 0)["featSize"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert tile(page, 0, 8, 0)["cell"] == W + 1
    assert tile(page, 0, 21, 0)["cell"] == 0, "a coarser map stays in its cell"
    for _ in range(W + 2):
        page.keyboard.press("ArrowRight")
    for _ in range(H + 2):
        page.keyboard.press("ArrowUp")
    assert tile(page, 0, 8, 0)["cell"] == W - 1


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_keyboard_alone(open_page):
    """Tab reaches the photo and the tiles, Enter chooses a tile, and the focus is seen."""
    page = open_page("#layer=9&head=0")
    names = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, ring = page.evaluate("""() => {
          const e = document.activeElement, ring = getComputedStyle(e.closest("label") ?? e), own = getComputedStyle(e);
          return [e.getAttribute("aria-label") ?? e.textContent.trim().slice(0, 20),
                  ring.outlineStyle !== "none" || own.outlineStyle !== "none"];
        }""")
        assert ring, name
        names.append(name)
        if name == "layer 8, head 1":
            break
    assert names[-1] == "layer 8, head 1"
    assert "arrow keys move the query" in " ".join(names)
    page.keyboard.press("Enter")
    check_state(page, layer=8, head=1)
    assert "layer 8 \u00b7 head 1" in page.locator(".part").first.inner_text()


def test_a_tile_is_chosen_in_all_models(open_page):
    """A model that lacks the layer or the head says which it has; thumbnails choose a head, large tiles a layer."""
    page = open_page()
    for label in ("layer 9, head 3", "layer 21, mean of the heads"):
        page.get_by_label(label, exact=True).click()
        settle(page)
        texts = page.locator(".part > header").all_inner_texts()
        assert label.replace(", ", " \u00b7 ") in texts[0]
        assert "none in this model, which has layers 1, 2, 3, 4, 5, 6" in texts[1]
    check_state(page, layer=21, head="mean")
    page.get_by_label("layer 21, thumbnail of head 2", exact=True).click()
    page.get_by_label("layer 2, large", exact=True).click()
    check_state(page, layer=2, head=2)
    page = open_page("#layer=2&head=7")
    texts = page.locator(".part > header").all_inner_texts()
    assert "layer 2 \u00b7 no head 7 here, but 0, 1, 2, 3" in texts[1]


def test_the_fragment_reproduces_the_view(open_page):
    page = open_page()
    page.locator("#more summary").click()
    page.locator("select[name=part]").select_option("logits")
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    page.get_by_label("layer 21, head 5", exact=True).click()
    page.get_by_label("Colour scale").select_option("all")
    page.get_by_label("Style").select_option("cells")
    page.get_by_label("Map over photo").fill("0.5")
    page.locator("input[name=image]").nth(1).check(force=True)
    page.wait_for_function(
        "() => location.hash.includes('image=1') && location.hash.includes('opacity=0.5')"
    )
    settle(page)
    fragment = page.evaluate("location.hash")
    again = open_page(fragment)
    assert state(again) == state(page)
    assert tile(again, 0, 21, 5) == tile(page, 0, 21, 5)


def test_a_link_with_unknown_values_says_what_there_is(open_page, address):
    page = open_page()
    first = state(page)
    page.goto(f"{address}#layer=99&head=7&image=5&style=nope&query=64,0;3,3")
    check_state(page, head=7, image=0)
    message = page.locator("#message")
    assert message.inner_text().startswith(
        "The address asks for image 5; there are 0, 1. "
        "The address asks for layer 99; there are 8, 9, 10, 21, 1, 2, 3, 4, 5, 6. "
        "The address asks for style nope; there are fog, cells. "
        "The address asks for query 64,0; there are all and 0,0 to 63,95 in ea_aa_resnet34"
    )
    page.get_by_label("layer 8, head 0", exact=True).click()
    assert not message.is_visible()
    assert not open_page("#layer=21&head=mean&image=1&query=63,95").locator("#message").is_visible()
    unknown = "#query=9999,-1&image=7&part=none&layer=x&head=-3&opacity=9&scale=<b>"
    for fragment in (unknown, "#%%%"):
        assert state(open_page(fragment)) == first


# ---- the first view -------------------------------------------------------------------------------------------------


def how(page, index):
    """Return the names of the tiles that show what changed, and how a model's layer computes its map."""
    buttons = page.locator(".how").nth(index).locator("button")
    return buttons.evaluate_all("all => all.map(b => b.ariaLabel)")


def test_how_a_layer_came_by_its_map(open_page):
    """Without the previous map, with it, what changed; then, on request, the logits in the order in which a layer
    computes them."""
    page = open_page("#query=20,30&head=3&layer=9")
    before = "layer 8\u2019s map"
    changes = [f"without {before}", f"with {before}", f"what {before} changed"]
    logits = ["previous", "own", "after conv."]
    assert how(page, 0) == [f"layer 9, {name}" for name in changes + logits]
    assert not page.get_by_label("layer 9, previous").is_visible()
    page.locator(".how summary").first.click()
    assert page.get_by_label("layer 9, previous").is_visible()
    page = open_page("#query=20,30&head=3&layer=2")
    logits = ["previous", "after conv.", "own", "logits"]
    # PA convolves the previous logits alone
    assert how(page, 1)[3:] == [f"layer 2, {name}" for name in logits]
    assert page.locator(".equation").all_text_contents()[1] == (
        "a layer: logits = 0.01 relu(conv(previous)) + 0.99 own, attention = softmax(logits)"
    )
    assert not page.locator(".how").nth(0).is_visible(), "the first model has no layer 2"


def test_the_page_begins_at_a_chains_second_layer_whatever_the_models_order(show):
    """On a wide screen the models stand side by side and are complete at first sight."""
    names = ["ea_conv_transformer_cifar", "pa_conv_transformer_cifar", "conv_transformer_cifar"]
    begun = []
    for models, (width, height) in product((names, names[::-1]), ((1400, 900), (400, 800))):
        page = show(models, image=picture(3), width=width, height=height)
        boxes = [tile.bounding_box() for tile in page.locator(".layers [aria-pressed=true]").all()]
        sheets = [sheet.bounding_box() for sheet in page.locator(".sheet").all()]
        bottoms = sorted(box["y"] + box["height"] for box in boxes)
        assert len(bottoms) == 3
        assert bottoms[1] <= height
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        begun.append(state(page))
        if width == 1400:
            assert len({box["x"] for box in sheets}) == 3
            assert max(box["y"] + box["height"] for box in boxes + sheets) <= height
    assert begun == begun[:1] * 4
    check_state(page, layer=2, queries=["all"] * 3)


def test_a_slider_over_epochs(open_page, tmp_path):
    """The equation has the gates of the epoch."""
    entries = []
    for epoch, alpha in ((0, 0.25), (5, 0.75)):
        model = load_model("ea_conv_transformer_cifar", random=True, alpha=alpha)
        explorer = Explorer([model], [recordable_layers(model.model)[:2]])
        entries.append(explorer.view(f"epoch {epoch}", picture(0)))
    page = open_page(url=write_page(build_page(explorer, entries, epochs=True), tmp_path))
    before = tile(page, 0, 2, 1)["values"]
    assert "0.25 previous + 0.75 own" in page.locator(".equation").text_content()
    page.get_by_label("epoch", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert state(page)["image"] == 1
    assert page.locator("output").inner_text() == "epoch 5 \u00b7 2 of 2"
    assert tile(page, 0, 2, 1)["values"] != before
    assert "0.75 previous + 0.25 own" in page.locator(".equation").text_content()


def test_a_page_inside_a_notebook_works(open_page, tmp_path):
    shown = show_page("ea_conv_transformer_cifar", picture(3))
    html = f"<!doctype html><body>{shown._repr_html_()}</body>"
    page = open_page(url=write_page(html, tmp_path))
    frame = page.frame_locator("iframe")
    frame.get_by_label("layer 3, head 2", exact=True).click()
    frame.locator(".caption", has_text="layer 3 \u00b7 head 2").wait_for(timeout=5000)
    page.wait_for_timeout(400)  # the address is written when the hand rests


def test_attention_that_is_everywhere_alike_does_not_look_strong(open_page):
    """The colour scale reaches at least 2/N, with a scale per tile and with a common one."""
    page = open_page("#opacity=1&layer=8&head=0&style=cells&query=32,48")

    def highest(head):
        return 24 * max(tile(page, 0, 8, head)["values"])

    # random weights look everywhere nearly alike
    assert highest(0) < 1.7
    page.locator("#more summary").click()
    for scale, heads in (("tile", [0]), ("layer", [*range(8), "mean"])):
        page.get_by_label("Colour scale").select_option(scale)
        end = 24 * tile(page, 0, 8, 0)["range"][1]
        largest = max(highest(head) for head in heads)
        assert 2 - 1e-5 <= end <= max(2, largest) + 1e-5


def test_uniform_attention_is_that_of_the_keys_that_a_query_sees(show):
    """In windows (Swin) a query sees fewer keys than the map's cells; at a shifted window's border even fewer."""
    fragment = "#style=cells&scale=tile&head=0&layer=2&query=0,0"
    page = show(small_swin(), fragment, layers=[1, 2])
    for number, keys in ((1, 16), (2, 4)):
        shown = tile(page, 0, number, 0)
        low, high = shown["range"]
        assert np.sqrt(low * high) == pytest.approx(1 / keys)
    largest = 4 * max(shown["values"])
    page.locator("#more summary").click()
    numbers = page.locator("#numbers").inner_text()
    [times] = re.findall(r"([\d.]+) times uniform", numbers)
    assert float(times) == pytest.approx(largest, rel=0.01)
    assert f"of at most {np.log(4):.2f} nats" in numbers


# ---- picture, looks -------------------------------------------------------------------------------------------------


def test_the_view_is_saved_as_png(open_page, tmp_path):
    page = open_page("#image=1&layer=9&head=2&style=cells&opacity=1", width=1400)
    before = page.locator(".tile canvas").first.bounding_box()
    page.locator("#more summary").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as PNG").click()
    assert download.value.suggested_filename == "attention--script-b-second-layer-9-head-2.png"
    download.value.save_as(tmp_path / "saved.png")
    settle(page)
    assert page.locator(".tile canvas").first.bounding_box() == before
    with Image.open(tmp_path / "saved.png") as image:
        saved = np.asarray(image.convert("RGB"), int)
    assert saved.shape[1] == 2 * 1400
    drawn = canvas_pixels(page, "layer 9, large", tile(page, 0, 9, 2))
    one_number = (65536, 256, 1)
    # the large tile is in the picture
    assert np.isin(drawn @ one_number, saved @ one_number).all()


def brightness(page, property):
    """Return the mean of red, green and blue of a colour of the page's text."""
    colour = page.evaluate(f"getComputedStyle(document.body).{property}")
    return np.mean([int(value) for value in re.findall(r"\d+", colour)[:3]])


@pytest.mark.parametrize("width, theme", [(1400, "light"), (400, "dark")])
def test_looks(open_page, width, theme):
    """The background follows the system's theme; text has contrast."""
    page = open_page(width=width, color_scheme=theme)
    ground = brightness(page, "backgroundColor")
    assert (ground > 128) == (theme == "light")
    assert abs(ground - brightness(page, "color")) > 180


def test_class_tokens_and_registers_are_queries(show):
    """Values equal numpy's, by a button and by an address; a linked network without such a token keeps its query."""
    options = {**TINY, "img_size": (32, 32), "reg_tokens": 2, "alpha": 0.3}
    transformer = load_model("ea_vit_tiny_patch16_224", random=True, **options)
    models = [transformer, "pa_conv_transformer_cifar"]
    recording = record(transformer, picture(0), recordable_layers(transformer.model))
    page = show(models)
    for token in ("reg2", "cls"):
        page.locator("#asked button", has_text=token).click()
        check_state(page, queries=[token, "all"], pinned=True)
        shown = tile(page, 0, 2, 1)
        check_row(shown, recording, 2, token, 1)
        outside = 1 - rows_of(recording, 2, token, 1).sum()
        assert shown["outside"] == pytest.approx(outside, abs=2e-2)
        assert shown.get("distance") is None
    assert page.evaluate("explorer.fragment()").startswith("#query=cls")
    page.keyboard.press("ArrowDown")  # from the middle on
    assert state(page)["queries"][0] == [28, 20]
    assert state(show(models, "#query=reg3"))["queries"][0] == "all"


@pytest.mark.parametrize(
    "name, options, layer, query",
    [("vit_tiny_patch16_224", TINY, TINY["depth"], "cls"), ("cait_xxs24_224", CAIT, 2, "all")],
)
def test_a_vision_transformer_begins_with_its_class_token_at_its_last_layer(
    show, name, options, layer, query
):
    """Class attention, which has no queries of pixels, is skipped (CaiT)."""
    model = timm.create_model(name, **options)
    page = show(model)
    check_state(page, layer=layer, head="mean", queries=[query])
    assert page.locator("#asked button", has_text="cls").count() == (query == "cls")
    numbers = page.locator("#numbers").text_content()
    assert ("% of it to cls" in numbers) == (query == "cls")


def test_the_share_of_tokens_is_left_out_where_rows_do_not_sum_to_1(show):
    """Talking heads mix the probabilities: what the pixels lack is not what the class token gets."""
    model = evolve(timm.create_model("vit_tiny_patch16_224", **TINY), "talking_heads")
    page = show(stirred(model, by=1), "#query=cls&layer=2")
    numbers = page.locator("#numbers").text_content()
    assert "entropy of its attention" in numbers
    assert "of it to cls" not in numbers


def test_masked_logits_are_left_blank(show):
    """A causal mask; the strip leaves them blank, too."""
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    model = evolve(model, None, value_residual=True)
    causal = torch.ones(17, 17, dtype=torch.bool).tril()

    def add_mask(module, args, kwargs):
        return args, {**kwargs, "attn_mask": causal}

    for block in model.blocks:
        block.attn.register_forward_pre_hook(add_mask, with_kwargs=True)
    page = show(model, "#query=9,17&layer=2&head=0&opacity=1&part=logits&scale=tile&style=cells")
    shown = tile(page, 0, 2, 0)
    values = np.array(shown["values"])
    assert shown["cell"] == 6
    assert np.isneginf(values[7:]).all()
    assert shown["range"][1] == pytest.approx(np.abs(values[:7]).max())
    drawn = canvas_pixels(page, "layer 2, large", shown)
    assert not drawn[7:].any()
    assert drawn[:6].any(-1).all()
    figure = plot_strip(model, picture(0), layers=[2], head=0, query=(9, 17))
    [logits, _] = [axes.images[-1].get_array() for axes in figure.axes if axes.get_title()]
    assert logits.mask.ravel().tolist() == [cell > 6 for cell in range(16)]
