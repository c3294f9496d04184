#!/bin/sh
# install [OPTIONS of `bootseer node install`] | status | remove: the node service, of the host's systemd, from a pod that
# is privileged and sees the host's processes. It is no process of the pod: what it mounts and serves outlives that.
set -eu
programs=/opt/bootseer-node # of the image, and of the host
unit=/etc/systemd/system/bootseer-node.service
shown=/host$programs   # the host's, here
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

host() { nsenter -t 1 -m -- "$@"; }

served() { # the program of the unit, if there is one
    host sh -c "[ ! -e $unit ] || sed -n 's/^ExecStart=\([^ ]*\).*/\1/p' $unit"
}

forget() { # forget [VERSION]: removes all others, but those that processes still run, as block servers of running pods do
    for old in "$shown"/*; do
        name=${old##*/}
        if [ ! -d "$old" ] || [ "$name" = "${1:-}" ]; then continue; fi
        case $(host sh -c 'ls -l /proc/[0-9]*/exe' 2>/dev/null) in
            *"-> $programs/$name/"*) echo "$programs/$name stays: processes run it" ;;
            *"-> "*) rm -rf "$old" ;;
            *) echo "$programs/$name stays: what processes run cannot be told" ;;
        esac
    done
}

verb=$1
shift
case $verb in
    install)
        version=$(ls "$programs") # the image has one
        if [ ! -e "$shown/$version" ]; then
            rm -rf "$shown/.new"
            cp -a "$programs/$version" "$shown/.new"
            mv "$shown/.new" "$shown/$version"
        fi
        host "$programs/$version/bin/bootseer" node install "$@"
        host systemctl daemon-reload
        host systemctl enable bootseer-node
        host systemctl restart bootseer-node # volumes and mounts stay; the next one adopts them
        forget "$version" ;;
    status)
        host "$(served)" node status ;;
    remove)
        program=$(served)
        if [ -n "$program" ]; then
            host "$program" node drain || echo "it does not serve, so nothing new is mounted"
            host "$program" node uninstall # says what has to go first; the kubelet tries again
            host systemctl stop bootseer-node || :
            host systemctl daemon-reload
        fi
        forget ;;
    *)
        echo "node.sh: no verb $verb; there are install, status and remove" >&2
        exit 64 ;;
esac
