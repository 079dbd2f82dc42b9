#!/bin/sh
# Checks that a container engine answers, and pulls the images of the tests that it lacks. If the tests cannot use the engine, this
# prints the reason and fails.
set -u

fail() {
	echo "engine: $*" >&2
	exit 1
}

command -v docker >/dev/null || fail "the docker command is missing: install Docker (https://docs.docker.com/engine/install)"
version=$(docker version --format '{{.Server.Version}}' 2>&1) ||
	fail "no container engine answers: start Docker, or set DOCKER_HOST. Docker reports: $(echo "$version" | tr '\n' ' ')"
docker compose version >/dev/null 2>&1 ||
	fail "the engine answers, but \`docker compose\` fails: install Docker Compose (https://docs.docker.com/compose/install)"
for image in "${TEST_POSTGRES_IMAGE:-postgres:17-alpine}" "${TEST_NATS_IMAGE:-nats:2}" golang:1.26; do
	docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" >/dev/null ||
		fail "the engine lacks the image $image and cannot pull it"
done
echo "engine: Docker $version"
