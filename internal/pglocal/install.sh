#!/bin/sh
# Finds PostgreSQL's server binaries (version 15 or newer), or fetches them with the machine's own apt into a cache folder.
# Nothing is installed: the packages are downloaded with package lists of our own and unpacked, so that an ordinary user can do
# it and the system stays as it was. pglocal looks in the same places (binaries.go). `make postgres` calls this.
set -eu
umask 022 # as root, another user runs the server

min=15

fail() {
	echo "postgres: $1" >&2
	exit 1
}

ways_out="install PostgreSQL $min or newer, or set POSTGRES_BIN to the directory of its server binaries, or DATABASE_URL (for tests TEST_DATABASE_URL) to a running server"

# works DIR [LIBRARY_PATH]: DIR holds a server of at least $min that runs.
works() {
	[ -x "$1/postgres" ] && [ -x "$1/initdb" ] || return 1
	version=$(LD_LIBRARY_PATH="${2:-}" "$1/postgres" --version 2>/dev/null | sed -n 's/^[^0-9]*\([0-9][0-9]*\).*/\1/p')
	[ -n "$version" ] && [ "$version" -ge "$min" ]
}

library_path() { sed "s|^|$1/|" "$1/library-path" | paste -s -d : -; }

unpacked() {
	[ -f "$1/library-path" ] || return 1
	for dir in "$1"/usr/lib/postgresql/*/bin; do
		if works "$dir" "$(library_path "$1")"; then
			return 0
		fi
	done
	return 1
}

if [ -n "${POSTGRES_BIN:-}" ]; then
	works "$POSTGRES_BIN" || fail "POSTGRES_BIN=$POSTGRES_BIN holds no PostgreSQL server of version $min or newer"
	exit 0
fi
if found=$(command -v postgres) && works "$(dirname "$(readlink -f "$found")")"; then
	exit 0
fi
for dir in /usr/lib/postgresql/*/bin; do
	if works "$dir"; then
		exit 0
	fi
done
system=/var/cache/tidings/postgresql
if [ "$(id -u)" = 0 ]; then
	cache=$system
else
	cache=${XDG_CACHE_HOME:-${HOME:?postgres: HOME is not set}/.cache}/tidings/postgresql
fi
for root in "$cache/root" "$system/root"; do
	if unpacked "$root"; then
		exit 0
	fi
done

command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
	fail "no PostgreSQL server binaries of version $min or newer, and no apt-get to fetch them with: $ways_out"

echo "postgres: no server binaries here; fetching them into $cache with apt (nothing is installed)"
mkdir -p "$cache" 2>/dev/null || fail "cannot make $cache to keep PostgreSQL's binaries in: $ways_out"
work=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
chmod 755 "$work"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/root"

# What is installed is read from the system; all that apt writes goes to $work. Locks would be the system's, hence none.
apt() {
	command=$1
	shift
	"$command" -qq \
		-o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::State::extended_states=/dev/null \
		-o Dir::Cache="$work/cache" -o Dir::Log="$work" -o APT::Sandbox::User="" \
		-o Debug::NoLocking=true -o Acquire::Retries=3 -o Acquire::Languages=none "$@"
}

# A source that fails is no reason to give up: another may have what is wanted. If none does, the first complaint is the reason.
apt apt-get update >"$work/log" 2>&1 || true
complaint=$(grep -m 1 '^[EW]:' "$work/log" || true)
version=$(apt apt-cache pkgnames postgresql- 2>/dev/null | sed -n 's/^postgresql-\([0-9][0-9]*\)$/\1/p' | sort -rn | while read -r v; do
	if apt apt-cache policy "postgresql-$v" | grep -q 'Candidate: [0-9]'; then
		echo "$v"
		break
	fi
done)
[ -n "$version" ] && [ "$version" -ge "$min" ] ||
	fail "the package sources of this machine offer no PostgreSQL of version $min or newer${complaint:+ (apt says: $complaint)}: $ways_out"

apt apt-get install --download-only --no-install-recommends --yes "postgresql-$version" >"$work/log" 2>&1 ||
	fail "apt cannot fetch postgresql-$version ($(grep -m 1 '^E:' "$work/log" || tail -n 1 "$work/log")): $ways_out"
for deb in "$work"/cache/archives/*.deb; do
	[ -f "$deb" ] || fail "postgresql-$version is registered as installed, but its server does not run: reinstall it, or $ways_out"
	dpkg -x "$deb" "$work/root" || fail "cannot unpack $deb: $ways_out"
done
chmod 755 "$work/root"

# Beside the binaries, where their libraries are, as paths relative to the root. pglocal puts them into LD_LIBRARY_PATH.
(cd "$work/root" && find lib usr/lib -name '*.so*' ! -path '*/postgresql/*' 2>/dev/null | sed 's|/[^/]*$||' | sort -u) >"$work/root/library-path"

if ! unpacked "$work/root"; then
	works=$("$work/root/usr/lib/postgresql/$version/bin/postgres" --version 2>&1 || true)
	fail "the PostgreSQL that apt fetched does not run here ($works): $ways_out"
fi
rm -rf "$cache/root"
mv "$work/root" "$cache/root"
echo "postgres: PostgreSQL $version is in $cache/root"
