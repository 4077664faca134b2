#!/usr/bin/env bash
# Installs a Vulkan driver that runs on the processor, for machines without a GPU, and prints the settings
# that make programs use it.
#
# usage: eval "$(scripts/install-software-vulkan.sh)"
#
# The driver is Mesa's lavapipe. It runs the WGSL of the features `wgpu` and `webgpu` as it is; the SPIR-V
# of the feature `vulkan` needs a layer between the two, which this script compiles: shared-memory-layer.c
# says why.
#
# Works on Debian 12, Ubuntu 24.04 and later. Asks for packages with sudo unless it runs as root. Running
# it again changes nothing.
set -euo pipefail

fail() {
    echo "install-software-vulkan: $*" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "needs apt-get (Debian, Ubuntu)"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)

missing=()
for package in gcc libc6-dev libvulkan1 libvulkan-dev mesa-vulkan-drivers vulkan-tools; do
    [ "$(dpkg-query --show --showformat='${db:Status-Abbrev}' "$package" 2>/dev/null)" = "ii " ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    "${as_root[@]}" apt-get update -qq >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi
driver=$(dpkg-query --listfiles mesa-vulkan-drivers | grep '/lvp_icd.*\.json$') ||
    fail "mesa-vulkan-drivers has no lavapipe on this architecture"

source="$(cd "$(dirname "$0")" && pwd)/shared-memory-layer.c"
layers="${XDG_DATA_HOME:-$HOME/.local/share}/burn-flash-attention/vulkan-layers"
library="$layers/libshared_memory_layer.so"
layer=VK_LAYER_BURN_FLASH_ATTENTION_shared_memory
mkdir -p "$layers"
if [ ! -e "$library" ] || [ "$source" -nt "$library" ]; then
    gcc -std=c11 -O2 -Wall -Wextra -shared -fPIC -o "$library" "$source"
fi
cat >"$layers/shared_memory_layer.json" <<MANIFEST
{
    "file_format_version": "1.1.2",
    "layer": {
        "name": "$layer",
        "type": "GLOBAL",
        "library_path": "$library",
        "api_version": "1.3.0",
        "implementation_version": "1",
        "description": "Mends the shared memory of CubeCL's SPIR-V"
    }
}
MANIFEST

# The loader leaves out a driver or a layer it cannot use; this is where that shows.
export VK_DRIVER_FILES=$driver VK_LAYER_PATH=$layers VK_INSTANCE_LAYERS=$layer
summary=$(vulkaninfo --summary 2>/dev/null) || fail "vulkaninfo fails with $driver"
device=$(sed -n 's/^[[:space:]]*deviceName *= //p' <<<"$summary")
[ -n "$device" ] || fail "the Vulkan loader finds no device through $driver"
grep -q "^$layer" <<<"$summary" || fail "the Vulkan loader does not find the layer in $layers"

echo "# $device"
printf 'export %s=%q\n' VK_DRIVER_FILES "$driver" VK_LAYER_PATH "$layers" VK_INSTANCE_LAYERS "$layer"
