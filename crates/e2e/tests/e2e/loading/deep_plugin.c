/* A plugin (deep.c) that goes on with a connection of the program's, as PHP's extensions do. */
#define _GNU_SOURCE
#include "talk.h"

int plugin_talk(int fd);
ssize_t (*plugin_recv)(int, void *, size_t, int) = recv;

int plugin_talk(int fd) {
    struct sockaddr_in a;
    socklen_t len = sizeof a;
    char c;
    talk(fd, 7, 13);
    MUST(getpeername(fd, (struct sockaddr *)&a, &len) == 0 && a.sin_family == AF_INET);
    MUST(plugin_recv(fd, &c, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    part(fd);
    return 0;
}
