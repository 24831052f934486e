# Sourced by the other scripts: a PATH that finds cargo and the servers
# (Debian keeps nginx, haproxy and lighttpd in /usr/sbin).
if [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
    PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
fi
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
export PATH
