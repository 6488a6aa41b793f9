#!/usr/bin/env bash
# ./run.sh [FOLDER]: runs all that this kit holds, in eight minutes, and writes FOLDER/report.md
# (`report` by default). Needs a GPU's driver, no Rust and no network; for CUDA also NVRTC and
# CUDA's headers, of an installation or of PyTorch's wheels, and Python with PyTorch to compare with.
set -uo pipefail
cd "$(dirname "$0")"
out=${1:-report}
mkdir -p "$out"
# A software driver needs more than eight minutes: KIT_SECONDS.
all=${KIT_SECONDS:-480}
end=$((SECONDS + all))
export RUST_BACKTRACE=0 XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/tmp}

# The folders of NVIDIA's wheels, which PyTorch brings: CUDA 13 has one, CUDA 12 one a part.
wheels=$(python3 -c 'import nvidia; print("\n".join(nvidia.__path__))' 2>/dev/null)
if [[ -n $wheels ]]; then
  for include in "$wheels"/cu13 "$wheels"/cuda_runtime; do
    [[ -n ${CUDA_PATH:-} || ! -f $include/include/cuda_runtime.h ]] || export CUDA_PATH=$include
  done
  for lib in "$wheels"/*/lib; do LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$lib; done
  export LD_LIBRARY_PATH
fi

# part NAME SECONDS COMMAND...: runs it within its time and what is left of all; a row of the report.
rows=()
part() {
  local name=$1 limit=$(($2 * all / 480)) started=$SECONDS rc=0 left=$((end - SECONDS))
  shift 2
  ((left < limit)) && limit=$left
  if ((limit < 20)); then rows+=("| $name | no time left | 0 |"); return; fi
  echo "== $name"
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || rc=$?
  local outcome="exit status $rc"
  case $rc in 0) outcome=passed ;; 124 | 137) outcome="ended after $limit s" ;; esac
  rows+=("| $name | $outcome | $((SECONDS - started)) |")
  tail -1 "$out/$name.log"
}
part accept 180 ./mrope accept --device gpu --minutes 3 --out "$out/accept"
part gpu 150 ./gpu --test-threads=1
part gpu_memory 60 ./gpu_memory
part torch 130 python3 torch_layer.py "$out/accept/report.json" --seconds 90
# The next runtime that finds a GPU, often the same one by Vulkan.
second=$(./mrope gradcheck --device gpu:1 --filter half/single/bsnd 2>&1)
if [[ $second != *'gpu:1 is not there'* ]]; then
  part accept-1 120 ./mrope accept --device gpu:1 --minutes 2 --out "$out/accept-1"
fi

# Without names of hosts, users and folders.
clean() { sed -e "s|$PWD|.|g" -e "s|${HOME:-/root}|~|g" -e "s|$(uname -n)|host|g"; }
{
  echo "# Report of the GPU kit, $(cat version)"
  echo
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
    echo "no nvidia-smi"
  printf '\n| part | outcome | seconds |\n|---|---|---:|\n'
  printf '%s\n' "${rows[@]}"
  for report in accept accept-1; do
    [[ ! -f $out/$report/report.md ]] || { echo; sed 's/^#/##/' "$out/$report/report.md"; }
  done
  printf '\n## PyTorch\n\n'
  grep -v '^[EIW][0-9]' "$out/torch.log"
  for suite in gpu gpu_memory; do
    printf '\n## Suite %s\n\n```text\n' "$suite"
    grep -E '^test |panicked|^error|^skipped' -A2 "$out/$suite.log" | grep -v '^--' | head -120
    printf '```\n'
  done
} | clean >"$out/report.md"
echo "$out/report.md"
