#!/usr/bin/env bash
# Runs groups of tests (loom, unit, e2e, differential), loom beside those after it, and ends with one line that adds up
# what the test runners said. Exit status 0 only if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

log=$(mktemp) built=$(mktemp)
beside=() # name, process and output of the group that runs beside the others
trap 'rm -f "$log" "$built" "${beside[@]:2:1}"; [ ${#beside[@]} -eq 0 ] || kill -- "-${beside[1]}" 2>/dev/null' EXIT
status=0
started=$SECONDS

group() {
    local name=$1 before
    before=$(total passed)
    shift
    printf '\n=== %s\n' "$name"
    "$@" 2>&1 | tee -a "$log"
    local result=${PIPESTATUS[0]}
    if [ "$result" -ne 0 ]; then
        status=1
        printf '=== %s FAILED (exit %s)\n' "$name" "$result"
    elif [ "$(total passed)" -eq "$before" ]; then
        status=1
        printf '=== %s FAILED: no test ran\n' "$name"
    fi
}

# beside NAME COMMAND...: a group of which nothing is measured. It takes the CPU time that the groups after it leave (tests
# sleep a lot), and is a session of its own, to be ended as a whole. `joined` waits for it and shows what it said.
beside() {
    local output
    output=$(mktemp)
    setsid chrt --idle 0 "${@:2}" >"$output" 2>&1 &
    beside=("$1" "$!" "$output")
}

joined() {
    [ ${#beside[@]} -gt 0 ] || return 0
    wait "${beside[1]}"
    group "${beside[0]}" sh -c 'cat "$1"; exit "$2"' show "${beside[2]}" "$?"
    rm -f "${beside[2]}"
    beside=()
}

total() { grep -oE "test result: .*" "$log" | grep -oE "[0-9]+ $1" | awk '{n += $1} END {print n + 0}'; }

# Builds the test programs of what cargo selects.
build() {
    printf '\n=== test programs\n'
    if ! cargo test "$@" --locked --no-run --message-format=json-render-diagnostics | python3 -c "$LIST" | sort >"$built"; then
        status=1
        printf '=== test programs FAILED\n'
    fi
}
# One a line: the folder of its package, and the program.
LIST='
import json, os, sys
for artefact in map(json.loads, sys.stdin):
    if artefact.get("executable") and artefact["profile"]["test"]:
        print(os.path.relpath(os.path.dirname(artefact["manifest_path"])), artefact["executable"])
'

# programs FOLDERS [ARGUMENT...]: runs those of packages whose folder matches.
programs() {
    local folder program arguments result=0
    while read -r folder program; do
        [[ $folder =~ $1 ]] || continue
        arguments=("${@:2}")
        [[ ! $program =~ $WAITING ]] || arguments=("${arguments[@]/--test-threads=1/--test-threads=3}")
        printf '\n     Running %s, %s\n' "$folder" "$(basename "$program")"
        (cd "$folder" && exec "$program" "${arguments[@]}") </dev/null || result=$?
    done <"$built"
    return $result
}

# Its tests wait for seconds that pass, each on a host of its own.
WAITING='/policy-[0-9a-f]+$'
E2E='^(crates/e2e|tests/faults)$' DIFFERENTIAL='^tests/differential$'

unit_programs() {
    local others=0
    programs "^($(cut -d' ' -f1 "$built" | sort -u | grep -vE "$E2E|$DIFFERENTIAL" | paste -sd'|'))\$" -q || others=$?
    cargo test "${selection[@]}" --locked --no-fail-fast --doc -q || others=$?
    return $others
}

unit() { group "unit and integration tests" unit_programs; }

loom() {
    # A target directory of its own: the cfg would rebuild everything twice.
    # Link-time optimisation only costs time here; one code generation unit saves more of the models' time than it costs.
    "${1:-group}" "loom models" env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" \
        CARGO_PROFILE_RELEASE_LTO=off \
        cargo test --release --locked --no-fail-fast -q -p fsocket-sync -p fsocket-ring --lib --tests
}

e2e() {
    # One at a time: they measure descriptors and use both cores as it is.
    group "end-to-end tests with real programs" programs "$E2E" --test-threads=1 --nocapture
}

differential() {
    group "random programs, on kernel TCP and on shared memory" programs "$DIFFERENTIAL" --test-threads=1 --nocapture
}

case $(printf '%s\n' "$@" | grep -vx loom | paste -sd' ') in
    "") selection=() ;;
    unit) selection=(--workspace --exclude fsocket-e2e --exclude fsocket-differential --exclude fsocket-faults) ;;
    e2e) selection=(-p fsocket-e2e -p fsocket-faults) ;;
    differential) selection=(-p fsocket-differential) ;;
    *) selection=(--workspace) ;;
esac
# (All at once: for another part of the packages dependencies have other features, and are built again.)
[ ${#selection[@]} -eq 0 ] || build "${selection[@]}"
for name in "$@"; do
    case $name in
        loom) loom "$([ $# -eq 1 ] || echo beside)" ;;
        unit | e2e | differential) "$name" ;;
        *) echo "usage: test.sh [loom] [unit] [e2e] [differential]" >&2; exit 2 ;;
    esac
done
joined

passed=$(total passed) failed=$(total failed) ignored=$(total ignored)
skipped=$(grep -c '^SKIPPED:' "$log")
unasserted=$(grep -c 'PATH NOT ASSERTED' "$log")

printf '\n'
grep -E '^SKIPPED:|^test .* FAILED$' "$log" | sort | uniq -c
[ "$unasserted" -gt 0 ] && printf 'PATH NOT ASSERTED %s times (stock mode)\n' "$unasserted"
if [ "$passed" -eq 0 ]; then status=1; fi
verdict=ok
[ "$status" -eq 0 ] || verdict=FAILED
printf 'fastsocket test result: %s. %s passed; %s failed; %s ignored; %s skipped; finished in %s s\n' \
    "$verdict" "$passed" "$failed" "$ignored" "$skipped" "$((SECONDS - started))"
exit "$status"
