#!/usr/bin/env bash
# `cargo xtask dist [TARGET ...]`: archives for a release in target/dist, with checksums.
# Static programs for Linux without C, linked by the linker that comes with Rust; run where this
# machine or qemu can. Without CANN: a static program loads no library. Dockerfile.ascend has that.
source "$(dirname "$0")/environment.sh"

targets=("$@")
((${#targets[@]})) || targets=(x86_64-unknown-linux-musl aarch64-unknown-linux-musl)
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
out=target/dist
rm -rf "$out"
mkdir -p "$out"

# libloading asks for libdl. musl has its functions in libc, and Rust brings no empty libdl.
empty=$PWD/target/empty
mkdir -p "$empty"
printf '!<arch>\n' >"$empty/libdl.a"

for target in "${targets[@]}"; do
  processor=${target%%-*}
  installed=$(rustc --print target-libdir --target "$target")
  [[ -d $installed ]] || fail "no standard library for $target: rustup target add $target"
  gnu=$processor-unknown-linux-gnu   # of the wheel
  [[ -d $(rustc --print target-libdir --target "$gnu") ]] ||
    fail "no standard library for $gnu: rustup target add $gnu"
  linker=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$target")_LINKER
  env "$linker=rust-lld" cargo rustc --release --locked --package=rope-cli --bin=mrope \
    --target "$target" -- -L "native=$empty"
  program=target/$target/release/mrope
  if [[ $processor == "$(uname -m)" ]]; then
    run=()
  elif command -v "qemu-$processor-static" >/dev/null; then
    run=("qemu-$processor-static")
  elif command -v "qemu-$processor" >/dev/null; then
    run=("qemu-$processor")
  else
    fail "to try the program of $target, install qemu-user-static"
  fi
  "${run[@]}" "$program" verify tests/fixtures/inv_freq_tables.json
  "${run[@]}" "$program" gradcheck --filter half/single/bsnd

  name=mrope-$version-$target
  mkdir "$out/$name"
  cp "$program" README.md LICENSE-APACHE LICENSE-MIT crates/rope-cli/python/dump.py "$out/$name"
  tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner \
    --mtime="@$(git log -1 --format=%ct)" -czf "$out/$name.tar.gz" "$name"
  rm -r "${out:?}/$name"
done
# The wheel for each processor: of any CPython by its stable ABI, and of old C libraries, for zig
# links it. Its library is loaded by this machine's Python where that can.
python3 -m venv target/wheels
target/wheels/bin/pip install --quiet 'maturin>=1.7,<2' ziglang
for target in "${targets[@]}"; do
  processor=${target%%-*}
  PATH=$PWD/target/wheels/bin:$PATH maturin build --release --zig --target \
    "$processor-unknown-linux-gnu" --compatibility manylinux_2_28 --out "$out" \
    --manifest-path crates/mrope-python/Cargo.toml --target-dir target/wheels/build
  wheel=$(echo "$out"/mrope-*-cp310-abi3-manylinux_2_28_"$processor".whl)
  rm -rf "target/wheels/$processor"
  python3 -m zipfile -e "$wheel" "target/wheels/$processor"
  if [[ $processor == "$(uname -m)" ]]; then
    python3 - "target/wheels/$processor/mrope/_native.abi3.so" <<'END'
import importlib.util, sys
spec = importlib.util.spec_from_file_location("mrope._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
print("loaded:", native.VERSION, native.instruction_set())
END
  fi
done
(cd "$out" && sha256sum -- * >SHA256SUMS)
cat "$out/SHA256SUMS"
