#!/usr/bin/env bash
# Checks vram-pager on a machine with a CUDA card and no Rust: one short table, and JSON beside it.
#
#   tests/gpu-check.sh --collect FOLDER   where Rust is: gathers what is needed in FOLDER
#   FOLDER/gpu-check.sh [--out DIR]       where the card is
#
# --collect builds nothing. First, in a checkout:
#
#   tests/fetch-models.sh
#   cargo build --release --bins --examples && cargo test --release --no-run && cargo bench --no-run
#
# It takes target/release/vram-pager, examples/card_bench and examples/embed, the newest of
# deps/device_contract-*, deps/embedding-* and deps/page_fault-*, and tests/models. The folder goes to the
# other machine as it is (tar). Both need Linux on x86-64, the same C library or a newer one there.
#
#   VRAM_PAGER_CHECK_CAP    the capped card's size in MiB   [default 2048]
#   VRAM_PAGER_CHECK_BYTES  bytes of the copies             [default 256MiB]
#
# Ends with 0 if every check passed, 1 if one failed, 2 if there is nothing to check with.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

fail() { echo "gpu-check: $*" >&2; exit 2; }

newest() { # the newest executable whose name begins like that
    local file name found=""
    for file in "$1"-*; do
        name="${file##*/}"
        # What cargo writes beside it ends with a suffix.
        [ -x "$file" ] && [ "${name##*.}" = "$name" ] && { [ -z "$found" ] || [ "$file" -nt "$found" ]; } && found="$file"
    done
    echo "$found"
}

collect() {
    local to="$1" built="$here/../target/release" name file
    mkdir -p "$to"
    for name in vram-pager examples/card_bench examples/embed; do
        [ -x "$built/$name" ] || fail "there is no $built/$name: build it first, see the head of this script"
        cp "$built/$name" "$to/"
    done
    for name in device_contract embedding page_fault; do
        file="$(newest "$built/deps/$name")"
        [ -n "$file" ] || fail "there is no $built/deps/$name-*: build it first, see the head of this script"
        cp "$file" "$to/$name"
    done
    [ -d "$here/models/all-MiniLM-L6-v2" ] || fail "run tests/fetch-models.sh first"
    mkdir -p "$to/models"
    cp -r "$here/models/all-MiniLM-L6-v2" "$to/models/"
    cp "${BASH_SOURCE[0]}" "$to/gpu-check.sh"
    echo "collected in $to: $(du -sh "$to" | cut -f1)"
}

out="."
case "${1:-}" in
--collect) [ $# -eq 2 ] || fail "usage: gpu-check.sh --collect FOLDER"; collect "$2"; exit 0 ;;
--out) [ $# -eq 2 ] || fail "usage: gpu-check.sh --out DIR"; out="$2" ;;
"") ;;
*) fail "usage: gpu-check.sh [--collect FOLDER | --out DIR]" ;;
esac

for name in vram-pager card_bench embed device_contract page_fault; do
    [ -x "$here/$name" ] || fail "there is no $here/$name: run --collect where Rust is"
done
mkdir -p "$out"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cap="${VRAM_PAGER_CHECK_CAP:-2048}"
began=$SECONDS
failed=0
rows=""
json=""

row() { printf '%-44s %-8s %s\n' "$1" "$2" "$3"; rows="$rows,{\"check\":\"$1\",\"answer\":\"$2\",\"figures\":\"$3\"}"; }

# check NAME SECONDS COMMAND...: its standard output goes to $work/NAME
check() {
    local name="$1" limit="$2"
    shift 2
    timeout "$limit" "$@" >"$work/$name" 2>"$work/$name.errors"
    local code=$?
    [ $code -eq 0 ] || { failed=1; tail -n 5 "$work/$name.errors" "$work/$name" >&2; }
    return $code
}

field() { # the last number or word of a field in a JSON file
    grep -o "\"$2\": *[^,}]*" "$1" | tail -n 1 | sed 's/^[^:]*: *//; s/"//g'
}

answer() { if [ "$1" -eq 0 ]; then echo ok; else echo FAILED; fi; }

check devices 20 "$here/vram-pager" devices --json
grep -q '"kind":"cuda","usable":true' "$work/devices" || { "$here/vram-pager" devices >&2; fail "no usable card is here"; }
json="\"devices\":$(cat "$work/devices")"

printf '%-44s %-8s %s\n' check answer figures
VRAM_PAGER_TEST_DEVICE=card check contract 90 "$here/device_contract" --test-threads=1 cuda_card_over_the_standin
row "device contract" "$(answer $?)" "$(grep -o '[0-9]* passed; [0-9]* failed' "$work/contract" | tail -n 1)"

check embedding 60 "$here/embed" --model "$here/models/all-MiniLM-L6-v2" --device "cuda:0,cap=24MiB,page=2MiB" \
    --passes 3 --json "That is a happy person"
code=$?
# The first numbers of the published model's answer, to five places.
found="$(grep -o '"embedding":\[[^]]*' "$work/embedding" | sed 's/.*\[//' | cut -d, -f1-4)"
awk -v found="$found" 'BEGIN { split("-0.033877,0.091942,0.048701,-0.034884", want, ","); n = split(found, got, ",")
    for (i = 1; i <= 4; i++) { d = got[i] - want[i]; if (n < 4 || d > 1e-5 || d < -1e-5) exit 1 } }' || { code=1; failed=1; }
row "embedding on 24 MiB against its reference" "$(answer $code)" "$found"

check bench 60 "$here/card_bench" --bytes "${VRAM_PAGER_CHECK_BYTES:-256MiB}"
code=$?
bench() { field "$work/bench" "$1"; }
[ $code -ne 0 ] || json="$json,\"card\":$(cat "$work/bench")"
row "copy to the card, page-locked (its peak)" "$(answer $code)" "$(bench locked_to_card_gb_s) GB/s"
row "  in pieces of 4 MiB" "$(answer $code)" "$(bench locked_pieces_to_card_gb_s) GB/s"
row "  from ordinary memory" "$(answer $code)" "$(bench pageable_to_card_gb_s) GB/s"
row "copy to the host" "$(answer $code)" "$(bench card_to_locked_gb_s) GB/s"
row "page-locking" "$(answer $code)" "$(bench page_lock_gb_s) GB/s"
row "create, map, set access, unmap, release" "$(answer $code)" \
    "$(bench create_frame_us), $(bench map_us), $(bench set_access_us), $(bench unmap_us), $(bench release_frame_us) us"
row "record and query an event" "$(answer $code)" "$(bench record_us), $(bench query_us) us"

# A model 1.5 times the capped card. FLUX.1-dev has 22,700 MiB at scale 1, and bytes go with its square.
scale="$(awk -v cap="$cap" 'BEGIN { printf "%.4f", sqrt(1.5 * cap / 22700) }')"
check synth 90 "$here/vram-pager" synth --like flux1-dev --scale "$scale" --out "$work/model.safetensors"
check oversubscribed 120 "$here/vram-pager" run "$work/model.safetensors" --device "cuda:0,cap=${cap}MiB" \
    --passes 3 --verify --json
code=$?
wrong="$(field "$work/oversubscribed" mismatches)"
[ "$wrong" = 0 ] || { code=1; failed=1; }
[ $code -ne 0 ] || json="$json,\"oversubscribed\":$(cat "$work/oversubscribed")"
row "model 1.5x a card of $cap MiB, every byte checked" "$(answer $code)" \
    "$(field "$work/oversubscribed" verified_units) units by the $(field "$work/oversubscribed" verified_by), ${wrong:-?} wrong"
check streaming 60 "$here/vram-pager" run "$work/model.safetensors" --device "cuda:0,cap=${cap}MiB" --passes 4 --json
code=$?
[ $code -ne 0 ] || json="$json,\"streaming\":$(cat "$work/streaming")"
rate="$(awk -v bytes="$(field "$work/streaming" h2d_bytes)" -v ms="$(field "$work/streaming" wall_ms)" \
    'BEGIN { if (ms > 0) printf "%.2f", bytes / ms / 1e6 }')"
row "  streaming, last pass" "$(answer $code)" \
    "${rate:-?} GB/s, $(awk -v rate="${rate:-0}" -v peak="$(bench locked_to_card_gb_s)" 'BEGIN { if (peak > 0) printf "%.0f", 100 * rate / peak }') % of the card's peak"

link="$(awk -v rate="$(field "$work/streaming" link_bytes_per_second)" 'BEGIN { if (rate > 0) printf "%.2f", rate / 1e9 }')"
row "  the link, as its copies measured it" "$(answer $([ -n "$link" ]; echo $?))" \
    "${link:-?} GB/s, $(awk -v rate="${link:-0}" -v peak="$(bench locked_to_card_gb_s)" 'BEGIN { if (peak > 0) printf "%.0f", 100 * rate / peak }') % of the card's peak"

check page_fault 150 "$here/page_fault" --bench
row "page-fault bench" "$(answer $?)" "$(grep -c . "$work/page_fault") lines in page_fault.txt"
cp "$work/page_fault" "$out/page_fault.txt" 2>/dev/null

printf '{%s,"rows":[%s],"seconds":%s,"passed":%s}\n' "$json" "${rows#,}" "$((SECONDS - began))" \
    "$([ $failed -eq 0 ] && echo true || echo false)" >"$out/gpu-check.json"
echo "$out/gpu-check.json written, $((SECONDS - began)) s"
exit $failed
