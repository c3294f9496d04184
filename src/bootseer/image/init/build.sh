#!/bin/sh
# Makes the program for $1 (x86_64 or aarch64) in the file $2. Those beside this script are of gcc 12.2.0 and binutils 2.40.
set -eu
cc=gcc
[ "$(uname -m)" = "$1" ] || cc=$1-linux-gnu-gcc
"$cc" -Os -Wall -Wextra -Werror -static -nostdlib -ffreestanding -fno-pie -no-pie -fno-stack-protector \
    -fno-asynchronous-unwind-tables -Wl,-s,-z,noexecstack,-z,norelro,-z,max-page-size=65536,-z,noseparate-code,--build-id=none \
    -o "$2" "$(dirname "$0")/init.c"
