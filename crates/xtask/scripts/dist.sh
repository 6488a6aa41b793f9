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
if [[ -d crates/mrope-python ]] && python3 -m pip wheel --help >/dev/null 2>&1; then
  python3 -m pip wheel --no-deps --wheel-dir "$out" crates/mrope-python
fi
(cd "$out" && sha256sum -- * >SHA256SUMS)
cat "$out/SHA256SUMS"
