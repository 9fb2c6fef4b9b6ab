#!/usr/bin/env bash
# Make the virtual environment: "setup.sh demo" for what the demo needs, "setup.sh test" for everything.
# It says what it will install before it installs it.
set -euo pipefail
cd "$(dirname "$0")/.."

PURPOSE=${1:-test}
PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
case $PURPOSE in
  demo) extras=cli,tui,web ;;
  test) extras=cli,tui,web,prometheus,wandb,tensorboard,otel,transfer-queue,mooncake,bench,trl ;;
  *) echo "setup: the purpose is demo or test, not $PURPOSE" >&2; exit 2 ;;
esac
command -v "$PYTHON" >/dev/null || PYTHON=python3
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: rlplane needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1)" >&2
  exit 3
}

# The copy loop is C, and Mooncake links against the next three. The tests of the page drive a real browser, the
# bench and the alert rules are checked against the real redis-server and promtool, two hosts are made with ip, and
# top is tried in tmux. The demo needs none of them: without a compiler, large copies take a slower way.
SYSTEM_PACKAGES=(
  gcc libc6-dev libibverbs1 librdmacm1 libnuma1 chromium chromium-driver redis-server prometheus iproute2 tmux
)
missing=()
if [[ $PURPOSE == test ]]; then
  for package in "${SYSTEM_PACKAGES[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
fi
can_apt() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

# The requirements of pyproject.toml, one in a line: of the package, of the chosen extras, and of the tests.
requirements() {
  "$PYTHON" - "$@" <<'PY'
import re, sys, tomllib
with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
groups = config["dependency-groups"].values()
table = {"core": config["project"]["dependencies"], "tools": [name for group in groups for name in group]}
table |= config["project"]["optional-dependencies"]
for name in sys.argv[1].split(","):
    for requirement in table[name]:
        if not requirement.startswith("rlplane["):
            print(requirement if sys.argv[2] == "exact" else re.split(r"[<>=~!\[]", requirement)[0])
PY
}
torch=$(grep -E '^torch==' constraints.txt)
names=$(requirements "core,$extras" short | sort -u | paste -sd ' ')
[[ $PURPOSE == demo ]] || names+=" nixl nixl-cu12 verl $(requirements tools short | paste -sd ' ')"

echo "==> this will be installed, by pip, into $VENV and nowhere else, at the versions of constraints.txt:"
fold -s -w 100 <<<"$names" | sed 's/^/      /'
if ((${#missing[@]})) && can_apt; then
  echo "==> and these system packages, by apt-get:"
  fold -s -w 100 <<<"${missing[*]}" | sed 's/^/      /'
elif ((${#missing[@]})); then
  echo "setup: these system packages are missing; tests that need them will be skipped:" >&2
  echo "         ${missing[*]}" >&2
  echo "       install them with: sudo apt-get install ${missing[*]}" >&2
elif [[ $PURPOSE == demo ]]; then
  echo "    No system packages. The tests need more: make test says what, and installs it."
fi

if ((${#missing[@]})) && can_apt; then
  echo "==> apt-get"
  # policy-rc.d keeps Debian from starting redis and prometheus as services.
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
if [[ ! -x $VENV/bin/python ]]; then
  echo "==> $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "==> $torch, by its exact pin first: an open range would take a CUDA build"
pip install --quiet -c constraints.txt pip setuptools
pip install --quiet "$torch"
echo "==> rlplane[$extras]"
if [[ $PURPOSE == demo ]]; then
  pip install --quiet -c constraints.txt -e ".[$extras]"
else
  mapfile -t tools < <(requirements tools exact)
  pip install --quiet -c constraints.txt -e ".[$extras]" "${tools[@]}"
  # NIXL's dependency ranges would replace torch; it runs with the one that is there.
  pip install --quiet --no-deps -c constraints.txt nixl nixl-cu12
  # Of verl, the tests use what talks to TransferQueue, which needs none of what the rest depends on. It goes into a
  # directory of its own, because it brings packages named "tests" and "scripts", which would hide ours.
  verl=$(grep -E '^verl==' constraints.txt)
  [[ -d $VENV/verl/${verl/==/-}.dist-info ]] ||
    pip install --quiet --no-deps --upgrade --target "$VENV/verl" "$verl"
fi
echo "==> ready: $VENV/bin/rlplane --help"
