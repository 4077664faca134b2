#!/usr/bin/env bash
# Gives the features `cuda`, `rocm` and `cpu` an LLVM to build against, from the distribution's packages.
#
# usage: scripts/install-llvm.sh [Cargo.lock]
#
# Those features compile `tracel-llvm-bundler`, whose build script downloads a prebuilt LLVM. Where that
# download cannot be had (a proxy, a machine that is off line), this script puts the packaged LLVM in the
# folder the build script looks in, and it then downloads nothing. The folder carries the bundler's
# version, which is read from the given Cargo.lock (without one: this repository's).
#
# Works on Debian and Ubuntu releases that package LLVM 22 or 23; asks for the packages with sudo unless
# it runs as root. Running it again changes nothing. Kernels compiled by an LLVM other than the bundled
# one deserve a run of the device matrix before they are trusted.
set -euo pipefail

fail() {
    echo "install-llvm: $*" >&2
    exit 1
}

lock=${1:-$(dirname "$0")/../Cargo.lock}
[ -f "$lock" ] || fail "no Cargo.lock at $lock"
bundler=$(awk '/^name = / { name = $3 } /^version = / && name == "\"tracel-llvm-bundler\"" { gsub(/"/, "", $3); print $3; exit }' "$lock")
[ -n "$bundler" ] || fail "$lock does not list tracel-llvm-bundler, so no LLVM is needed"

# The build script takes the folder for complete once this file is there, and Cargo rebuilds everything
# that links LLVM when its time stamp changes: so it is made last, and only once.
prefix="${XDG_DATA_HOME:-$HOME/.local/share}/tracel/tracel-llvm-$bundler"
sentinel="$prefix/.tracel-llvm-installed"
llvm_config="$prefix/bin/llvm-config"
signature="# Written by scripts/install-llvm.sh"
if [ -e "$sentinel" ] && ! grep -qsF "$signature" "$llvm_config"; then
    echo "LLVM from the bundler's own download is already in $prefix"
    exit 0
fi

command -v apt-get >/dev/null || fail "needs apt-get (Debian, Ubuntu)"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)

installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Abbrev}' "$1" 2>/dev/null)" = "ii " ]
}
offered() {
    [ -n "$(apt-cache show --no-all-versions "$1" 2>/dev/null)" ]
}
newest() {
    local version
    for version in 23 22; do
        if "$1" "llvm-$version-dev"; then
            echo "$version"
            return
        fi
    done
}

version=$(newest installed)
if [ -z "$version" ]; then
    "${as_root[@]}" apt-get update -qq
    version=$(newest offered)
    [ -n "$version" ] || fail "this release packages neither llvm-23-dev nor llvm-22-dev"
fi
# lld serves the AMD target; the others are the system libraries that a static LLVM names.
missing=()
for package in "llvm-$version-dev" "liblld-$version-dev" libz3-dev zlib1g-dev libzstd-dev libxml2-dev; do
    installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi
packaged="/usr/lib/llvm-$version/bin/llvm-config"
[ -x "$packaged" ] || fail "llvm-$version-dev is installed, but $packaged is not there"

# The packaged llvm-config lists two things in a form the bundler cannot pass on: Polly, whose static
# libraries are in a package of their own and which nothing here uses, and z3 by its path.
mkdir -p "$prefix/bin"
wrapper=$(
    cat <<WRAPPER
#!/bin/sh
$signature
$packaged "\$@" | sed -E 's/-lPolly(ISL)?( |\$)/ /g; s#[^ ]*/libz3\.so#-lz3#g'
WRAPPER
)
if [ "$(cat "$llvm_config" 2>/dev/null)" != "$wrapper" ]; then
    printf '%s\n' "$wrapper" >"$llvm_config"
    chmod +x "$llvm_config"
fi

# Linking an empty program finds a missing system library now, not at the end of a long build.
libraries=$("$llvm_config" --link-static --system-libs)
program=$(mktemp)
trap 'rm -f "$program"' EXIT
# shellcheck disable=SC2086 # the list is meant to be split
echo 'int main(void) { return 0; }' | cc -x c - -o "$program" $libraries ||
    fail "cannot link the system libraries that LLVM names: $libraries"
[ -f "$("$llvm_config" --libdir)/libLLVMCore.a" ] || fail "llvm-$version-dev brought no static libraries"

[ -e "$sentinel" ] || touch "$sentinel"
echo "LLVM $("$llvm_config" --version) stands in for tracel-llvm $bundler in $prefix"
