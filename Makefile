# Two targets that need no setup:
#   make run     starts everything on this machine, on loopback; DATA=DIR keeps the data there
#   make test    runs every test
# Both need PostgreSQL's server binaries, which `make postgres` finds or fetches.
.DEFAULT_GOAL := help
SHELL := /bin/sh
GO ?= go
BIN := bin
BUILD = $(GO) build -buildvcs=false -o $(BIN)/tidings
# Tests wait as well as compute, so one package more than the number of processors runs at once, and six tests of a package.
# LONGEST names the packages that take longest: they start first.
JOBS = $(shell echo $$((1 + $$(getconf _NPROCESSORS_ONLN))))
TOGETHER := -parallel 6 -ldflags=-s
TAGS := faults,browser,upgrade,docker,brokers,contract,soak
LONGEST := ./consumers ./relay ./subscribe ./cmd/tidings/cli ./outbox ./cmd/internal/endtoend ./api ./store ./ops/console ./ops/replay ./migrations
# go.mod does not name the linter, because it would bring a hundred modules. Its version is pinned here.
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
# The race detector needs a C compiler.
RACE = $(shell cc=$$($(GO) env CC); [ "$$($(GO) env CGO_ENABLED)" = 1 ] && command -v "$${cc%% *}" >/dev/null && echo -race)

.PHONY: help
help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

.PHONY: run
run: ## start everything and print where it listens (DATA=DIR to keep the data there)
	@test -n "$$DATABASE_URL" || $(MAKE) --no-print-directory postgres
	@if ! test -x $(BIN)/tidings; then echo "Building tidings. The first build takes some minutes."; \
	elif $(BUILD) -n ./cmd/tidings 2>&1 | grep -qv "^touch "; then echo "Rebuilding tidings, because its code has changed."; fi
	@$(MAKE) --no-print-directory tidings
	@exec $(BIN)/tidings dev $(if $(DATA),--data "$(DATA)")

# The nested module reads files outside its own folder. The test cache does not watch those, hence -count=1.
.PHONY: test
test: ## run the tests that every change should pass: minutes, no race detector
	@$(MAKE) --no-print-directory postgres || { docker info >/dev/null 2>&1 && echo "postgres: the tests use PostgreSQL in Docker"; }
	$(GO) test -p $(JOBS) $(TOGETHER) -timeout 10m $(LONGEST) ./...
	$(GO) -C event/contracts/cloudevents test -count=1 ./...
	$(GO) -C examples/orm test -count=1 ./...

.PHONY: test-alerts
test-alerts: ## test the alert rules in Prometheus' own engine (a large build)
	$(GO) -C deploy/prometheus/test test -count=1 ./...

.PHONY: test-faults
test-faults: ## run the tests that kill, freeze, cut off, flood or take long (SHARD=2/4: one of four parts, RACE=1: with the race detector)
	@$(MAKE) --no-print-directory postgres
	@$(GO) run ./internal/testkit/suite $(if $(filter 1,$(RACE)),-race) $(if $(SHARD),-shard $(SHARD)) faults

.PHONY: test-race
test-race: ## run the tests of both with the race detector (SHARD=2/4: one of four parts, QUICK=1: those of make test)
	@$(MAKE) --no-print-directory postgres
	@$(GO) run ./internal/testkit/suite -race $(if $(SHARD),-shard $(SHARD)) $(if $(QUICK),quick,all)

.PHONY: mutants
mutants: ## take guards out of the code, one at a time: a test must find each (CHANGED=REF: of changed files, RUN=REGEXP, QUICK=1; DRAW=60 SEED=1 OUT=FILE: by chance)
	@$(MAKE) --no-print-directory postgres
	@$(GO) run ./internal/testkit/mutate $(if $(DRAW),-draw $(DRAW)) $(if $(SEED),-seed $(SEED)) $(if $(OUT),-out $(OUT)) $(if $(CHANGED),-changed $(CHANGED)) $(if $(RUN),-run '$(RUN)') $(if $(QUICK),-quick)

# The strongest fault tests: they kill, freeze, restart or cut off a server while other processes work.
# `TEST_SERVERS=docker make test` runs all tests that use servers on containers.
DOCKER_PACKAGES := ./relay ./store ./consumers ./internal/testkit
DOCKER_TESTS := TestFaultKilledTestBinaryLeavesNoContainer \
	TestContainersAreOpenToThisMachineAlone \
	TestNATSProcessKeepsMessagesOverKillAndRestart \
	TestFrozenPostgresIsThawedWhenTheTestEnds \
	TestFaultsMixedFromASeedLoseAndDoubleNothing \
	TestOnThreeBrokersTheLeaderIsCutOff \
	TestPostgreSQLIsShutDownAtOnceAndRestarted \
	TestMarksThatACrashTakesBackAreMadeAgain \
	TestARelayWhoseBrokerReadsNothingStopsInTime \
	TestServersThatDieLoseAndRepeatNothing \
	TestABatchThatACrashTakesBackIsAppliedAgain \
	TestNoWriteThatWasAnsweredIsLostWhenPostgreSQLCrashes \
	TestACommitThatIsFoundIsOnTheStandbysToo

.PHONY: test-docker
test-docker: engine ## run fault tests with servers in containers, then the tests of the image and of Compose (CONTRIBUTING.md)
	GORACE="atexit_sleep_ms=100 $$GORACE" TEST_SERVERS=docker $(GO) test $(RACE) -tags faults -count=1 -p 2 -timeout 10m \
		-run "^($$(echo $(DOCKER_TESTS) | tr ' ' '|'))$$" $(DOCKER_PACKAGES)
	$(GO) test -tags docker -count=1 -timeout 15m -run 'Image|Containers' ./deploy

.PHONY: engine
engine: ## check that a container engine answers, and pull the images of the tests; print what is missing
	@sh internal/testkit/engine.sh

.PHONY: test-helm
test-helm: ## test the Helm chart: render it with Helm's library, and decode it as the Kubernetes API does
	$(GO) -C deploy/helm/test test -count=1 ./...

.PHONY: test-brokers
test-brokers: ## rehearse the loss of one, two and three brokers (docs/runbook/LosingBrokers.md)
	@$(MAKE) --no-print-directory postgres
	$(GO) test -tags brokers,faults -count=1 -timeout 10m -run '^TestLosingOneTwoAndThreeBrokers$$' ./cmd/tidings/cli

.PHONY: test-upgrade
test-upgrade: ## test this tree beside the previous release; needs the full git history to build that release
	@$(MAKE) --no-print-directory postgres
	$(GO) test -tags upgrade,faults -count=1 -timeout 14m -v -run TheReleaseBefore ./deploy

.PHONY: test-node
test-node: tidings ## test the TypeScript client and the Node example against `tidings dev`, if node is installed
	@$(MAKE) --no-print-directory postgres
	@client/typescript/test.sh

.PHONY: test-browser
test-browser: ## test the console in Chromium, if it is installed, with axe-core from the npm registry
	@$(MAKE) --no-print-directory postgres
	@GO="$(GO)" ops/console/test-browser.sh

.PHONY: screenshots
screenshots: ## write docs/images: screenshots in Chromium of the console of `tidings dev` and `tidings demo`
	@$(MAKE) --no-print-directory postgres
	@mkdir -p docs/images
	@TIDINGS_SCREENSHOTS="$(CURDIR)/docs/images" GO="$(GO)" ops/console/test-browser.sh -run TestTheSiteInTheBrowser

.PHONY: generate-ts
generate-ts: tidings ## generate client/typescript from the OpenAPI document (node 20.19 or later)
	@$(MAKE) --no-print-directory postgres
	@cd client/typescript && npm ci --silent --no-audit --no-fund && npm run --silent generate

.PHONY: tidings
tidings:
	@$(BUILD) ./cmd/tidings

.PHONY: test-short
test-short: ## run the tests that need no server
	$(GO) test -short ./...

.PHONY: bench
bench: ## run the Go benchmarks (`tidings bench` measures the system)
	@$(MAKE) --no-print-directory postgres
	$(GO) test -run '^$$' -bench . -benchmem ./...

.PHONY: bench-peers
bench-peers: ## compare with three other outboxes under faults, in 20 minutes (ARGS='--peer naive,tidings --scenario calm --seconds 5')
	@$(MAKE) --no-print-directory postgres
	@cd bench/peers && $(GO) run . $(ARGS)

.PHONY: test-peers
test-peers: ## test the program of bench-peers: its checker, and a short run of each outbox
	@$(MAKE) --no-print-directory postgres
	$(GO) -C bench/peers test -count=1 ./...

.PHONY: lint
lint: ## check formatting, what the linters of .golangci.yml find, the workflows and the import rules
	@out=$$(gofmt -l .); test -z "$$out" || { echo "not formatted, run make fmt:"; echo "$$out"; exit 1; }
	$(GO) run $(GOLANGCI) run --build-tags $(TAGS) ./...
	$(GO) -C event/contracts/cloudevents vet ./...
	$(GO) -C examples/orm vet ./...
	$(GO) -C deploy/prometheus/test vet ./...
	$(GO) -C deploy/helm/test vet ./...
	$(GO) -C deploy/release vet ./...
	$(GO) -C bench/peers vet ./...
	$(GO) -C deploy/release tool actionlint
	$(GO) test -count=1 ./internal/archtest

.PHONY: linter
linter:
	@$(GO) run $(GOLANGCI) version

.PHONY: api
api: ## write api.txt: the exported identifiers of the supported packages
	@$(GO) test -count=1 ./internal/archtest -run TheAPIFile -update

.PHONY: fmt
fmt: ## format the Go files
	gofmt -w .

.PHONY: build
build: ## build the binaries into bin/, without the web pages of gRPC that no service serves
	CGO_ENABLED=0 $(GO) build -trimpath -tags grpcnotrace -o $(BIN)/ ./cmd/...

.PHONY: release
release: ## write everything that a release publishes to dist/ (VERSION=v0.1.0; PLATFORMS=linux/amd64: only that one)
	@$(GO) run -C deploy/release . -repository ../.. -dist ../../dist $(if $(PLATFORMS),-platforms "$(PLATFORMS)") $(VERSION)

.PHONY: test-release
test-release: ## build a release twice for this platform, compare, install and use it
	$(GO) -C deploy/release test -count=1 -timeout 15m ./...

.PHONY: tidy-check
tidy-check: ## check that go.mod and go.sum list exactly what the code needs
	$(GO) mod tidy -diff
	$(GO) -C event/contracts/cloudevents mod tidy -diff
	$(GO) -C examples/orm mod tidy -diff
	$(GO) -C deploy/prometheus/test mod tidy -diff
	$(GO) -C deploy/helm/test mod tidy -diff
	$(GO) -C deploy/release mod tidy -diff
	$(GO) -C bench/peers mod tidy -diff

.PHONY: postgres
postgres: ## find PostgreSQL's server binaries, or fetch them without an installation
	@sh internal/pglocal/install.sh

.PHONY: soak
soak: ## run the long fault tests: SEEDS (20) random runs, or only SEED; then check that they find removed guards
	@$(MAKE) --no-print-directory postgres
	TIDINGS_SOAK_SEEDS=$(or $(SEEDS),20) TIDINGS_TEST_SEED=$(SEED) \
		$(GO) test $(RACE) -tags faults,soak -count=1 -parallel 3 -timeout 120m -run '^TestSoak' -v \
		$$(grep -rl --include='*_test.go' '^//go:build soak' . | xargs -n1 dirname | sort -u)

.PHONY: image
image: ## build the image `tidings` from deploy/Dockerfile; the same commit gives the same bytes
	@sh deploy/docker.sh image

.PHONY: up
up: ## start the fleet in Docker on loopback (BROKERS=3: a cluster, METRICS=: no Grafana), then run `tidings doctor`
	@sh deploy/docker.sh up

.PHONY: down
down: ## stop the fleet in Docker (BROKERS=3: the cluster's); the volumes keep the data
	@sh deploy/docker.sh down
