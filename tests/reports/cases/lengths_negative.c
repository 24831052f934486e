/* report: the -1 of a failed read is passed on as a length: memory of the process is sent
 * kind: lengths
 * stock: write\(-1\): -1 EFAULT; the peer got nothing
 * path: shm
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static int client, server;

static const char *drained(void) {
    static char sink[1 << 20];
    long n, sum = 0;
    usleep(20000);
    while ((n = recv(server, sink, sizeof sink, MSG_DONTWAIT)) > 0)
        sum += n;
    return sum ? "bytes" : "nothing";
}

#define TRY(name, call)                                                                                                \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        long result_ = (call);                                                                                         \
        int error_ = errno;                                                                                            \
        printf("%s: %ld %s; the peer got %s\n", name, result_, result_ < 0 ? strerrorname_np(error_) : "", drained()); \
    } while (0)

int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&a, size);
    getsockname(listener, (void *)&a, &size);
    listen(listener, 4);
    client = socket(AF_INET, SOCK_STREAM, 0);
    connect(client, (void *)&a, size);
    server = accept(listener, 0, 0);
    fcntl(client, F_SETFL, O_NONBLOCK);
    fcntl(server, F_SETFL, O_NONBLOCK);
    setvbuf(stdout, 0, _IONBF, 0);
    char *buffer = malloc(64);
    memset(buffer, 'b', 64);
    volatile size_t lengths[] = {-1, -9, 1ul << 63, 1ul << 48, 1ul << 47};
    const char *names[] = {"-1", "-9", "1<<63", "1<<48", "1<<47"};
    for (int i = 0; i < 5; i++) {
        char name[64];
        struct iovec one = {buffer, lengths[i]};
        struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
        sprintf(name, "write(%s)", names[i]);
        TRY(name, write(client, buffer, lengths[i]));
        sprintf(name, "writev(%s)", names[i]);
        TRY(name, writev(client, &one, 1));
        sprintf(name, "sendmsg(%s)", names[i]);
        TRY(name, sendmsg(client, &message, 0));
        sprintf(name, "read(%s)", names[i]);
        write(client, "xyz", 3);
        TRY(name, read(server, buffer, lengths[i]));
        sprintf(name, "readv(%s)", names[i]);
        write(client, "xyz", 3);
        TRY(name, readv(server, &one, 1));
        sprintf(name, "recvmsg(%s)", names[i]);
        write(client, "xyz", 3);
        TRY(name, recvmsg(server, &message, 0));
    }
    struct iovec two[2] = {{buffer, 1ul << 62}, {buffer, 1ul << 62}};
    TRY("writev(1<<62, 1<<62)", writev(client, two, 2));
    write(client, "xyz", 3);
    TRY("readv(1<<62, 1<<62)", readv(server, two, 2));
    return 0;
}
