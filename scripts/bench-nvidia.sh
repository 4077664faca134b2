#!/usr/bin/env bash
# Measures burn-flash-attention and PyTorch's attention kernels beside each other on an NVIDIA GPU.
#
#   cargo build --release --bin attn --features cuda-nvrtc
#   ATTN=target/release/attn PYTHON=.venv/bin/python scripts/bench-nvidia.sh results --grid paper --dtype bf16
#
# The first argument is the folder for results, the rest are options of `attn bench` that choose points.
# Environment: ATTN and PYTHON, the programs; DEVICE, a name that `attn devices` lists (cuda); SAMPLES (20) of
# each point; TIME_LIMIT in seconds, for PyTorch and for attn each (none); KERNELS, those of PyTorch (by point).
#
# Leaves points.csv, peers.csv and peers.txt (PyTorch), attn.csv, attn.txt and attn.svg (with PyTorch's lines),
# and prints the ratios. The exit status is 0 only when both measured all they were asked for.
set -euo pipefail

if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 FOLDER [options of attn bench]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
attn=${ATTN:-$here/../target/release/attn}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
limits=(--samples "${SAMPLES:-20}")
if [ -n "${TIME_LIMIT:-}" ]; then
    limits+=(--time-limit "$TIME_LIMIT")
fi
kernels=()
if [ -n "${KERNELS:-}" ]; then
    kernels+=(--kernels "$KERNELS")
fi
# The same permission for PyTorch.
rounding=()
case " $* " in
*" --f32-precision tf32 "* | *" --f32-precision=tf32 "*) rounding+=(--allow-tf32) ;;
esac
mkdir -p "$out"
status=0
peers=()

"$attn" bench --device "$device" "$@" --list --csv "$out/points.csv" >/dev/null
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv
fi

rm -f "$out/peers.csv"
"$python" "$here/bench_nvidia.py" --points "$out/points.csv" --csv "$out/peers.csv" \
    "${limits[@]}" "${kernels[@]}" "${rounding[@]}" >"$out/peers.txt" || status=$?
if [ -e "$out/peers.csv" ]; then
    peers+=(--peers "$out/peers.csv")
fi
"$attn" bench --device "$device" "$@" "${limits[@]}" --csv "$out/attn.csv" --plot "$out/attn.svg" \
    "${peers[@]}" >"$out/attn.txt" || status=$?

# Without peers there are no ratios: then the table of times.
if [ ${#peers[@]} -gt 0 ]; then
    sed -n '/^Ratios\|^No peer/,$p' "$out/attn.txt"
else
    cat "$out/attn.txt"
fi
echo
echo "all figures are in $out"
exit "$status"
