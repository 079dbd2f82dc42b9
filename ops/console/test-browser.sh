#!/bin/sh
# Tests the console in Chromium, with axe-core from the npm registry. Without Chromium the tests skip, or fail if CI=true.
# TIDINGS_SCREENSHOTS=DIR writes the screenshots there. Arguments go to `go test`.
set -eu
cd "$(dirname "$0")"

version=4.14.1
sum=29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c
cache="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tidings/axe-core-$version"
if ! echo "$sum  $cache/axe.min.js" | sha256sum --check --status 2>/dev/null; then
	if ! command -v npm >/dev/null; then
		echo "test-browser: npm is not installed; it fetches axe-core $version from the registry (Debian: apt-get install npm)"
		[ "${CI:-}" != true ] || exit 1
		exit 0
	fi
	mkdir -p "$cache"
	(
		cd "$cache"
		npm pack --silent "axe-core@$version" >/dev/null
		tar -xzf "axe-core-$version.tgz" --strip-components=1 package/axe.min.js package/LICENSE
		rm "axe-core-$version.tgz"
	)
	if ! echo "$sum  $cache/axe.min.js" | sha256sum --check --status; then
		echo "test-browser: $cache/axe.min.js is not axe-core $version"
		exit 1
	fi
fi
TIDINGS_AXE="$cache/axe.min.js" exec "${GO:-go}" test -tags browser -count=1 -timeout 15m -run 'Browser|Key|Frozen' "$@" .
