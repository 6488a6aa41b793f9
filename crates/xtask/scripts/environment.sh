# Sourced by the other scripts: the root of the repository, and cargo as a user starts it. The
# variables that cargo sets for this package would make it build other packages again, for minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
for name in $(compgen -e); do
  [[ $name != CARGO_PKG_* && $name != CARGO_MANIFEST_* ]] || unset "$name"
done
fail() { echo "error: $*" >&2; exit 1; }
