#!/usr/bin/env bash
# `cargo xtask deep`: the steps of deep.txt one after the other, with the outcome of each in
# docs/tables/deep.md as soon as it is known.
source "$(dirname "$0")/environment.sh"
steps=crates/xtask/scripts/deep.txt page=docs/tables/deep.md
others=(-- . ":!$page")   # all files but the page, which every step changes

list='' resume='' vendor='' chosen=()
while (($#)); do
  case $1 in
    --list) list=1 ;;
    --resume) resume=1 ;;
    --vendor) vendor=$(realpath -e -- "${2-}"); shift ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
FEATURES=$(sed -n 's/^features=//p' .ci/run)
export FEATURES
# Else all is compiled again. Other steps have other compilers, which want another clippy or none.
eval "$(grep '^export CARGO_PROFILE_' .ci/run)"
wrapper=$(grep RUSTC_WORKSPACE_WRAPPER .ci/run)
if [[ $list ]]; then grep -v '^#' "$steps"; exit; fi

mapfile -t known < <(sed -n 's/^\([a-z-]*\): .*/\1/p' "$steps")
commands() { awk -v step="$1:" '/^[^ ]/ { on = $1 == step; next } on' "$steps"; }
row() { grep "^| $1 | 20" "$page"; }
for name in "${chosen[@]}"; do
  [[ " ${known[*]} " == *" $name "* ]] || fail "no step $name: there are ${known[*]}"
  [[ $vendor || $(commands "$name") != *FOLDER* ]] ||
    fail "$name reads the vendor's repositories: name their folder by --vendor FOLDER"
done
for name in "${known[@]}"; do
  grep -q "\`$name\`" docs/dev/deep.md || fail "docs/dev/deep.md does not name the step $name"
done

is_changed() { [[ $(git status --porcelain "${others[@]}") ]]; }
# Puts a row into the page instead of the step's earlier one, in the order of the steps.
keep() {
  local name rows
  rows=$(for name in "${known[@]}"; do
    if [[ $name == "$1" ]]; then echo "$2"; else row "$name" || true; fi
  done)
  awk -v rule='|---|---|---|---|---:|---|' -v rows="$rows" '
    $0 == rule { print; print rows; skip = 1; next }
    skip && /^\|/ { next }
    { skip = 0; print }' "$page" >"$page.new"
  mv "$page.new" "$page"
}

machine="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
passed=0 failed=()
for name in "${chosen[@]:-${known[@]}}"; do
  IFS='| ' read -r _ _ commit _ < <(row "$name") || commit=''
  if [[ $resume && $(row "$name") == *'| passed |' && $commit != *+ ]] && ! is_changed &&
    git diff --quiet "$commit" "${others[@]}"; then
    printf '\n== %s: passed with these files, not run again\n' "$name"
    continue
  fi
  commit=$(git rev-parse --short=12 HEAD)
  if is_changed; then commit+=+; fi
  SECONDS=0
  printf '\n== %s\n' "$name"
  if [[ ! $vendor && $(commands "$name") == *FOLDER* ]]; then
    echo "left out: it wants --vendor FOLDER"
    if row "$name" >/dev/null; then continue; fi
    outcome='left out'
  elif (
    if [[ $(commands "$name") == *FEATURES* ]]; then eval "$wrapper"; fi
    FOLDER=$vendor exec bash -exc "$(commands "$name")"
  ); then
    outcome=passed passed=$((passed + 1))
  else
    outcome=failed; failed+=("$name")
  fi
  keep "$name" "| $name | $(date -u +%F) | $commit | $machine | $SECONDS | $outcome |"
  echo "== $name: $outcome after $SECONDS s"
done
((${#failed[@]} == 0)) || fail "failed: ${failed[*]}; the messages are above"
echo "$passed passed; $page has the table"
