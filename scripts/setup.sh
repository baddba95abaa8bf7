#!/usr/bin/env bash
# Make .venv ready: created once, then reused until what it holds, or how, changes.
#
#   bash scripts/setup.sh                     # picks a Python >= 3.10
#   PYTHON=/path/to/python bash scripts/setup.sh
#
# If that Python has torch >= 2.6 already (a CUDA build, say), .venv uses it; otherwise the version
# in scripts/constraints.txt is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

wanted=${PYTHON:-any}
kernels=$(cat dsx/compress/wire/native/*.[ch] | cksum)
has_kernels() { compgen -G "dsx/compress/wire/native/kernels*.so" > /dev/null; }
built() {  # of the C sources; an installation goes without where there is no compiler
    echo "$kernels" > .venv/kernels
    has_kernels || echo "setup: no C compiler has built the native kernels; codecs are slower"
}
fail() { echo "setup: $*" >&2; exit 1; }

find_python() {
    local candidate
    local candidates=(python3 python3.13 python3.12 python3.11 python3.10 python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            # an activated .venv must not be rebuilt from itself
            "$candidate" -c 'import sys; print(
                sys._base_executable if sys.prefix == sys.argv[1] else sys.executable)' "$PWD/.venv"
            return
        fi
    done
    fail "${PYTHON:-no Python found that} is not Python >= 3.10; name one: PYTHON=/path/to/python bash $0"
}

# what is installed hangs on the package's own part of pyproject.toml, not on settings of tools
stamp="$({ sed '/^\[tool\./,$d' pyproject.toml; cat scripts/constraints.txt scripts/setup.sh; } | cksum)"
built_for=$(cat .venv/built_for 2>/dev/null || true)
if [ "$(cat .venv/ready 2>/dev/null)" = "$stamp" ] && .venv/bin/python -c '' 2>/dev/null &&
    { [ "$wanted" = any ] || [ "$wanted" = "$built_for" ]; }; then
    if [ "$(cat .venv/kernels 2>/dev/null)" != "$kernels" ] ||
        { ! has_kernels && command -v gcc clang cc > /dev/null; }; then
        echo "setup: building the C kernels"
        install=(.venv/bin/pip install --quiet --no-deps --editable .)
        "${install[@]}" --no-build-isolation || "${install[@]}" || fail "could not install dsx anew"
        built
    fi
    exit 0
fi

python=$(find_python)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
own_torch=$("$python" - <<'PY' 2>/dev/null || true
import pathlib, torch
if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 6):
    print(torch.__version__, pathlib.Path(torch.__file__).parents[1])
PY
)
echo "setup: creating .venv with Python $version (once; a few minutes)"
rm -rf .venv
"$python" -m venv .venv || fail "cannot create .venv (Debian, Ubuntu: apt install python3-venv)"
options=(--quiet)
if [ -n "$own_torch" ]; then
    echo "setup: using torch ${own_torch/ / from }"
    echo "${own_torch#* }" > ".venv/lib/python$version/site-packages/own_torch.pth"
else
    options+=(--constraint scripts/constraints.txt)
    echo "setup: installing torch"
    .venv/bin/pip install "${options[@]}" torch \
        || fail "could not install torch; to use your own, install it for $python and run this again"
fi
echo "setup: installing dsx with its extras deepspeed, links, megatron, dev"
.venv/bin/pip install "${options[@]}" --editable ".[deepspeed,links,megatron,dev]" \
    || fail "could not install the dependencies named in pyproject.toml"
if [ ! -e .venv/bin/deepspeed ]; then  # the own Python's DeepSpeed, whose command is not of .venv
    printf '#!/bin/sh\nexec "%s/.venv/bin/python" -m deepspeed.launcher.runner "$@"\n' "$PWD" \
        > .venv/bin/deepspeed
    chmod +x .venv/bin/deepspeed
fi
built
echo "$wanted" > .venv/built_for
echo "$stamp" > .venv/ready
echo "setup: .venv is ready"
