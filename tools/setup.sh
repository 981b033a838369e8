# tools/serve and tools/test source this file. It makes .venv if that is missing or out of date.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, …) are passed through. If torch's default
# build is the CUDA one and you want the CPU build, see the README.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Many containers tell Python to keep no bytecode. Every process would then compile torch anew, which
# takes longer than everything else that a server does until it is ready.
unset PYTHONDONTWRITEBYTECODE

find_python() {
    local candidate
    for candidate in "${TRIOLET_PYTHON:-}" python3.11 python3 python3.12 python3.13; do
        [ -n "$candidate" ] || continue
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "triolet: needs Python 3.11 or newer with venv; set TRIOLET_PYTHON to it" >&2
    return 1
}

# setup EXTRAS: install the project with EXTRAS ("[openai]" or "[dev]", which has all that the other
# has) in the versions of constraints.txt.
setup() {
    local extras=$1 venv="$root/.venv" python stamp
    stamp=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
    # an environment with the development tools can serve, too
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.triolet-dev" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if [ "$extras" != "[dev]" ] && [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.triolet-serve" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    python=$(find_python) || return 1
    echo "setting up .venv (once; torch is a large download) …" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return 1
    # --no-compile: Python compiles a module when it is first imported; compiling all of them, of
    # which most are never imported, takes a minute.
    local install=("$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile)
    # torch comes first and alone, in its exact version, so that no other package decides its build
    "${install[@]}" "$(grep '^torch==' "$root/constraints.txt")" || return 1
    "${install[@]}" -c "$root/constraints.txt" -e "$root$extras" || return 1
    if [ "$extras" = "[dev]" ]; then echo "$stamp" >"$venv/.triolet-dev"; else echo "$stamp" >"$venv/.triolet-serve"; fi
}
