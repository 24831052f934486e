/* report: SO_REUSEADDR of a connected client is not looked at when another socket binds to its address
 * kind: addresses in use
 * stock: client, there 1, here 1: bind ok
 * path: shm
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int on = 1;
static const char *tried(int result) { return result < 0 ? strerrorname_np(errno) : "ok"; }

static int listening(struct sockaddr_in *s, int reuse) {
    socklen_t size = sizeof *s;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (reuse)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    bind(fd, (void *)s, size);
    listen(fd, 5);
    getsockname(fd, (void *)s, &size);
    return fd;
}

static void one(int accepted, int there, int here, int then) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, b = a, mine;
    socklen_t size = sizeof a;
    int first = listening(&a, accepted && there), second = listening(&b, 0);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    if (!accepted && there)
        setsockopt(client, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    connect(client, (void *)&a, size);
    int server = accept(first, 0, 0);
    getsockname(accepted ? server : client, (void *)&mine, &size);
    if (accepted)
        close(first);
    int other = socket(AF_INET, SOCK_STREAM, 0);
    if (here)
        setsockopt(other, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int bound = bind(other, (void *)&mine, size);
    printf("%s, there %d, here %d: bind %s", accepted ? "accepted" : "client", there, here, tried(bound));
    if (bound == 0 && then == 0)
        printf(", listen %s", tried(listen(other, 5)));
    if (bound == 0 && then == 1)
        printf(", connect elsewhere %s", tried(connect(other, (void *)&b, size)));
    if (bound == 0 && then == 2 && !accepted)
        printf(", connect there too %s", tried(connect(other, (void *)&a, size)));
    puts("");
    close(other);
    close(client);
    close(server);
    if (!accepted)
        close(first);
    close(second);
}

int main(void) {
    for (int i = 0; i < 24; i++)
        one(i / 12, i / 6 % 2, i / 3 % 2, i % 3);
    return 0;
}
