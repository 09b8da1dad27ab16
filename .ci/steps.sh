# Functions of .ci/run and .ci/nightly. Source this file; it makes a temporary folder, $WORK, removes it
# at the end, and works on copies of the tree in it.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
WORK=$(mktemp -d "${TMPDIR:-/tmp}/beamjax-ci.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_QUIET=1 PIP_PROGRESS_BAR=off
export PYTHONUNBUFFERED=1 JAX_PLATFORMS=cpu
# Without bytecode, each process would compile the thousands of modules of Beam and JAX again.
unset PYTHONPATH VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

section() { printf '\n===== [%ss] %s =====\n' "$SECONDS" "$*"; }

# Prints the interpreter of a Python version; pyenv has shims on PATH for versions that are not active.
find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python python3; do
        if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" \
            2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    printf 'Python %s is not on this machine\n' "$1" >&2
    return 1
}

# Copies the tree to a folder, without what was built, installed or cached in it.
checkout() {
    mkdir -p "$1"
    tar -c -C "$ROOT" --exclude={.git,'.venv*','*.egg-info',build,dist,__pycache__} \
        --exclude={'.*_cache',.hypothesis,.mutations} . | tar -x -C "$1"
}

# Makes an environment of a Python in a folder and installs into it: `environment FOLDER PYTHON ARGS...`.
environment() {
    local folder=$1 python=$2
    shift 2
    if ! uv --version >/dev/null 2>&1; then  # pyenv has a shim for programs of other versions
        "$python" -m venv "$WORK/uv"
        "$WORK/uv/bin/pip" install uv
        PATH="$WORK/uv/bin:$PATH"
    fi
    uv venv --quiet --python "$python" "$folder"
    uv pip install --quiet --python "$folder/bin/python" "$@"
}

# Runs, in a copy of the tree, the README's line that makes an environment and ends with this text:
# `readme_command PYTHON TEXT`.
readme_command() {
    local line bin="$WORK/readme-bin"
    if ! line=$(grep -E "^python3 -m venv .*$2\$" README.md) || [ "$(wc -l <<<"$line")" != 1 ]; then
        printf 'README.md: found %s, expected one command that ends with %s\n' "'$line'" "$2" >&2
        return 1
    fi
    mkdir -p "$bin"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$1" >"$bin/python3"
    chmod +x "$bin/python3"
    printf '$ %s\n' "$line"
    PATH="$bin:$PATH" bash -euo pipefail -c "$line"
}

# Checks the prose of the tree in this folder by Vale and the word list in docs/vale.
prose() {
    GOBIN="$WORK/bin" go install github.com/vale-cli/vale/v3/cmd/vale@v3.21.0
    "$WORK/bin/vale" --output=line README.md CHANGELOG.md CONTRIBUTING.md CODE_OF_CONDUCT.md SECURITY.md docs benchmarks/README.md
}
