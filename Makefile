# make          prints these lines
# make demo     trains four recurrent nets on handwritten digits, in minutes, and plots the runs
# make demo-all trains all of them
# make bench    measures precision and time on this machine, in ten minutes: tables, and pages in .asv/html
# make bench-quick  measures some of it in under a minute and writes one page, report.html
# make bench-full  the same at more sizes and over more steps, in hours
# make bench-gpu  enters FIGURES of a GPU, an H100's by default, into those pages under GPU_NAME; needs no GPU
# make bench-smoke  a glance at the benchmarks, and the regression gate, as CI does it
# make fuzz     random lives of random models for SECONDS from SEED: each failure with its smallest form;
#               and MUTATIONS of each file of a run, and of PEFT
# make gpu      laws, drift and times on a GPU, in less than nine minutes; torch must be built for it
# make gpu-smoke  goes the same way in seconds, without a GPU
# make results  writes docs/results.md and the line of README.md anew from benchmarks/results
# make papers-gpu  trains rows of papers on a GPU for MINUTES, in the order of CELLS, JOBS at once; goes on where OUT stops
#               and writes OUT.tar.gz, which `stiefelkit reproduce --add` reads
# make test     runs the tests: of laws with many cases some of them, in four minutes on two quiet cores
# make test-all runs all of them, as CI does, in a quarter of an hour
# make test-seeds  runs them with every seed shifted, by each of SEEDS
# make test-arithmetic  runs the laws under other kernels, threads and precisions: all, or VARIANT=
# make test-torch  runs `make test` with other releases of torch: TORCHES=, gigabytes each
# make test-oldest-torch  runs the tests of compile, export and trace with the oldest release, kept in a cache
# make test-interop  runs the tests with other people's libraries: transformers, peft, accelerate, lightning, ...
# make peers-suites  runs the tests of torch, geoopt and pymanopt on ours: all inputs, in a quarter of an hour or more
# make docs     runs the pages of docs/ and builds them into docs/_build/html
# make docs-links  asks for an answer from every address that docs/ links to; needs a network, so CI leaves it out
# make lint     checks style, format and types
# make format   rewrites the files as `make lint` wants them
# make release-check  builds wheel and sdist, and tries each in a fresh environment with the core's requirements alone
# make clean    removes caches and build outputs; the environment (.venv) and the runs stay
#
# Each target first brings .venv up to date; only the first time, or after pyproject.toml or constraints.txt
# has changed, is there anything to do. Another interpreter: make test PYTHON=python3.12

.PHONY: help demo demo-all bench bench-full bench-quick bench-smoke bench-gpu gpu gpu-smoke results papers-gpu test test-all test-seeds test-arithmetic test-interop
.PHONY: docs docs-links fuzz
.PHONY: lint format release-check clean
.PHONY: peers-suites test-torch test-oldest-torch
.PRECIOUS: build/torch-%.txt
.NOTPARALLEL:
.DELETE_ON_ERROR:

VENV := .venv
# Windows has other places in an environment; its make is run by a bash (git's).
PLACE := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
EXE := $(if $(filter Windows_NT,$(OS)),.exe)
BIN := $(VENV)/$(PLACE)
DEMO := runs/demo
MODELS := scornn,scurnn,full_urnn,restricted_urnn,ornn,eurnn,exprnn,lie_urnn,margin_rnn,goru,rotrnn,lru,reflector,irnn,henaff_rnn,gru,lstm

# Evaluated only when .venv is made. ensurepip: some systems ship a Python that cannot make environments.
RIGHT_PYTHON := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	"$$p" -c '$(RIGHT_PYTHON)' >/dev/null 2>&1 && echo "$$p" && break; done)

# A .pth file of the environment holds the path of this folder, and Python 3.11 reads it in the locale's encoding.
ifneq ($(filter C POSIX,$(LC_ALL)),)
export LC_ALL := C.UTF-8
endif

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1
CONSTRAINTS := constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.cli
	rm -rf $(DEMO)
	$(BIN)/stiefelkit compare digits --models scornn,scurnn,exprnn,lstm --out $(DEMO)
	@echo "Plots:"; find $(DEMO) -name '*.png' | sort

demo-all: $(VENV)/.cli
	rm -rf $(DEMO)-all
	$(BIN)/stiefelkit compare digits --models $(MODELS) --out $(DEMO)-all
	@echo "Plots:"; find $(DEMO)-all -name '*.png' | sort

ASV = $(BIN)/asv
ASV_CONFIG := --config benchmarks/asv.conf.json
MACHINE := here

bench: MODE := quick
bench-full: MODE := full
bench bench-full: $(VENV)/.bench
	$(ASV) machine $(ASV_CONFIG) --yes --machine $(MACHINE) >/dev/null
	STIEFELKIT_BENCH=$(MODE) $(ASV) run $(ASV_CONFIG) --machine $(MACHINE) --python=same \
	  --set-commit-hash $$(git rev-parse HEAD)
	STIEFELKIT_BENCH=$(MODE) $(ASV) publish $(ASV_CONFIG)
	@echo "Pages: .asv/html; to look at them: $(ASV) preview $(ASV_CONFIG)"
	@echo "They load scripts from the web; the page of $(BIN)/stiefelkit report needs no network."

# Figures of make gpu, of this machine or another, beside those of make bench.
FIGURES := benchmarks/results/gpu/h100-2026-11-28/gpu.json
GPU_NAME := h100

bench-gpu: $(VENV)/.bench
	$(BIN)/python -m benchmarks.recorded $(FIGURES) $(GPU_NAME)

bench-quick: $(VENV)/.cli
	$(BIN)/stiefelkit report --quick

bench-smoke: $(VENV)/.bench
	$(ASV) machine $(ASV_CONFIG) --yes --machine $(MACHINE) >/dev/null
	$(ASV) check $(ASV_CONFIG) --python=same
	STIEFELKIT_BENCH=smoke $(ASV) run $(ASV_CONFIG) --machine $(MACHINE) --python=same --quick --dry-run \
	  --bench 'drift.Frames|step_time.Parametrizations'
	$(BIN)/python -m benchmarks.gate --subset smoke

SECONDS := 3600
SEED := 0

MUTATIONS := 500
MUTATED := tests/training/test_mutations_of_runs.py tests/nn/test_mutations_of_peft.py

fuzz: $(VENV)/.test
	$(ONE_THREAD) $(BIN)/python -m benchmarks.fuzz --seconds $(SECONDS) --seed $(SEED)
	$(ONE_THREAD) STIEFELKIT_MUTATIONS=$(MUTATIONS) $(BIN)/python -m pytest -q $(MUTATED)

# The Python of an environment with torch for CUDA; nothing is installed into it.
GPU_PYTHON ?= $(shell command -v python3)
GPU_OUT := runs/gpu

gpu:
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_OUT)

gpu-smoke: $(VENV)/.cli
	$(BIN)/python -m benchmarks.gpu --smoke --device cpu --out $(GPU_OUT)-smoke

RESULTS := benchmarks/results

results: $(VENV)/.test
	$(BIN)/stiefelkit reproduce --report --out $(RESULTS) --page docs/results.md --readme README.md --dpi 110

# ROW:SEED:EPOCHS, the first matter most. A run that is finished is passed over in seconds; one that time cuts off is
# saved, and the next call goes on with it.
CELLS := $(foreach s,1 2,rotrnn-pmnist-64:$(s):20) $(foreach s,0 1,rotrnn-pmnist-shifts-64:$(s):20) \
  $(foreach s,1 2,scornn-adding-200:$(s):3 scurnn-adding-200:$(s):3 scornn-copying-1000:$(s):2 scurnn-copying-1000:$(s):2) \
  scornn-mnist-170:1:10 scurnn-mnist-116:1:10 scornn-mnist-170:2:10 scurnn-mnist-116:2:10 \
  scurnn-adding-text-750:5544:10 scurnn-mnist-epsilon-116:5544:70 lstm-mnist-unbounded-128:5544:10 \
  ornn-mnist-script-256:5544:70 full-urnn-copying-1000:5544:2 restricted-urnn-copying-1000:5544:2 \
  eurnn-copying-1000:5544:2 full-urnn-mnist-116:5544:70 scornn-mnist-360:5544:70 scornn-mnist-512:5544:70 \
  scurnn-mnist-250:5544:70
MINUTES := 8
JOBS := 4
OUT := runs/papers-gpu
DEVICE := cuda
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
STIEFELKIT = env PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) -m stiefelkit
# A run that the end of the time interrupts is saved; one of seconds would only begin.
ONE_CELL = IFS=: read -r row seed epochs <<<"$$1"; left=$$(($$0 - $$(date +%s))); [ $$left -gt 0 ] || exit 0; \
  run="reproduce $$row --epochs $$epochs --seed $$seed"; at=$(OUT)/seed-$$seed; log=$(OUT)/$$row-$$seed.txt; \
  timeout --signal=INT $$left $(STIEFELKIT) $$run --device $(DEVICE) --out $$at $(if $(DATA),--data $(DATA)) >>$$log 2>&1; \
  echo "$$row, seed $$seed: $$(tail -n 1 $$log)"; [ -f $$at/$$row/log.jsonl ] || exit 0; \
  number() { grep -o "\"$$1\": [0-9.]*" $$at/$$row/$$2 | tail -n 1 | cut -d" " -f2; }; \
  awk "BEGIN {n = $$(number steps config.json) - $$(number step log.jsonl); printf \"  %d steps left, %.1f minutes by its log\n\", \
    n, n * $$(number ms_per_step log.jsonl) / 60000}"; \
  printf "{\"made_by\": [{\"command\": \"stiefelkit $$run\", \"commit\": $(if $(COMMIT),\"$(COMMIT)\",null)}]}\n" >$$at/$$row/reproduced.json

papers-gpu: SHELL := bash
papers-gpu:
	@mkdir -p $(OUT)
	@end=$$(date -d "+$$(awk 'BEGIN {print int($(MINUTES) * 60)}') seconds" +%s); \
	  printf '%s\n' $(CELLS) | xargs -P $(JOBS) -n 1 bash -c '$(ONE_CELL)' $$end
	cd $(OUT) && { ls seed-*/*/*.json* && for run in seed-*/*/checkpoints; do ls -d $$run/step-* | tail -n 1; done; } >runs.txt && \
	  tar -czf ../$(notdir $(OUT)).tar.gz -T runs.txt
	@ls -l $(OUT).tar.gz; test $$(wc -c <$(OUT).tar.gz) -lt 16000000

# One thread a worker: on a small busy machine a second one makes small matrices much slower, not faster.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS := 2
PARALLEL = -n $(WORKERS) --dist worksteal

test: $(VENV)/.test
	@echo "About four minutes on two quiet cores; the share of tests that are over stands at the right."
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(VENV)/.test
	@echo "A quarter of an hour on two quiet cores; the share of tests that are over stands at the right."
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL)

# The oldest torch that is supported, and the newest that was tried. What torch itself requires is left to it, and
# Triton 3.6, which comes with 2.11, interprets no program under numpy 2.4.
TORCHES := 2.11.0 2.14.1 2.15.0
REQUIRED := torch|triton|setuptools|sympy|networkx|fsspec|filelock|numpy

test-torch: $(addprefix test-torch-,$(TORCHES))

build/torch-%.txt: constraints.txt
	mkdir -p build
	grep -Ev '^($(REQUIRED))==' constraints.txt >$@
	printf '%s\n' 'torch==$*' 'numpy<$(if $(filter 2.11.%,$*),2.4,3)' >>$@

test-torch-%: build/torch-%.txt
	$(MAKE) --no-print-directory test VENV=build/torch-$* CONSTRAINTS=$< TORCH=torch==$*

# Tracing differs most between releases. The environment is made once, outside of the checkout, and holds no stiefelkit
# of its own but an older copy, which PYTHONPATH hides.
OLDEST := $(firstword $(TORCHES))
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stiefelkit
OLDEST_VENV := $(CACHE)/torch-$(OLDEST)
OLDEST_PIP = $(OLDEST_VENV)/$(PLACE)/python -m pip install --quiet -c build/torch-$(OLDEST).txt
TRACING := compile or export or trace or onnx

test-oldest-torch: build/torch-$(OLDEST).txt $(VENV)/.test
	@mkdir -p $(CACHE)
	@if cmp -s pyproject.toml $(OLDEST_VENV)/made-from.toml || { "$(PYTHON)" -m venv $(OLDEST_VENV) && \
	  $(OLDEST_PIP) torch==$(OLDEST) && $(OLDEST_PIP) ".[test]" && cp pyproject.toml $(OLDEST_VENV)/made-from.toml; }; \
	then $(ONE_THREAD) PYTHONPATH="$(CURDIR)" $(OLDEST_VENV)/$(PLACE)/python -m pytest $(PARALLEL) -q \
	  -m "not slow" -k "$(TRACING)" tests; \
	else echo "torch $(OLDEST) was not tried: no environment could be made for it in $(CACHE)."; fi

SEEDS := 1000 77777 31337

test-seeds: $(VENV)/.test
	for offset in $(SEEDS); do \
	  echo "STIEFELKIT_SEED_OFFSET=$$offset"; \
	  STIEFELKIT_SEED_OFFSET=$$offset $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) || exit; \
	done

# What a law may not depend on: the instruction set of torch and of MKL, the number of threads, lowered products.
VARIANTS := default avx2 mkl-compatible mkl-avx2 threads medium oldest-torch
SET_default := ATEN_CPU_CAPABILITY=default
SET_avx2 := ATEN_CPU_CAPABILITY=avx2
SET_mkl-compatible := MKL_CBWR=COMPATIBLE
SET_mkl-avx2 := MKL_CBWR=AVX2
SET_threads := OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 STIEFELKIT_TEST_THREADS=2
SET_medium := STIEFELKIT_TEST_PRECISION=medium
# VARIANT=rotating: one of them, by the commit.
ROTATING = $(word $(shell echo $$((0x$$(git rev-parse HEAD 2>/dev/null | cut -c1-6 | grep . || echo 0) \
  % $(words $(VARIANTS)) + 1))),$(VARIANTS))
VARIANT := all
CHOSEN = $(if $(filter all,$(VARIANT)),$(VARIANTS),$(if $(filter rotating,$(VARIANT)),$(ROTATING),$(VARIANT)))
ARITHMETIC := $(addprefix tests/,$(addsuffix .py,testing/test_laws optim/test_frame_optimizers scan/test_scan \
  scan/test_rotation_scan nn/test_goru nn/test_rnn house/test_precision))
# Compiling, copying and refusing do the same under any kernel, and float64 derivatives are compared with differences.
SAME := compile or checkpoint or functional_call or contract or schemes or second_derivatives or threads or refused \
  or finite_differences or (gradients and (float64 or complex128))
# Lowering changes no float64, and its stand-in takes time.
SAME_medium := or (test_laws and (float64 or complex128))

test-arithmetic: $(addprefix test-arithmetic-,$(CHOSEN))

test-arithmetic-oldest-torch: test-oldest-torch ;

test-arithmetic-%: $(VENV)/.test
	$(if $(SET_$*),,$(error No variant is named $*: $(VARIANTS)))
	@echo "Variant $*: $(SET_$*)"
	$(ONE_THREAD) $(SET_$*) $(BIN)/python -m pytest $(if $(filter threads,$*),,$(PARALLEL)) -q \
	  -k "not ($(SAME) $(SAME_$*))" $(ARITHMETIC)

# `make test` leaves out what is not installed, and says so.
test-interop: $(VENV)/.interop
	$(BIN)/python tests/peers_suites/their_tests.py geoopt pymanopt
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -q tests/interop tests/peers_suites

# The sources of others come to build/peers, where they can be got; STIEFELKIT_GEOOPT names another copy of geoopt's.
peers-suites: $(VENV)/.interop
	$(BIN)/python tests/peers_suites/their_tests.py geoopt pymanopt
	STIEFELKIT_SUITES=full $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -q tests/peers_suites

# No network: links into other projects want STIEFELKIT_DOCS_ONLINE=1. Pages that have not changed are not run again.
docs: $(VENV)/.docs
	$(ONE_THREAD) $(BIN)/python -m sphinx -W -n -j $(WORKERS) -b html docs docs/_build/html
	@echo "Pages: docs/_build/html/index.html"

# Links between pages are checked by every build. These run nothing, and write docs/_build/links/output.txt.
docs-links: $(VENV)/.docs
	STIEFELKIT_DOCS_EXECUTE=off $(ONE_THREAD) $(BIN)/python -m sphinx -b linkcheck docs docs/_build/links

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

FRESH := build/fresh

# -I: the program sees what is installed, and not the files here.
release-check: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf $(FRESH) && "$(PYTHON)" -m venv $(FRESH) && \
	  $(FRESH)/$(PLACE)/python -m pip install --quiet -c constraints.txt $(TORCH) && \
	  $(FRESH)/$(PLACE)/python -m pip install --quiet -c constraints.txt "$$file" && \
	  $(FRESH)/$(PLACE)/python -I tests/smoke.py && echo "$$file works" || exit; \
	done

clean:
	rm -rf build dist docs/_build docs/generated .pytest_cache .ruff_cache .hypothesis .asv
	find stiefelkit tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last in `python -m venv`, so it stands for a whole environment.
$(BIN)/pip$(EXE):
	@"$(PYTHON)" -c '$(RIGHT_PYTHON)' 2>/dev/null || { echo "stiefelkit needs Python 3.11 or newer with its venv" \
	  "module, got $(if $(PYTHON),$(PYTHON),none); install one or name it: make PYTHON=path/to/python3." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# torch first and by its exact version: a looser request may bring another build, with gigabytes of GPU libraries.
$(VENV)/.torch: constraints.txt | $(BIN)/pip$(EXE)
	@echo "Packages go into $(VENV), torch first; that takes minutes, once."
	$(INSTALL) $(TORCH)
	@touch $@

# The stamps .cli, .test and .dev: each set of extras holds the one before it; .docs and .bench hold .cli as well.
SOURCES := pyproject.toml constraints.txt stiefelkit/_version.py $(VENV)/.torch

$(VENV)/.cli: $(SOURCES)
	$(INSTALL) -e ".[cli]"
	@touch $@

$(VENV)/.test: $(SOURCES)
	$(INSTALL) -e ".[test]"
	@touch $(VENV)/.cli $@

$(VENV)/.dev: $(SOURCES)
	$(INSTALL) -e ".[dev]"
	@touch $(VENV)/.cli $(VENV)/.test $@

$(VENV)/.interop: $(SOURCES)
	$(INSTALL) -e ".[interop]"
	@touch $(VENV)/.cli $(VENV)/.test $@

$(VENV)/.release: $(SOURCES)
	$(INSTALL) -e ".[release]"
	@touch $@

$(VENV)/.docs: $(SOURCES)
	$(INSTALL) -e ".[docs]"
	@touch $(VENV)/.cli $@

$(VENV)/.bench: $(SOURCES)
	$(INSTALL) -e ".[bench]"
	@touch $(VENV)/.cli $@
