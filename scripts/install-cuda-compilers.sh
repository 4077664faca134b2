#!/usr/bin/env bash
# Installs NVIDIA's compilers (NVRTC, ptxas, nvdisasm) from PyPI into a virtual environment of their own,
# for machines without a GPU, and prints the settings that the test `machine_code` reads.
#
# usage: eval "$(scripts/install-cuda-compilers.sh)"
#        cargo test -p kernels-cubecl --features machine-code --test machine_code -- --nocapture
#
# Needs python3 with venv, on x86-64 or 64-bit ARM Linux. Running it again changes nothing.
set -euo pipefail

fail() {
    echo "install-cuda-compilers: $*" >&2
    exit 1
}

# The assembler reads PTX of its own release or older, the disassembler any: only the rest move together.
packages=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-cuda-nvrtc==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-crt==13.0.88
    nvidia-cuda-cccl==13.0.85
    nvidia-cuda-nvdisasm==13.5.37
)
home="${XDG_DATA_HOME:-$HOME/.local/share}/burn-flash-attention/cuda-compilers-13.0"

if [ ! -e "$home/complete" ]; then
    command -v python3 >/dev/null || fail "needs python3"
    python3 -m venv "$home" >&2 || fail "needs python3's venv (Debian, Ubuntu: python3-venv)"
    "$home/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2
    touch "$home/complete"
fi

toolkit=$(echo "$home"/lib/python3*/site-packages/nvidia/cu13)
library=$(echo "$toolkit"/lib/libnvrtc.so.*)
for file in "$library" "$toolkit/bin/ptxas" "$toolkit/bin/nvdisasm" "$toolkit/include/cuda_runtime.h" "$toolkit/include/cccl"; do
    [ -e "$file" ] || fail "$file is missing: remove $home and run this again"
done

"$toolkit/bin/ptxas" --version | sed -n 's/^Cuda compilation tools, /# CUDA /p'
printf 'export %s=%q\n' \
    NVRTC_LIBRARY "$library" \
    CUDA_INCLUDE "$toolkit/include:$toolkit/include/cccl" \
    PTXAS "$toolkit/bin/ptxas" \
    NVDISASM "$toolkit/bin/nvdisasm"
