# draco-ray: every target sets up what it needs. Start with `make demo`.
PYTHON ?= python3.11
# Extra arguments for pip, for example an index or a folder that holds CPU builds of PyTorch.
PIP_ARGS ?=
VENV := .venv
APPWORLD_VENV := .venv-appworld
BENCH_VENV := .venv-bench
VERIFIERS_VENV := .venv-verifiers
GPU_VENV := .venv-gpu
# A Python of a GPU machine with all packages installed: `make gpu-check GPU_PYTHON=python3` then installs nothing.
GPU_PYTHON ?=
# The sandbox of world, demo, ablation and bench-noise: standard, or hard (make demo WORLD=hard).
WORLD ?= standard
SANDBOX := $(if $(filter-out standard,$(WORLD)),sandbox-$(WORLD),sandbox)
ADAPTERS := inspect art verl skyrl tinker openrlhf $(if $(DRACO_PRIME_RL),prime-rl)
AGENTS_PATH := $(CURDIR)/.venv-agents/bin:$(CURDIR)/.venv-agents/node_modules/.bin:$(PATH)
FRAMEWORKS := agents langgraph smolagents
UV_COMPILE := .venv-tools/bin/uv pip compile --python-version 3.11 --no-annotate --no-header --quiet
DRACO := $(VENV)/bin/draco
export DRACO_APPWORLD_PYTHON := $(CURDIR)/$(APPWORLD_VENV)/bin/python
export DRACO_VERIFIERS_PYTHON := $(CURDIR)/$(VERIFIERS_VENV)/bin/python
export LITELLM_LOCAL_MODEL_COST_MAP := True
# Images of containers often set it; pytest would rewrite every test file in each of its processes, and commands compile what they import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-verifiers install-check lock lock-hashes lock-gpu world demo demo-real demo-real-seeds example-shop sample example-desk example-parcels example-hangman example-repairs bench bench-overlap bench-judge-plans bench-judge-throughput bench-learner bench-intervals bench-staleness gpu-check gpu-step gpu-library ablation bench-noise chaos mutate-method adapters-check frameworks-check check format docs test test-packages test-deployment test-all test-failed test-fast fuzz-replies clean release-check

# List the targets.
help:
	@awk '/^# /{sub(/^# /,"");d=$$0;next} /^[a-z][a-z-]*:/{split($$1,t,":");if(d!="")printf "  %-14s %s\n",t[1],d} {d=""}' $(MAKEFILE_LIST)

# Create both virtual environments from their lock files (idempotent).
setup: $(VENV)/.ready $(APPWORLD_VENV)/.ready

$(VENV)/.ready: requirements/cpu.lock requirements/install.sh pyproject.toml setup.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	requirements/install.sh $(VENV)/bin/python $(PIP_ARGS)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(PIP_ARGS) --editable .
	touch $@

$(APPWORLD_VENV)/.ready: requirements/appworld.lock
	test -x $(APPWORLD_VENV)/bin/python || $(PYTHON) -m venv $(APPWORLD_VENV)
	$(APPWORLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(PIP_ARGS) -r requirements/appworld.lock
	cd $(APPWORLD_VENV) && bin/appworld install >/dev/null
	touch $@

$(VERIFIERS_VENV)/.ready: requirements/verifiers.lock
	test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(PIP_ARGS) -r requirements/verifiers.lock
	touch $@

$(GPU_VENV)/.ready: requirements/gpu.lock pyproject.toml setup.py
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(PIP_ARGS) -r requirements/gpu.lock
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(PIP_ARGS) --editable .
	touch $@

# TRL and Liger kernels beside the GPU environment.
$(GPU_VENV)/.bench-ready: requirements/gpu-bench.lock $(GPU_VENV)/.ready
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(PIP_ARGS) -r requirements/gpu-bench.lock
	touch $@

# TRL or mkdocs, and of what they require only what the main environment lacks; the rest they see there.
.venv-bench/.ready .venv-docs/.ready: .venv-%/.ready: requirements/%.lock $(VENV)/.ready
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	$(VENV)/bin/python -c "import site; print('import site; site.addsitedir(' + repr(site.getsitepackages()[0]) + ')')" \
		> $$(.venv-$*/bin/python -c "import site; print(site.getsitepackages()[0])")/main.pth
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(PIP_ARGS) -r requirements/$*.lock
	touch $@

# Other trainers' packages, from the package index; some see torch, Ray and the like in the main environment.
.venv-adapter-%/.ready: requirements/adapters/%.txt $(VENV)/.ready $(VERIFIERS_VENV)/.ready
	test -x .venv-adapter-$*/bin/python || $(PYTHON) -m venv .venv-adapter-$*
	$(if $(filter verl prime-rl,$*),for site in $(if $(filter prime-rl,$*),$(VERIFIERS_VENV)) $(VENV); do \
		$$site/bin/python -c "import site; print('import site; site.addsitedir(' + repr(site.getsitepackages()[0]) + ')')"; \
		done > $$(.venv-adapter-$*/bin/python -c "import site; print(site.getsitepackages()[0])")/main.pth)
	.venv-adapter-$*/bin/python -m pip install --quiet --disable-pip-version-check $(if $(filter-out inspect art,$*),--no-deps) $(PIP_ARGS) -r $<
	touch $@

.venv-agents/.ready: requirements/agents/pypi.txt
	test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/agents/pypi.txt
	touch $@

.venv-agents/.npm-ready: requirements/agents/npm.txt .venv-agents/.ready
	npm install --silent --no-save --prefix .venv-agents $$(cat requirements/agents/npm.txt)
	touch $@

.venv-framework-%/.ready: requirements/frameworks/%.txt
	test -x .venv-framework-$*/bin/python || $(PYTHON) -m venv .venv-framework-$*
	.venv-framework-$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r $<
	touch $@

.venv-tools/bin/uv:
	$(PYTHON) -m venv .venv-tools && .venv-tools/bin/pip install --quiet uv

# Create the environment of a GPU machine, .venv-gpu, from requirements/gpu.lock (several GB).
setup-gpu: $(GPU_VENV)/.ready

# Create the environment of the package verifiers, .venv-verifiers, from its lock file, for environment.use=verifiers.
setup-verifiers: $(VERIFIERS_VENV)/.ready

# Set up in an empty folder with a plain package index and play one sandbox task there (several GB, minutes).
install-check:
	requirements/install_check.sh $(PYTHON)

# Regenerate the lock files from pyproject.toml and requirements/*.in: first the versions, then the hashes of all their files.
lock: .venv-tools/bin/uv
	$(UV_COMPILE) pyproject.toml requirements/cpu.in --extra cpu --extra dev --excludes requirements/cpu.excludes --upgrade \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o requirements/cpu.lock
	# The local label (+cpu) is the index's business; the version is ours.
	sed -i 's/^\(torch==[0-9.]*\)+cpu/\1/' requirements/cpu.lock
	$(UV_COMPILE) requirements/appworld.in --upgrade -o requirements/appworld.lock
	$(UV_COMPILE) requirements/verifiers.in --upgrade -o requirements/verifiers.lock
	$(MAKE) lock-hashes lock-gpu

# The GPU environment's lock, in the CPU one's versions where both have a package, and what the package index's default
# build of torch requires beyond cpu.lock.
lock-gpu: .venv-tools/bin/uv
	sed -n '/^\(triton\|torch\)==/d; s/^\([A-Za-z0-9][^ ]*==[^ ]*\).*/\1/p' requirements/cpu.lock > requirements/.cpu.txt
	# uv keeps a version that the output file already names where it can.
	cp requirements/.cpu.txt requirements/gpu.lock
	env -u PIP_FIND_LINKS $(UV_COMPILE) pyproject.toml --extra gpu \
		--python-platform x86_64-manylinux_2_35 --only-binary :all: --generate-hashes -o requirements/gpu.lock
	grep '^torch==' requirements/gpu.lock | cut -d' ' -f1 > requirements/.torch.in
	env -u PIP_FIND_LINKS $(UV_COMPILE) requirements/.torch.in --constraints requirements/.cpu.txt --generate-hashes \
		--python-platform x86_64-manylinux_2_35 $$(sed 's/==.*//; s/^/--no-emit-package /' requirements/.cpu.txt) -o requirements/torch-default.lock
	sed -n 's/^\([A-Za-z0-9][^ ]*==[^ ]*\).*/\1/p' requirements/gpu.lock > requirements/.gpu.txt
	(grep '^trl==' requirements/bench.lock | cut -d' ' -f1; echo 'liger-kernel>=0.8,<0.9') > requirements/.bench.in
	env -u PIP_FIND_LINKS $(UV_COMPILE) requirements/.bench.in --constraints requirements/.gpu.txt --generate-hashes --only-binary :all: \
		--python-platform x86_64-manylinux_2_35 $$(sed 's/==.*//; s/^/--no-emit-package /' requirements/.gpu.txt) -o requirements/gpu-bench.lock
	rm requirements/.cpu.txt requirements/.torch.in requirements/.gpu.txt requirements/.bench.in

# Ask a resolver whether requirements/gpu.lock, which nothing here installs, still resolves (seconds; no download).
.PHONY: lock-check
lock-check:
	-@test -x .venv-tools/bin/uv || $(MAKE) --no-print-directory .venv-tools/bin/uv
	requirements/lock_check.sh .venv-tools/bin/uv

# Write the hashes of the versions that the lock files name, after one was changed by hand.
lock-hashes: .venv-tools/bin/uv
	for lock in cpu appworld verifiers bench docs; do \
		sed -n 's/^\([A-Za-z0-9][^ ]*==[^ ]*\).*/\1/p' requirements/$$lock.lock > requirements/.$$lock.in && \
		env -u PIP_FIND_LINKS $(UV_COMPILE) requirements/.$$lock.in --no-deps --generate-hashes -o requirements/.$$lock.lock && \
		mv requirements/.$$lock.lock requirements/$$lock.lock && rm requirements/.$$lock.in || exit 1; \
	done
	# PyTorch's CPU builds for Linux come from its own index, not from PyPI; copy their hashes from there for a new version.
	builds=requirements/torch-$$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/cpu.lock)-cpu.hashes && \
		test -f $$builds && sed -i "/^torch==/r $$builds" requirements/cpu.lock

# Build the sandbox world and the starter policy (cached).
world: setup
	$(DRACO) sandbox build --variety $(WORLD)
	$(DRACO) starter build --variety $(WORLD)

# Train the starter policy with DRACO: a few minutes on 2 cores, no GPU, no key, no download.
demo: world
	$(DRACO) train $(SANDBOX) $(ARGS)

# Train a real small language model (examples/library): fetch it, fine-tune on demonstrations, train and evaluate one run, write its page (half an hour, and the evaluations).
demo-real: LIBRARY := --settings draco --seeds 1
# The same for six seeds of draco, no-credit and outcome; continues after an interruption (half an hour a run: nights).
demo-real-seeds: LIBRARY := --settings "draco no-credit outcome" --seeds 6
demo-real demo-real-seeds: .cache/library/policy
	$(VENV)/bin/python jobs/ablation.py --preset examples/library/environment.yaml $(LIBRARY) --every 6 --runs-per-task 1 --root .cache/library/runs $(ARGS) model.path=.cache/library/policy
	for run in .cache/library/runs/draco-library-seed*; do if [ -f $$run/metrics.jsonl ]; then $(DRACO) report $$run || exit 1; fi; done

.cache/library/policy: | setup
	test -d .cache/models/smollm2-135m || $(DRACO) model fetch smollm2-135m
	mkdir -p .cache/library && $(VENV)/bin/python examples/library/demonstrations.py .cache/library
	$(DRACO) sft examples/library/environment.yaml .cache/library/demonstrations.jsonl --epochs 1 --out $@ learner.minibatch_prompts=8

# Train an agent with your own tools (examples/shop): fine-tune a policy on demonstrations, then train with DRACO (ten minutes).
example-shop: setup
	mkdir -p .cache/shop && rm -rf .cache/shop/policy
	$(VENV)/bin/python examples/shop/demonstrations.py .cache/shop
	$(DRACO) sft examples/shop/environment.yaml .cache/shop/demonstrations.jsonl --new --epochs 8 --out .cache/shop/policy
	$(DRACO) train examples/shop/environment.yaml model.path=.cache/shop/policy $(ARGS)

# Train the library's agent (half an hour); write docs/sample/report.html from its first four steps and the notebook's output from all.
sample: .cache/library/policy
	$(DRACO) train examples/library/environment.yaml --resume-or-start model.path=.cache/library/policy train.evaluate_every=6 \
		run.root=.cache/library/runs run.name=sample
	$(VENV)/bin/python jobs/sample_page.py .cache/library/runs/sample
	$(VENV)/bin/python jobs/notebook.py .cache/library/runs/sample

# Train an agent on OpenAI's SDK through its endpoint (examples/desk_agent): fine-tune a policy on demonstrations, then train with DRACO.
example-desk: setup
	mkdir -p .cache/desk && rm -rf .cache/desk/policy
	$(VENV)/bin/python examples/desk_agent/demonstrations.py .cache/desk/demonstrations.jsonl
	$(DRACO) sft examples/desk_agent/desk_agent.yaml .cache/desk/demonstrations.jsonl --new --epochs 10 --out .cache/desk/policy
	$(DRACO) train examples/desk_agent/desk_agent.yaml model.path=.cache/desk/policy $(ARGS)

# Train on your own verifiers taskset (examples/parcels): fine-tune a policy on demonstrations, then train with DRACO.
example-parcels: setup setup-verifiers
	mkdir -p .cache/parcels && rm -rf .cache/parcels/policy
	$(DRACO_VERIFIERS_PYTHON) examples/parcels/demonstrations.py parcels .cache/parcels/demonstrations.jsonl
	$(DRACO) sft examples/parcels/parcels.yaml .cache/parcels/demonstrations.jsonl --new --epochs 8 --out .cache/parcels/policy
	$(DRACO) train examples/parcels/parcels.yaml model.path=.cache/parcels/policy $(ARGS)

# Train on a taskset included in verifiers (TextArena's Hangman), without network access.
example-hangman: export NLTK_DATA := $(CURDIR)/examples/parcels/nltk_data
example-hangman: setup setup-verifiers
	mkdir -p .cache/hangman && rm -rf .cache/hangman/policy
	$(DRACO_VERIFIERS_PYTHON) examples/parcels/demonstrations.py hangman .cache/hangman/demonstrations.jsonl
	$(DRACO) sft examples/parcels/hangman.yaml .cache/hangman/demonstrations.jsonl --new --epochs 3 --out .cache/hangman/policy
	$(DRACO) train examples/parcels/hangman.yaml model.path=.cache/hangman/policy $(ARGS)

# Train mini-swe-agent, installed in a separate environment, on toy repositories (examples/repairs): one step.
example-repairs: export PATH := $(AGENTS_PATH)
example-repairs: setup .venv-agents/.ready
	test -d .cache/models/smollm2-135m || $(DRACO) model fetch smollm2-135m
	$(DRACO) train examples/repairs/repairs.yaml --resume-or-start run.name=repairs run.root=.cache/repairs $(ARGS)
	$(DRACO) runs show .cache/repairs/repairs
	grep -o '"grad_norm": [^,}]*' .cache/repairs/repairs/metrics.jsonl

# Train all four examples from scratch and print each one's gain on held-out tasks (ten minutes each).
.PHONY: examples
examples: setup setup-verifiers
	$(VENV)/bin/python jobs/train_examples.py $(ARGS)

# Print the numbers of docs/benchmarks.md: three seeds, overlap with a slow judge, peak memory; ARGS="--only deterministic": cost of engine.deterministic; ARGS="--only mcp": opening MCP sessions.
bench: world
	$(VENV)/bin/python jobs/bench.py $(ARGS)

# Measure step time against its critical path and against running phase by phase, e.g. make bench-overlap ARGS="--repeats 3".
bench-overlap: world
	$(VENV)/bin/python jobs/bench_overlap.py $(ARGS)

# Measure the cost of a group for driver, run store and object store, at 16 to 1,024 groups per step, e.g. make bench-store ARGS="--groups 16" (half an hour for all).
.PHONY: bench-store
bench-store: setup
	$(VENV)/bin/python jobs/bench_store.py $(ARGS)

# Compare one learner update with TRL's GRPO trainer: speed and memory, e.g. make bench-learner ARGS="--repeats 1".
bench-learner: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python jobs/bench_learner.py $(ARGS)

# Compare one learner update with TRL's on one GPU, at the layer widths of Qwen3.6-27B, also with TRL's Liger kernels.
.PHONY: bench-learner-gpu
bench-learner-gpu:
	@if nvidia-smi --list-gpus 2> /dev/null | grep -q .; then \
		$(if $(GPU_PYTHON),true,$(MAKE) $(GPU_VENV)/.bench-ready) && \
		PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python) jobs/bench_learner.py \
			--trl-python $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python) --device cuda --shapes 27b-layers --repeats 1 $(ARGS); \
	else echo "bench-learner-gpu: skipped: no GPU"; fi

# Simulate how often the 95 % intervals of evaluations contain the true value, compared with other methods (some minutes).
bench-intervals: setup
	$(VENV)/bin/python jobs/bench_intervals.py $(ARGS)

# Simulate which reward hacks the held-out judge flags and how much they have cost by then, without a model (five minutes).
.PHONY: bench-hacks
bench-hacks: setup
	$(VENV)/bin/python jobs/bench_hacks.py $(ARGS)

# Train in the sandbox with judges that have a hole and print when the held-out judge flags it, and false alarms, e.g. make bench-hacks-sandbox ARGS="--clean 2" (a night).
.PHONY: bench-hacks-sandbox
bench-hacks-sandbox: world
	$(VENV)/bin/python jobs/bench_hacks_sandbox.py $(ARGS)

# Simulate how much of a token limit the judge's limiter uses, and whether it exceeds the limit (ten minutes).
.PHONY: bench-limiter
bench-limiter: setup
	$(VENV)/bin/python jobs/bench_limiter.py $(ARGS)

# Run the image's last stage and the commands of Ray's launcher in a Debian made by debootstrap (root; two minutes).
.PHONY: image-check
image-check: setup
	$(VENV)/bin/python jobs/image_check.py $(ARGS)

# Compiled kernels of the GPU targets; take this folder along to another machine of the same GPU.
GPU_TARGETS := gpu-check gpu-step gpu-library bench-learner-gpu
$(GPU_TARGETS): export TRITON_CACHE_DIR ?= $(CURDIR)/.cache/gpu/triton
$(GPU_TARGETS): export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/gpu/inductor
$(GPU_TARGETS): export VLLM_CACHE_ROOT ?= $(CURDIR)/.cache/gpu/vllm

# Check layers of the paper's models at real size on one GPU: agreement, speed, memory, e.g. make gpu-check ARGS="--parts learner".
gpu-check:
	@if nvidia-smi --list-gpus 2> /dev/null | grep -q .; then \
		$(if $(GPU_PYTHON),true,$(MAKE) $(GPU_VENV)/.ready) && \
		PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python) jobs/gpu_check.py $(ARGS); \
	else echo "gpu-check: skipped: nvidia-smi lists no GPU here"; fi

# Measure a GRPO step of a whole model on one GPU and compare it with `draco plan`; on CPUs: make gpu-step ARGS=--tiny GPU_PYTHON=.venv/bin/python.
gpu-step:
	@if [ -n "$(findstring --tiny,$(ARGS))" ] || nvidia-smi --list-gpus 2> /dev/null | grep -q .; then \
		$(if $(GPU_PYTHON),true,$(MAKE) $(GPU_VENV)/.ready) && \
		PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python) jobs/gpu_step.py $(ARGS); \
	else echo "gpu-step: skipped: no GPU"; fi

# Train SmolLM2-135M on examples/library with draco train and with TRL, on one GPU, ten minutes a call; on CPUs: make gpu-library ARGS=--tiny GPU_PYTHON=.venv-bench/bin/python.
gpu-library:
	@if [ -n "$(findstring --tiny,$(ARGS))" ] || nvidia-smi --list-gpus 2> /dev/null | grep -q .; then \
		$(if $(GPU_PYTHON),true,$(MAKE) $(GPU_VENV)/.bench-ready) && \
		PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python) jobs/gpu_library.py $(ARGS); \
	else echo "gpu-library: skipped: no GPU"; fi

# Measure steps per hour and held-out gain at each train.staleness, over seeds, e.g. make bench-staleness ARGS="--steps 6 --seeds 1 judge.rule_judge.latency_seconds=20" (nights).
bench-staleness: world
	$(VENV)/bin/python jobs/bench_staleness.py $(ARGS)

# Train every setting of the ablation, five seeds, with learning curves on held-out tasks, e.g. make ablation ARGS="--steps 6 --seeds 1" (nights).
ablation: world
	$(VENV)/bin/python jobs/ablation.py --preset $(SANDBOX) $(ARGS)

# Train with a judge that has known error rates, or those of a real judge, and print the remaining gain, e.g. make bench-noise ARGS="--seeds 1" (a night).
bench-noise: world
	$(VENV)/bin/python jobs/bench_noise.py --preset $(SANDBOX) $(ARGS)

# Train under judge.plan=paper and lean and print tokens, dollars and held-out TGC, paired, e.g. make bench-judge-plans ARGS="--seeds 1" (20 minutes per seed).
bench-judge-plans: world
	$(VENV)/bin/python jobs/bench_judge_plans.py --preset $(SANDBOX) $(ARGS)

# Measure the client's CPU time per judge call: draco-ray, bare httpx, LiteLLM, and RULER and Inspect if installed (a minute).
bench-judge-throughput: setup
	$(VENV)/bin/python jobs/bench_judge_throughput.py $(ARGS)

# Kill each kind of process in small sandbox runs and print whether the run survived (a minute or two each).
chaos: world
	$(VENV)/bin/python jobs/chaos.py $(ARGS)

# Break every rule of docs/method.md and check that the test it names fails, e.g. make mutate-method ARGS="credit" (ten minutes).
mutate-method: setup
	$(VENV)/bin/python jobs/mutate.py $(ARGS)

# Test the adapters with the real TRL, verl, SkyRL, OpenRLHF, Tinker, verifiers, Inspect and ART, each in its own environment (2 GB, twenty minutes).
adapters-check: setup setup-verifiers $(BENCH_VENV)/.ready $(ADAPTERS:%=.venv-adapter-%/.ready)
	$(VENV)/bin/python -m pytest tests/integration/test_adapters_real.py -rs $(ARGS)

# Test agents of the OpenAI Agents SDK, LangGraph and smolagents with the endpoint, each in its own environment (a minute).
frameworks-check: setup $(FRAMEWORKS:%=.venv-framework-%/.ready)
	$(VENV)/bin/python -m pytest tests/integration/test_frameworks_real.py -rs $(ARGS)

# Check formatting, lint, types and the direction of imports.
check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Format and apply safe fixes.
format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Number of concurrent test processes: one more than the two cores of the smallest machine, because tests also wait (peak 13 GiB with all tests).
TESTS_AT_ONCE ?= 3

PYTEST := $(VENV)/bin/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder

# Run the tests, including those with real processes, except deployment tests; end-to-end tests first.
test: setup setup-verifiers
	$(PYTEST) -m "not deployment"

# Run the tests that `make test` skips without a browser, bubblewrap (`.ci/packages` installs both) and coding agents.
test-packages: export PATH := $(AGENTS_PATH)
test-packages: setup setup-verifiers .venv-agents/.npm-ready
	$(PYTEST) -m "packages and not deployment"

# Run the tests that `make test` leaves out: several nodes or ranks, submitted jobs, the wheel, GPU builds, whole runs of settings and examples (two hours on two cores).
test-deployment: setup setup-verifiers
	$(PYTEST) -m deployment

# Run every test, including deployment tests.
test-all: setup setup-verifiers
	$(PYTEST)

# Build the documentation site in site/; a broken link is an error.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

# Check builds, metadata, installation in empty environments of each supported Python, and links of the README (minutes). Uploads nothing.
release-check:
	PIP_ARGS="$(PIP_ARGS)" jobs/release_check.sh

# Repeat the tests that failed last time, one at a time; tests that pass now are listed in the log as unreliable.
test-failed: setup setup-verifiers
	$(VENV)/bin/python -m pytest --last-failed --last-failed-no-failures none --maxfail 10 -v

# Run the tests that start no process (some six minutes on one core).
test-fast: setup
	$(VENV)/bin/python -m pytest -m "not slow and not deployment"

# Fuzz the judge's reply parser with a hundred times as many random replies as in the tests (minutes), e.g. make fuzz-replies REPLIES=60000.
REPLIES ?= 600000
fuzz-replies: setup
	DRACO_FUZZED_REPLIES=$(REPLIES) $(VENV)/bin/python -m pytest tests/unit/test_judging_reply_fuzz.py tests/unit/test_judging_meant_replies.py -rP --timeout 0

# Remove runs and caches, but keep the virtual environments.
clean:
	rm -rf runs .cache build mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis
