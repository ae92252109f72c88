#!/usr/bin/env bash
# Installs, upgrades, rolls back or removes one of Quartet's services on this host. Run it as root, from a checkout.
#
#   install.sh SERVICE                     user, release, configuration, unit; running it again upgrades
#   install.sh --rollback SERVICE          the release before, with its unit and packages; again: back to the newer one
#   install.sh --check SERVICE             only its dry run, as the unit makes it: user, folder, variables, options
#   install.sh --uninstall SERVICE         unit, releases; keeps configuration, data and user
#   install.sh --uninstall --purge SERVICE and configuration, data and user
#
# SERVICE: broker, reward, rollout, trainer, environment.  Options: --no-start (do not enable and restart it), --python PATH (3.11 or 3.12),
# --gpu or --cpu (rollout, trainer: packages for CUDA, the default if nvidia-smi lists a GPU, or for the CPU),
# --with PACKAGE (install it too, now and at later upgrades: a requirement, wheel, folder or requirements file; repeatable),
# --without PACKAGE (no longer; repeatable).
#
# /opt/quartet/SERVICE is a link to a release, a Python environment with pinned packages in /opt/quartet/.releases/SERVICE.
# An upgrade makes another one; if its dry run refuses /etc/quartet/SERVICE.{toml,env}, nothing is changed, else the link is
# exchanged and the service restarted. The release before is kept. Also created: /etc/quartet/SERVICE.{toml,env,packages}
# (existing ones are kept), the system user quartet-SERVICE, /etc/systemd/system/quartet-SERVICE.service.
set -euo pipefail
umask 022  # root may have 077, with which the service's user could not read its environment

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CHECKOUT="$(cd "$HERE/../.." && pwd)"
readonly HERE CHECKOUT
readonly UV_VERSION=0.13.8
readonly LEAST_DRIVER=580.65.06
readonly PREFIX=/opt/quartet
readonly CONFIGURATION=/etc/quartet
readonly UNITS=/etc/systemd/system
readonly LOCK=/etc  # the folder itself, so that no file is left

fail() { echo "install.sh: $*" >&2; exit 2; }
say() { echo "install.sh: $*"; }

usage() { sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# Whether systemd runs this host. Without it, as in a container build, the service is installed but not started.
has_systemd() { [[ -d /run/systemd/system ]]; }

# Sets the Python. The host's own come first: the service's user cannot run one in another user's home folder.
choose_python() {
    local candidate candidates=(/usr/bin/python3.11 /usr/bin/python3.12 /usr/local/bin/python3.11 /usr/local/bin/python3.12 python3)
    [[ -z $python ]] || candidates=("$python")
    for candidate in "${candidates[@]}"; do
        python="$candidate"
        # Not setpriv, which executes the program with root's right to read any folder. The service's user may not exist yet.
        if runuser -u nobody -- "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then return; fi
    done
    fail "$python is not Python 3.11 or 3.12, for which the packages are pinned, or lies in a folder of a user; name another with --python"
}

# Sets the profile, "gpu" or "cpu", if no option did, to what the host has.
choose_profile() {
    local driver
    case "$service" in rollout | trainer) ;; *) profile=cpu; return ;; esac
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)" || driver=""
    [[ -n $profile ]] || { [[ -n $driver ]] && profile=gpu || profile=cpu; }
    if [[ $profile == gpu && -n $driver && "$(printf '%s\n' "$LEAST_DRIVER" "$driver" | sort -V | head -n 1)" != "$LEAST_DRIVER" ]]; then
        fail "the NVIDIA driver is $driver, and CUDA 13.0 needs $LEAST_DRIVER or newer; update it, or install with --cpu"
    fi
}

make_tools() {
    if [[ "$("$PREFIX/.tools/bin/uv" --version 2>/dev/null)" != "uv $UV_VERSION"* ]]; then
        "$python" -m venv "$PREFIX/.tools" || fail "$python cannot make environments: install its venv package (Debian: python3-venv)"
        "$PREFIX/.tools/bin/python" -m pip install --quiet "uv==$UV_VERSION"
    fi
}

# Tells uv the indexes and certificates of pip's files and variables. uv's own variables come first.
use_pip_settings() {
    local settings key variable value
    settings="$("$PREFIX/.tools/bin/python" -m pip config list | sed 's/^:env:/variable/; s/\\n/ /g' | sort)"
    while read -r key variable; do # the last of [global], [install] and variables counts
        value="$(sed -En "s/^(global|install|variable)\.$key='\s*(.*)'$/\2/p" <<<"$settings" | tail -n 1)"
        [[ $key != cert ]] || value="${value:-${REQUESTS_CA_BUNDLE:-${CURL_CA_BUNDLE:-}}}"
        [[ ! -d $value || $key != cert ]] || variable=SSL_CERT_DIR
        [[ $key != find-links ]] || value="${value// /,}"
        [[ -z $value || ($variable == UV_* && -n ${!variable:-}) ]] || export "$variable=$value"
    done <<<"index-url UV_DEFAULT_INDEX
        extra-index-url UV_INDEX
        find-links UV_FIND_LINKS
        no-index UV_OFFLINE
        trusted-host UV_INSECURE_HOST
        cert SSL_CERT_FILE
        client-cert SSL_CLIENT_CERT
        proxy ALL_PROXY"
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # pip's: the best version of all indexes
}

# Runs `uv pip install` for the release that is being made.
install_packages() {
    local options=()
    [[ -f $source/overrides.txt ]] && options=(--overrides "$source/overrides.txt")
    # vLLM's CPU build needs torch's CPU build, which only PyTorch's own index has. An index that the user names must have it.
    [[ $service =~ ^(rollout|trainer)$ && $profile == cpu ]] &&
        [[ -z ${UV_FIND_LINKS:-}${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_TORCH_BACKEND:-} ]] && options+=(--torch-backend cpu)
    # A service may not write bytecode: it would compile all modules at every start.
    UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-1}" \
        "$PREFIX/.tools/bin/uv" --no-progress --quiet pip install --python "$release/bin/python" "${options[@]}" "$@"
}

# Makes a release that nothing uses yet.
make_release() {
    local source="$CHECKOUT/services/$service" requirements package extras=() version
    requirements="$source/requirements.txt"
    [[ $profile == cpu ]] || requirements="$source/requirements-gpu.txt"
    release="$releases/unfinished"
    install -d -m 755 "$releases"
    make_tools
    use_pip_settings
    "$PREFIX/.tools/bin/uv" --quiet venv --clear --python "$python" --relocatable "$release"
    say "installing the requirements of $service, for the ${profile^^}"
    install_packages -r "$requirements"
    install_packages --no-deps "$source"
    touch "$release/packages"
    for package in "${packages[@]}"; do
        echo "$package" >>"$release/packages"
        [[ -e $CHECKOUT/$package ]] && package="$CHECKOUT/$package"
        [[ $package == *.txt ]] && extras+=(-r)
        extras+=("$package")
    done
    ((${#extras[@]} == 0)) || install_packages --constraints "$requirements" "${extras[@]}" ||
        fail "cannot install ${packages[*]} beside the pins of $requirements: uv says why above; leave one out with --without"
    install -m 644 "$HERE/$unit" "$release/$unit"
    version="$("$release/bin/python" -c "from importlib.metadata import version; print(version('quartet-$service'))")"
    version="$version-$(date -u +%Y%m%dT%H%M%S)"
    mv -T "$release" "$releases/$version"
    release="$releases/$version"
}

# Prints how the list has a package. A path in the checkout is relative to it: an upgrade takes the new checkout's.
package_line() {
    if [[ $1 == *[/.]* && -e $1 ]]; then set -- "$(realpath "$1")"; fi
    echo "${1#"$CHECKOUT"/}"
}

# Sets the packages: those of the list, with --with and --without.
choose_packages() {
    local list="$CONFIGURATION/$service.packages" package
    for package in "${without[@]}"; do
        grep -qsxFe "$package" "$list" || fail "--without $package: allowed is a line of $list"
    done
    mapfile -t packages < <(
        { [[ ! -e $list ]] || cat "$list"; printf '%s\n' "${with[@]}"; } |
            grep -vxFf <(printf '%s\n' "" "${without[@]}") | awk '!seen[$0]++'
    )
}

make_configuration() {
    local file
    if ! getent passwd "$user" >/dev/null; then
        useradd --system --user-group --home-dir "/var/lib/$user" --no-create-home --shell /usr/sbin/nologin "$user"
        say "made the user $user"
    fi
    install -d -m 755 "$CONFIGURATION"
    install -d -m 750 -o "$user" -g "$user" "/var/lib/$user"
    for file in toml env; do
        if [[ ! -e $CONFIGURATION/$service.$file ]]; then
            # Readable by the service alone, because it may contain a password.
            install -m 640 -o root -g "$user" "$HERE/$service.$file" "$CONFIGURATION/$service.$file"
            say "wrote $CONFIGURATION/$service.$file; look at it"
        fi
    done
}

# What the unit runs, with --dry-run, from the release. As the service's user: root could read keys that the service cannot.
check_configuration() {
    local line value options
    (
        while IFS= read -r line; do # as systemd reads it, not as a shell would
            [[ $line =~ ^([A-Za-z_][A-Za-z0-9_]*)=(.*)$ ]] || continue
            value="${BASH_REMATCH[2]}"
            [[ $value =~ ^\"(.*)\"$ || $value =~ ^\'(.*)\'$ ]] && value="${BASH_REMATCH[1]}"
            export "${line%%=*}=$value"
        done <"$CONFIGURATION/$service.env"
        cd "/var/lib/$user"
        read -ra options <<<"${QUARTET_OPTIONS:-}"
        runuser -u "$user" -- "$release/bin/quartet-$service" "$CONFIGURATION/$service.toml" "${options[@]}" --dry-run
    )
}

replace_link() { ln -sfn "$1" "$releases/link"; mv -fT "$releases/link" "$2"; }

# Makes the release the current one, with its unit and its list of packages; the one before becomes `previous`.
exchange() {
    local older="$releases/older-$EPOCHSECONDS"
    if [[ -d $current && ! -L $current ]]; then # of an installer without releases
        install -m 644 "$UNITS/$unit" "$current/$unit"
        touch "$current/packages"
        mv -T "$current" "$older"
        ln -s "$older" "$current"
    fi
    if [[ -L $current ]]; then replace_link "$(readlink "$current")" "$releases/previous"; fi
    replace_link "$release" "$current"
    install -m 644 "$release/$unit" "$UNITS/$unit"
    install -m 644 "$release/packages" "$CONFIGURATION/$service.packages"
    if has_systemd; then systemctl daemon-reload; fi
    say "$service is the release ${release##*/}"
}

# Checks the release, makes it the current one and restarts the service. The first one is kept even if its dry run fails.
use_release() {
    local refused=""
    check_configuration >/dev/null ||
        refused="${release##*/} cannot use $CONFIGURATION/$service.toml as the user $user; it says why above"
    [[ -z $refused || ! -e $current ]] || fail "nothing is changed: $refused"
    exchange
    if [[ -n $refused ]]; then
        say "not started: $refused"
        [[ $start == no ]] || exit 1
    elif [[ $start == no ]] || ! has_systemd; then
        say "installed; start it with: systemctl enable --now quartet-$service"
    else
        systemctl enable --quiet "quartet-$service"
        systemctl restart "quartet-$service" ||
            fail "$unit does not start: journalctl -u quartet-$service says why; return to the release before with --rollback"
        say "quartet-$service runs: systemctl status quartet-$service"
    fi
}

install_service() {
    choose_python
    choose_profile
    choose_packages
    make_release
    make_configuration
    use_release
}

roll_back() {
    release="$(readlink -e "$releases/previous")" || fail "$service has no previous release; allowed after an upgrade: install.sh $service"
    use_release
}

uninstall_service() {
    if has_systemd && [[ -e $UNITS/$unit ]]; then
        systemctl disable --quiet --now "quartet-$service"
    fi
    rm -rf "${UNITS:?}/$unit" "$current" "$releases"
    if has_systemd; then systemctl daemon-reload; fi
    if [[ $purge == yes ]]; then
        rm -rf "${CONFIGURATION:?}/$service"{,.toml,.env,.packages} "/var/lib/$user" "${UNITS:?}/$unit.d"
        rmdir --ignore-fail-on-non-empty "$CONFIGURATION"
        if getent passwd "$user" >/dev/null; then userdel "$user"; fi
    fi
    say "$service is gone"
}

# Removes releases that are neither current nor previous nor used by a process; and everything with the last service.
clean_up() {
    local each kept
    kept="$(readlink -f "$current" "$releases/previous")" || true
    for each in "$releases"/*; do
        [[ -L $each ]] || grep -qxFe "$each" <<<"$kept" || grep -qsFe "$each/" /proc/[0-9]*/maps || rm -rf "$each"
    done
    compgen -G "$releases/*" >/dev/null || rm -rf "$releases"
    compgen -G "$PREFIX/*" >/dev/null || rm -rf "$PREFIX"
}

main() {
    local action=install_service purge=no start=yes python="" service="" profile="" with=() without=() packages=() release
    while (($#)); do
        case "$1" in
            --uninstall) action=uninstall_service ;;
            --check) action=check_configuration ;;
            --rollback) action=roll_back ;;
            --purge) purge=yes ;;
            --no-start) start=no ;;
            --gpu | --cpu) profile="${1#--}" ;;
            --python) (($# > 1)) || fail "--python needs a path"; python="$2"; shift ;;
            --with) (($# > 1)) || fail "--with needs a package"; with+=("$(package_line "$2")"); shift ;;
            --without) (($# > 1)) || fail "--without needs a package"; without+=("$(package_line "$2")"); shift ;;
            -h | --help) usage; exit 0 ;;
            -*) fail "option $1 does not exist; there are --rollback, --check, --uninstall, --purge, --no-start, --python, --gpu, --cpu, --with, --without, --help" ;;
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
    [[ $action == install_service || ${#with[@]}${#without[@]} == 00 ]] || fail "--with and --without are allowed for an installation only"
    readonly user="quartet-$service" unit="quartet-$service.service" current="$PREFIX/$service" releases="$PREFIX/.releases/$service"
    if [[ $action == check_configuration ]]; then
        [[ -x $current/bin/quartet-$service ]] || fail "$service is not installed; install it with: install.sh $service"
        release="$current"
    else
        exec 9<"$LOCK"
        flock --nonblock 9 || fail "another install.sh holds the lock on the folder $LOCK (lslocks shows it); wait until it has ended"
        trap clean_up EXIT
    fi
    "$action"
}

main "$@"
