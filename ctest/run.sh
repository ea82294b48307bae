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
cmake -S "$root/bindings/c" -B "$target/c" -G Ninja -DDSV4_CARGO_TARGET_DIR="$target" -DCMAKE_INSTALL_LIBDIR=lib
cmake --build "$target/c"
cmake --install "$target/c" --prefix "$target/stage-moved"
# the package must work wherever it is
mv "$target/stage-moved" "$stage"

# a compiler and pkg-config are enough
PKG_CONFIG_PATH=$stage/lib/pkgconfig
export PKG_CONFIG_PATH
model=$root/examples/models/tiny-v4
# shellcheck disable=SC2046 # the flags are several words
cc -std=c99 -Wall -Wextra -Wpedantic -Werror -o "$target/c/example" "$root/examples/c/chat.c" $(pkg-config --cflags --libs dsv4)
LD_LIBRARY_PATH=$stage/lib "$target/c/example" "$model" "Tell me about the sea." </dev/null >"$target/c/example.out"
test -s "$target/c/example.out"
printf 'My name is "Ann".\nWhat is my name?\n' | LD_LIBRARY_PATH=$stage/lib "$target/c/example" "$model" >"$target/c/talk.out"
test "$(wc -l <"$target/c/talk.out")" -ge 2
if grep -q '<｜\|</think>' "$target/c/talk.out"; then
    echo "the example prints markers: $target/c/talk.out" >&2
    exit 1
fi
# shellcheck disable=SC2046
cc -std=c99 -o "$target/c/example-static" "$root/examples/c/chat.c" $(pkg-config --cflags dsv4) "$stage/lib/libdsv4.a" \
    $(pkg-config --libs-only-l --static dsv4 | sed 's/-ldsv4//')
"$target/c/example-static" "$model" "Tell me about the sea." </dev/null | cmp - "$target/c/example.out"

for sanitize in OFF ON; do
    build=$target/ctest-$sanitize
    cmake -S "$root/ctest" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_PREFIX_PATH="$stage" \
        -DDSV4_SANITIZE=$sanitize
    cmake --build "$build"
    ctest --test-dir "$build" --output-on-failure -j "$jobs"
done
echo "the C library passed; it is staged in $stage"
