#!/bin/sh
# Fetches PgBouncer with the machine's apt into the folder $1, for the tests. It installs nothing: it downloads the packages with
# its own package lists and unpacks them (as internal/pglocal/install.sh does with PostgreSQL).
set -eu
umask 022
cache=$1
mkdir -p "$cache"
work=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/root"
apt() {
	apt-get -qq \
		-o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::State::extended_states=/dev/null \
		-o Dir::Cache="$work/cache" -o Dir::Log="$work" -o APT::Sandbox::User="" \
		-o Debug::NoLocking=true -o Acquire::Retries=3 -o Acquire::Languages=none "$@"
}
apt update || true # one source of several may fail
apt install --download-only --no-install-recommends --yes pgbouncer
for deb in "$work"/cache/archives/*.deb; do
	dpkg -x "$deb" "$work/root"
done
rm -rf "$cache/root"
mv "$work/root" "$cache/root"
