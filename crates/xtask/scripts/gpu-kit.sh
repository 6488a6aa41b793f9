#!/usr/bin/env bash
# `cargo xtask gpu-kit`: the program and the GPU suites, for CUDA and for WGSL through Vulkan, for a
# machine without Rust and network, in target/gpu-kit/mrope-gpu-kit.tar.xz, with a script that runs
# all of it. Needs no GPU, CUDA or LLVM.
source "$(dirname "$0")/environment.sh"
out=target/gpu-kit
kit=$out/mrope-gpu-kit
most=$((60 << 20))

# CubeCL links LLVM also where NVRTC compiles the kernels, as feature `cuda-cpp` has it, and would
# download it: 60 MB that nothing calls. Functions that end the program stand for LLVM's.
export DOCS_RS=1 CARGO_TARGET_DIR=$PWD/$out CARGO_PROFILE_RELEASE_STRIP=symbols
features=rope-cli/cuda-cpp,rope-cli/wgpu,rope-cli/rayon,rope-tests/wgpu,rope-tests/cuda
build() {
  cargo build --release --locked -p rope-cli -p rope-tests --bin mrope --test gpu --test gpu_memory \
    --features "$features" "$@"
}
mkdir -p "$out"
stubs=$PWD/$out/llvm.o
mapfile -t sources < <(cargo metadata --locked --format-version 1 | python3 -c '
import json, os, sys
for package in json.load(sys.stdin)["packages"]:
    if package["name"] in ("llvm-sys", "cubecl-llvm"):
        print(os.path.join(os.path.dirname(package["manifest_path"]), "src"))')
{
  echo '#include <stdlib.h>'
  grep -rhoE 'fn (LLVM[A-Za-z0-9_]+|cubecl_[a-z_]+)' "${sources[@]}" | sort -u |
    sed 's/fn \(.*\)/void \1(void) { abort(); }/'
} | cc -x c -O1 -c -o "$stubs" -
# RUSTFLAGS would compile all crates again; only what links needs them.
mkdir -p "$out/bin"
cat >"$out/bin/cc" <<END
#!/bin/sh
case " \$* " in *" -c "* | *" -E "*) exec $(command -v cc) "\$@" ;; esac
exec $(command -v cc) "\$@" $stubs
END
chmod +x "$out/bin/cc"
export PATH=$PWD/$out/bin:$PATH
messages=$(build --message-format=json-render-diagnostics)

rm -rf "$kit"
mkdir -p "$kit/tests"
for name in mrope gpu gpu_memory; do
  program=$(sed -n 's|.*"name":"'$name'".*"executable":"\([^"]*\)".*|\1|p' <<<"$messages" | tail -1)
  cp "$program" "$kit/$name"
done
cp crates/xtask/scripts/gpu-kit/run.sh benches/torch_layer.py LICENSE-APACHE LICENSE-MIT "$kit"
# What the suite `gpu` reads.
git ls-files -z tests/fixtures/MANIFEST ':(glob)tests/fixtures/*.safetensors' \
  'tests/fixtures/head_norm*' tests/fixtures/models | xargs -0 cp --parents -t "$kit"
git log -1 --format='commit %h of %cs' >"$kit/version"
# The programs have much in common: a dictionary that holds them all makes a third less of them.
XZ_OPT='--lzma2=preset=9,dict=192MiB' tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" \
  -cJf "$kit.tar.xz" mrope-gpu-kit
size=$(stat -c %s "$kit.tar.xz")
((size <= most)) || fail "$kit.tar.xz has $size bytes, more than $most"
echo "$kit.tar.xz: $size bytes, unpacked $(du -sb "$kit" | cut -f1)"
