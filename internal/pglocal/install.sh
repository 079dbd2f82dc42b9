#!/bin/sh
# `make postgres` calls this. It finds PostgreSQL's server binaries (version 15 or newer), or fetches them with the machine's apt
# into a cache folder. It installs nothing: it downloads the packages with its own package lists and unpacks them. So an ordinary
# user can run it, and the system does not change. pglocal searches the same places (binaries.go).
set -eu
umask 022 # if root runs this, another user runs the server and must read the files

min=15

fail() {
	echo "postgres: $1" >&2
	exit 1
}

ways_out="install PostgreSQL $min or newer, or set POSTGRES_BIN to the directory of its server binaries,"
ways_out="$ways_out or DATABASE_URL (for tests TEST_DATABASE_URL) to a running server, or run everything in Docker with make up"

# package prints how to install the server binaries where this script cannot fetch them.
package() {
	case $(uname -s) in
	Darwin) echo "brew install postgresql@17" && return ;;
	esac
	for tool in "dnf install postgresql-server" "apk add postgresql17" "pacman -S postgresql" "zypper install postgresql-server"; do
		if command -v "${tool%% *}" >/dev/null; then
			echo "sudo $tool"
			return
		fi
	done
	echo "see https://www.postgresql.org/download/ ($min or newer), then set POSTGRES_BIN to the directory of postgres and initdb"
}

# works DIR [LIBRARY_PATH] succeeds if DIR holds a PostgreSQL server of version $min or newer that starts.
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
# Debian; Homebrew on Apple silicon and on Intel; PostgreSQL's own packages for Fedora and others; Alpine
for dir in /usr/lib/postgresql/*/bin /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin /usr/pgsql-*/bin \
	/usr/libexec/postgresql[0-9]*; do
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

if [ "$(uname -s)" != Linux ] || ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
	fail "this machine lacks PostgreSQL's server binaries (postgres and initdb, version $min or newer). \`make postgres\` can fetch them
  only with apt, on Debian and its relatives. Do one of these:
  install them           $(package)
  or run all in Docker   make up
  or use your server     DATABASE_URL=postgres://USER:PASSWORD@HOST/DATABASE make run"
fi

echo "postgres: fetching PostgreSQL's server binaries into $cache with apt, without an installation"
mkdir -p "$cache" 2>/dev/null || fail "cannot create $cache for PostgreSQL's binaries: $ways_out"
work=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
chmod 755 "$work"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/root"

# apt reads the list of installed packages from the system, and writes only to $work. It takes no locks, because they would be
# the system's.
apt() {
	command=$1
	shift
	"$command" -qq \
		-o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::State::extended_states=/dev/null \
		-o Dir::Cache="$work/cache" -o Dir::Log="$work" -o APT::Sandbox::User="" \
		-o Debug::NoLocking=true -o Acquire::Retries=3 -o Acquire::Languages=none "$@"
}

# A package source may fail while another one has PostgreSQL. If none has it, the first complaint is the reason that this prints.
apt apt-get update >"$work/log" 2>&1 || true
complaint=$(grep -m 1 '^[EW]:' "$work/log" || true)
version=$(apt apt-cache pkgnames postgresql- 2>/dev/null | sed -n 's/^postgresql-\([0-9][0-9]*\)$/\1/p' | sort -rn | while read -r v; do
	if apt apt-cache policy "postgresql-$v" | grep -q 'Candidate: [0-9]'; then
		echo "$v"
		break
	fi
done)
[ -n "$version" ] && [ "$version" -ge "$min" ] ||
	fail "this machine's package sources offer no PostgreSQL of version $min or newer${complaint:+ (apt reports: $complaint)}: $ways_out"

apt apt-get install --download-only --no-install-recommends --yes "postgresql-$version" >"$work/log" 2>&1 ||
	fail "apt cannot fetch postgresql-$version ($(grep -m 1 '^E:' "$work/log" || tail -n 1 "$work/log")): $ways_out"
for deb in "$work"/cache/archives/*.deb; do
	[ -f "$deb" ] || fail "apt lists postgresql-$version as installed, but its server does not run: reinstall it, or $ways_out"
	dpkg -x "$deb" "$work/root" || fail "cannot unpack $deb: $ways_out"
done
chmod 755 "$work/root"

# The file library-path lists the folders of the shared libraries, relative to the root. pglocal puts them into LD_LIBRARY_PATH.
(cd "$work/root" && find lib usr/lib -name '*.so*' ! -path '*/postgresql/*' 2>/dev/null |
	sed 's|/[^/]*$||' | sort -u) >"$work/root/library-path"

if ! unpacked "$work/root"; then
	works=$("$work/root/usr/lib/postgresql/$version/bin/postgres" --version 2>&1 || true)
	fail "the PostgreSQL that apt fetched does not run on this machine ($works): $ways_out"
fi
rm -rf "$cache/root"
mv "$work/root" "$cache/root"
echo "postgres: PostgreSQL $version is in $cache/root"
