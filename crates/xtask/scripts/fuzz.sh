#!/usr/bin/env bash
# `cargo xtask fuzz`: the targets of `fuzz/` under libFuzzer.
#
# Without the address sanitizer, under which rope-core alone takes three times as long to compile as
# all of this: `cargo xtask sanitize` has it. Debug assertions of the kernels compare their
# arguments with their conditions.
source "$(dirname "$0")/environment.sh"

limit=-max_total_time=5
case ${1-} in
  --seconds) limit=-max_total_time=$2; shift 2 ;;
  --runs) limit=-runs=$2; shift 2 ;;
esac
known=$(cd fuzz/targets && ls | sed 's/\.rs$//')
for target; do
  grep -qx -- "$target" <<<"$known" || fail "no target $target: there are" $known
done
host=$(rustc -vV | sed -n 's/^host: //p')
folder=$PWD/target/fuzz
# Coverage that libFuzzer reads, by LLVM's own options: the stable compiler has them too. With
# --target, cargo builds build scripts and macros without these flags.
coverage='-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table'
(cd fuzz && RUSTFLAGS="$coverage --cfg fuzzing" \
  cargo build --release --locked --bins --target "$host" --target-dir "$folder")

for target in ${@:-$known}; do
  program=$folder/$host/release/$target
  # New inputs go to the first folder; the kept ones are only read.
  found=$folder/found/$target artifacts=$folder/artifacts/$target log=$folder/$target.log
  mkdir -p "$found" "$artifacts"
  options=(-print_final_stats=1 -timeout=60 -rss_limit_mb=2048 "$limit")
  if [[ -e fuzz/words/$target ]]; then options+=("-dict=fuzz/words/$target"); fi
  echo "fuzz $target"
  if ! "$program" "${options[@]}" "-artifact_prefix=$artifacts/" "$found" "fuzz/corpus/$target" \
    >"$log" 2>&1; then
    tail -60 "$log" >&2
    fail "$target failed: the input is in $artifacts; make it a test, and see it fail again by" \
      "$program FILE"
  fi
  echo "    $(sed -n 's/^stat::number_of_executed_units://p' "$log") inputs"
done
echo "nothing found"
