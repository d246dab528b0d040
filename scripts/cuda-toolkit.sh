#!/usr/bin/env bash
# Makes a CUDA compiler available where there is none, from PyPI wheels, inside this checkout (.cuda/, git-ignored).
# Needs python3 with pip, a C compiler and cargo; no GPU and no driver. About 1.2 GB and a minute the first time, and
# well under a second after that. Prints the environment of a CUDA build, so use it as
#
#     eval "$(scripts/cuda-toolkit.sh)" && cargo build --release -p comoe-cli --features cuda
#
# CUDA_COMPUTE_CAP (candle's kernels are built for one GPU generation) is taken from the environment, else from the
# GPU of this machine, else 90. CoMoE's own kernels are built for every generation whatever it says.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$root/.cuda
packages=(
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-nvrtc==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cublas==13.0.2.14 nvidia-curand==10.4.5.25 nvidia-cuda-cccl==13.3.5.0.6
)
# Written last: what is installed. Another list of packages, a moved checkout or a new cudarc start afresh.
cudarc_version=$(awk '/^name = "cudarc"$/ { getline; gsub(/[^0-9.]/, ""); print; exit }' "$root/Cargo.lock")
stamp="$root ${packages[*]} cudarc==$cudarc_version"

fail() {
    echo "cuda-toolkit: $*" >&2
    exit 1
}

install() {
    command -v python3 >/dev/null || fail "python3 is missing; install it (Debian: python3 python3-pip)"
    python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip; install it (Debian: python3-pip)"
    command -v "${CC:-cc}" >/dev/null || fail "no C compiler; install one (Debian: build-essential)"

    echo "cuda-toolkit: installing CUDA 13.0 into $home" >&2
    rm -rf "$home"
    mkdir -p "$home/lib64"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --no-deps --only-binary=:all: --target "$home/wheels" "${packages[@]}" >&2

    local cu=$home/wheels/nvidia/cu13
    [[ -x $cu/bin/nvcc ]] || fail "the wheels hold no nvidia/cu13/bin/nvcc"
    ln -s "$cu/bin" "$cu/include" "$cu/nvvm" "$home/"
    local library name
    for library in "$cu"/lib/*; do
        name=$(basename "$library")
        ln -s "$library" "$home/lib64/$name"
        # The linker looks for the unversioned name.
        [[ $name == *.so.* ]] && ln -sf "$library" "$home/lib64/${name%%.so.*}.so"
    done
    stub
    echo "$stamp" >"$home/stamp"
}

# The driver's library belongs to the driver, so there is none to link against here: a stub with its SONAME and every
# symbol that cudarc may name. At run time the loader takes the driver's own.
stub() {
    local manifest sources
    manifest=$(cd "$root" && cargo metadata --format-version 1 --locked --features cuda | python3 -c '
import json, sys
print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
    sources=$(dirname "$manifest")/src/driver/sys
    grep -rhoE 'fn cu[A-Z][A-Za-z0-9_]*' "$sources" | awk '{ print $2 }' | sort -u |
        awk '{ print "int " $1 "(void) { return 999; }" }' >"$home/libcuda.c"
    [[ $(wc -l <"$home/libcuda.c") -gt 300 ]] || fail "found too few driver functions in $sources"
    "${CC:-cc}" -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$home/lib64/libcuda.so" "$home/libcuda.c"
}

compute_cap() {
    if [[ -n ${CUDA_COMPUTE_CAP:-} ]]; then
        echo "$CUDA_COMPUTE_CAP"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .
    else
        echo 90
    fi
}

[[ -f $home/stamp && $(<"$home/stamp") == "$stamp" ]] || install

export_line() {
    printf 'export %s=%q\n' "$1" "$2"
}
export_line CUDA_HOME "$home"
export_line CUDA_PATH "$home"
export_line CUDA_COMPUTE_CAP "$(compute_cap)"
export_line CUDARC_CUDA_VERSION 13000
# Not twice when the environment is already in force.
case ":$PATH:" in
*":$home/bin:"*) ;;
*) export_line PATH "$home/bin:$PATH" ;;
esac
case ":${LIBRARY_PATH:-}:" in
*":$home/lib64:"*) ;;
*) export_line LIBRARY_PATH "$home/lib64${LIBRARY_PATH:+:$LIBRARY_PATH}" ;;
esac
