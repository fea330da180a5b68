#!/usr/bin/env bash
# Everything a release takes, short of the upload: build wheel and source distribution, check their metadata, install each
# in an empty environment of every Python that is supported and here, and use it from another folder (minutes).
set -euo pipefail
root=$(pwd) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build twine ${PIP_ARGS:-}
git ls-files -z | sort -zu | tar --null --files-from - --create | tar --extract --directory "$work" --one-top-level=source
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" > "$work/build.log" || { tail -20 "$work/build.log"; exit 1; }
"$work/build/bin/twine" check --strict "$work"/dist/*
links=$("$work/build/bin/python" - "$work" <<'PYTHON'
import pathlib, re, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1], "dist").glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
print(*sorted({link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith(("http://", "https://"))}))
PYTHON
)
[ -z "$links" ] || { echo "the index cannot follow these links of the README: $links"; exit 1; }
checked=0
for version in 3.11 3.12 3.13; do
    python=$(command -v "python$version" || true)
    if [ -z "$python" ] || ! "$python" --version > /dev/null 2>&1; then
        echo "Python $version: not here, not checked"
        continue
    fi
    for package in "$work"/dist/*; do
        environment="$work/$version-${package##*.}"
        "$python" -m venv "$environment"
        "$environment/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} "$package"
        cp -r "$root/examples/traces" "$work/traces"
        (
            cd "$work"
            "$environment/bin/python" -c "import draco_ray; print(draco_ray.__file__, draco_ray.__version__)"
            "$environment/bin/draco" judge traces --judge rules --out "$environment/judged" > /dev/null
        )
        rm -rf "$work/traces"
        echo "Python $version: ${package##*/} installed and used"
        checked=$((checked + 1))
    done
done
[ "$checked" -gt 0 ]
echo "release-check: passed; dev/RELEASE.md says what a person does next"
