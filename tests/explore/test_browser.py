"""The page in a real browser: Debian's chromium, driven by Playwright.

Skipped where either is absent; with EA_VISION_REQUIRE_BROWSER=1 (`make test-browser`) that is a failure instead.
EA_VISION_CHROMIUM names another chromium.
"""

import os
import re
import shutil

import matplotlib
import numpy as np
import pytest
from PIL import Image

from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize import show_page
from ea_vision.visualize.explore import STORED_PARTS, Explorer, build_page
from ea_vision.visualize.image_maps import record
from ea_vision.visualize.map_style import MapStyle, norm_of
from tests.data.photos import picture

REQUIRED = os.environ.get("EA_VISION_REQUIRE_BROWSER") == "1"
CHROMIUM = os.environ.get("EA_VISION_CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

MISSING = [
    name
    for name, there in (
        ("playwright (pip install playwright)", sync_playwright),
        ("chromium (apt-get install chromium)", CHROMIUM),
    )
    if not there
]
if MISSING and REQUIRED:
    pytest.fail(
        f"EA_VISION_REQUIRE_BROWSER=1, and there is no {' and no '.join(MISSING)}", pytrace=False
    )
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


# ---- browser, pages -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(explorer, entries, tmp_path_factory) -> str:
    return written(explorer, entries, tmp_path_factory.mktemp("page"))


def written(explorer, entries, folder, **options) -> str:
    """The address of the page as a file."""
    (folder / "page.html").write_text(build_page(explorer, entries, **options))
    return (folder / "page.html").as_uri()


@pytest.fixture
def open_page(browser, address):
    """Opens a page. At the end of the test none may have asked the network, complained, or written to its console."""
    contexts, wrong = [], []

    def open_it(
        fragment: str = "",
        url: str = address,
        width: int = 1280,
        height: int = 800,
        view: str = "heads",
        **options,
    ):
        """view: "heads" unless the address says another one; "": what the page begins with."""
        if view and "view=" not in fragment:
            fragment = f"#view={view}&{fragment.removeprefix('#')}"
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((url.split("#")[0], "data:", "blob:"))
                or wrong.append(f"request: {request.url}")
            ),
        )
        page.goto(url + fragment)
        settle(page)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert not wrong


def settle(page) -> None:
    """Wait until all is drawn."""
    page.evaluate("explorer.ready()")


def state(page) -> dict:
    settle(page)
    return page.evaluate("explorer.state()")


def tile(page, *place) -> dict | None:
    """What the tile of (model, layer, head) shows, or of (model, layer, head, part)."""
    settle(page)
    return page.evaluate("place => explorer.tile(...place)", place)


def zoom_pixels(page, feat_size) -> np.ndarray:
    """(N, 3): colours in the middle of the enlarged tile's cells."""
    pixels = page.evaluate(
        """([H, W]) => {
      const canvas = document.querySelector(".zoom"), copy = new OffscreenCanvas(canvas.width, canvas.height);
      const context = copy.getContext("2d", { willReadFrequently: true });
      context.drawImage(canvas, 0, 0);
      const at = (cell, cells, size) => Math.floor((cell + 0.5) * size / cells);
      return Array.from({length: H * W}, (_, i) => [...context.getImageData(
        at(i % W, W, canvas.width), at(Math.floor(i / W), H, canvas.height), 1, 1).data]);
    }""",
        feat_size,
    )
    return np.array(pixels)[:, :3].astype(int)


def check_row(shown: dict, layer, img_size, part: str, head, query) -> None:
    """A tile is, by numpy from a recording, the map of a query (y, x in pixels), rounded to 8 bits."""
    (height, width), (H, W) = img_size, layer.feat_size
    maps = layer[part][0, :, query[0] * H // height * W + query[1] * W // width].double().numpy()
    rows = maps if head == "mean" else maps[[head]]
    bound = np.mean(np.ptp(rows, -1) / 255 * 0.501 + 1e-5 * np.abs(rows).max(-1))
    assert np.abs(np.array(shown["values"]) - rows.mean(0)).max() <= bound


# ---- values ---------------------------------------------------------------------------------------------------------


def test_tiles_equal_numpy(open_page, explorer, recordings):
    """Every part, head and the mean, of both models and images, for queries by fragment."""
    page = open_page()
    places = [
        (index, layer, head)
        for index, layers in enumerate(explorer.layers)
        for layer in layers
        for head in (0, layer.num_heads - 1, "mean")
    ]
    compared = 0
    for image, query in ((0, (5, 90)), (1, (63, 0))):
        for part in STORED_PARTS:
            page.evaluate(
                "hash => { location.hash = hash }",
                f"view=heads&image={image}&part={part}&query={query[0]},{query[1]}",
            )
            page.wait_for_function(
                "hash => ['image', 'part'].every((name) => "
                "String(explorer.state()[name]) === new URLSearchParams(hash).get(name))",
                arg=f"image={image}&part={part}",
            )
            settle(page)
            tiles = page.evaluate(
                "places => places.map((place) => explorer.tile(...place))",
                [(index, layer.number, head) for index, layer, head in places],
            )
            for (index, layer, head), shown in zip(places, tiles, strict=True):
                maps = recordings[image, index].maps[layer.number]
                assert (shown is None) == (part not in maps.recorded())
                if shown:
                    own = query if index == 0 else (query[0] * 32 // 64, query[1] * 32 // 96)
                    check_row(shown, maps, explorer.models[index].img_size, part, head, own)
                    compared += 1
    assert compared > 130


def test_entropy_and_distance_equal_numpy(open_page, explorer, recordings):
    page = open_page("#query=40,50&part=logits")  # of the attention, whatever part is shown
    for number in (8, 9, 21):
        layer = recordings[0, 0].maps[number]
        (H, W), attn = layer.feat_size, layer.attn[0, 3].double().numpy()
        row, col = 40 * H // 64, 50 * W // 96
        p = attn[row * W + col]
        down, right = np.mgrid[:H, :W].reshape(2, -1) - np.array([[row], [col]])
        shown = tile(page, 0, number, 3)
        assert shown["entropy"] == pytest.approx(
            -(p * np.log(np.maximum(p, 1e-30))).sum(), abs=0.02
        )
        assert shown["distance"] == pytest.approx(
            (p * np.hypot(down * 64 / H, right * 96 / W)).sum(), abs=0.2
        )


@pytest.mark.parametrize("part", ["logits", "attn"])
def test_drawn_pixels_are_the_values_in_the_colour_map(open_page, part):
    """By the scales and colours of the figures: attention's logarithms around uniform attention, logits around 0."""
    page = open_page(f"#query=20,30&layer=9&head=2&opacity=1&part={part}&scale=tile")
    shown = tile(page, 0, 9, 2)
    values = np.array(shown["values"])
    if part == "logits":
        norm = matplotlib.colors.Normalize(-np.abs(values).max(), np.abs(values).max())
    else:
        values = values * len(values)
        norm = norm_of([values], MapStyle(scale="all"))
    colour = MapStyle().colormap(part)(norm(values), bytes=True)
    inside = [cell for cell in range(len(values)) if cell != shown["cell"]]
    assert (
        np.abs(zoom_pixels(page, shown["featSize"]) - colour[:, :3])[inside].max() <= 6
    )  # a neighbour in the table


# ---- query ----------------------------------------------------------------------------------------------------------


def test_the_mouse_moves_the_query_and_a_click_pins_it(open_page):
    page = open_page()
    photo = page.locator(".photo").first
    box = photo.bounding_box()

    def at(y, x):
        return {
            "position": {"x": (x + 0.5) * box["width"] / 96, "y": (y + 0.5) * box["height"] / 64}
        }

    before = tile(page, 0, 9, 0)["values"]
    photo.hover(**at(10, 80))
    assert state(page)["queries"] == [[10, 80], [5, 26]] and not state(page)["pinned"], (
        "linked models follow"
    )
    assert tile(page, 0, 9, 0)["values"] != before
    photo.click(**at(50, 20))
    photo.hover(**at(10, 80))
    assert state(page)["queries"][0] == [50, 20] and state(page)["pinned"], "a pinned query stays"
    assert "pinned" in page.locator(".caption").first.inner_text()
    page.keyboard.press("Escape")
    assert not state(page)["pinned"]


def test_arrows_move_the_query_by_a_cell_and_stop_at_the_edge(open_page):
    page = open_page("#query=2,2")
    H, W = tile(page, 0, 8, 0)["featSize"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    shown = tile(page, 0, 8, 0)
    assert shown["cell"] == W + 1
    assert tile(page, 0, 21, 0)["cell"] == 0, "a coarser map stays in its cell"
    for _ in range(W + 2):
        page.keyboard.press("ArrowRight")
    for _ in range(H + 2):
        page.keyboard.press("ArrowUp")
    assert tile(page, 0, 8, 0)["cell"] == W - 1


# ---- tiles, parts, views --------------------------------------------------------------------------------------------


def test_keyboard_alone(open_page):
    """Tab reaches the photo and the tiles, Enter chooses a tile, and the focus is seen."""
    page = open_page("#layer=9&head=0")
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("""() => {
          const e = document.activeElement, ring = getComputedStyle(e.closest("label") ?? e), own = getComputedStyle(e);
          return [e.getAttribute("aria-label") ?? e.textContent.trim().slice(0, 20),
                  ring.outlineStyle !== "none" || own.outlineStyle !== "none"];
        }""")
        )
        if seen[-1][0] == "layer 8, head 1":
            break
    assert seen[-1][0] == "layer 8, head 1" and all(ring for _, ring in seen)
    assert any("arrow keys move the query" in name for name, _ in seen)
    page.keyboard.press("Enter")
    assert (state(page)["layer"], state(page)["head"]) == (8, 1)
    assert "layer 8 \u00b7 head 1" in page.locator(".stage").first.inner_text()


def test_a_tile_enlarges_in_all_models(open_page):
    """A model that lacks the layer says which it has."""
    page = open_page()
    for label in ("layer 9, head 3", "layer 21, mean of the heads"):
        page.get_by_label(label, exact=True).click()
        settle(page)
        texts = [text.replace("\n", " ") for text in page.locator(".stage").all_inner_texts()]
        assert label.replace(", ", " \u00b7 ") in texts[0]
        assert "none in this model, which has layers 1, 2, 3, 4, 5, 6" in texts[1]
    assert (state(page)["layer"], state(page)["head"]) == (21, "mean")


def test_the_fragment_reproduces_the_view(open_page):
    page = open_page()
    page.locator("select[name=part]").select_option("logits")
    page.keyboard.press("ArrowRight")
    page.get_by_label("layer 21, head 5", exact=True).click()
    page.get_by_label("Colour scale").select_option("all")
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


def test_a_link_to_what_there_is_not_is_told_so(open_page):
    page = open_page("#layer=99&head=7&image=5&view=nope&query=64,0;3,3", view="")
    message = page.locator("#message")
    assert message.inner_text().startswith(
        "The address asks for image 5; there are 0, 1. The address asks for view nope; there are parts, heads. "
        "The address asks for layer 99; there are 8, 9, 10, 21, 1, 2, 3, 4, 5, 6. "
        "The address asks for query 64,0; there are 0,0 to 63,95 in ea_aa_resnet34"
    )
    assert (state(page)["layer"], state(page)["head"], state(page)["image"]) == (8, 7, 0)
    page.get_by_label("layer 8, own", exact=True).click()
    assert not message.is_visible()
    assert not open_page("#layer=21&head=mean&image=1&query=63,95").locator("#message").is_visible()
    first = state(open_page(view=""))
    for fragment in (
        "#query=9999,-1&image=7&view=no&part=none&layer=x&head=-3&opacity=9&scale=<b>",
        "#%%%",
    ):
        assert state(open_page(fragment, view="")) == first


# ---- the first view: evolution, layer by layer -----------------------------------------------------------------------

COLUMNS = (
    ("prev_logits", "previous"),
    ("self_logits", "own"),
    ("conv_logits", "after conv."),
    ("attn", "attention"),
    ("attn_own_alone", "own alone"),
)


def test_the_first_view_is_what_one_head_computes(open_page, explorer, recordings):
    """A row a layer; previous, own, convolved, attention as recorded; PA has logits of its own besides. The equation
    says how the columns make each other."""
    page = open_page("#query=20,30&head=3", view="")
    assert state(page)["view"] == "parts"
    labels = (
        page.locator(".buttons")
        .first.locator("button")
        .evaluate_all("all => all.map(b => b.ariaLabel)")
    )
    assert labels == [
        f"layer {layer.number}, {name}" for layer in explorer.layers[0] for _, name in COLUMNS
    ]
    assert page.locator(".buttons").nth(1).locator("button").count() == 6 * 6
    for layer in explorer.layers[0]:
        for part, _ in COLUMNS:
            shown = tile(page, 0, layer.number, 3, part)
            maps = recordings[0, 0].maps[layer.number]
            assert (shown is None) == (part not in maps.recorded())
            if shown:
                check_row(shown, maps, (64, 96), part, 3, (20, 30))
    assert page.locator(".equation:visible").all_inner_texts() == [
        "a layer: logits = relu(conv(0.5 previous + 0.5 own)), attention = softmax(logits)",
        "a layer: logits = 0.01 relu(conv(previous)) + 0.99 own, attention = softmax(logits)",
    ]


def test_the_first_view_shows_what_a_chain_hands_on(open_page):
    """The second layer of a chain is shown at first, the first one's empty boxes say why, and lines lead from what a
    layer hands on to the next one's previous logits: own logits of the first, convolved ones of EA, PA's logits."""
    page = open_page(view="")
    assert state(page)["layer"] == 8, "its chain began on a layer that is not on the page"
    box = page.get_by_label("layer 21, previous", exact=True)
    assert "the chain begins" in box.get_attribute("title")
    assert page.evaluate("explorer.links(0)") == [
        [0, 2, 0],
        [1, 2, 0],
    ]  # layers 8, 9, 10; 21 is another chain's
    assert page.evaluate("explorer.links(1)") == [[0, 3, 0], [1, 3, 0], [3, 3, 0], [4, 3, 0]]
    assert (
        page.locator(".bar.logits:visible").count()
        == page.locator(".bar.attn:visible").count()
        == 1
    )
    box.click()
    page.locator(
        ".stage", has_text="the chain begins"
    ).first.wait_for()  # drawn with the next frame


@pytest.mark.parametrize("count, wide_rows", [(1, 3), (2, 3), (3, 2)])
def test_the_first_rows_are_in_view(open_page, tmp_path, count, wide_rows):
    """Of models side by side; and rows of several models begin alike. One model uses the width."""
    names = ["ea_conv_transformer_cifar", "pa_conv_transformer_cifar", "conv_transformer_cifar"]
    (tmp_path / "page.html").write_text(show_page(names[:count], picture(3)).text)
    for width, height, rows, models in ((1400, 900, wide_rows, count), (400, 800, 1, 1)):
        page = open_page(url=(tmp_path / "page.html").as_uri(), view="", width=width, height=height)
        boxes = [
            [
                page.locator(".buttons")
                .nth(index)
                .get_by_label(f"layer {row + 1}, attention", exact=True)
                .bounding_box()
                for row in range(rows)
            ]
            for index in range(models)
        ]
        for of_model in boxes:
            assert [box["y"] for box in of_model] == [box["y"] for box in boxes[0]]
            assert of_model[-1]["y"] + of_model[-1]["height"] <= height
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        tiles = page.locator(".tiles canvas").first.bounding_box()
        assert count > 1 or tiles["x"] + tiles["width"] > 0.95 * width


def test_a_slider_over_epochs(open_page, tmp_path):
    models = [load_model("ea_conv_transformer_cifar", random=True, seed=seed) for seed in range(2)]
    made = [
        Explorer([model], [recordable_layers(model.model)[:2]], parts=("attn",)) for model in models
    ]
    entries = [one.view(f"epoch {5 * epoch}", picture(0)) for epoch, one in enumerate(made)]
    page = open_page(url=written(made[0], entries, tmp_path, epochs=True))
    before = tile(page, 0, 2, 1)["values"]
    page.get_by_label("epoch", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert (
        state(page)["image"] == 1 and page.locator("output").inner_text() == "epoch 5 \u00b7 2 of 2"
    )
    assert tile(page, 0, 2, 1)["values"] != before


def test_a_page_inside_a_notebook_works(browser, tmp_path):
    shown = show_page(load_model("ea_conv_transformer_cifar", random=True), picture(3))
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{shown._repr_html_()}</body>")
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))
    page.on("console", lambda message: errors.append(message))
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.get_by_label("layer 2, own", exact=True).click()
    frame.locator("strong", has_text="layer 2 \u00b7 head 0 \u00b7 own").wait_for(timeout=5000)
    page.wait_for_timeout(400)  # the address is written when the hand rests
    page.close()
    assert not errors


def test_attention_that_is_everywhere_alike_does_not_look_strong(open_page):
    """Colours reach to twice 1/N at least, each tile its own or not."""
    page = open_page("#opacity=1&layer=8&head=0")
    assert max(tile(page, 0, 8, 0)["values"]) < 1.7 / 24, (
        "random weights look everywhere nearly alike"
    )
    for scale, heads in (("tile", [0]), ("layer", [*range(8), "mean"])):
        page.get_by_label("Colour scale").select_option(scale)
        end = max(2, *(24 * value for head in heads for value in tile(page, 0, 8, head)["values"]))
        assert tile(page, 0, 8, 0)["range"] == pytest.approx([1 / 24 / end, end / 24], rel=1e-5)


# ---- picture, looks, speed ------------------------------------------------------------------------------------------


def test_the_view_is_saved_as_png(open_page, explorer, tmp_path):
    """The models side by side, alike from a narrow and a wide window; the page is as it was."""
    pictures = []
    for width in (400, 1400):
        page = open_page("#image=1&part=logits&opacity=1&layer=9&head=2", width=width)
        before = page.locator(".tiles canvas").first.bounding_box()
        with page.expect_download() as download:
            page.get_by_role("button", name="Save as PNG").click()
        assert download.value.suggested_filename == "attention--script-b-second-logits.png"
        download.value.save_as(tmp_path / "saved.png")
        settle(page)
        assert page.locator(".tiles canvas").first.bounding_box() == before
        with Image.open(tmp_path / "saved.png") as image:
            pictures.append(np.asarray(image.convert("RGB"), int))
    narrow, wide = pictures
    assert (
        narrow.shape == wide.shape
        and narrow.shape[1] > 2 * 2 * 640
        and np.abs(narrow - wide).mean() < 2
    )
    drawn = zoom_pixels(page, tile(page, 0, 9, 2)["featSize"]) @ (65536, 256, 1)
    assert np.isin(drawn, wide @ (65536, 256, 1)).all(), "the enlarged tile is in the picture"


@pytest.mark.parametrize("width, view, theme", [(1400, "parts", "light"), (400, "heads", "dark")])
def test_looks(open_page, width, view, theme):
    """Nothing sticks out to the side; the ground follows the system's theme; text stands out from it."""
    page = open_page(width=width, color_scheme=theme, view=view)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground, text = (
        np.mean([int(value) for value in re.findall(r"\d+", colour)[:3]])
        for colour in page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
    )
    assert (ground > 128) == (theme == "light") and abs(ground - text) > 180
    photo, first = (
        page.locator(".photo").first.bounding_box(),
        page.locator(".buttons button").first.bounding_box(),
    )
    assert photo["width"] >= 150 and first["width"] >= 26


def test_class_tokens_and_registers_are_queries(open_page, tmp_path):
    """Values by numpy, of a button and of an address; a linked network without such a token stays where it was."""
    transformer = load_model(
        "ea_vit_tiny_patch16_224",
        random=True,
        img_size=(32, 32),
        reg_tokens=2,
        alpha=0.3,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
    )
    (tmp_path / "page.html").write_text(
        show_page([transformer, "pa_conv_transformer_cifar"], picture(0)).text
    )
    address = (tmp_path / "page.html").as_uri()
    maps = record(transformer, picture(0), recordable_layers(transformer.model)).maps
    page = open_page(url=address)
    for token, number in (("reg2", 2), ("cls", 0)):
        page.locator(".tokens button", has_text=token).click()
        assert state(page)["queries"] == [token, [16, 16]] and state(page)["pinned"]
        row, shown = maps[2].attn[0, 1, number].double().numpy(), tile(page, 0, 2, 1)
        assert (
            np.abs(np.array(shown["values"]) - row[3:]).max() <= np.ptp(row[3:]) / 510 * 1.01 + 1e-6
        )
        assert (
            shown["outside"] == pytest.approx(row[:3].sum(), abs=2e-2)
            and shown.get("distance") is None
        )
    assert page.evaluate("explorer.fragment()").startswith("#query=cls")
    page.keyboard.press("ArrowDown")  # from the middle on
    assert state(page)["queries"][0] == [28, 20]
    assert state(open_page("#query=reg3", url=address))["queries"][0] == [16, 16]
