# Both need nothing set up first:
#   make run     everything on this machine, on loopback; DATA=DIR keeps the data there
#   make test    every test
# What else they need, PostgreSQL's server binaries, `make postgres` finds or fetches.
.DEFAULT_GOAL := help
SHELL := /bin/sh
GO ?= go
BIN := bin
# The race detector needs a C compiler, and a machine with Go, git and make alone has none: there the tests run without it.
RACE = $(shell cc=$$($(GO) env CC); [ "$$($(GO) env CGO_ENABLED)" = 1 ] && command -v "$${cc%% *}" >/dev/null && echo -race)
# Tests wait as well as compute, so one package more runs at once than there are processors, those that take longest first. The race
# detector has each process sleep for a second at its end, for goroutines that still run. A package fails if it leaves any, so a tenth is enough.
JOBS = $(shell echo $$((1 + $$(getconf _NPROCESSORS_ONLN))))
LONGEST := ./cmd/tidings/cli ./relay ./consumers ./api ./internal/broker ./cmd/internal/fuzz ./cmd/internal/fleet ./store ./outbox

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

.PHONY: run
run: tidings ## start everything and print where it listens (DATA=DIR to keep the data there)
	@test -n "$$DATABASE_URL" || $(MAKE) --no-print-directory postgres
	@exec $(BIN)/tidings dev $(if $(DATA),--data "$(DATA)")

# The other modules read files outside of themselves, where the test cache does not look.
.PHONY: test
test: ## every test: unit, integration, fault, with the race detector where it can run
	@$(MAKE) --no-print-directory postgres || { docker info >/dev/null 2>&1 && echo "postgres: taking it from Docker"; }
	@test -n "$(RACE)" || echo "test: no C compiler here, so without the race detector"
	GORACE="atexit_sleep_ms=100 $$GORACE" $(GO) test $(RACE) -p $(JOBS) -timeout 14m $(LONGEST) ./...
	$(GO) -C contracts/cloudevents test -count=1 ./...
	$(GO) -C deploy/prometheus/test test -count=1 ./...

# The strongest fault tests: a server that is killed, frozen, restarted, or cut off while others work. All the tests that use servers run on containers
# with TEST_SERVERS=docker make test.
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
test-docker: engine ## fault tests with servers in containers, and what deploy/ makes of the engine (docs/testing.md)
	GORACE="atexit_sleep_ms=100 $$GORACE" TEST_SERVERS=docker $(GO) test $(RACE) -count=1 -p 2 -timeout 10m -run "^($$(echo $(DOCKER_TESTS) | tr ' ' '|'))$$" $(DOCKER_PACKAGES)
	$(GO) test -tags docker -count=1 -timeout 15m -run 'Image|Containers' ./deploy

.PHONY: engine
engine: ## whether a container engine answers and has the images of the tests, which it pulls; else what is missing
	@sh internal/testkit/engine.sh

.PHONY: test-helm
test-helm: ## the Helm chart, rendered by Helm's library and read as the Kubernetes API reads it
	$(GO) -C deploy/helm/test test -count=1 ./...

.PHONY: test-brokers
test-brokers: ## the rehearsal of the loss of one, two and three brokers (docs/runbook/LosingBrokers.md)
	@$(MAKE) --no-print-directory postgres
	$(GO) test -tags brokers -count=1 -timeout 10m -run '^TestLosingOneTwoAndThreeBrokers$$' ./cmd/tidings/cli

.PHONY: test-upgrade
test-upgrade: ## this tree beside the release before, which it builds from the full git history
	@$(MAKE) --no-print-directory postgres
	$(GO) test -tags upgrade -count=1 -timeout 14m -v -run TheReleaseBefore ./deploy

.PHONY: test-node
test-node: tidings ## the TypeScript client and the Node example against `tidings dev`, where there is node
	@$(MAKE) --no-print-directory postgres
	@clients/typescript/test.sh

.PHONY: test-browser
test-browser: ## the console in Chromium, where there is one, with axe-core from the npm registry
	@$(MAKE) --no-print-directory postgres
	@GO="$(GO)" console/test-browser.sh

.PHONY: screenshots
screenshots: ## write docs/images from the console of `tidings dev` and `tidings demo`, in Chromium
	@$(MAKE) --no-print-directory postgres
	@mkdir -p docs/images
	@TIDINGS_SCREENSHOTS="$(CURDIR)/docs/images" GO="$(GO)" console/test-browser.sh -run TestTheSiteInTheBrowser

.PHONY: generate-ts
generate-ts: tidings ## generate clients/typescript from the OpenAPI document (node 20.19 or later)
	@$(MAKE) --no-print-directory postgres
	@cd clients/typescript && npm ci --silent --no-audit --no-fund && npm run --silent generate

.PHONY: tidings
tidings:
	@$(GO) build -buildvcs=false -o $(BIN)/tidings ./cmd/tidings

.PHONY: test-short
test-short: ## the tests that need no server
	$(GO) test -short ./...

.PHONY: bench
bench: ## the Go benchmarks (`tidings bench` measures the system)
	@$(MAKE) --no-print-directory postgres
	$(GO) test -run '^$$' -bench . -benchmem ./...

.PHONY: lint
lint: ## formatting, go vet, staticcheck, the import rules
	@out=$$(gofmt -l .); test -z "$$out" || { echo "not formatted, run make fmt:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags browser ./console
	$(GO) vet -tags upgrade ./deploy
	$(GO) vet -tags docker ./deploy
	$(GO) vet -tags brokers ./cmd/tidings/cli
	$(GO) tool staticcheck ./...
	$(GO) -C contracts/cloudevents vet ./...
	$(GO) -C deploy/prometheus/test vet ./...
	$(GO) -C deploy/helm/test vet ./...
	$(GO) test -count=1 ./internal/archtest

.PHONY: fmt
fmt: ## format the Go files
	gofmt -w .

.PHONY: build
build: ## the binaries, into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ ./cmd/...

.PHONY: tidy-check
tidy-check: ## go.mod and go.sum are what the code needs
	$(GO) mod tidy -diff
	$(GO) -C contracts/cloudevents mod tidy -diff
	$(GO) -C deploy/prometheus/test mod tidy -diff
	$(GO) -C deploy/helm/test mod tidy -diff

.PHONY: postgres
postgres: ## find PostgreSQL's server binaries, or fetch them without installing anything
	@sh internal/pglocal/install.sh

.PHONY: soak
soak: ## the long fault tests: SEEDS (20) random runs, or the one of SEED; and that they find the bug when a guard is taken out
	@$(MAKE) --no-print-directory postgres
	TIDINGS_SOAK_SEEDS=$(or $(SEEDS),20) TIDINGS_TEST_SEED=$(SEED) $(GO) test $(RACE) -tags soak -count=1 -parallel 3 -timeout 120m -run '^TestSoak' -v \
		$$(grep -rl --include='*_test.go' '^//go:build soak' . | xargs -n1 dirname | sort -u)

.PHONY: image
image: ## the image `tidings` of deploy/Dockerfile, the same bits for the same commit
	@sh deploy/docker.sh image

.PHONY: up
up: ## the fleet in Docker, on loopback ports (BROKERS=3 for a cluster, METRICS= without Grafana), and what `tidings doctor` finds there
	@sh deploy/docker.sh up

.PHONY: down
down: ## stop the fleet in Docker (BROKERS=3 for the cluster's); its data stays in the volumes
	@sh deploy/docker.sh down
