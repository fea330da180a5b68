#!/usr/bin/env bash
# Does requirements/gpu.lock still resolve: are its packages what they themselves ask for, as wheels for a GPU node? Asks uv, which reads
# the packages' metadata and downloads no wheel. Where there is no uv, or its index lacks a file, that is said and nothing is decided.
#
# Usage: requirements/lock_check.sh UV [LOCK]
set -euo pipefail
uv=$1
lock=${2:-$(dirname "$0")/gpu.lock}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
names() { sed -n 's/^\([A-Za-z0-9][^ =]*\)==.*/\1/p' "$1" | sort; }

if ! [ -x "$uv" ]; then
    echo "lock-check: skipped: no uv"
elif "$uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_35 --only-binary :all: --no-annotate \
    --no-header "$lock" -o "$scratch/resolved" 2> "$scratch/said"; then
    missing=$(comm -13 <(names "$lock") <(names "$scratch/resolved") | paste -sd ' ')
    if [ -n "$missing" ]; then
        echo "lock-check: $lock lacks what its packages ask for: $missing; run make lock-gpu" >&2
        exit 1
    fi
    echo "lock-check: $lock resolves, $(names "$lock" | wc -l) packages"
elif grep -q "No solution found" "$scratch/said" && ! grep -Eq "no version of|not found in|network|no wheels" "$scratch/said"; then
    cat "$scratch/said" >&2
    echo "lock-check: $lock does not resolve; run make lock-gpu" >&2
    exit 1
else
    echo "lock-check: skipped: the package index does not answer for it: $(tr -s ' \n' ' ' < "$scratch/said" | head -c 300)"
fi
