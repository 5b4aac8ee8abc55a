#!/bin/bash
# usage: tests/lavapipe.sh DIR
# Unpacks Mesa lavapipe 26, a software Vulkan driver with cooperative matrix, and the glibc it was built for, under DIR.
# Nothing is installed on the system. Then `DIR/run PROGRAM [ARG…]` runs a native program on it.
# Needs Debian bookworm or trixie on x86-64; the packages come from the Debian mirror that apt already uses.
set -euo pipefail
dir=${1:?usage: tests/lavapipe.sh DIR}
dir=$(mkdir -p "$dir" && cd "$dir" && pwd)
[ -x "$dir/run" ] && exit 0
state=$dir/apt keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# An apt of its own: no installed packages, so that every dependency down to libc is fetched.
mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$dir/root"
: > "$state/status"
# shellcheck disable=SC2016  # $(REPO_URI) is for apt-get
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1)
[ -n "$mirror" ] || { echo "tests/lavapipe.sh: apt knows no Debian mirror (run apt-get update first)" >&2; exit 1; }
for suite in trixie trixie-backports; do
    echo "deb [signed-by=$keyring] $mirror $suite main"
done > "$state/sources.list"
apt=(apt-get -qq
    -o Dir::Etc::SourceList="$state/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$state/lists" -o Dir::State::Status="$state/status"
    -o Dir::Cache="$state/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" -t trixie-backports install -y --no-install-recommends --download-only mesa-vulkan-drivers libc-bin > /dev/null
for deb in "$state"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$dir/root" --keep-directory-symlink \
        --exclude=./usr/share/doc --exclude=./usr/share/locale --exclude=./usr/share/man
done
rm -rf "$state"

lib=$dir/root/usr/lib/x86_64-linux-gnu
cat > "$dir/lavapipe26.json" <<J
{ "file_format_version": "1.0.0", "ICD": { "library_path": "$lib/libvulkan_lvp.so", "api_version": "1.4.305" } }
J
# Written last: its presence says that the folder is complete.
cat > "$dir/run.part" <<R
#!/bin/bash
export VK_DRIVER_FILES='$dir/lavapipe26.json' VK_ICD_FILENAMES='$dir/lavapipe26.json' XDG_RUNTIME_DIR="\${XDG_RUNTIME_DIR:-/tmp}"
exec '$lib/ld-linux-x86-64.so.2' --library-path '$lib' "\$@"
R
chmod +x "$dir/run.part"
mv "$dir/run.part" "$dir/run"
