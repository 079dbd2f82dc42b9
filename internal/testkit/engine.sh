#!/bin/sh
# Whether the tests can use a container engine: it answers, and has or pulls their images. Says what is missing, and fails.
set -u

fail() {
	echo "engine: $*" >&2
	exit 1
}

command -v docker >/dev/null || fail "there is no docker command: install Docker (https://docs.docker.com/engine/install)"
said=$(docker version --format '{{.Server.Version}}' 2>&1) || fail "no container engine answers: start Docker, or set DOCKER_HOST. Docker says: $(echo "$said" | tr '\n' ' ')"
docker compose version >/dev/null 2>&1 || fail "the engine answers, but \`docker compose\` does not: install Docker Compose (https://docs.docker.com/compose/install)"
for image in "${TEST_POSTGRES_IMAGE:-postgres:17-alpine}" "${TEST_NATS_IMAGE:-nats:2}" golang:1.26; do
	docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" >/dev/null || fail "the engine has no image $image and cannot pull it"
done
echo "engine: Docker $said"
