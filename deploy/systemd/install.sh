#!/usr/bin/env bash
# Installs or removes one of Quartet's services on this host. Run it as root, from a checkout.
#
#   install.sh SERVICE                     user, environment, configuration, unit; running it again upgrades
#   install.sh --check SERVICE             only its dry run, as the unit makes it: user, folder, variables, options
#   install.sh --uninstall SERVICE         unit, environment; keeps configuration, data and user
#   install.sh --uninstall --purge SERVICE and configuration, data and user
#
# SERVICE: broker, reward, rollout, trainer, environment.  Options: --no-start (do not enable and start it), --python PATH (3.11 or 3.12),
# --gpu or --cpu (rollout, trainer: packages for CUDA, the default if nvidia-smi lists a GPU, or for the CPU).
# It creates /opt/quartet/SERVICE (a Python environment with pinned packages), /etc/quartet/SERVICE.{toml,env} (existing
# ones are kept), the system user quartet-SERVICE, /etc/systemd/system/quartet-SERVICE.service.
set -euo pipefail
umask 022  # root may have 077, with which the service's user could not read its environment

readonly UV_VERSION=0.13.8
readonly LEAST_DRIVER=580.65.06
readonly HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly CHECKOUT="$(cd "$HERE/../.." && pwd)"
readonly PREFIX=/opt/quartet
readonly CONFIGURATION=/etc/quartet
readonly UNITS=/etc/systemd/system

fail() { echo "install.sh: $*" >&2; exit 2; }
say() { echo "install.sh: $*"; }

usage() { sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# Whether systemd runs this host. Without it, as in a container build, the service is installed but not started.
has_systemd() { [[ -d /run/systemd/system ]]; }

make_user() {
    local user="quartet-$1"
    if ! getent passwd "$user" >/dev/null; then
        useradd --system --user-group --home-dir "/var/lib/$user" --no-create-home --shell /usr/sbin/nologin "$user"
        say "made the user $user"
    fi
}

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

# The host's own first: the service's user cannot run one in another user's home folder.
find_python() {
    local candidate
    for candidate in /usr/bin/python3.11 /usr/bin/python3.12 /usr/local/bin/python3.11 /usr/local/bin/python3.12 python3; do
        if suits "$candidate"; then echo "$candidate"; return; fi
    done
}

check_python() {
    suits "$1" || fail "${1:-python3} is not Python 3.11 or 3.12, for which the packages are pinned; name one with --python"
    # Not setpriv, which executes the program with root's right to read any folder.
    runuser -u "$2" -- "$1" -c '' 2>/dev/null ||
        fail "the user $2 may not run $1, which lies in another user's folder; name one with --python"
}

# Runs uv with the settings of pip's variables.
installer() {
    [[ -n ${PIP_FIND_LINKS:-} ]] && export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"
    [[ -n ${PIP_INDEX_URL:-} ]] && export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
    [[ -n ${PIP_EXTRA_INDEX_URL:-} ]] && export UV_INDEX="${UV_INDEX:-$PIP_EXTRA_INDEX_URL}"
    [[ -n ${PIP_CERT:-} ]] && export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
    [[ -n ${HOME:-} ]] || export UV_CACHE_DIR="${UV_CACHE_DIR:-/var/cache/quartet}"
    "$PREFIX/.tools/bin/uv" --no-progress --quiet "$@"
}

# vLLM's CPU build needs torch's CPU build, which only PyTorch's own index has. An index that the user names must have it.
torch_options() {
    [[ -z ${PIP_FIND_LINKS:-}${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}${UV_TORCH_BACKEND:-} ]] || return 0
    case "$1 $2" in
        "rollout cpu" | "trainer cpu") echo --torch-backend cpu ;;
    esac
}

# Prints "gpu" or "cpu": the option, else what the host has.
choose_profile() {
    local service="$1" asked="$2" driver
    case "$service" in rollout | trainer) ;; *) echo cpu; return ;; esac
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)" || driver=""
    [[ -n $asked ]] || { [[ -n $driver ]] && asked=gpu || asked=cpu; }
    if [[ $asked == gpu && -n $driver && "$(printf '%s\n' "$LEAST_DRIVER" "$driver" | sort -V | head -n 1)" != "$LEAST_DRIVER" ]]; then
        fail "the NVIDIA driver is $driver, and CUDA 13.0 needs $LEAST_DRIVER or newer; update it, or install with --cpu"
    fi
    echo "$asked"
}

make_tools() {
    local python="$1"
    if [[ "$("$PREFIX/.tools/bin/uv" --version 2>/dev/null)" != "uv $UV_VERSION"* ]]; then
        "$python" -m venv "$PREFIX/.tools" || fail "$python cannot make environments: install its venv package (Debian: python3-venv)"
        "$PREFIX/.tools/bin/python" -m pip install --quiet "uv==$UV_VERSION"
    fi
}

make_environment() {
    local service="$1" python="$2" profile="$3" folder="$PREFIX/$1" source="$CHECKOUT/services/$1"
    local requirements="$source/requirements.txt"
    [[ $profile == cpu ]] || requirements="$source/requirements-gpu.txt"
    install -d -m 755 "$PREFIX"
    make_tools "$python"
    # Built in a new folder and exchanged at the end: a running service keeps its files until its restart.
    local making="$folder.new" overrides=()
    [[ -f $source/overrides.txt ]] && overrides=(--overrides "$source/overrides.txt")
    rm -rf "$making"
    installer venv --python "$python" --relocatable "$making"
    say "installing the requirements of $service, for the ${profile^^}"
    installer pip install --python "$making/bin/python" -r "$requirements" "${overrides[@]}" $(torch_options "$service" "$profile")
    installer pip install --python "$making/bin/python" --no-deps "$source"
    rm -rf "$folder.old"
    [[ -d $folder ]] && mv "$folder" "$folder.old"
    mv "$making" "$folder"
    rm -rf "$folder.old"
}

make_configuration() {
    local service="$1" user="quartet-$1"
    install -d -m 755 "$CONFIGURATION"
    install -d -m 750 -o "$user" -g "$user" "/var/lib/$user"
    local file
    for file in toml env; do
        if [[ ! -e $CONFIGURATION/$service.$file ]]; then
            # Readable by the service alone, because it may contain a password.
            install -m 640 -o root -g "$user" "$HERE/$service.$file" "$CONFIGURATION/$service.$file"
            say "wrote $CONFIGURATION/$service.$file; look at it"
        fi
    done
}

# What the unit runs, with --dry-run. As the service's user: root could read keys that the service cannot.
check_configuration() {
    local service="$1" user="quartet-$1" line value
    (
        while IFS= read -r line; do # as systemd reads it, not as a shell would
            [[ $line =~ ^([A-Za-z_][A-Za-z0-9_]*)=(.*)$ ]] || continue
            value="${BASH_REMATCH[2]}"
            [[ $value =~ ^\"(.*)\"$ || $value =~ ^\'(.*)\'$ ]] && value="${BASH_REMATCH[1]}"
            export "${line%%=*}=$value"
        done <"$CONFIGURATION/$service.env"
        cd "/var/lib/$user"
        runuser -u "$user" -- "$PREFIX/$service/bin/quartet-$service" "$CONFIGURATION/$service.toml" ${QUARTET_OPTIONS:-} --dry-run
    )
}

install_service() {
    local service="$1" python="$2" start="$3" profile
    profile="$(choose_profile "$service" "$4")"
    make_user "$service"
    check_python "$python" "quartet-$service"
    make_environment "$service" "$python" "$profile"
    make_configuration "$service"
    install -m 644 "$HERE/quartet-$service.service" "$UNITS/quartet-$service.service"
    has_systemd && systemctl daemon-reload
    if ! check_configuration "$service" >/dev/null; then
        say "not started: quartet-$service cannot use $CONFIGURATION/$service.toml as the user quartet-$service; it says why above"
        [[ $start == no ]] || exit 1
        return
    fi
    if has_systemd; then
        if [[ $start == yes ]]; then
            systemctl enable --quiet "quartet-$service"
            systemctl restart "quartet-$service"
            say "quartet-$service runs: systemctl status quartet-$service"
            return
        fi
    fi
    say "installed; start it with: systemctl enable --now quartet-$service"
}

uninstall_service() {
    local service="$1" purge="$2" unit="quartet-$1"
    if has_systemd && [[ -e $UNITS/$unit.service ]]; then
        systemctl disable --quiet --now "$unit"
    fi
    rm -f "$UNITS/$unit.service"
    rm -rf "${PREFIX:?}/$service"
    if has_systemd; then systemctl daemon-reload; fi
    if [[ $purge == yes ]]; then
        rm -rf "${CONFIGURATION:?}/$service.toml" "${CONFIGURATION:?}/$service.env" "${CONFIGURATION:?}/$service" "/var/lib/$unit"
        if getent passwd "$unit" >/dev/null; then userdel "$unit"; fi
    fi
    say "$service is gone"
}

main() {
    local action=install purge=no start=yes python="" service="" profile=""
    while (($#)); do
        case "$1" in
            --uninstall) action=uninstall ;;
            --check) action=check ;;
            --purge) purge=yes ;;
            --no-start) start=no ;;
            --gpu | --cpu) profile="${1#--}" ;;
            --python) (($# > 1)) || fail "--python needs a path"; python="$2"; shift ;;
            -h | --help) usage; exit 0 ;;
            -*) fail "option $1 does not exist; there are --check, --uninstall, --purge, --no-start, --python, --gpu, --cpu, --help" ;;
            *) [[ -z $service ]] || fail "one service at a time, got $service and $1"; service="$1" ;;
        esac
        shift
    done
    case "$service" in
        broker | reward | rollout | trainer | environment) ;;
        "") usage >&2; exit 2 ;;
        *) fail "service is '$service'; allowed: broker, reward, rollout, trainer, environment" ;;
    esac
    [[ $EUID == 0 ]] || fail "run it as root: it makes a user and a unit"
    if [[ $action == check ]]; then
        [[ -x $PREFIX/$service/bin/quartet-$service ]] || fail "$service is not installed; install it with: install.sh $service"
        check_configuration "$service"
        return
    fi
    if [[ $action == uninstall ]]; then
        uninstall_service "$service" "$purge"
        return
    fi
    [[ -n $python ]] || python="$(find_python)"
    install_service "$service" "$python" "$start" "$profile"
}

main "$@"
