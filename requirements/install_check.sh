#!/usr/bin/env bash
# Does a fresh machine with a plain package index get a working installation? Sets up a copy of this tree in an empty folder
# with pip and uv as they come (no configuration, no extra index, no folder of wheels), imports torch and vLLM, and lets
# a starter policy, trained for seconds, play one sandbox task. Needs 8 GB of disk; the folder is removed at the end.
#
# Usage: requirements/install_check.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d "${TMPDIR:-/var/tmp}/draco-install-check-XXXXXX")
trap 'rm -rf "$folder"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory "$folder"
cd "$folder"

# A machine's certificates and its patience are no package index.
for variable in $(compgen -e | grep -E '^(PIP|UV)_' | grep -vE '^PIP_(CERT|DEFAULT_TIMEOUT)$' || true) PYTHONPATH MAKEFLAGS MAKEOVERRIDES; do
    unset "$variable"
done
export PIP_CONFIG_FILE=/dev/null UV_NO_CONFIG=1

make setup PYTHON="${1:-python3.11}"
du -sh .venv
.venv/bin/python - << 'END'
import torch, vllm, vllm._C

print(f"torch {torch.__version__} and vLLM {vllm.__version__} import")
END
export DRACO_APPWORLD_PYTHON=$folder/.venv-appworld/bin/python LITELLM_LOCAL_MODEL_COST_MAP=True
.venv/bin/draco sandbox build --scenarios 1
.venv/bin/python - << 'END'
from pathlib import Path

from draco_ray.sandbox.starter import StarterSettings, build_starter

build_starter(Path(".cache/starter"), Path(".cache/sandbox"), settings=StarterSettings(variants=4, epochs=4))
END
.venv/bin/draco evaluate --policy starter --split dev --runs 1 data.eval_tasks=1 ray.dashboard=false \
    environment.slots=1 environment.slots_per_worker=1 --out played
.venv/bin/python - << 'END'
from pathlib import Path

from draco_ray.lab.evaluation.results import EvaluationDirectory

evaluation = EvaluationDirectory.open(Path("played"))
((played,),) = evaluation.complete_results().values()
assert played.error is None and played.evaluation.turns > 0, played
print(f"played {played.evaluation.task_id}: {played.evaluation.turns} turns, ended {played.evaluation.ended}")
END
echo "install-check: a fresh installation on a plain package index works"
