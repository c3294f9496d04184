# Write start-up events from a POSIX shell (dash, bash, busybox sh); no Python, usually one fork (date) per event.
#
#   . emit.sh
#   bootseer_span env installer=pip -- pip install -r requirements.txt    # one span around a command; its exit code
#   bootseer_begin image ref="$ref"; id=$BOOTSEER_ID; ...; bootseer_end "$id" bytes=123
#   bootseer_annotate "$id" outcome=cached
#
# Format: docs/internals/events.md. Nothing happens unless BOOTSEER_EVENTS names the events file. bootseer_begin, _end and
# _annotate return 0 and print nothing, whatever happens, also under set -eu. Names that start with _bs_ belong to this file.

# bootseer_begin STAGE [NAME=VALUE ...]: sets BOOTSEER_ID to the new span's id, or to "" when events go nowhere.
bootseer_begin() {
    BOOTSEER_ID=
    [ -n "${BOOTSEER_EVENTS-}" ] || return 0
    _bs_a= _bs_b= _bs_c= _bs_d= _bs_e=
    { IFS=- read -r _bs_a _bs_b _bs_c _bs_d _bs_e </proc/sys/kernel/random/uuid; } 2>/dev/null || return 0
    BOOTSEER_ID=$_bs_d$_bs_e
    _bs_stage=${1-}
    [ $# -eq 0 ] || shift
    case $_bs_stage-${WORLD_SIZE-} in
    first_step- | first_step-*[!0-9]*) ;;
    first_step-*) set -- world="$WORLD_SIZE" "$@" ;;
    esac
    _bs_write begin "$BOOTSEER_ID" "$_bs_stage" "$@"
    return 0
}

# bootseer_end ID [NAME=VALUE ...]
bootseer_end() {
    [ -n "${BOOTSEER_EVENTS-}" ] && [ -n "${1-}" ] || return 0
    _bs_id=$1
    shift
    _bs_write end "$_bs_id" "" "$@"
    return 0
}

# bootseer_annotate ID NAME=VALUE ...
bootseer_annotate() {
    [ -n "${BOOTSEER_EVENTS-}" ] && [ -n "${1-}" ] || return 0
    _bs_id=$1
    shift
    _bs_write note "$_bs_id" "" "$@"
    return 0
}

# bootseer_span STAGE [NAME=VALUE ...] -- COMMAND [ARG ...]: returns what COMMAND returns.
bootseer_span() {
    _bs_n=0
    for _bs_v in "$@"; do
        [ "$_bs_v" = -- ] && break
        _bs_n=$((_bs_n + 1))
    done
    if [ "$_bs_n" -ge $(($# - 1)) ]; then
        echo "bootseer_span: usage: bootseer_span STAGE [NAME=VALUE ...] -- COMMAND [ARG ...]" >&2
        return 64
    fi
    _bs_i=0
    BOOTSEER_ID=
    if [ -n "${BOOTSEER_EVENTS-}" ]; then
        _bs_begin_first "$_bs_n" "$@"
    fi
    while [ "$_bs_i" -le "$_bs_n" ]; do
        shift
        _bs_i=$((_bs_i + 1))
    done
    _bs_run "$BOOTSEER_ID" "${BOOTSEER_SPAN-}" "$@"
}

# Positional parameters are the only variables that POSIX makes local, so spans inside spans keep their ids there.
_bs_run() {
    if [ -n "$1" ]; then
        BOOTSEER_SPAN=$1
        export BOOTSEER_SPAN
    fi
    _bs_call "$@" && _bs_rc=0 || _bs_rc=$?
    set -- "$1" "$2" "$_bs_rc"
    if [ -n "$1" ]; then
        if [ -n "$2" ]; then BOOTSEER_SPAN=$2; else unset BOOTSEER_SPAN; fi
        bootseer_end "$1" exit_code="$3"
    fi
    return "$3"
}

_bs_call() {
    shift 2
    "$@"
}

# The first N of the arguments (stage and attributes) as a begin.
_bs_begin_first() {
    _bs_n=$1
    shift
    _bs_i=0
    _bs_total=$#
    for _bs_v in "$@"; do
        _bs_i=$((_bs_i + 1))
        [ "$_bs_i" -gt "$_bs_n" ] || set -- "$@" "$_bs_v"
    done
    shift "$_bs_total"
    _bs_i=0
    bootseer_begin "$@"
}

# Sets _bs_q to the JSON string of $1, cut to about $2 characters.
_bs_quote() {
    _bs_q=$1
    [ ${#_bs_q} -le "$2" ] || _bs_q=$(printf "%.$2s" "$_bs_q")
    case $_bs_q in
    *[[:cntrl:]]*) _bs_q=$(printf '%s' "$_bs_q" | tr '\000-\037\177' ' ') ;;
    esac
    case $_bs_q in
    # a dollar and a backquote, too: no shell that sources the file finds anything to expand
    *[\\\"\$\`]*) _bs_q=$(printf '%s' "$_bs_q" | sed 's/[\\"]/\\&/g; s/\$/\\u0024/g; s/`/\\u0060/g') ;;
    esac
    _bs_q="\"$_bs_q\""
}

# Sets _bs_q to the JSON value of attribute $1 with text $2.
_bs_value() {
    case $1 in
    *[Pp][Aa][Ss][Ss][Ww]* | *[Ss][Ee][Cc][Rr][Ee][Tt]* | *[Tt][Oo][Kk][Ee][Nn]* | *[Cc][Rr][Ee][Dd][Ee][Nn][Tt][Ii][Aa][Ll]* | \
        *[Aa][Pp][Ii][Kk][Ee][Yy]* | *[Aa][Pp][Ii]_[Kk][Ee][Yy]* | *[Aa][Cc][Cc][Ee][Ss][Ss]_[Kk][Ee][Yy]* | \
        *[Pp][Rr][Ii][Vv][Aa][Tt][Ee]_[Kk][Ee][Yy]* | *[Aa][Uu][Tt][Hh][Oo][Rr][Ii][Zz]*)
        _bs_q='"[redacted]"'
        return 0
        ;;
    esac
    case $2 in
    # Coarser than the Python emitter on purpose: the whole value goes.
    *://*@* | *[Pp][Aa][Ss][Ss][Ww]*=* | *[Ss][Ee][Cc][Rr][Ee][Tt]*=* | *[Tt][Oo][Kk][Ee][Nn]*=* | *[Ss][Ii][Gg][Nn][Aa][Tt][Uu][Rr][Ee]=* | \
        *[?\&][Ss][Ii][Gg]=* | *[?\&][Kk][Ee][Yy]=* | *[Kk][Ee][Yy]=* | *[Bb][Ee][Aa][Rr][Ee][Rr]\ *)
        _bs_h=${2#*://}
        _bs_h=${_bs_h%%/*}
        case $2 in
        *=* | *[Bb][Ee][Aa][Rr][Ee][Rr]\ *) _bs_q='"[redacted]"' ;;
        *) case $_bs_h in *@*) _bs_q='"[redacted]"' ;; *) _bs_quote "$2" 200 ;; esac ;;
        esac
        return 0
        ;;
    0 | [1-9] | [1-9][0-9]*)
        case $2 in
        *[!0-9]*) ;;
        *)
            if [ ${#2} -le 18 ]; then
                _bs_q=$2
                return 0
            fi
            ;;
        esac
        ;;
    esac
    _bs_quote "$2" 200
}

# Sets _bs_q to $1 as a number, or to 0.
_bs_int() {
    case $1 in
    '' | *[!0-9]*) _bs_q=0 ;;
    *)
        _bs_q=$1
        while case $_bs_q in 0?*) true ;; *) false ;; esac do _bs_q=${_bs_q#0}; done
        ;;
    esac
}

# KIND ID STAGE [NAME=VALUE ...]
_bs_write() {
    _bs_up= _bs_frac= _bs_rest= _bs_boot=
    { IFS='. ' read -r _bs_up _bs_frac _bs_rest </proc/uptime; } 2>/dev/null || :
    { read -r _bs_boot </proc/sys/kernel/random/boot_id; } 2>/dev/null || :
    _bs_wall=$(date +%s%N 2>/dev/null) || _bs_wall=
    case $_bs_wall in
    '' | *[!0-9]*) _bs_wall=$(date +%s 2>/dev/null)000000000 ;; # busybox's date may know no nanoseconds
    esac
    _bs_node=${BOOTSEER_NODE-}
    if [ -z "$_bs_node" ]; then
        { read -r _bs_node </proc/sys/kernel/hostname; } 2>/dev/null || _bs_node=unknown
    fi
    _bs_quote "$2" 128
    _bs_line="{\"bootseer\":2,\"ev\":\"$1\",\"span\":$_bs_q"
    if [ "$1" = begin ]; then
        if [ -n "${BOOTSEER_SPAN-}" ]; then
            _bs_quote "$BOOTSEER_SPAN" 128
            _bs_line="$_bs_line,\"parent\":$_bs_q"
        fi
        _bs_quote "$3" 128
        _bs_line="$_bs_line,\"stage\":$_bs_q"
    fi
    _bs_quote "${BOOTSEER_JOB-}" 128
    _bs_line="$_bs_line,\"job\":$_bs_q"
    _bs_quote "${BOOTSEER_ATTEMPT:-0}" 128
    _bs_line="$_bs_line,\"attempt\":$_bs_q"
    _bs_int "${BOOTSEER_CYCLE-}"
    _bs_cycle=$_bs_q
    _bs_int "${NVRX_CYCLE:-${TORCHELASTIC_RESTART_COUNT-}}"
    _bs_line="$_bs_line,\"cycle\":$((_bs_cycle + _bs_q))"
    _bs_quote "$_bs_node" 128
    _bs_line="$_bs_line,\"node\":$_bs_q"
    _bs_rank=${BOOTSEER_RANK-${RANK-}}
    case $_bs_rank in
    '' | *[!0-9]*) ;;
    *)
        _bs_int "$_bs_rank"
        _bs_line="$_bs_line,\"rank\":$_bs_q"
        ;;
    esac
    _bs_int "${BOOTSEER_GPUS-}"
    _bs_line="$_bs_line,\"gpus\":$_bs_q,\"wall\":$_bs_wall"
    case $_bs_up$_bs_frac in
    '' | *[!0-9]*) ;;
    *)
        _bs_int "$_bs_up${_bs_frac}0000000" # hundredths of a second
        _bs_line="$_bs_line,\"mono\":$_bs_q"
        [ -z "$_bs_boot" ] || _bs_line="$_bs_line,\"boot\":\"$_bs_boot\",\"res\":10000000"
        ;;
    esac
    _bs_line="$_bs_line,\"pid\":$$"
    [ "${_bs_lost:-0}" = 0 ] || _bs_line="$_bs_line,\"lost\":$_bs_lost"
    shift 3
    _bs_attrs= _bs_cut=0
    for _bs_v in "$@"; do
        case $_bs_v in
        [!=]*=*)
            _bs_quote "${_bs_v%%=*}" 64
            _bs_name=$_bs_q
            _bs_value "${_bs_v%%=*}" "${_bs_v#*=}"
            # 600 characters: at most 2,400 bytes of UTF-8, whatever the shell counts
            if [ $((${#_bs_attrs} + ${#_bs_name} + ${#_bs_q})) -lt 600 ]; then
                _bs_attrs="$_bs_attrs${_bs_attrs:+,}$_bs_name:$_bs_q"
            else
                _bs_cut=$((_bs_cut + 1))
            fi
            ;;
        *) _bs_cut=$((_bs_cut + 1)) ;;
        esac
    done
    [ -z "$_bs_attrs" ] || _bs_line="$_bs_line,\"attrs\":{$_bs_attrs}"
    [ "$_bs_cut" = 0 ] || _bs_line="$_bs_line,\"cut\":$_bs_cut"
    # A shell cannot open without following links, so look first; emit.py asks what it has opened.
    if [ ! -L "$BOOTSEER_EVENTS" ] && { [ -f "$BOOTSEER_EVENTS" ] || [ ! -e "$BOOTSEER_EVENTS" ]; } &&
        { printf '%s}\n' "$_bs_line" >>"$BOOTSEER_EVENTS"; } 2>/dev/null; then
        _bs_lost=0
    else
        _bs_lost=$((${_bs_lost:-0} + 1))
    fi
}
