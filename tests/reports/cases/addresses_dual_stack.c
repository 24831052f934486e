/* report: bind of [::]:P succeeds although a live IPv4 connection holds P
 * kind: addresses in use
 * stock: client port, v6only 0: bind EADDRINUSE
 * path: shm
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *tried(int result) { return result < 0 ? strerrorname_np(errno) : "ok"; }

static void one(int side, int only) {
    struct sockaddr_in s = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, local;
    struct sockaddr_in6 any = {.sin6_family = AF_INET6}, wanted = any;
    socklen_t size = sizeof s, size6 = sizeof any;
    int listener = socket(side == 2 ? AF_INET : AF_INET6, SOCK_STREAM, 0);
    if (side == 2) {
        bind(listener, (void *)&s, size);
        getsockname(listener, (void *)&s, &size);
    } else {
        bind(listener, (void *)&any, size6);
        getsockname(listener, (void *)&any, &size6);
        s.sin_port = any.sin6_port;
    }
    listen(listener, 5);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    connect(client, (void *)&s, sizeof s);
    int server = accept(listener, 0, 0);
    getsockname(client, (void *)&local, &size);
    if (side == 0)
        shutdown(listener, SHUT_RD);
    if (side == 1)
        close(listener);
    wanted.sin6_port = side == 2 ? local.sin_port : s.sin_port;
    int other = socket(AF_INET6, SOCK_STREAM, 0);
    setsockopt(other, SOL_IPV6, IPV6_V6ONLY, &only, sizeof only);
    const char *names[] = {"listener shut down", "listener closed", "client port"};
    printf("%s, v6only %d: bind %s\n", names[side], only, tried(bind(other, (void *)&wanted, sizeof wanted)));
    close(other);
    close(client);
    close(server);
    close(listener);
}

int main(void) {
    for (int side = 0; side < 3; side++)
        for (int only = 0; only < 2; only++)
            one(side, only);
    return 0;
}
