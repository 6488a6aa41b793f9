#!/usr/bin/env bash
# `cargo xtask claims`: the commands of docs/dev/evidence.md whose output a row states are run, and their
# output is searched for it. The others are timed, want what this machine may not have, or are run
# by `cargo test --workspace`.
source "$(dirname "$0")/environment.sh"

cargo build --release --locked --package=rope-cli
mrope() { "${CARGO_TARGET_DIR:-target}/release/mrope" "$@"; }

declare -A outputs
rows='' failed=0
while IFS='|' read -r _ name command _ says _; do
  command=$(sed 's/^ *`//; s/` *$//' <<<"$command")
  mapfile -t parts < <(grep -o '`[^`]*`' <<<"$says" | tr -d '`')
  verdict='-     '
  if ((${#parts[@]})); then
    if [[ ! ${outputs[$command]-} ]]; then
      echo "$command"
      outputs[$command]=$(eval "$command" && echo) || outputs[$command]="failed: $command"
    fi
    verdict='ok    '
    for part in "${parts[@]}"; do
      if [[ ${outputs[$command]} != *"$part"* || ${outputs[$command]} == "failed: $command" ]]; then
        verdict="FAILS " failed=$((failed + 1)) command+=": its output does not say $part"
        break
      fi
    done
  fi
  rows+="$verdict $name: $command"$'\n'
done < <(grep '^| ' docs/dev/evidence.md | tail -n +2)
printf '\n%s\n' "$rows"
((failed == 0)) || fail "$failed of the claims are not shown; the table above says which"
