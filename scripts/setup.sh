#!/usr/bin/env bash
# Make the virtual environment with every pinned dependency, and the system libraries that tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
command -v "$PYTHON" >/dev/null || PYTHON=python3
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: rlplane needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1)" >&2
  exit 3
}

# The loop that copies is C; Mooncake links against the next three; the page's tests drive a real browser; the bench
# and the alert rules are checked against the real redis-server and promtool; two hosts are made with ip; top is tried
# in tmux.
SYSTEM_PACKAGES=(
  gcc libc6-dev libibverbs1 librdmacm1 libnuma1 chromium chromium-driver redis-server prometheus iproute2 tmux
)
missing=()
for package in "${SYSTEM_PACKAGES[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "==> system packages: ${missing[*]}"
    # policy-rc.d keeps Debian from starting redis and prometheus as services.
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "setup: these system packages are missing; tests that need them will be skipped:" >&2
    echo "         ${missing[*]}" >&2
    echo "       install them with: sudo apt-get install ${missing[*]}" >&2
  fi
fi

if [[ ! -x $VENV/bin/python ]]; then
  echo "==> $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "==> torch, by its exact pin first: an open range would take a CUDA build"
pip install --quiet -c constraints.txt pip setuptools
pip install --quiet "$(grep -E '^torch==' constraints.txt)"
echo "==> rlplane with every extra, and the tools of the tests"
dev=$("$VENV/bin/python" - <<'PY'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["dependency-groups"]["dev"]))
PY
)
extras=cli,tui,web,prometheus,wandb,tensorboard,otel,transfer-queue,mooncake,bench
mapfile -t dev_packages <<<"$dev"
pip install --quiet -c constraints.txt -e ".[$extras]" "${dev_packages[@]}"
# NIXL's dependency ranges would replace torch; it runs with the one that is there.
pip install --quiet --no-deps -c constraints.txt nixl nixl-cu12
echo "==> ready: $VENV/bin/rlplane --help"
