#!/usr/bin/env bash
# `cargo xtask dist [TARGET ...]`: archives for a release in target/dist, with checksums.
# Static programs for Linux without C, linked by the linker that comes with Rust; without CANN: a
# static program loads no library. Dockerfile.ascend has that. And wheels. All are tried, those of
# another processor under qemu.
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

# Sets run to what starts programs of a processor, and asks early for what its wheel will want.
runner() {
  run=()
  [[ $1 != "$(uname -m)" ]] || return 0
  local name
  for name in "qemu-$1-static" "qemu-$1"; do
    if command -v "$name" >/dev/null; then run=("$name"); break; fi
  done
  ((${#run[@]})) || fail "to try the program and the wheel of $1, install qemu-user-static"
  for name in apt-get dpkg-deb; do
    command -v "$name" >/dev/null || fail "no $name: the wheel of $1 is tried in Debian's Python" \
      "for that processor; run this on Debian or Ubuntu, or name targets of $(uname -m) alone"
  done
}

# Sets python to a Python of a processor. Debian's packages for another one are unpacked and not
# installed, by an apt with a state of its own: this machine's packages stay as they are.
python_of() {
  runner "$1"
  python=(python3)
  ((${#run[@]})) || return 0
  local folder=$PWD/target/wheels/python-$1 architecture=$1 package name
  case $1 in aarch64) architecture=arm64 ;; x86_64) architecture=amd64 ;; esac
  python=("${run[@]}" -L "$folder" "$folder/usr/bin/python3")
  [[ ! -x $folder/usr/bin/python3 ]] || return 0
  rm -rf "$folder" "$folder.apt"
  mkdir -p "$folder" "$folder.apt"/{state/lists,cache/archives}/partial
  : >"$folder.apt/status"
  cat >"$folder.apt/conf" <<END
APT::Architecture "$architecture"; APT::Architectures {"$architecture";};
APT::Sandbox::User "root"; Debug::NoLocking "1";
Dir::State "$folder.apt/state"; Dir::State::status "$folder.apt/status";
Dir::Cache "$folder.apt/cache";
END
  APT_CONFIG=$folder.apt/conf apt-get -qq update
  # The C++ library is for PyTorch.
  APT_CONFIG=$folder.apt/conf apt-get -qq --yes --no-install-recommends --download-only install \
    python3-minimal libpython3-stdlib libstdc++6
  for package in "$folder.apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder"; done
  # Newer releases have all below usr, and these links in a package that nothing here needs.
  for name in bin lib; do
    [[ -e $folder/$name ]] || ln -s "usr/$name" "$folder/$name"
  done
  rm -r "$folder.apt"
}

for target in "${targets[@]}"; do
  processor=${target%%-*}
  installed=$(rustc --print target-libdir --target "$target")
  [[ -d $installed ]] || fail "no standard library for $target: rustup target add $target"
  gnu=$processor-unknown-linux-gnu   # of the wheel
  [[ -d $(rustc --print target-libdir --target "$gnu") ]] ||
    fail "no standard library for $gnu: rustup target add $gnu"
  runner "$processor"
  linker=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$target")_LINKER
  env "$linker=rust-lld" cargo rustc --release --locked --package=rope-cli --bin=mrope \
    --target "$target" -- -L "native=$empty"
  program=target/$target/release/mrope
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
# links it. A Python of the processor loads its library. AArch64 is not there in `deep python`: its
# wheel also rotates with a norm, forward and backward, against PyTorch's own operators, in the oldest
# PyTorch that it takes, which brings no CUDA there.
python3 -m venv target/wheels
target/wheels/bin/pip install --quiet 'maturin>=1.7,<2' ziglang
for target in "${targets[@]}"; do
  processor=${target%%-*}
  PATH=$PWD/target/wheels/bin:$PATH maturin build --release --zig --target \
    "$processor-unknown-linux-gnu" --compatibility manylinux_2_28 --out "$out" \
    --manifest-path crates/mrope-python/Cargo.toml --target-dir target/wheels/build
  wheel=$(echo "$out"/mrope-*-cp310-abi3-manylinux_2_28_"$processor".whl)
  site=target/wheels/site-$processor
  rm -rf "$site"
  python3 -m zipfile -e "$wheel" "$site"
  python_of "$processor"
  "${python[@]}" - "$site/mrope/_native.abi3.so" <<'END'
import importlib.util, platform, sys
spec = importlib.util.spec_from_file_location("mrope._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
print("loaded:", native.VERSION, native.instruction_set(), "on", platform.machine())
END
  [[ $processor == aarch64 ]] || continue
  # pip judges conditions by this machine's processor, so what PyTorch imports is named.
  target/wheels/bin/pip install --quiet --no-deps --only-binary=:all: --target "$site" \
    --platform "manylinux_2_28_$processor" \
    --python-version "$("${python[@]}" -c 'import sys; print(*sys.version_info[:2], sep=".")')" \
    torch==2.6.0 typing_extensions sympy mpmath
  PYTHONPATH=$site "${python[@]}" -W ignore - <<'END'
import torch
from mrope.torch import Norm, angles_from_cos_sin, rotary

torch.manual_seed(0)
shapes = [(2, 9, 4, 64), (2, 9, 2, 64), (64,), (64,)]
given = [torch.randn(shape, requires_grad=True) for shape in shapes]
phases = torch.rand(2, 9, 16).repeat(1, 1, 2)
cos, sin = phases.cos(), phases.sin()


def fused(q, k, q_weight, k_weight):
    table = angles_from_cos_sin(cos, sin, head_dim=64)
    return rotary(q, k, table, norm=Norm(1e-6), q_weight=q_weight, k_weight=k_weight)


def composed(q, k, q_weight, k_weight):
    def one(x, weight):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
        a, b, rest = x.split((16, 16, 32), -1)
        c, s = (t[:, :, None, :16] for t in (cos, sin))
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    return one(q, q_weight), one(k, k_weight)


results = []
for function in (fused, composed):
    values = function(*given)
    sums = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in values)
    results.append([*values, *torch.autograd.grad(sums, given)])
worst = max(float(((a - b) / b.abs().max()).abs().max()) for a, b in zip(*results))
print(f"values and gradients within {worst:.1e} of PyTorch {torch.__version__}")
assert worst < 1e-6, worst
END
done
(cd "$out" && sha256sum -- * >SHA256SUMS)
cat "$out/SHA256SUMS"
