/* report: after connect(AF_UNSPEC) bind says EINVAL, and the old address stays
 * kind: addresses in use
 * stock: client: connect\(AF_UNSPEC\) ok
 * path: shm
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *tried(int result) { return result < 0 ? strerrorname_np(errno) : "ok"; }

static void name(const char *when, int fd) {
    struct sockaddr_in s = {0};
    socklen_t size = sizeof s;
    int result = getsockname(fd, (void *)&s, &size);
    printf("  %s: getsockname %s family %d %s port %s\n", when, tried(result), s.sin_family, inet_ntoa(s.sin_addr),
           s.sin_port ? "set" : "0");
}

int main(void) {
    for (int accepted = 0; accepted < 2; accepted++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, any = {.sin_family = AF_INET};
        struct sockaddr none = {.sa_family = AF_UNSPEC};
        socklen_t size = sizeof a;
        char byte;
        int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
        bind(listener, (void *)&a, size);
        listen(listener, 5);
        getsockname(listener, (void *)&a, &size);
        connect(client, (void *)&a, size);
        int server = accept(listener, 0, 0);
        int mine = accepted ? server : client, other = accepted ? client : server;
        printf("%s: connect(AF_UNSPEC) %s\n", accepted ? "accepted" : "client", tried(connect(mine, &none, sizeof none)));
        name("after it", mine);
        struct pollfd p = {other, POLLIN, 0};
        poll(&p, 1, 1000);
        ssize_t got = recv(other, &byte, 1, MSG_DONTWAIT);
        printf("  the other end: recv %zd %s\n", got, got < 0 ? strerrorname_np(errno) : "");
        printf("  bind %s\n", tried(bind(mine, (void *)&any, sizeof any)));
        name("after bind", mine);
        printf("  listen %s\n", tried(listen(mine, 5)));
        getsockname(mine, (void *)&a, &size);
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int again = socket(AF_INET, SOCK_STREAM, 0);
        printf("  connect to it %s\n", tried(connect(again, (void *)&a, size)));
        p = (struct pollfd){mine, POLLIN, 0};
        printf("  poll %d\n", poll(&p, 1, 1000));
        close(again);
        close(mine);
        close(other);
        close(listener);
    }
    return 0;
}
