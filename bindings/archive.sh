#!/usr/bin/env bash
# Makes a release archive for Linux on x86-64: bindings/archive.sh DIR writes dsv4-VERSION-x86_64-linux.tar.gz and its
# checksum to DIR. What is in it needs glibc 2.31 or newer and, for GPUs, the driver: the kernels of all architectures
# are compiled in. Refuses to make an archive that needs more.
#
# cargo-zigbuild links against the old glibc; it is installed with pip below the target folder. nvcc is DSV4_NVCC, the one
# on the PATH, or the one that .ci/kernels has installed.
set -euo pipefail
out=$(mkdir -p "${1:?usage: bindings/archive.sh DIR}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
triple=x86_64-unknown-linux-gnu
glibc=2.31
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
name=dsv4-$version-x86_64-linux
fail() { echo "archive: $*" >&2; exit 1; }

nvcc=${DSV4_NVCC:-$(command -v nvcc || echo "$PWD"/.nvcc/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)}
[ -x "$nvcc" ] || fail "there is no nvcc for the kernels: set DSV4_NVCC, or run .ci/kernels, which installs one"
zig=$target/zig
if [ ! -e "$zig/complete" ]; then
  rm -rf "$zig"
  python3 -m venv "$zig" && "$zig/bin/pip" install -q 'cargo-zigbuild==0.24.*' 'ziglang==0.17.*' && touch "$zig/complete" ||
    fail "cargo-zigbuild cannot be installed with pip"
fi
PATH=$zig/bin:$PATH
rustup target list --installed 2>/dev/null | grep -qx "$triple" || fail "rustup target add $triple"

env -u DSV4_CUDA_ARCHS CARGO_TARGET_DIR="$target" DSV4_NVCC="$nvcc" \
  cargo zigbuild --release --lib --bin dsv4 --locked --target "$triple.$glibc"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stage=$work/$name
cmake -S bindings/c -B "$work/cmake" -DDSV4_CARGO_TARGET_DIR="$target/$triple" -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
cmake --install "$work/cmake" --prefix "$stage" >/dev/null
strip --strip-unneeded "$stage/lib/libdsv4.so.$version" "$stage/bin/dsv4"
strip --strip-debug "$stage/lib/libdsv4.a"
# zig links these in
zig=$(python3 -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')
python3 bindings/licences.py "$triple" "LLVM libunwind=$zig/lib/libunwind/LICENSE.TXT" "the zig compiler's run-time library=$zig/LICENSE" \
  >"$stage/share/doc/dsv4/THIRD-PARTY.txt"

for file in "$stage/lib/libdsv4.so.$version" "$stage/bin/dsv4"; do
  newest=$(objdump -T "$file" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
  [ "$(printf '%s\nGLIBC_%s\n' "$newest" "$glibc" | sort -V | tail -1)" = "GLIBC_$glibc" ] || fail "$file needs $newest"
  needed=$(readelf -d "$file" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p')
  for library in $needed; do
    case $library in
      libc.so.6 | libm.so.6 | libgcc_s.so.1 | libpthread.so.0 | libdl.so.2 | ld-linux-x86-64.so.2) ;;
      *) fail "$file needs $library" ;;
    esac
  done
  echo "$(basename "$file"): $(stat -c %s "$file") bytes, needs $newest and" $needed
done
size=$(stat -c %s "$stage/lib/libdsv4.so.$version")
[ "$size" -lt 60000000 ] || fail "libdsv4.so.$version has $size bytes, not under 60 MB"
strings -n 12 "$stage/lib/libdsv4.so.$version" | grep "kernels for" || fail "the kernels are not compiled in"

# the same sources and tools make the same archive
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct 2>/dev/null || echo 0)" \
  -cf - "$name" | gzip -9n >"$out/$name.tar.gz"
(cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
echo "$out/$name.tar.gz: $(stat -c %s "$out/$name.tar.gz") bytes"
