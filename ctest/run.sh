#!/bin/sh
# Builds and stages the C library, then tests the staged tree: shared, static, sanitised, under valgrind, and moved.
# Everything is made under target/ (or $CARGO_TARGET_DIR). Installs nothing; names what is missing.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
missing=
for tool in cargo cmake ninja cc c++ nm readelf valgrind pkg-config; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    echo "ctest/run.sh needs:$missing (Debian: apt-get install cmake ninja-build gcc g++ binutils valgrind pkg-config)" >&2
    exit 2
fi

jobs=$(nproc 2>/dev/null || echo 2)
stage=$target/stage
rm -rf "$stage" "$target/stage-moved"
CARGO_TARGET_DIR=$target "$root/bindings/install.sh" "$target/stage-moved" -DCMAKE_INSTALL_LIBDIR=lib
# the package must work wherever it is
mv "$target/stage-moved" "$stage"

for sanitize in OFF ON; do
    build=$target/ctest-$sanitize
    cmake -S "$root/ctest" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_PREFIX_PATH="$stage" \
        -DDSV4_SANITIZE=$sanitize
    cmake --build "$build"
    ctest --test-dir "$build" --output-on-failure -j "$jobs"
done
echo "the C library passed; it is staged in $stage"
