# Most users need two targets: `make demo` (train a small network, draw its attention) and `make test`.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready

DEMO   := runs/demo

.PHONY: demo pictures test test-slow test-all test-oldest test-gpu test-browser lint pages size wheel docs release clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip uv
	VIRTUAL_ENV=$(VENV) $(VENV)/bin/uv pip install --quiet --compile-bytecode --constraint constraints.txt --editable ".[dev]"
	touch $@

# A narrow ea_conv_transformer_cifar on scikit-learn's digits, about two minutes on 2 cores, then its attention maps.
demo: $(READY)
	$(RUN) train_cifar.py --dataset digits --model ea_conv_transformer_cifar \
		--model-kwargs 'widths=[32,64,128,128]' --epochs 10 --channels-last --output $(DEMO)
	$(RUN) visualize/heatmap.py --model $(DEMO) --layers 1 --queries 6,12 16,16 26,20 \
		-o $(DEMO)/heads.png digits#5
	$(RUN) visualize/strip.py --model $(DEMO) --layers 1-3 --heads mean --queries 16,16 \
		-o $(DEMO)/evolution.png digits#5
	@echo
	@echo "Trained: $(DEMO). Pictures to open: $(DEMO)/heads.png, and $(DEMO)/evolution.png: a map from layer to layer."
	@echo "Accuracy jumps about epoch 6: with 11 updates per epoch BatchNorm's running statistics lag behind weights that move fast."
	@echo "The next three commands to try (digits#5 is the sixth test image of the digits, counted from 0):"
	@echo "  $(VENV)/bin/ea-vision predict $(DEMO) digits#5"
	@echo "  $(VENV)/bin/ea-vision explore --model $(DEMO) -o $(DEMO)/page.html digits#5"
	@echo "  $(VENV)/bin/ea-vision predict ea_conv_transformer_cifar docs/cat.jpg"

# README's pictures and a page to try, docs/attention.html, from the weights in weights/. SCENES, a folder of
# experiments/scenes/split.py, has the photo of one more; VIT_WEIGHTS and VIT_RUNS, of experiments/finetune_scenes, record
# its maps anew. The other photos are free (docs/photos/README.md); the page's film needs chromium and playwright.
pictures: $(READY)
	$(RUN) visualize/heatmap.py --model ea_conv_transformer_cifar --layers 1-3 --heads 0 --style fog --width 6.75 --dpi 110 \
		-o visualize/fog.png docs/cat.jpg docs/photos/*.jpg
	$(RUN) -m experiments.evolution_at_work docs/cat.jpg -o visualize/evolution.png
	$(RUN) -m experiments.page_film docs/photos/macaw.jpg docs/cat.jpg docs/photos/dog.jpg docs/photos/moose.jpg
	$(RUN) visualize/explore.py --model ea_conv_transformer_cifar --model conv_transformer_cifar \
		-o docs/attention.html docs/cat.jpg
	$(RUN) -m experiments.finetune_scenes.pictures $(if $(VIT_RUNS),"$(VIT_WEIGHTS)" --runs "$(VIT_RUNS)")
	@if [ -n "$(SCENES)" ]; then $(RUN) visualize/heatmap.py --model ea_aa_resnet34_050 --layers 5 --heads 5,7 \
		--queries 30,56 80,56 --width 3.3 -o visualize/scene.png "$(SCENES)/test/street/1011.jpg"; \
	else echo "left out: visualize/scene.png, which needs SCENES=FOLDER, as experiments/scenes/split.py writes it"; fi

# Two workers of one thread each: threads that wait for each other on 2 cores take several times as long. A worker takes
# whole files if possible, so that the runs that a file's tests share are trained once.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest tests -rs --durations 15 --ignore tests/explore/test_browser.py -n 2 --dist worksteal
test: $(READY)
	$(PYTEST)

# The slow tests, which `make test` leaves out; CI runs both.
test-slow: $(READY)
	$(PYTEST) -m slow

# Fast and slow tests, with the model tests over every network at full width; `make test` takes the smallest of each kind.
test-all: export EA_VISION_TEST_ALL = 1
test-all: test

# Tests of models, layers, engine and data with the oldest versions that pyproject.toml allows, in a separate environment.
OLDEST := .venv-oldest
$(OLDEST)/.ready: $(READY) pyproject.toml
	$(VENV)/bin/uv venv --quiet --clear --python $(RUN) $(OLDEST)
	VIRTUAL_ENV=$(OLDEST) $(VENV)/bin/uv pip install --quiet --compile-bytecode --resolution lowest-direct --editable ".[dev]"
	touch $@

test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest tests/models tests/layers tests/engine tests/data -n 2 --dist worksteal

# The GPU tests, at most 25 minutes, with $(PYTHON), which needs this package, hypothesis and pytest; without a GPU make
# stops with "Error 77".
test-gpu:
	@$(PYTHON) -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 77)" || { echo "no CUDA device found, nothing was run"; exit 77; }
	$(PYTHON) -m pytest tests/gpu tests/ops -m "slow or not slow" -rP

# The attention page in a real browser; needs Debian's chromium and a font (apt-get install chromium fonts-dejavu-core).
test-browser: $(READY)
	EA_VISION_REQUIRE_BROWSER=1 $(RUN) -m pytest tests/explore/test_browser.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m experiments.pages --check

# The tables on the pages of experiments, from the rows of the runs.
pages: $(READY)
	$(RUN) -m experiments.pages

# Tokens and statements by room, without docstrings and comments.
size:
	$(PYTHON) tests/test_size.py

# The site, in build/site: README as the front page, docs/, experiments/, the notebook, and a reference from the docstrings.
docs: $(READY)
	VIRTUAL_ENV=$(VENV) $(VENV)/bin/uv pip install --quiet --constraint constraints.txt --editable ".[docs]"
	bin="$$(cd $(VENV)/bin && pwd)" && cd docs/site && NO_MKDOCS_2_WARNING=1 "$$bin/python" -m mkdocs build --strict --quiet
	@echo "The site: build/site/index.html"

# Check that a release is complete: version, changelog, tag, wheel and sdist.
release: $(READY)
	rm -rf dist
	VIRTUAL_ENV=$(VENV) $(VENV)/bin/uv pip install --quiet --constraint constraints.txt twine
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m tests.release

wheel: $(READY)
	$(RUN) -m build --wheel

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
