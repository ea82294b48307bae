#!/bin/sh
# Builds dsv4 and installs it under PREFIX: library, headers for C and C++, pkg-config file, CMake package, the Go module's
# sources, the command with its man page, the licence. What is installed can be moved.
#
#   bindings/install.sh PREFIX [CMAKE OPTIONS]
#
# DESTDIR, CARGO_TARGET_DIR and -DCMAKE_INSTALL_LIBDIR=lib64 do what they do everywhere.
set -eu

if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: bindings/install.sh PREFIX [CMAKE OPTIONS]" >&2
    exit 2
fi
prefix=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
# CMake refuses what it kept of a source tree that has another path now, and would go on with options that are not given
rm -rf "$target/install"
cmake -S "$root/bindings/c" -B "$target/install" -DDSV4_CARGO_TARGET_DIR="$target" "$@"
cmake --build "$target/install"
cmake --install "$target/install" --prefix "$prefix"
