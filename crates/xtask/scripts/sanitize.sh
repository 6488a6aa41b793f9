#!/usr/bin/env bash
# `cargo xtask sanitize`: the tests of unsafe code under the address sanitizer, which also finds
# leaks. The simulator compiles the device kernels with the undefined-behaviour sanitizer.
source "$(dirname "$0")/environment.sh"

host=$(rustc -vV | sed -n 's/^host: //p')
[[ $host == x86_64-unknown-linux-gnu || $host == aarch64-unknown-linux-gnu ]] ||
  fail "the sanitizers run on Linux on x86-64 and AArch64, this is $host"
# The stable compiler includes the sanitizer's library, but accepts the option only so.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address
# An allocation beyond memory fails, as it does without the sanitizer: tests try some.
export ASAN_OPTIONS=allocator_may_return_null=1
export CXXFLAGS='-fsanitize=undefined -fno-sanitize-recover=undefined'
# The crates with `unsafe`, without burn, which takes longer to build than all of these. rope-core's
# kernels take many minutes to compile if they are optimised or have checks in place instead of
# checks that are calls; the simulator's tests, with either, many minutes to run.
build=(
  --config=profile.dev.package.rope-core.opt-level=0
  -Zprofile-rustflags
  "--config=profile.dev.package.rope-core.rustflags=['-Cllvm-args=-asan-instrumentation-with-call-threshold=0']"
  --package=rope-check --package=rope-ascend --package=ascend-sim
  --no-default-features --locked
  # With it, cargo builds build scripts and macros without these flags.
  "--target=$host" --target-dir=target/sanitize
)
# Tests that reach nothing that the others do not: of how values are rounded, of how many bytes
# kernels move, and of what is found in wrong kernels. They would take a third of the time.
skipped=(
  --skip=every_pattern_is_rounded_once
  --skip=qwen3_vl_8b
  --skip=every_fault_in_the_kernels_is_caught
)
# The tests that reach unsafe code; rope-core has no unit tests.
cargo test "${build[@]}" --package=rope-core '--test=*' -- "${skipped[@]}"
cargo test "${build[@]}" --lib -- "${skipped[@]}"
echo "nothing found"
