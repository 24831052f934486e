# The daily entry. `make` builds; `make demo` and `make test` install by
# themselves what a fresh Debian 12 lacks.

SHELL := /bin/bash
.DEFAULT_GOAL := build
.PHONY: build benchmark quick deps demo test test-all test-manycore test-rdma test-rdma-hosts test-6.1 unit e2e differential fuzz-differential faults fuzz mutants stock loom bench bench-shapes bench-kernel bench-paper bench-zones bench-balance bench-containers bench-programs bench-unix suites programs reports soak short starts convoy upstreams handover restarts hostile lives kills docs pages agent install uninstall packages test-systemd test-musl differential-musl test-upgrade check fmt lint clean help

export DESTDIR PREFIX
RUN = . scripts/env.sh;
ARTIFACTS = target/release/libfsocket.so target/release/fastsocketd target/release/fastsocket target/release/fastsocket-demo target/release/fastsocket-agent

build: ## target/release/{libfsocket.so,fastsocketd,fastsocket,fastsocket-demo,fastsocket-agent}
	@scripts/deps.sh build
	@$(RUN) cargo build --release --locked -p fsocket-preload -p fsocket-monitor -p fsocket-cli -p fsocket-demo -p fsocket-agent
	@ls -l $(ARTIFACTS) | awk '{print "built:", $$NF, "(" $$5 " bytes)"}'

benchmark: build ## target/release/fastsocket-bench, to which `fastsocket bench` hands over
	@$(RUN) cargo build --release --locked -p fsocket-bench

quick: ## these and the benchmark in target/quick, built without link-time optimisation: FASTSOCKET_ARTIFACTS=$$PWD/target/quick for tests
	@scripts/deps.sh build
	@$(RUN) cargo build --profile quick --locked -p fsocket-preload -p fsocket-monitor -p fsocket-cli -p fsocket-demo -p fsocket-agent -p fsocket-bench

deps: ## install what building, tests and the demo need
	@scripts/deps.sh test

demo: deps benchmark ## nginx, redis and haproxy, stock and ours in turn
	@demo/demo.sh

# Of the tests: T=REGEX for those whose name matches, N=TIMES each, BUSY=N beside busy processes, PROFILE=release.
TESTS = scripts/test.py $(if $(T),--only '$(T)') $(if $(N),--repeat $(N)) $(if $(BUSY),--busy $(BUSY)) $(if $(PROFILE),--profile $(PROFILE))

test: deps ## unit, end-to-end and differential tests; ends with one line that says how it went (tests/README.md)
	@$(RUN) $(TESTS) unit e2e differential

test-all: deps ## what `make test` leaves out: models in full, and on a release build random programs, and what the compiler makes of the hooks and of their stack
	@$(RUN) $(TESTS) --profile release loom differential
	@$(RUN) $(TESTS) --profile release --only 'exports|much_stack' e2e

unit: ## unit and integration tests only
	@$(RUN) $(TESTS) unit

e2e: deps ## end-to-end tests with real programs only
	@$(RUN) $(TESTS) e2e

differential: ## random programs on both paths, and those that differed once
	@$(RUN) $(TESTS) differential

fuzz-differential: build ## random programs for TIME seconds, from SEED on
	@$(RUN) cargo run -q --release --locked -p fsocket-differential -- run --time $(or $(TIME),600) \
		--seed $(or $(SEED),$$(date +%s)000) --shrink --out target/differential

faults: build ## system calls of library and monitor fail one by one in ten programs (about 40 minutes): FAULTS="nginx redis:server --full 20"
	@scripts/deps.sh test
	@$(RUN) cargo run -q --locked -p fsocket-faults -- $(FAULTS)

fuzz: ## each fuzzer for TIME seconds (60); needs a C++ compiler, and root for the monitor's own network
	@TIME=$(TIME) fuzz/run.sh $(FUZZERS)

mutants: ## COUNT (10) operators of each set of files changed, one at a time: which tests notice? MUTANTS="ring switch", SEED=1
	@$(RUN) scripts/mutants.py --count $(or $(COUNT),10) --seed $(or $(SEED),1) $(MUTANTS)

stock: deps ## the end-to-end tests on kernel sockets: a check of the tests
	@$(RUN) FASTSOCKET_TEST_MODE=stock $(TESTS) e2e

test-manycore: build ## 8 and 24 emulated CPUs, and emulated cards: right, not fast (minutes; downloads Debian's kernel once)
	@scripts/manycore.sh

test-rdma: ## agents of two hosts over soft-RoCE in an emulated machine (a minute; downloads Debian's kernel once)
	@scripts/rdma.sh

test-rdma-hosts: ## agents on two hosts, programs' connections over soft-RoCE, in two emulated machines (ten minutes)
	@scripts/rdma.sh hosts

test-6.1: build ## the tests of containers on Debian's kernel 6.1 in an emulated machine (13 minutes of CPU time, on one to four CPUs; downloads the kernel once)
	@scripts/manycore.sh containers

test-musl: $(if $(PROFILE),,quick) ## programs that have musl: the end-to-end tests, then redis, nginx, memcached and haproxy built with it and with glibc, stock and ours in turns (some twelve minutes): PROFILE=release MUSL="redis --rounds 5 --strict"
	@scripts/deps.sh musl
	@$(RUN) scripts/test.py $(if $(PROFILE),--profile $(PROFILE)) --only 'musl::' e2e
	@$(RUN) python3 tests/musl/run.py --artifacts target/$(or $(PROFILE),quick) $(MUSL)

differential-musl: quick ## random programs whose processes have musl: MUSL="--count 20000 --seed 1 --with scm" (rustup fetches Rust's library for musl)
	@scripts/deps.sh test
	@$(RUN) FASTSOCKET_ARTIFACTS=$(CURDIR)/target/quick tests/differential/musl.sh --mixed 25 $(or $(MUSL),--count 1000)

test-upgrade: quick ## an upgrade to a build with another ABI number, under load, also under a systemd of its own (a second quick build at first)
	@$(RUN) FASTSOCKET_TEST_ABI=9999 cargo build --locked --profile quick --target-dir target/other-abi -p fsocket-preload -p fsocket-monitor -p fsocket-cli
	@$(RUN) FASTSOCKET_TEST_OTHER=$(CURDIR)/target/other-abi/quick $(TESTS) --ignored --only 'other_abi::' e2e
	@packaging/test-systemd.sh rpm target/quick target/other-abi/quick

loom: ## model checking of rings, doorbells and tokens
	@$(RUN) $(TESTS) loom

bench: deps benchmark ## the whole benchmark; JSON and a picture in bench/out
	@mkdir -p bench/out
	@$(RUN) target/release/fastsocket bench --json bench/out/bench.json --report bench/out/bench.html

bench-shapes: benchmark ## servers and clients of many kinds with work in each request, stock and ours: SHAPES="--quick" (else about 90 minutes); fails where ours is below stock by more than the spread
	@mkdir -p bench/out
	@$(RUN) target/release/fastsocket bench shapes --strict --json bench/out/shapes.json --report bench/out/shapes.html $(SHAPES)

bench-kernel: deps benchmark ## connections whose other end has no library, stock beside ours and stock again (about 30 minutes): KERNEL="--strict"
	@mkdir -p bench/out
	@$(RUN) target/release/fastsocket bench --quick --layout two-cpus --paths stock,kernel --json bench/out/kernel.json $(KERNEL)
	@$(RUN) target/release/fastsocket bench shapes --quick --reps 5 --secs 1 --paths stock,kernel --json bench/out/kernel-shapes.json $(KERNEL)
	@$(RUN) python3 tests/programs/rates.py --paths stock,kernel --json bench/out/kernel-rates.json $(KERNEL)

bench-paper: deps benchmark ## each figure and table of the three papers, stock beside ours (about 20 minutes, and 14 builds of Tcl, alone and beside a web server): PAPER="--quick" BUILD=DIR for another project
	@scripts/deps.sh paper
	@mkdir -p bench/out
	@$(RUN) cargo build --release --locked -p fsocket-bpf --example select_cost
	@$(RUN) dir=$(or $(BUILD),$$(python3 bench/project.py)) && target/release/fastsocket bench paper --out bench/out --build "$$dir" $(PAPER)

bench-zones: deps build ## zones between hosts (namespaces; needs root): stock, SO_REUSEPORT, ours; about 15 minutes
	@mkdir -p bench/out
	@$(RUN) cargo run -q --release --locked -p fsocket-bench-zones --bin zones-bench -- --json bench/out/zones.json

bench-balance: deps build ## busy cores, stealing, flow groups (namespaces; needs root): about 6 minutes
	@mkdir -p bench/out
	@$(RUN) cargo run -q --release --locked -p fsocket-bench-zones --bin balance-bench -- --json bench/out/balance.json --timeline bench/out
	@$(RUN) cargo run -q --release --locked -p fsocket-bench-zones --bin balance-bench -- --path shm --json bench/out/balance-shm.json

bench-containers: deps build ## redis and nginx between containers (namespaces; needs root), stock and ours in turns: about 4 minutes
	@mkdir -p bench/out
	@$(RUN) cargo run -q --release --locked -p fsocket-bench-zones --bin containers-bench -- --json bench/out/containers.json

suites: build ## published test suites, stock and ours (slow): SUITES="cpython libevent"
	@scripts/deps.sh suites
	@$(RUN) python3 tests/suites/run.py $(SUITES)

programs: build ## real programs, stock and ours: served, reloaded, restarted, shut down (about 5 minutes): PROGRAMS="nginx redis"
	@scripts/deps.sh programs
	@$(RUN) python3 tests/programs/run.py $(PROGRAMS)

reports: build ## small programs after public reports of other socket layers, stock beside ours (a minute): REPORTS="lengths recycled"
	@scripts/deps.sh test
	@$(RUN) python3 tests/reports/run.py $(REPORTS)

short: build ## N (3000) short programs, none of which may hang; BUSY=20 processes that only compute beside them
	@$(RUN) python3 tests/soak/short.py target/release/libfsocket.so target/release/fastsocketd $(or $(N),3000) 10 $(or $(BUSY),0)

starts: build ## a shell that starts 500 programs without sockets: stock, an empty library and ours in turns: STARTS="--strict"
	@$(RUN) python3 tests/soak/starts.py target/release/libfsocket.so target/release/fastsocketd $(STARTS)

bench-programs: build ## requests a second of real programs, stock and ours in turns (about 40 minutes): RATES="redis nginx --rounds 3 --paths stock,ours,kernel"
	@scripts/deps.sh programs
	@$(RUN) python3 tests/programs/rates.py $(RATES)

bench-unix: build ## Unix sockets: real programs, stock and ours in turns (about 30 minutes): UNIX="mariadb php-fpm --rounds 3 --quick", UNIX=--shapes
	@scripts/deps.sh programs
	@$(RUN) python3 bench/unix/run.py $(UNIX)

convoy: build ## 1 to 500 threads of one process that open and close connections, stock and ours in turns: CONVOY="--threads 500 --strict"
	@$(RUN) python3 tests/soak/convoy.py target/release/libfsocket.so target/release/fastsocketd $(CONVOY)

upstreams: build ## a client with many upstreams, stock and ours in turns: UPSTREAMS="--count 250 --connections 2500"
	@$(RUN) python3 tests/soak/upstreams.py target/release $(UPSTREAMS)

soak: build ## mixed programs with random kills for TIME seconds (3600); what is left at the end: SEED=1
	@scripts/deps.sh test
	@$(RUN) python3 tests/soak/soak.py --time $(or $(TIME),3600) $(if $(SEED),--seed $(SEED))

handover: build ## haproxy, a node cluster, nginx (binary upgrade) and an activated service reloaded once a second for TIME seconds (60) each, under load: HANDOVER="haproxy --ours"
	@scripts/deps.sh programs
	@$(RUN) python3 tests/programs/handover.py --time $(or $(TIME),60) $(HANDOVER)

restarts: build ## the monitor killed, stopped and reloaded once a second for TIME seconds (60) each, under load
	@scripts/deps.sh test
	@$(RUN) env FASTSOCKET_RESTARTS=$(or $(TIME),60) cargo test -q --release --locked -p fsocket-e2e --test e2e restarts:: -- --nocapture --test-threads 1

hostile: build ## each attack that was found once, its variants, all at once, and the same by kernel TCP: TIME=6 seconds each, ROWS="--row 2,7"
	@scripts/deps.sh test
	@$(RUN) cargo run -q --release --locked -p fsocket-hostile -- rows --strict --time $(or $(TIME),6) $(ROWS)

lives: build ## a scripted hostile peer beside servers and honest users for TIME seconds (600): UIDS=4 SEED=1
	@scripts/deps.sh test
	@$(RUN) cargo run -q --release --locked -p fsocket-hostile -- run --strict --control --time $(or $(TIME),600) --turns 10 --uids $(or $(UIDS),4) --seed $(or $(SEED),1)

kills: build ## kill -9 of clients, servers, workers and the monitor, N times (10000): SEED=1
	@$(RUN) cargo run -q --release --locked -p fsocket-hostile -- kills --strict --count $(or $(N),10000) --seed $(or $(SEED),1)

docs: ## write the generated pages: docs/hooks.md, docs/fallbacks.md, docs/limits.md
	@$(RUN) cargo run -q --locked -p fsocket-hooktable

pages: ## manual pages and completions, in target/pages
	@$(RUN) cargo build -q --release --locked -p fsocket-cli
	@rm -rf target/pages && target/release/fastsocket pages target/pages
	@$(RUN) cargo run -q --release --locked -p fsocket-monitor --example manpage > target/pages/fastsocketd.8

agent: ## target/agent/fastsocket-agent, with RDMA: rdma-core is loaded when it runs, if it is there
	@scripts/deps.sh agent
	@$(RUN) cargo build --release --locked -p fsocket-agent --features verbs --target-dir target/verbs
	@mkdir -p target/agent
	@strip --strip-unneeded -o target/agent/fastsocket-agent target/verbs/release/fastsocket-agent

install: ## what `make`, `make pages` and, if they were run, `make benchmark` and `make agent` left: DESTDIR= PREFIX=/usr/local
	@packaging/install.sh install

uninstall: ## the same, removed
	@packaging/install.sh uninstall

packages: benchmark pages ## .deb (with its debug symbols) and .rpm, in target/debian and target/rpm; installed and removed as a test
	@packaging/packages.sh

test-systemd: build pages ## enabled redis, nginx and clients under a systemd of its own (systemd-nspawn; needs root)
	@packaging/test-systemd.sh

check: fmt lint ## formatting and lints, nothing is changed

fmt:
	@$(RUN) cargo fmt --all --check

lint:
	@$(RUN) cargo clippy --profile quick --workspace --all-targets --locked -- -D warnings
	@if command -v shellcheck >/dev/null; then shellcheck -x fuzz/*.sh packaging/*.sh packaging/container/*.sh packaging/debian/* packaging/rpm/* scripts/*.sh tools/*.sh demo/*.sh tests/reports/cases/*.sh .ci/run; fi
	@python3 -c 'import ast, sys; [ast.parse(open(f).read(), f) for f in sys.argv[1:]]' tests/apps/*.py crates/e2e/tests/e2e/*/*.py crates/e2e/tests/e2e/*/*/*.py tests/conformance/*.py tests/conformance/*/*.py tests/reports/*.py tests/reports/cases/*.py tests/suites/*.py tests/suites/suites/*.py tests/programs/*.py tests/programs/*/*.py tests/soak/*.py tests/musl/*.py bench/*.py

clean:
	@$(RUN) cargo clean

help: ## this list
	@grep -E '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9.-]+):.*## (.*)/  make \1\t\2/' | expand -t 26
