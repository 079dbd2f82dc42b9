#!/bin/sh
# docker.sh image|up|down: the commands behind `make image`, `make up` and `make down`. Variables of the environment:
#   BROKERS        1 or 3
#   MODE           serve: one process for all parts. fleet: a process for each
#   METRICS        empty: without Prometheus and Grafana
#   DOCKER         the docker command
#   TIDINGS_IMAGE  the image's name
#   ENV_FILE       the file of secrets, to which `up` adds the missing ones
set -eu
cd "$(dirname "$0")"
docker=${DOCKER:-docker} env=${ENV_FILE:-.env} oldest=2.23.1

fail() {
	echo "make: $*" >&2
	exit 1
}

# The same commit and the same Go image give the same digest: every file in the image has the time of the commit.
image() {
	version=$(git describe --tags --always --dirty 2>/dev/null) || true
	revision=$(git rev-parse HEAD 2>/dev/null) || true
	epoch=$(git log -1 --format=%ct 2>/dev/null) || true
	$docker buildx build --load --provenance=false --file Dockerfile --tag "${TIDINGS_IMAGE:-tidings}" --build-arg VERSION="${version#v}" \
		--build-arg REVISION="$revision" --build-arg SOURCE_DATE_EPOCH="${epoch:-0}" "$@" ..
}

if [ "$1" = image ]; then
	shift
	image "$@"
	exit
fi
version=$($docker compose version --short 2>/dev/null) ||
	fail "\`$docker compose version\` fails. The fleet needs Docker with Compose $oldest or later: https://docs.docker.com/compose/install/"
echo "${version#v}" | awk -F. '{exit $1 * 10000 + $2 * 100 + $3 < 22301}' ||
	fail "Docker Compose is $version. The fleet needs $oldest or later: https://docs.docker.com/compose/install/"
case ${BROKERS:-1} in
1) files="-f compose.yaml" ;;
3) files="-f compose.yaml -f compose.three.yaml" ;;
*) fail "BROKERS is $BROKERS. It must be 1 or 3" ;;
esac
case ${MODE:-serve} in
serve) ;;
fleet)
	files="$files -f compose.fleet.yaml" NATS_REPLICAS=${BROKERS:-1}
	export NATS_REPLICAS
	;;
*) fail "MODE is $MODE. It must be serve or fleet" ;;
esac
compose() { $docker compose --env-file "$env" $files "$@"; }
# without a file of the fleet, Compose takes its services for orphans and advises to remove them
run="$docker compose $(echo "$files" | sed 's,-f ,-f deploy/,g') run --rm tidings"

if [ "$1" = down ]; then
	compose --profile metrics --profile serve down --remove-orphans # the services of both modes
	exit
fi
umask 077
touch "$env"
add() { grep -q "^$1=" "$env" || printf '%s=%s\n' "$1" "${2:-}$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" >>"$env"; }
add API_CURSOR_KEY
for name in "" _SERVE _API _CONSOLE _RELAY _FOLLOWERCOUNTS _THREADCACHE _VERIFY _ARCHIVER _OPERATOR; do add "POSTGRES_PASSWORD$name"; done
for name in RELAY API CONSUMER SERVE OPERATOR CLUSTER; do add "NATS_PASSWORD_$name" p; done

metrics=${METRICS-true}
image
# The services of the other mode use the same ports. serve is in both files, so it is no orphan.
if [ "${MODE:-serve}" = fleet ]; then compose --profile serve rm --stop --force serve; fi
if ! compose ${metrics:+--profile metrics} up --detach --remove-orphans; then
	compose logs --no-log-prefix --tail 5 migrate >&2 # the other services wait for it
	fail "a service did not start. If a password is wrong, the data was made with another deploy/.env: docs/docker.md"
fi
compose run --rm -T tidings doctor --wait 1m || test $? -eq 1 # 1: the doctor found only warnings
cat <<END

API:       http://localhost:${API_PORT:-8080}, described at http://localhost:${API_PORT:-8080}/docs
  token:     $run token create --tenant 1 --name me
Console:   http://localhost:${CONSOLE_PORT:-8081}/console/
  token:     $run token create --system --name me --roles read,moderate,admin
${metrics:+Metrics:   http://localhost:${GRAFANA_PORT:-3000} (Grafana), http://localhost:${PROMETHEUS_PORT:-9090} (Prometheus)
}Commands:  $run status
END
