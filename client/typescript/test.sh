#!/bin/sh
# Tests the TypeScript client and the Node examples against bin/tidings, with the machine's node. Without node it prints a message and
# succeeds.
set -eu
cd "$(dirname "$0")"

skip() {
	echo "test-node: SKIPPED, the TypeScript client and the Node examples are not tested: $*"
	exit 0
}
command -v node >/dev/null || skip "node is not installed (Debian: apt-get install nodejs npm)"
command -v npm >/dev/null || skip "npm is not installed (Debian: apt-get install npm)"
node -e 'process.exit(parseInt(process.versions.node) < 18 ? 1 : 0)' || skip "node is $(node --version), and the client needs 18"
npm view --silent typescript version >/dev/null || skip "npm does not reach its registry"

for package in . ../../examples/node-reader ../../examples/node-writer; do
	(cd $package && npm ci --silent --no-audit --no-fund)
done
npm run --silent build
node --test test/*.test.mjs ../../examples/node-reader/*.test.mjs ../../examples/node-writer/*.test.mjs
